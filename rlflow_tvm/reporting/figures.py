"""What is drawn of a training and of plans: curves, and which rules stand where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
"""One line of a log."""

# the least of all models, by first times: each model's own is drawn by `best_curve`
_NO_CURVES = {"update", "env_steps", "iteration", "wall_secs", "longest", "best_run_secs"}
_FIRST = (
    "mean_return",
    "real/return",
    "dream/return",
    "best_return",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
)
_STEPS, _LINES = "environment steps", "line of the log"
_POINTS = 600  # of a curve, at most
_COLUMNS = 40  # of a heat map, at most


def curves(log: Sequence[Line]) -> list[dict[str, Any]]:
    """Each number of a training's log: `name`, `points` [x, value], and `over`, which says what x is; the best known
    ones first. That is environment steps; lines without a number of them have that of the line before. Where most
    lines have the same number as others, as those of a world model that learns between real episodes, it is the line's
    place in the log."""
    told = [line["env_steps"] for line in log if is_number(line.get("env_steps"))]
    over, by_line = (_LINES, True) if 2 * len(set(told)) < len(told) else (_STEPS, False)
    found: dict[str, list[list[float]]] = {}
    x = 0.0
    for number, line in enumerate(log, 1):
        x = number if by_line else line["env_steps"] if is_number(line.get("env_steps")) else x
        for name, value in line.items():
            if name not in _NO_CURVES and is_number(value):
                found.setdefault(name, []).append([x, value])
    names = [*(name for name in _FIRST if name in found), *(name for name in found if name not in _FIRST)]
    return [{"name": name, "points": _thinned(found[name]), "over": over} for name in names]


def best_curve(
    log: Sequence[Line], model: str, start_secs: float | None, progress: Sequence[Line] = ()
) -> list[list[float]]:
    """[environment steps, seconds] of the best graph of `model` each time that a training found a better one, after
    what it began with, and at its end, as `progress` tells it; empty where it found none."""
    lines = [line for line in log if line.get("model") == model]
    points = [
        [line["env_steps"], line["run_secs"]]
        for line in lines
        if is_number(line.get("env_steps")) and is_number(line.get("run_secs"))
    ]
    steps = [line["env_steps"] for line in progress if is_number(line.get("env_steps"))]
    if points and steps and max(steps) > points[-1][0]:
        points.append([max(steps), points[-1][1]])
    return [[0, start_secs], *points] if points and start_secs is not None else points


def is_number(value: object) -> bool:
    """Whether a value out of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rules_by_position(rules: Sequence[str]) -> dict[str, Any]:
    """How often each rule stands at which place of a plan: `columns` (places, from 1, several to a column where the
    plan is long) and `rows` of `rule` and `counts`, in the order in which they first stand in the plan."""
    wide = max(1, math.ceil(len(rules) / _COLUMNS))
    firsts = range(0, len(rules), wide)
    columns = [
        str(first + 1) if wide == 1 or first + 1 == len(rules) else f"{first + 1}-{min(first + wide, len(rules))}"
        for first in firsts
    ]
    parts = [Counter(rules[first : first + wide]) for first in firsts]
    return {
        "columns": columns,
        "rows": [{"rule": rule, "counts": [part[rule] for part in parts]} for rule in dict.fromkeys(rules)],
    }


def rules_by_model(plans: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """How often each rule stands in each model's plan (name -> its rules), those met most first: RLFlow's figure 10.
    In the form of `rules_by_position`."""
    counts = [Counter(rules) for rules in plans.values()]
    total = sum(counts, Counter[str]())
    return {
        "columns": list(plans),
        "rows": [{"rule": rule, "counts": [count[rule] for count in counts]} for rule, _ in total.most_common()],
    }


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """No more points than a curve shows: means of neighbours."""
    if len(points) <= _POINTS:
        return points
    wide = math.ceil(len(points) / _POINTS)
    groups = [points[first : first + wide] for first in range(0, len(points), wide)]
    return [[sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)] for group in groups]
