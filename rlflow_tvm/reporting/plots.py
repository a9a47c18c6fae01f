"""A report as pictures: what is no table and needs no click. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

from rlflow_tvm.errors import UsageError
from rlflow_tvm.reporting.contents import Contents

_ACROSS = 4  # training curves side by side
_DPI = 120


def require_matplotlib() -> None:
    """UsageError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--format png needs {error.name}, which is not installed: pip install 'rlflow_tvm[plots]', "
            "or leave --format out for a page"
        ) from None


FIGURES = ("cost.png", "rules.png", "training.png")
"""What `plots` may draw."""


def plots(contents: Contents) -> dict[str, bytes]:
    """Name of a PNG file -> what is in it: `cost.png`, `rules.png` of a plan that has rewrites, and `training.png`
    where there was a training. UsageError without matplotlib."""
    require_matplotlib()
    drawn = {"cost.png": _cost(contents)}
    rules = contents["models"] or contents["rules"]
    if rules["rows"]:
        drawn["rules.png"] = _rules(rules, by_model=contents["models"] is not None)
    if contents["curves"] or contents["best"]:
        drawn["training.png"] = _training(contents)
    return drawn


def _figure(width: float, height: float) -> Any:
    """One that belongs to no window and is not kept by pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _written(figure: Any) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _plain(text: str) -> str:
    """Names as they are: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _cost(contents: Contents) -> bytes:
    figure = _figure(8, 4)
    axes = figure.add_subplot()
    secs = [contents["start"]["secs"], *(step["after"] for step in contents["steps"])]
    axes.plot(range(len(secs)), [math.nan if each is None else each * 1e3 for each in secs], marker="o", markersize=4)
    axes.set(title=_plain(contents["model"]), xlabel="rewrites", ylabel="cost, ms")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    return _written(figure)


def _rules(table: dict[str, Any], by_model: bool) -> bytes:
    rows, columns = table["rows"], table["columns"]
    figure = _figure(4 + 0.25 * len(columns), 1.8 + 0.22 * len(rows))
    axes = figure.add_subplot()
    image = axes.imshow([row["counts"] for row in rows], aspect="auto", cmap="viridis", vmin=0)
    axes.set_yticks(range(len(rows)), [_plain(row["rule"]) for row in rows], fontsize=7)
    axes.set_xticks(range(len(columns)), [_plain(each) for each in columns], rotation=90, fontsize=7)
    axes.set_xlabel("model" if by_model else "place in the plan")
    bar = figure.colorbar(image, ax=axes, label="rewrites")
    bar.ax.yaxis.get_major_locator().set_params(integer=True)
    return _written(figure)


def _training(contents: Contents) -> bytes:
    points = [[steps, secs * 1e3] for steps, secs in contents["best"]]
    best = [{"name": "best cost, ms", "points": points, "over": "environment steps"}]
    series = [*(best if contents["best"] else []), *contents["curves"]]
    down = math.ceil(len(series) / _ACROSS)
    figure = _figure(3.2 * _ACROSS, 2.4 * down)
    for number, each in enumerate(series, 1):
        axes = figure.add_subplot(down, _ACROSS, number)
        x, y = zip(*each["points"], strict=True)
        axes.plot(x, y, drawstyle="steps-post" if each in best else "default", marker="." if len(x) == 1 else "")
        axes.set_title(_plain(each["name"]), fontsize=9)
        axes.set_xlabel(each["over"], fontsize=7)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    return _written(figure)
