"""A plan step by step: the graph before and after each rewrite, what it costs, and what around the place changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax

from rlflow_tvm.cost import CostModel, GraphCost
from rlflow_tvm.passes import GraphState, Plan, RewriteAction
from rlflow_tvm.passes.match import Match
from rlflow_tvm.reporting.changes import Mark, changes
from rlflow_tvm.reporting.drawing import part, surroundings

Progress = Callable[[int, int, str], None]
"""Told after each part of the work: how much is done, of how much, and what is being done."""


@dataclass(frozen=True)
class Along:
    """The states that a plan goes through, the first without any rewrite, and what each costs.

    `reach`: how far away weights are, for all of them alike (see `CostModel.cost`).
    """

    states: tuple[GraphState, ...]
    costs: tuple[GraphCost, ...]
    reach: int

    @property
    def actions(self) -> tuple[RewriteAction, ...]:
        return self.states[-1].actions

    @property
    def gain(self) -> float | None:
        """Cost at the start / cost in the end; None where one of them is not known."""
        before, after = (secs_of(cost) for cost in (self.costs[0], self.costs[-1]))
        return before / after if before and after else None


def price_along(start: GraphState, plan: Plan, cost_model: CostModel, progress: Progress | None = None) -> Along:
    """Replay `plan` from `start` and price every graph on the way; kernels that are not known are measured, those of
    both ends twice.

    PlanError as in `GraphState.replay`; errors of `CostModel.cost`.
    """
    states = (start, *start.along(plan))
    reach = cost_model.reach(start.graph)
    costs = []
    for number, state in enumerate(states):
        # what is between tells the way, not what was gained: a second time for each step of a long plan takes minutes
        ends = number in (0, len(states) - 1)
        costs.append(cost_model.cost(state.graph, reach=reach, confirmed=ends))
        if progress is not None:
            progress(number + 1, len(states), "")
    # by now kernels that these share with the end have second times: else the last step would be charged with them all
    costs[1:-1] = [cost_model.cost(state.graph, reach=reach) for state in states[1:-1]]
    return Along(states, tuple(costs), reach)


def secs_of(cost: GraphCost) -> float | None:
    """Seconds of a run; None where a kernel of it could not be measured."""
    return cost.run_secs if math.isfinite(cost.run_secs) else None


def cost_row(cost: GraphCost) -> dict[str, Any]:
    """A graph's cost, in seconds, bytes and numbers, as JSON takes it."""
    return {
        "secs": secs_of(cost),
        "launch_secs": cost.launch_secs,
        "kernels": cost.kernels,
        "flops": cost.flops,
        "bytes_moved": cost.bytes_moved,
        "peak_bytes": cost.peak_bytes,
        "failed": list(cost.failed),
    }


def step_rows(along: Along) -> list[dict[str, Any]]:
    """For each rewrite its rule, its costs in seconds and the drawings of the place before and after."""
    rows = []
    for number, action in enumerate(along.actions):
        before, after = along.states[number], along.states[number + 1]
        match = before.match(action)
        rows.append(
            {
                "rule": match.rule.name,
                "family": match.rule.family,
                "equation": str(match.rule.equation),
                "when": list(match.rule.when),
                "site": str(action.site),
                "before": secs_of(along.costs[number]),
                "after": secs_of(along.costs[number + 1]),
                "cost": cost_row(along.costs[number + 1]),
                "drawings": _drawings(before, after, match),
            }
        )
    return rows


def _drawings(before: GraphState, after: GraphState, match: Match) -> dict[str, Any]:
    """The match with its neighbours, and what came in its place with the same neighbours."""
    gone, new = changes(before.graph, after.graph)
    old_marks = {**gone, **dict.fromkeys(match.reads, Mark.MATCHED)}
    new_marks = {**new}
    kept = dict.fromkeys(match.roots, Mark.ADDED)  # bound anew, even where by the same operator
    new_marks.update({var: mark for var, mark in kept.items() if var in new})
    old_shown = surroundings(before.graph, _middle(old_marks))
    new_shown = surroundings(after.graph, _middle(new_marks), also=old_shown)
    if not _middle(new_marks):  # nothing was added: what read the match now reads something else
        new_shown = surroundings(after.graph, [*new_marks, *old_shown])
    return {
        "before": part(before.graph, old_shown, old_marks),
        "after": part(after.graph, new_shown, new_marks),
    }


def _middle(marks: dict[relax.Var, Mark]) -> list[relax.Var]:
    return [var for var, mark in marks.items() if mark is not Mark.REWIRED]
