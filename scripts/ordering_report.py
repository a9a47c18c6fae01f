"""Tables of what `scripts/ordering.py` left in a folder, as Markdown, and the curves of the trainings.

    python scripts/ordering_report.py runs/ordering

`left`: the geometric mean over the held-out graphs of what is left of the operations. `against documented` and `against
cleaning`: the geometric mean of (left by that default order) / (left here), less one: the paper's measure. `at least as
good`: the share of graphs where that is no less than nought. An interval is Student's 95 % over the seeds. Writes
FOLDER/report.md and FOLDER/curves.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from agents_plots import pyplot
from agents_results import read_json, read_number, told
from papers.page import markdown

from rlflow_tvm.differences import TOLERANCE
from rlflow_tvm.errors import UsageError

Left = Mapping[str, float]
DEFAULTS = ("documented", "cleaning")
COLUMNS = (
    *("order by", "seeds", "left", "against documented", "at least as good", "against cleaning", "at least as good"),
    *("passes tried on a graph", "training, s", "steps a second", "peak, MiB"),
)


def percent(values: Sequence[float], digits: int = 1) -> str:
    return told([100 * value for value in values], digits) + " %"


def mean_left(runs: Sequence[Left]) -> float:
    """Over seeds, of the geometric means over graphs."""
    return float(np.mean([geometric_mean(run.values()) for run in runs]))


def line(label: str, runs: Sequence[Left], defaults: Mapping[str, Left], *more: str) -> list[str]:
    """A row of the table; `runs`: what each seed leaves of each graph."""
    cells = [label, str(len(runs)), percent([geometric_mean(run.values()) for run in runs])]
    for left in defaults.values():
        cells.append(percent([geometric_mean(left[name] / run[name] for name in run) - 1 for run in runs]))
        cells.append(percent([float(np.mean([run[n] <= left[n] + 1e-9 for n in run])) for run in runs], 0))
    return [*cells, *more]


def without_training(rows: Mapping[str, Any]) -> Iterator[tuple[str, list[Left], str]]:
    """Label, what each seed leaves, passes tried on a graph."""
    first = next(iter(rows.values()))
    for label in first:
        if label in ("operations", "random"):
            continue
        tried = [row[label].get("tried", len(row[label]["order"])) for row in rows.values()]
        yield label, [{name: row[label]["left"] for name, row in rows.items()}], f"{np.mean(tried):.0f}"
    seeds = min(len(row["random"]) for row in rows.values())  # a graph may have had more of them before
    runs = [{name: row["random"][seed]["left"] for name, row in rows.items()} for seed in range(seeds)]
    yield "random", runs, "32"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        pyplot()
        lines, found = report(folder)
    except UsageError as error:
        parser.error(str(error))
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    curves(found, folder / "curves.png")
    return 0


def report(folder: Path) -> tuple[list[str], dict[tuple[str, int], list[dict[str, Any]]]]:
    """Its lines, and the trainings by agent and steps. UsageError where `scripts/ordering.py` has not left all."""
    rows = read_json(folder / "baselines.json")
    defaults = {default: {name: row[default]["left"] for name, row in rows.items()} for default in DEFAULTS}
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        row = read_json(path)
        if "agent" in row:
            found.setdefault((row["agent"], row["steps"]), []).append(row)
    table = []
    for label, runs, tried in without_training(rows):
        table.append((mean_left(runs), line(label, runs, defaults, tried, "", "", "")))
    for (agent, steps), runs in found.items():
        lefts = [{name: each["left"] for name, each in run["graphs"].items()} for run in runs]
        more = (
            "at most 32",
            f"{np.median([run['wall_secs'] for run in runs]):.0f}",
            steps_a_second(runs),
            f"{max(run['peak_mib'] for run in runs):.0f}",
        )
        table.append((mean_left(lefts), line(f"{agent}, {steps} steps", lefts, defaults, *more)))
        common = [run["common"]["left"] for run in runs]
        label = f"{agent}, {steps} steps: one order for all"
        table.append((mean_left(common), line(label, common, defaults, "", "", "", "")))
    lines = markdown(COLUMNS, [cells for _, cells in sorted(table)])
    for part in (by_family(rows, found, defaults), run_times(folder), equality(folder), endurance(folder)):
        lines += ["", *part]
    return lines, found


def steps_a_second(runs: Sequence[Mapping[str, Any]]) -> str:
    """Of trainings, by the last line of their logs: the median; nothing where all were too short for a line."""
    ends = [run["log"][-1] for run in runs if run["log"]]
    return f"{np.median([end['env_steps'] / end['secs'] for end in ends]):.0f}" if ends else ""


def by_family(
    rows: Mapping[str, Any], found: Mapping[tuple[str, int], list[dict[str, Any]]], defaults: Mapping[str, Left]
) -> list[str]:
    """Operations left, by what the graphs are."""
    kinds = sorted({"-".join(name.split("-")[:2]) for name in rows})
    heads = [f"{kind} ({sum(name.startswith(f'{kind}-') for name in rows)} graphs)" for kind in kinds]
    lefts: dict[str, list[Left]] = {label: [left] for label, left in defaults.items()}
    lefts["greedy"] = [{name: row["greedy"]["left"] for name, row in rows.items()}]
    for (agent, steps), runs in found.items():
        lefts[f"{agent}, {steps}"] = [{n: each["left"] for n, each in run["graphs"].items()} for run in runs]

    def told_of(kind: str, seeds: Sequence[Left]) -> str:
        return percent([geometric_mean(left for name, left in run.items() if name.startswith(kind)) for run in seeds])

    cells = [[label, *(told_of(f"{kind}-", seeds) for kind in kinds)] for label, seeds in lefts.items()]
    return markdown(("left of", *heads), cells)


def run_times(folder: Path) -> list[str]:
    """What fewer operations did to run time: medians over the rounds of ratios, geometric means over graphs."""
    path = folder / "times.json"
    if not path.exists():
        return []
    rows = read_json(path)
    labels = list(next(iter(rows.values())))
    cells = []
    for label in labels[1:]:
        left, ratios = [], []
        for row in rows.values():
            left.append(row[label]["operations"] / row[labels[0]]["operations"])
            rounds = zip(row[label]["round_secs"], row[labels[0]]["round_secs"], strict=True)
            ratios.append(float(np.median([new / old for new, old in rounds])))
        slower = sum(ratio > 1.02 for ratio in ratios)
        means = (f"{100 * geometric_mean(each):.1f} %" for each in (left, ratios))
        cells.append([label, *means, str(slower)])
    return markdown((f"{len(rows)} graphs, TVM's default build", "operations left", "run time left", "slower"), cells)


def equality(folder: Path) -> list[str]:
    path = folder / "checks.json"
    if not path.exists():
        return []
    rows = read_json(path)
    errors = {(name, key): read_number(error) for name, row in rows.items() for key, error in row.items()}
    wrong = [f"{name} ({error:.1e})" for (name, _), error in errors.items() if error > TOLERANCE]
    told_wrong = f"{len(wrong)} differ: {', '.join(wrong)}" if wrong else "none differs"
    return [f"{len(errors)} modules run against their originals: {told_wrong}; largest difference "
            f"{max(errors.values()):.1e} of an output's range."]  # fmt: skip


def endurance(folder: Path) -> list[str]:
    """How memory and speed went over the many random steps."""
    path = folder / "endurance.json"
    if not path.exists():
        return []
    told_of = read_json(path)
    rows = told_of["rows"]
    cells = [
        [str(row["steps"]), f"{row['resident_mib']:.0f}", f"{row['steps_per_sec']:.0f}", str(row["refusals"])]
        for row in rows[:: max(1, len(rows) // 5)] + rows[-1:]
    ]
    columns = ("random steps in one process", "resident, MiB", "steps a second", "refusals")
    return [*markdown(columns, cells, left=0), "", *(f"- refused: {why}" for why in told_of["refusals"])]


def curves(found: Mapping[tuple[str, int], list[dict[str, Any]]], path: Path) -> None:
    """Operations left in training, over its steps; the mean over seeds."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (agent, steps), every in found.items():
        runs = [run for run in every if run["log"]]
        if not runs:
            continue
        points = np.linspace(0, steps, 33)[1:]
        each = [
            np.interp(points, [row["env_steps"] for row in run["log"]], [100 * row["left"] for row in run["log"]])
            for run in runs
        ]
        axes.plot(points, np.mean(each, axis=0), label=f"{agent} ({len(runs)} seeds)")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("% of operations left at best, last 20 episodes")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
