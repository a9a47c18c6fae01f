"""Tables and figures of `scripts/agents.py`'s runs: what was found, by whom, in what time, and by which rules.

RLFlow's table 2 and its figures 5, 7 and 10; X-RLflow's speed-ups by model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from agents_plots import draw_gains, gain_plot, heat_map, rule_means
from agents_results import Found, Row, gain, gains_along, interval, rows_of, told

from papers.page import NOTHING, Page, less, markdown, panels, save, scaled, short
from rlflow_tvm.errors import UsageError
from rlflow_tvm.search import SEARCHES

FOR = "-for-"
FIRST = ("candidate", "ppo", "world-model", "backtracking", "greedy")
"""The columns of X-RLflow's comparison; other methods come after them."""
MOST_RULES = 25


def usual(method: str) -> bool:
    """Whether a method's reward is the usual one."""
    return FOR not in method


def chosen(found: Found, wanted: Callable[[str], bool], script: str) -> Found:
    """The runs of some methods alone; UsageError where there is none."""
    kept = {
        model: {(method, steps): rows for (method, steps), rows in methods.items() if wanted(method)}
        for model, methods in found.items()
    }
    kept = {model: methods for model, methods in kept.items() if methods}
    if not kept:
        raise UsageError(f"no run in these folders is of a method that this table is about: {script}")
    return kept


def described(found: Found) -> list[str]:
    """How the runs were made: prices, and settings of agents that are not the usual ones."""
    every = [row for methods in found.values() for rows in methods.values() for row in rows]
    prices = sorted({row.get("prices", "an unknown machine") for row in every})
    lines = [f"Prices of {' and of '.join(prices)}."]
    settings = sorted({f"{row['method']}: {json.dumps(row['settings'])}" for row in every if row.get("settings")})
    return [*lines, *(f"Settings that are not the usual ones: {each}." for each in settings)]


def label(method: str, steps: int) -> str:
    return f"{method}, {steps} steps"


def ordered(methods: dict[tuple[str, int], list[Row]]) -> list[tuple[tuple[str, int], list[Row]]]:
    """The best on average first."""
    return sorted(methods.items(), key=lambda item: -interval([gain(row) for row in item[1]])[0])


def changes(rows: Sequence[Row], name: str) -> str:
    """By how many percent less a metric is after the plans; nothing where the runs do not tell."""
    values = [less(row["metrics"]["before"][name], row["metrics"]["after"][name]) for row in rows if "metrics" in row]
    return told(values, 1) if len(values) == len(rows) else NOTHING


def mean_metric(rows: Sequence[Row], when: str, name: str, unit: float, digits: int) -> str:
    values = [row["metrics"][when][name] for row in rows if "metrics" in row]
    return scaled(float(np.mean(values)), unit, digits) if len(values) == len(rows) else NOTHING


def table2(folders: Sequence[Path]) -> Page:
    """Run time, memory and work before and after, by model and method."""
    found = chosen(rows_of(*folders), usual, "it is about agents.py's usual reward")
    columns = (
        *("model", "method", "seeds", "before, ms", "after, ms", "less, %", "peak memory before, MB", "less, %"),
        *("kernels before", "after", "FLOPs less, %", "bytes moved less, %"),
    )
    cells = []
    for model, methods in found.items():
        for (method, steps), rows in ordered(methods):
            secs = [row["best_secs"] for row in rows]
            saved = [less(row["start_secs"], row["best_secs"]) for row in rows]
            cells.append(
                [
                    short(model), label(method, steps), str(len(rows)), scaled(rows[0]["start_secs"], 1e-3),
                    scaled(float(np.mean(secs)), 1e-3), told(saved, 2),
                    mean_metric(rows, "before", "peak_bytes", 1e6, 2), changes(rows, "peak_bytes"),
                    mean_metric(rows, "before", "kernels", 1, 0), mean_metric(rows, "after", "kernels", 1, 1),
                    changes(rows, "flops"), changes(rows, "bytes_moved"),
                ]
            )  # fmt: skip
    lines = [
        *markdown(columns, cells, left=2),
        "",
        *described(found),
        "Run times are sums of measured kernels and their launches; memory is the peak of inputs, outputs and "
        "intermediates by TVM's memory plan, without weights. Means over the seeds, 95 % intervals.",
    ]
    return Page(lines)


def figure5(folders: Sequence[Path]) -> Page:
    """PPO for one reward and another: gains, and returns while it trains."""
    found = chosen(rows_of(*folders), lambda m: m == "ppo" or m.startswith(f"ppo{FOR}"), "ppo, ppo-for-REWARD")
    both = {model: methods for model, methods in found.items() if any(FOR in method for method, _ in methods)}
    if not both:
        raise UsageError("no run in these folders is for another reward than the usual one: run agents.py with "
                         "--methods ppo ppo-for-mixed ...")  # fmt: skip
    columns = ("model", "reward", "steps", "seeds", "gain", "after half of the steps", "16 sampled plans")
    cells = []
    for model, methods in both.items():
        for (method, steps), rows in ordered(methods):
            halfway = [float(gains_along(row, np.array([steps / 2]))[0]) for row in rows]
            asked = [gain(row["asked"]) for row in rows if "asked" in row]
            cells.append(
                [
                    short(model), method.partition(FOR)[2] or "improvement (the default)", str(steps), str(len(rows)),
                    told([gain(row) for row in rows]), told(halfway), told(asked) if asked else NOTHING,
                ]
            )  # fmt: skip
    lines = [
        *markdown(columns, cells, left=2),
        "",
        *described(both),
        "Gains are what the cheapest graph met saves, whatever the reward: rewards have different units.",
    ]
    return Page(lines, partial(draw_rewards, both))


def draw_rewards(found: Found, path: Path) -> None:
    """For each model gains over steps, and where the logs are there each reward's returns, from least to most."""
    logged = [m for m, methods in found.items() if any(row.get("log") for rows in methods.values() for row in rows)]
    figure, axes = panels(len(found) + len(logged), 5.0, 3.8)
    for each, (model, methods) in zip(axes, found.items(), strict=False):
        draw_gains(each, model, methods)
        each.legend(fontsize=6)
    for each, model in zip(axes[len(found) :], logged, strict=True):
        for number, ((method, _), rows) in enumerate(sorted(found[model].items())):
            for row in rows:
                updates = [line for line in row.get("log", []) if line.get("mean_return") is not None]
                returns = np.array([line["mean_return"] for line in updates])
                if len(returns) > 1 and np.ptp(returns) > 0:
                    steps = [line["env_steps"] for line in updates]
                    name = method if row["seed"] == 0 else None
                    normalised = (returns - returns.min()) / np.ptp(returns)
                    each.plot(steps, normalised, color=f"C{number}", alpha=0.6, label=name)
        each.set(xlabel="environment steps", ylabel="mean return, 0 to 1 in each run", title=model)
        each.legend(fontsize=6)
    save(figure, path)


def figure7(folders: Sequence[Path]) -> Page:
    """How long searches and trainings take, and what a trained agent needs to act."""
    found = chosen(rows_of(*folders), usual, "it is about agents.py's usual reward")
    columns = (
        *("model", "method", "seeds", "searching or training, s", "steps", "a step, ms", "kernels measured meanwhile"),
        *("acting, s", "steps of it"),
    )
    cells = []
    for model, methods in found.items():
        for (method, steps), rows in sorted(methods.items()):
            measured = [row["kernels_measured"] for row in rows if "kernels_measured" in row]
            asked = [row["asked"] for row in rows if "asked" in row]
            cells.append(
                [
                    short(model), label(method, steps), str(len(rows)), told([row["wall_secs"] for row in rows], 1),
                    f"{np.median([row['env_steps'] for row in rows]):.0f}",
                    f"{np.median([1e3 * row['wall_secs'] / max(row['env_steps'], 1) for row in rows]):.1f}",
                    f"{np.median(measured):.0f}" if measured else NOTHING,
                    told([each["wall_secs"] for each in asked], 1) if asked else NOTHING,
                    f"{np.median([each['env_steps'] for each in asked]):.0f}" if asked else NOTHING,
                ]
            )  # fmt: skip
    lines = [
        *markdown(columns, cells, left=2),
        "",
        *described(found),
        "Means with 95 % intervals over the seeds, steps and kernels medians. All runs of a model share one database "
        "of kernels: what the first ones had to measure the others find there, so that the first look slower. RLFlow "
        "tells the time of acting alone; here the training stands beside it.",
    ]
    return Page(lines, partial(draw_times, found))


def draw_times(found: Found, path: Path) -> None:
    """Seconds of searching or training with their intervals, and of acting, a panel for each model."""
    figure, axes = panels(len(found), 4.2, 3.6)
    for each, (model, methods) in zip(axes, found.items(), strict=True):
        names = []
        for number, ((method, steps), rows) in enumerate(sorted(methods.items())):
            names.append(label(method, steps))
            mean, half = interval([row["wall_secs"] for row in rows])
            bounds = [[min(half, 0.9 * mean)], [half]]  # the axis has no room for nought
            each.errorbar(mean, number, xerr=bounds, fmt="o", color="C0" if method in SEARCHES else "C3", capsize=3)
            asked = [row["asked"]["wall_secs"] for row in rows if "asked" in row]
            if asked:
                each.plot(np.mean(asked), number, "x", color="0.2")
        each.set_yticks(range(len(names)), names, fontsize=6)
        each.grid(axis="x", alpha=0.3)
        each.set(xscale="log", xlabel="seconds (cross: a trained agent acts)", title=short(model))
    save(figure, path)


def figure10(folders: Sequence[Path]) -> Page:
    """Which rules the best plans are made of."""
    found = chosen(rows_of(*folders), usual, "it is about agents.py's usual reward")
    rules, columns, means = rule_means(found)
    if not rules:
        raise UsageError("no plan of these runs has a rewrite in it: give the runs more steps")
    first = np.argsort(-means.sum(axis=1), kind="stable")[:MOST_RULES]
    cells = [[f"`{rules[row]}`", *(f"{value:.1f}" if value else "" for value in means[row])] for row in first]
    lines = [
        *markdown(("rule", *columns), cells),
        "",
        f"Rewrites in the best plan, means over the seeds; the {len(first)} rules that stand in them most.",
    ]
    return Page(lines, partial(heat_map, found))


def speed_up(folders: Sequence[Path]) -> Page:
    """Graph gains by model and method, and their geometric means over the models that a method was run on."""
    found = chosen(rows_of(*folders), usual, "it is about agents.py's usual reward")
    every = {key for methods in found.values() for key in methods}
    order = {name: number for number, name in enumerate(FIRST)}
    keys = sorted(every, key=lambda key: (order.get(key[0], len(order)), key))
    cells = []
    for model, methods in found.items():
        own = [told([gain(row) for row in methods[key]]) if key in methods else NOTHING for key in keys]
        cells.append([short(model), *own])
    means = []
    for key in keys:
        gains = [interval([gain(row) for row in methods[key]])[0] for methods in found.values() if key in methods]
        means.append(f"{geometric_mean(gains):.3f}" if len(gains) == len(found) else NOTHING)
    if len(found) > 1:
        cells.append(["geometric mean", *means])
    lines = [
        *markdown(("model", *(label(*key) for key in keys)), cells),
        "",
        *described(found),
        "Graph gains: the first graph's time over the cheapest one's, both sums of measured kernels; means and 95 % "
        "intervals over the seeds. A geometric mean stands where a method was run on all models.",
    ]
    return Page(lines, partial(gain_plot, found))
