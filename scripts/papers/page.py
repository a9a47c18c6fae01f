"""What all tables share: a page of Markdown with perhaps a figure, and reading what scripts have left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents_plots import pyplot
from agents_results import Row, read_json

from rlflow_tvm.errors import UsageError

NOTHING = "-"
"""A cell that the runs say nothing of."""


@dataclass(frozen=True)
class Page:
    """A table, as lines of Markdown, and what draws its figure into a file, where there is one."""

    lines: list[str]
    draw: Callable[[Path], None] | None = None


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A table; the first `left` columns are text, the others numbers."""
    ruler = ["---"] * left + ["---:"] * (len(columns) - left)
    return [f"| {' | '.join(each)} |" for each in (columns, ruler, *rows)]


def rows_in(path: Path, names: Sequence[str], script: str) -> list[Row]:
    """The rows that a script left in one file, a list of objects with at least these names; UsageError otherwise."""
    rows = read_json(path)
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: holds no list of rows; give what scripts/{script} writes")
    for row in rows:
        missing = [name for name in names if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}: a row has no {missing[0]}; give what scripts/{script} writes")
    return rows


def one(paths: Sequence[Path]) -> Path:
    """The only path; UsageError where there are more."""
    if len(paths) != 1:
        raise UsageError(f"{' '.join(map(str, paths))}: this table is made of one file or folder")
    return paths[0]


def scaled(value: float | None, unit: float, digits: int = 3) -> str:
    """A number in a larger unit."""
    return NOTHING if value is None else f"{value / unit:.{digits}f}"


def less(before: float, after: float) -> float:
    """By how much less `after` is, in percent of `before`; nought of nothing stays nought."""
    return round(100.0 * (1.0 - after / before), 9) if before else 0.0


def short(model: str) -> str:
    """A model's name in a table."""
    return model.removeprefix("zoo:")


def save(figure: Any, path: Path) -> None:
    """The figure as a file, and no longer in memory."""
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def panels(number: int, width: float = 3.4, height: float = 3.2) -> tuple[Any, list[Any]]:
    """A figure of so many axes beside each other, four in a row."""
    columns = min(number, 4)
    rows = math.ceil(number / columns)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for unused in flat[number:]:
        unused.set_axis_off()
    return figure, flat[:number]
