"""All that a report tells, as data that JSON takes; the page and the plots are drawn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow_tvm.cost import CostModel
from rlflow_tvm.passes import Plan, RewriteAction
from rlflow_tvm.reporting.changes import changes
from rlflow_tvm.reporting.drawing import whole
from rlflow_tvm.reporting.figures import Line, best_curve, curves, rules_by_model, rules_by_position
from rlflow_tvm.reporting.kernel_table import kernel_rows
from rlflow_tvm.reporting.steps import Along, cost_row, secs_of, step_rows

Contents = dict[str, Any]
"""`model`, `target`, `agent`: texts. `gain`: cost at the start / cost in the end. `start`, `end`: `steps.cost_row`.
`steps`: `steps.step_rows`. `kernels`, `graphs`: `before` and `after`. `curves`, `best`: of a training. `rules`:
`figures.rules_by_position`; `models`: `figures.rules_by_model`, or None. Times in seconds."""


@dataclass(frozen=True)
class Training:
    """What is told of the training that found a plan: the lines of its logs, and the plans of all its models.

    `as_priced`: whether the report's prices are of the machines and the target that the training's are of.
    """

    agent: str
    progress: Sequence[Line] = ()
    best: Sequence[Line] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)
    as_priced: bool = True


def contents(model: str, along: Along, cost_model: CostModel, training: Training | None = None) -> Contents:
    """The report on `model`'s plan, priced by `cost_model` before (`steps.price_along`).

    KernelError for an operator that cannot be lowered.
    """
    first, last = along.states[0], along.states[-1]
    told = outline(model, along, str(cost_model.target), training)
    gone, new = changes(first.graph, last.graph)
    told["kernels"] = {
        side: kernel_rows(cost_model, state, along.reach, secs_of(cost))
        for side, state, cost in (("before", first, along.costs[0]), ("after", last, along.costs[-1]))
    }
    told["graphs"] = {"before": whole(first.graph, gone), "after": whole(last.graph, new)}
    return told


def outline(model: str, along: Along, target: str, training: Training | None = None) -> Contents:
    """The same without `kernels` and `graphs`: what plots are made of."""
    began_at = secs_of(along.costs[0]) if training is not None and training.as_priced else None
    plans = {} if training is None else training.plans
    return {
        "model": model,
        "target": target,
        "agent": None if training is None else training.agent,
        "gain": along.gain,
        "start": cost_row(along.costs[0]),
        "end": cost_row(along.costs[-1]),
        "steps": step_rows(along),
        "curves": [] if training is None else curves(training.progress),
        "best": [] if training is None else best_curve(training.best, model, began_at, training.progress),
        "rules": rules_by_position([action.rule for action in along.actions]),
        "models": rules_by_model({name: _rules(plan) for name, plan in plans.items()}) if len(plans) > 1 else None,
    }


def _rules(plan: Plan) -> list[str]:
    return [RewriteAction.parse(action).rule for action in plan.actions]
