"""Figures of what `scripts/agents.py` left, drawn into files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from agents_results import SCORES, Found, Row, gain, gains_along, interval, names_of

from rlflow_tvm.errors import UsageError
from rlflow_tvm.search import SEARCHES
from rlflow_tvm.training_files import model_name

POINTS, RULES = 200, 50


def pyplot() -> Any:
    """matplotlib's, which draws into files. UsageError where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise UsageError("figures need matplotlib, which is not installed: pip install 'rlflow_tvm[plots]'") from None
    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def gain_plot(found: Found, path: Path) -> None:
    """Gains of all methods in the end, with their intervals; a panel for each model."""
    plt = pyplot()
    called = names_of({each for methods in found.values() for each in methods})
    names = sorted(called.values(), reverse=True)
    figure, panels = plt.subplots(
        1, len(found), figsize=(1.5 + 2.2 * len(found), 1.2 + 0.28 * len(names)), sharey=True, squeeze=False
    )
    for axes, (model, methods) in zip(panels[0], found.items(), strict=True):
        for (method, steps), rows in methods.items():
            gains, at = [gain(row) for row in rows], names.index(called[method, steps])
            mean, half = interval(gains)
            axes.scatter(gains, [at] * len(gains), s=8, color="0.7")
            axes.errorbar(mean, at, xerr=half, fmt="o", color="C0" if method in SEARCHES else "C3", capsize=3)
        axes.set(title=model_name(model), xlabel="graph gain")
        axes.grid(axis="x", alpha=0.3)
    panels[0][0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def world_plot(found: Found, path: Path) -> None:
    """Scores on episodes held out while V and M learn, a line for each run; iterations follow one another."""
    plt = pyplot()
    figure, panels = plt.subplots(1, len(SCORES), figsize=(3.2 * len(SCORES), 3.2))
    for number, (model, methods) in enumerate(found.items()):
        for row in [row for (method, _), rows in methods.items() if method == "world-model" for row in rows]:
            for axes, (name, label) in zip(panels, SCORES.items(), strict=True):
                values = [each[f"held_out/{name}"] for each in row["log"] if f"held_out/{name}" in each]
                axes.plot(values, color=f"C{number}", alpha=0.7, label=model_name(model) if row["seed"] == 0 else None)
                axes.set(title=label, xlabel="50 gradient steps each")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot(model: str, methods: dict[tuple[str, int], list[Row]], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5))
    draw_gains(axes, model, methods)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_gains(axes: Any, model: str, methods: dict[tuple[str, int], list[Row]]) -> None:
    """The best gain after each number of steps: means over the seeds, with their intervals."""
    names = names_of(methods)
    for (method, steps), rows in sorted(methods.items()):
        grid = np.geomspace(10, steps, POINTS)
        along = np.stack([gains_along(row, grid) for row in rows])
        means, halves = np.array([interval(column) for column in along.T]).T
        (line,) = axes.plot(grid, means, label=f"{names[method, steps]} ({len(rows)})")
        axes.fill_between(grid, means - halves, means + halves, color=line.get_color(), alpha=0.2)
    axes.set(xscale="log", xlabel="environment steps", ylabel="graph gain", title=model)
    axes.legend()


def rule_means(found: Found) -> tuple[list[str], list[str], np.ndarray]:
    """How often the rules met most stand in the best plans: rules, columns (model and method), and means over the
    seeds; rules in alphabetical order."""
    columns = {
        f"{model_name(model)} {names_of(methods)[which]}": [
            Counter(action.split("@")[0] for action in row["actions"]) for row in rows
        ]
        for model, methods in found.items()
        for which, rows in sorted(methods.items())
    }
    rules = sorted({rule for counts in columns.values() for each in counts for rule in each})
    means = np.array([[np.mean([each[rule] for each in counts]) for counts in columns.values()] for rule in rules])
    most = np.sort(np.argsort(-means.sum(axis=1), kind="stable")[:RULES]) if rules else []
    return [rules[row] for row in most], list(columns), means[most] if rules else np.zeros((0, len(columns)))


def heat_map(found: Found, path: Path) -> None:
    """How often the rules met most stand in the best plans: means over the seeds, by model and method (RLFlow's figure
    10)."""
    plt = pyplot()
    rules, columns, means = rule_means(found)
    figure, axes = plt.subplots(figsize=(2 + 0.3 * len(columns), 2.5 + 0.16 * len(rules)))
    image = axes.imshow(np.log1p(means), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    axes.set_yticks(range(len(rules)), rules, fontsize=6)
    ticks = np.array([0, 1, 3, 10, 30, 100])
    bar = figure.colorbar(image, label="rewrites in the best plan", ticks=np.log1p(ticks))
    bar.ax.set_yticklabels([str(tick) for tick in ticks])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
