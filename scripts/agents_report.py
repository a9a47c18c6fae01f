"""Tables and curves of what `scripts/agents.py` left in a folder.

    python scripts/agents_report.py runs/a --plots

Gains are (cost of the start graph) / (cost of the cheapest graph found), both sums of measured kernel times: graph
gains. An interval is Student's 95 % over the seeds; a method that draws nothing has none. `asked` is what a trained
agent finds when it only acts; `95 % of ppo's` the steps (median over the seeds) until a method had 0.95 of the gain,
less one, that PPO has on average in the end. Writes FOLDER/report.md, and with --plots FOLDER/MODEL.png and
FOLDER/rules.png, which rules the plans are made of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlflow_tvm.training import model_name

Row = dict[str, Any]
POINTS = 200


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (nought for one value)."""
    if len(values) < 2:
        return float(np.mean(values)), 0.0
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


def told(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}" if len(values) > 1 else f"{mean:.3f}"


def gain(row: Row) -> float:
    return float(row["start_secs"] / row["best_secs"])


def gains_along(row: Row, steps: np.ndarray) -> np.ndarray:
    """The best gain after each number of steps."""
    at, secs = np.array(row["curve"]).T
    best = np.minimum.accumulate(secs)
    return row["start_secs"] / best[np.searchsorted(at, steps, side="right") - 1]


def steps_to(row: Row, wanted: float) -> float:
    """Environment steps until a gain was reached; infinite if it never was."""
    return next((step for step, secs in row["curve"] if row["start_secs"] / secs >= wanted), np.inf)


def rows_of(folder: Path) -> dict[str, dict[tuple[str, int], list[Row]]]:
    """Model -> (method, steps) -> its runs."""
    found: dict[str, dict[tuple[str, int], list[Row]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        row = json.loads(path.read_text())
        found.setdefault(row["model"], {}).setdefault((row["method"], row["steps"]), []).append(row)
    return found


def table(model: str, methods: dict[tuple[str, int], list[Row]]) -> list[str]:
    """As Markdown."""
    lines = [
        f"## {model}",
        "",
        "| method | steps allowed | seeds | gain | steps until 99 % of it | 95 % of ppo's | seconds | asked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    most = max((steps for method, steps in methods if method == "ppo"), default=None)
    wanted = np.inf if most is None else 1 + 0.95 * (np.mean([gain(row) for row in methods["ppo", most]]) - 1)
    for (method, steps), rows in sorted(methods.items(), key=lambda item: -interval([gain(r) for r in item[1]])[0]):
        asked = [gain(row["asked"]) for row in rows if "asked" in row]
        near = np.median([steps_to(row, 1 + 0.99 * (gain(row) - 1)) for row in rows])
        there = np.median([steps_to(row, wanted) for row in rows])
        lines.append(
            f"| {method} | {steps} | {len(rows)} | {told([gain(row) for row in rows])} | {near:.0f} | "
            f"{f'{there:.0f}' if np.isfinite(there) else 'never'} | "
            f"{np.median([row['wall_secs'] for row in rows]):.0f} | {told(asked) if asked else ''} |"
        )
    return [*lines, ""]


def plot(model: str, methods: dict[tuple[str, int], list[Row]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for (method, steps), rows in sorted(methods.items()):
        grid = np.geomspace(10, steps, POINTS)
        along = np.stack([gains_along(row, grid) for row in rows])
        means, halves = np.array([interval(column) for column in along.T]).T
        (line,) = axes.plot(grid, means, label=f"{method} ({len(rows)})")
        axes.fill_between(grid, means - halves, means + halves, color=line.get_color(), alpha=0.2)
    axes.set(xscale="log", xlabel="environment steps", ylabel="graph gain", title=model)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def heat_map(found: dict[str, dict[tuple[str, int], list[Row]]], path: Path) -> None:
    """How often each rule stands in the best plans: means over the seeds, by model and method (RLFlow's figure 10)."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    columns = {
        f"{model_name(model)} {method}": [Counter(action.split("@")[0] for action in row["actions"]) for row in rows]
        for model, methods in found.items()
        for (method, _), rows in sorted(methods.items())
    }
    rules = sorted({rule for counts in columns.values() for each in counts for rule in each})
    means = np.array([[np.mean([each[rule] for each in counts]) for counts in columns.values()] for rule in rules])
    figure, axes = plt.subplots(figsize=(2 + 0.3 * len(columns), 2.5 + 0.16 * len(rules)))
    image = axes.imshow(np.log1p(means), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), list(columns), rotation=90, fontsize=6)
    axes.set_yticks(range(len(rules)), rules, fontsize=6)
    ticks = np.array([0, 1, 3, 10, 30, 100])
    bar = figure.colorbar(image, label="rewrites in the best plan", ticks=np.log1p(ticks))
    bar.ax.set_yticklabels([str(tick) for tick in ticks])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plots", action="store_true", help="curves too (extra [plots])")
    options = parser.parse_args()
    found = rows_of(options.folder)
    if not found:
        parser.error(f"{options.folder}: no results here; run scripts/agents.py first")
    lines: list[str] = []
    for model, methods in found.items():
        lines += table(model, methods)
        if options.plots:
            plot(model, methods, options.folder / f"{model_name(model)}.png")
    if options.plots:
        heat_map(found, options.folder / "rules.png")
    (options.folder / "report.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
