"""Tables and curves of what `scripts/agents.py` left in a folder.

    python scripts/agents_report.py runs/a --plots

Gains are (cost of the start graph) / (cost of the cheapest graph found), both sums of measured kernel times: graph
gains. An interval is Student's 95 % over the seeds; a method that draws nothing has none. `asked` is what a trained
agent finds when it only acts; `95 % of ppo's` the steps (median over the seeds) until a method had 0.95 of the gain,
less one, that PPO has on average in the end. Of world models also, for each iteration, how well V and M know episodes
held out, and what the controller's episodes return in dreams and before the real graph (medians over the seeds).

Writes FOLDER/report.md and FOLDER/results.csv (a line for each run); with --plots FOLDER/gains.png, FOLDER/MODEL.png
(gains over steps), FOLDER/rules.png (which rules the plans are made of) and FOLDER/world.png (scores while V and M
learn).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlflow_tvm.errors import UsageError
from rlflow_tvm.search import SEARCHES
from rlflow_tvm.training import model_name

Row = dict[str, Any]
Found = dict[str, dict[tuple[str, int], list[Row]]]
POINTS, RULES = 200, 50
RUN = ("model", "method", "steps", "seed", "start_secs", "best_secs", "env_steps", "curve", "wall_secs", "actions")
"""What each run has told since the first version of `scripts/agents.py`."""
SCORES = {
    "nll": "-log p(z'), nats",
    "reward_r2": "R² of savings",
    "rule_mask_f1": "F1 of the mask",
    "rule_change_f1": "F1 of its changes",
    "locations_exact": "counts exact",
}
"""Of a world model on episodes held out."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (nought for one value)."""
    if len(values) < 2:
        return float(np.mean(values)), 0.0
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


def told(values: Sequence[float], digits: int = 3) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


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


def read_json(path: Path) -> Any:
    """What a script left in a file; UsageError where there is none, or it is no JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); run the script that writes it first") from None
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON ({error}); remove it, and run the script that writes it again") from None


def rows_of(*folders: Path) -> Found:
    """Model -> (method, steps) -> its runs, of all folders. UsageError where there is none, a file is no run, or a
    model's runs are of several machines or versions of the kernels."""
    found: Found = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*/*.json"))]:
        row = read_json(path)
        missing = [name for name in RUN if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}: is no result of scripts/agents.py ({missing[0]} is missing); move it away")
        runs = found.setdefault(row["model"], {}).setdefault((row["method"], row["steps"]), [])
        if all(row["seed"] != known["seed"] for known in runs):  # the same one in two folders counts once
            runs.append(row)
    if not found:
        raise UsageError(f"{' '.join(map(str, folders))}: no results here; run scripts/agents.py first")
    for model, methods in found.items():
        prices = sorted({row.get("prices", "an unknown machine") for rows in methods.values() for row in rows})
        if len(prices) > 1:
            raise UsageError(f"{model}: results of {' and '.join(prices)} cannot be held against each other")
    return found


def table(model: str, methods: dict[tuple[str, int], list[Row]]) -> list[str]:
    """As Markdown."""
    (prices,) = {row.get("prices", "an unknown machine") for rows in methods.values() for row in rows}
    lines = [
        f"## {model}",
        "",
        f"Prices of {prices}.",
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
            f"| {method} | {steps} | {len(rows)} | {told([gain(row) for row in rows], 4)} | {near:.0f} | "
            f"{f'{there:.0f}' if np.isfinite(there) else 'never'} | "
            f"{np.median([row['wall_secs'] for row in rows]):.0f} | {told(asked, 4) if asked else ''} |"
        )
    return [*lines, ""]


def last_of(log: list[Row], name: str) -> dict[int, float]:
    """Iteration -> the last number of that name in it; of environment steps, those that V and M learn from in it.

    A score that says nothing (of episodes in which there was nothing to tell apart) is None in the log.
    """
    rows = log if name != "env_steps" else log[::-1]
    return {row["iteration"]: row[name] for row in rows if row.get(name) is not None}


def world_table(found: Found) -> list[str]:
    """How well world models know what they have not learnt from, as Markdown; empty where there is none."""
    lines = [
        "## World models, by iteration",
        "",
        f"| model | steps allowed | seeds | iteration | steps learnt from | {' | '.join(SCORES.values())} | "
        "return in dreams | real return |",
        f"|{'---|' * (len(SCORES) + 7)}",
    ]
    names = ["env_steps", *(f"held_out/{name}" for name in SCORES), "dream/return", "real/return"]
    some = False
    for model, methods in found.items():
        for (method, steps), rows in methods.items():
            if method != "world-model":
                continue
            some = True
            columns = [[last_of(row["log"], name) for row in rows] for name in names]
            for iteration in sorted(columns[0][0]):
                there = [[each[iteration] for each in column if iteration in each] for column in columns]
                told = [f"{np.median(values):.4g}" if values else "" for values in there]
                lines.append(f"| {model} | {steps} | {len(rows)} | {iteration + 1} | {' | '.join(told)} |")
    return [*lines, ""] if some else []


def write_csv(found: Found, path: Path) -> None:
    """A line for each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("start_secs", "best_secs", "env_steps", "kernels_measured", "wall_secs")
        writer.writerow(["model", "method", "steps_allowed", "seed", *names, "gain", "asked_gain", "rewrites"])
        for model, methods in found.items():
            for (method, steps), rows in sorted(methods.items()):
                for row in sorted(rows, key=lambda row: row["seed"]):
                    asked = f"{gain(row['asked']):.5f}" if "asked" in row else ""
                    numbers = [f"{row[name]:.9g}" if name in row else "" for name in names]
                    found_by = [model, method, steps, row["seed"]]
                    writer.writerow([*found_by, *numbers, f"{gain(row):.5f}", asked, len(row["actions"])])


def pyplot() -> Any:
    """matplotlib's, which draws into files."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def gain_plot(found: Found, path: Path) -> None:
    """Gains of all methods in the end, with their intervals; a panel for each model."""
    plt = pyplot()
    names = sorted({f"{method} {steps}" for methods in found.values() for method, steps in methods}, reverse=True)
    figure, panels = plt.subplots(
        1, len(found), figsize=(1.5 + 2.2 * len(found), 1.2 + 0.28 * len(names)), sharey=True, squeeze=False
    )
    for axes, (model, methods) in zip(panels[0], found.items(), strict=True):
        for (method, steps), rows in methods.items():
            gains, at = [gain(row) for row in rows], names.index(f"{method} {steps}")
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
    for (method, steps), rows in sorted(methods.items()):
        grid = np.geomspace(10, steps, POINTS)
        along = np.stack([gains_along(row, grid) for row in rows])
        means, halves = np.array([interval(column) for column in along.T]).T
        (line,) = axes.plot(grid, means, label=f"{method} ({len(rows)})")
        axes.fill_between(grid, means - halves, means + halves, color=line.get_color(), alpha=0.2)
    axes.set(xscale="log", xlabel="environment steps", ylabel="graph gain", title=model)
    axes.legend()


def rule_means(found: Found) -> tuple[list[str], list[str], np.ndarray]:
    """How often the rules met most stand in the best plans: rules, columns (model and method), and means over the
    seeds; rules in alphabetical order."""
    columns = {
        f"{model_name(model)} {method}": [Counter(action.split("@")[0] for action in row["actions"]) for row in rows]
        for model, methods in found.items()
        for (method, _), rows in sorted(methods.items())
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plots", action="store_true", help="curves too (extra [plots])")
    options = parser.parse_args()
    try:
        found = rows_of(options.folder)
    except UsageError as error:
        parser.error(str(error))
    lines: list[str] = []
    for model, methods in found.items():
        lines += table(model, methods)
        if options.plots:
            plot(model, methods, options.folder / f"{model_name(model)}.png")
    world = world_table(found)
    lines += world
    if options.plots:
        gain_plot(found, options.folder / "gains.png")
        heat_map(found, options.folder / "rules.png")
        if world:
            world_plot(found, options.folder / "world.png")
    write_csv(found, options.folder / "results.csv")
    (options.folder / "report.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
