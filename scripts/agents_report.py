"""Tables and curves of what `scripts/agents.py` left in a folder.

    python scripts/agents_report.py runs/a --plots

Gains are (cost of the start graph) / (cost of the cheapest graph found), both sums of measured kernel times: graph
gains. `priced anew`: the same by kernel times that no run chose by (`scripts/agents_anew.py`), and so without what is
gained by choosing what was measured too low. An interval is Student's 95 % over the seeds; a method that draws nothing
has none. `asked` is what a trained agent finds when it only acts; `95 % of ppo's` the steps (median over the seeds)
until a method had 0.95 of the gain, less one, that PPO has on average in the end. Of world models also, for each
iteration, how well V and M know episodes held out, and what the controller's episodes return in dreams and before the
real graph (medians over the seeds).

Writes FOLDER/report.md and FOLDER/results.csv (a line for each run); with --plots FOLDER/gains.png, FOLDER/MODEL.png
(gains over steps), FOLDER/rules.png (which rules the plans are made of) and FOLDER/world.png (scores while V and M
learn).
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from agents_plots import gain_plot, heat_map, plot, pyplot, world_plot
from agents_results import SCORES, Found, Row, gain, gains_anew, interval, rows_of, steps_to, told

from rlflow_tvm.errors import UsageError
from rlflow_tvm.training_files import model_name


def table(model: str, methods: dict[tuple[str, int], list[Row]], folder: Path) -> list[str]:
    """As Markdown."""
    (prices,) = {row.get("prices", "an unknown machine") for rows in methods.values() for row in rows}
    lines = [
        f"## {model}",
        "",
        f"Prices of {prices}.",
        "",
        "| method | steps allowed | seeds | gain | priced anew | steps until 99 % of it | 95 % of ppo's | seconds | "
        "asked | seconds, asked |",
        f"|{'---|' * 10}",
    ]
    most = max((steps for method, steps in methods if method == "ppo"), default=None)
    wanted = np.inf if most is None else 1 + 0.95 * (np.mean([gain(row) for row in methods["ppo", most]]) - 1)
    for (method, steps), rows in sorted(methods.items(), key=lambda item: -interval([gain(r) for r in item[1]])[0]):
        asked = [row["asked"] for row in rows if "asked" in row]
        acting = f"{np.median([each['wall_secs'] for each in asked]):.0f}" if asked else ""
        anew = gains_anew(folder, model, rows)
        missing = f" ({len(anew)} of {len(rows)})" if 0 < len(anew) < len(rows) else ""
        near = np.median([steps_to(row, 1 + 0.99 * (gain(row) - 1)) for row in rows])
        there = np.median([steps_to(row, wanted) for row in rows])
        lines.append(
            f"| {method} | {steps} | {len(rows)} | {told([gain(row) for row in rows], 4)} | "
            f"{told(anew, 4) if anew else ''}{missing} | {near:.0f} | "
            f"{f'{there:.0f}' if np.isfinite(there) else 'never'} | "
            f"{np.median([row['wall_secs'] for row in rows]):.0f} | "
            f"{told([gain(each) for each in asked], 4) if asked else ''} | {acting} |"
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
            for iteration in sorted(set[int]().union(*columns[0])):
                there = [[each[iteration] for each in column if iteration in each] for column in columns]
                told = [f"{np.median(values):.4g}" if values else "" for values in there]
                lines.append(f"| {model} | {steps} | {len(there[0])} | {iteration + 1} | {' | '.join(told)} |")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plots", action="store_true", help="curves too (extra [plots])")
    options = parser.parse_args()
    lines: list[str] = []
    try:
        if options.plots:
            pyplot()
        found = rows_of(options.folder)
        for model, methods in found.items():
            lines += table(model, methods, options.folder)
    except UsageError as error:
        parser.error(str(error))
    for model, methods in found.items() if options.plots else ():
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
