"""What world models learn and what their dreams are worth: RLFlow's figures 8 and 9, its table 3, and its 85 times.

Of the logs in `scripts/agents.py`'s runs, of `scripts/temperature.py` and of `scripts/dream_time.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from agents_plots import world_plot
from agents_report import last_of, world_table
from agents_results import Found, Row, rows_of, told

from papers.page import NOTHING, Page, markdown, one, panels, rows_in, save, short
from papers.runs import chosen, described
from rlflow_tvm.errors import UsageError

WORLD = "world-model"


def world_runs(folders: Sequence[Path]) -> Found:
    """Runs of world models, with their logs."""
    found = chosen(rows_of(*folders), lambda method: method == WORLD, "world-model")
    for methods in found.values():
        for rows in methods.values():
            for row in rows:
                if not row.get("log"):
                    raise UsageError(f"{row['model']}, seed {row['seed']}: the run has no log; run agents.py again")
    return found


def figure8(folders: Sequence[Path]) -> Page:
    """The loss of M, and how well V and M know episodes held out."""
    found = world_runs(folders)
    lines = [
        *world_table(found)[2:],
        *described(found),
        "Of episodes held out, medians over the seeds at the end of each iteration; the figure shows them while V and "
        "M learn.",
    ]
    return Page(lines, partial(world_plot, found))


def returns(rows: Sequence[Row], name: str) -> dict[int, list[float]]:
    """Iteration -> the last return of that name in it, of each run that has one."""
    values: dict[int, list[float]] = {}
    for row in rows:
        for iteration, value in last_of(row["log"], name).items():
            values.setdefault(iteration, []).append(value)
    return values


def figure9(folders: Sequence[Path]) -> Page:
    """What dreams promise, and what the controller then gets."""
    found = world_runs(folders)
    cells = []
    for model, methods in found.items():
        for (_, steps), rows in sorted(methods.items()):
            dreams, real = returns(rows, "dream/return"), returns(rows, "real/return")
            known = returns(rows, "held_out/reward_r2")
            for iteration in sorted(dreams | real):
                columns = [values.get(iteration, []) for values in (dreams, real, known)]
                cells.append(
                    [short(model), str(steps), str(len(rows)), str(iteration + 1)]
                    + [told(values, 2) if values else NOTHING for values in columns]
                )
    columns = ("model", "steps", "seeds", "iteration", "return in dreams", "real return", "R² of a rewrite's saving")
    lines = [
        *markdown(columns, cells),
        "",
        *described(found),
        "Returns of an episode in percent of the first graph's time, means and 95 % intervals over the seeds: of the "
        "iteration's last update in dreams, of the controller's judged episodes before the real graph. Dreams begin "
        "all along real episodes and end after fewer steps, so that the two need not be equal.",
    ]
    return Page(lines, partial(draw_returns, found))


def draw_returns(found: Found, path: Path) -> None:
    """Returns in dreams while the controller learns, and at the end of each iteration the real ones."""
    figure, axes = panels(len(found), 4.4, 3.6)
    for each, (model, methods) in zip(axes, found.items(), strict=True):
        for row in [row for rows in methods.values() for row in rows]:
            dreams: dict[int, list[float]] = {}
            for line in row["log"]:
                if "dream/return" in line:
                    dreams.setdefault(line["iteration"], []).append(line["dream/return"])
            # logs that are kept hold the last update of an iteration alone
            dreamt = [
                (iteration + number / len(values), value)
                for iteration, values in dreams.items()
                for number, value in enumerate(values, 1)
            ]
            real = [(line["iteration"] + 1, line["real/return"]) for line in row["log"] if "real/return" in line]
            first = row["seed"] == 0
            if dreamt:
                each.plot(*zip(*dreamt, strict=True), "C0", alpha=0.5, label="in dreams" if first else None)
            if real:
                each.plot(*zip(*real, strict=True), "C3o", alpha=0.7, label="real" if first else None)
        each.set(xlabel="iterations of dreaming", ylabel="return, %", title=short(model))
        each.legend(fontsize=7)
    save(figure, path)


def table3(paths: Sequence[Path]) -> Page:
    """Returns by the temperature of the dreams that the controllers learnt in."""
    rows = rows_in(one(paths), ("temperature", "seed", "dream_returns", "real_returns", "best_gain"), "temperature.py")
    return Page(
        [
            *temperature_lines(rows),
            "",
            "Returns of an episode in percent of the first graph's time, means and 95 % intervals over the seeds; best "
            "gain: of the cheapest graph that a controller met in its real episodes.",
        ]
    )


def temperature_lines(rows: Sequence[Row]) -> list[str]:
    """The table of a sweep, as Markdown."""
    cells = []
    for temperature in sorted({row["temperature"] for row in rows}):
        own = [row for row in rows if row["temperature"] == temperature]
        means = [[float(np.mean(row[name])) for row in own] for name in ("dream_returns", "real_returns")]
        gains = told([row["best_gain"] for row in own])
        cells.append([f"{temperature:g}", *map(told, means), gains, str(len(own))])
    return markdown(("temperature", "dream", "real", "best gain", "seeds"), cells, left=0)


def step_time(paths: Sequence[Path]) -> Page:
    """A step of a dream against a step of the real environment."""
    cells = []
    for row in rows_in(one(paths), ("model", "real_secs", "dreams"), "dream_time.py"):
        cells.append([short(row["model"]), "real", f"{1e3 * row['real_secs']:.2f}", ""])
        for dream in row["dreams"]:
            alone = dream["step_secs"] / dream["batch"]
            name = f"{dream['batch']} dreams at once"
            cells.append([short(row["model"]), name, f"{1e3 * alone:.3f}", f"1/{row['real_secs'] / alone:.0f}"])
    lines = [
        *markdown(("model", "step", "ms", "of a real one"), cells, left=2),
        "",
        "Uniform actions, medians, every kernel known.",
    ]
    return Page(lines)
