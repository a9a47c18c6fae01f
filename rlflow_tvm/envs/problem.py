"""The search problem that environments and plain searches share: states, their costs, and moves that are refused."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import tvm

from rlflow_tvm.cost import CostModel, GraphCost
from rlflow_tvm.errors import CostError, EnvError, KernelError, RewriteError
from rlflow_tvm.kernels import Kernel, vector_lanes
from rlflow_tvm.passes import GraphState, Plan, RewriteAction, RuleSet, default_rules

log = logging.getLogger("rlflow_tvm")


@dataclass(frozen=True)
class Beginning:
    """A graph to begin a search at, and its price, confirmed."""

    run_secs: float
    state: GraphState


class RewriteProblem:
    """A start graph, a rule set and a cost: the moves from a state and what they cost.

    `moves` counts the successors asked for (a search's environment steps). A move that cannot be made (the rewrite is
    ill-typed, or TVM cannot lower it, or build or run one of its kernels) is refused: `successor` returns None, and the
    reason is logged once and kept in `refusals`. Where somebody sets `stopped`, searches end with what they have found.
    `best` is the cheapest state that a search has taken: what is left of one that an error ends. `settled` is the
    cheapest state in which families of rules are settled, where `search.beginnings` was asked and found one.
    """

    def __init__(self, mod: tvm.IRModule, cost_model: CostModel, ruleset: RuleSet | None = None) -> None:
        self.cost_model = cost_model
        ruleset = default_rules(vector_lanes(cost_model.target)) if ruleset is None else ruleset
        self.start = GraphState.from_module(mod, ruleset)
        self.best = self.start
        self.settled: Beginning | None = None
        self.moves = 0
        self.stopped = False
        self.refusals: dict[tuple[int, str], str] = {}
        # those that are refused for a kernel, until another process has measured one that failed here: revisions
        self._failing: dict[tuple[int, str], int] = {}
        self._end_to_end: dict[int, float | str] = {}  # seconds, or why there are none
        self._kept = {self.start.plan.actions: self.start}
        self._replay = lru_cache(maxsize=32)(self._replayed)
        if self.start.graph.is_empty:
            raise EnvError("the module computes nothing from its inputs: there is nothing to rewrite")
        self._reach = cost_model.reach(self.start.graph)
        cost = self.surest_cost(self.start)
        if not math.isfinite(cost.run_secs):
            raise EnvError(f"the module cannot be priced as it is: {_failure(cost)} fails; report it as a bug")
        self.start_secs = cost.run_secs

    @property
    def ruleset(self) -> RuleSet:
        return self.start.ruleset

    def cost(self, state: GraphState, *, confirmed: bool = False) -> GraphCost:
        """Cost of a state, in seconds and the other metrics (remembered by structure).

        With `confirmed` no kernel's time is predicted, whatever the cost model's policy, or of one measurement.
        """
        return self.cost_model.cost(state.graph, reach=self._reach, confirmed=confirmed)

    def surest_cost(self, state: GraphState) -> GraphCost:
        """As `cost`, confirmed, but of one measurement where a kernel fails only when it is measured again: that may be
        chance, and a graph to begin with need not be the cheapest of many."""
        cost = self.cost(state, confirmed=True)
        if math.isfinite(cost.run_secs):
            return cost
        once = self.cost(state)
        if math.isfinite(once.run_secs):
            log.warning("a graph is priced by first measurements, as %s", _failure(cost))
            return once
        return cost

    def replay(self, plan: Plan) -> GraphState:
        """The state at a plan's end, remembered for the last few plans; errors as `GraphState.replay`'s."""
        return self._replay(plan)

    def _replayed(self, plan: Plan) -> GraphState:
        plan.check_start(self.start.structural_hash)
        last = self._kept[max((way for way in self._kept if plan.actions[: len(way)] == way), key=len)]
        return last.replay(replace(plan, actions=plan.actions[len(last.actions) :], start_hash=last.structural_hash))

    def keep(self, state: GraphState) -> None:
        """Have plans that lead through `state` replayed from there: many of them have the same long beginning."""
        self._kept.setdefault(state.plan.actions, state)

    def kernels(self, state: GraphState) -> list[Kernel]:
        """The kernels whose times `cost` sums up."""
        return self.cost_model.kernels(state.graph, self._reach)

    def end_to_end(self, state: GraphState) -> float:
        """Seconds of a run of a state's module as a whole, measured once; CostError where it cannot be run, which is
        tried once too."""
        key = state.structural_hash
        if key not in self._end_to_end:
            try:
                self._end_to_end[key] = self.cost_model.end_to_end(state.bound())
            except CostError as error:
                self._end_to_end[key] = str(error)
        found = self._end_to_end[key]
        if isinstance(found, str):
            raise CostError(found)
        return found

    def successor(
        self, state: GraphState, action: RewriteAction, *, confirmed: bool = False, again: bool = False
    ) -> tuple[GraphState, GraphCost] | None:
        """The state after `action` and its cost (as in `cost`), or None where the move is refused.

        `again`: it was tried before in this state, and is no other move now.
        """
        self.moves += not again
        key = (state.structural_hash, str(action))
        if key in self.refusals and self._failing.get(key, self.cost_model.revision) == self.cost_model.revision:
            return None
        try:
            following = state.apply(action)
        except RewriteError as error:
            self._refuse(key, str(error))
            return None
        if following.graph.is_empty:
            self._refuse(key, "nothing would be left to compute, and so to build and to price")
            return None
        try:
            cost = self.cost(following, confirmed=confirmed)
        except KernelError as error:  # a rule of the user's makes an operator that cannot be lowered
            self._refuse(key, str(error))
            return None
        if not math.isfinite(cost.run_secs):
            if not confirmed or not math.isfinite(self.cost(following).run_secs):
                if key not in self._failing:
                    self._refuse(key, _failure(cost))
                self._failing[key] = self.cost_model.revision
            return None  # not refused for good where a kernel failed only when it was measured again
        if self._failing.pop(key, None) is not None:  # another process has measured the kernel meanwhile
            del self.refusals[key]
        return following, cost

    def _refuse(self, key: tuple[int, str], reason: str) -> None:
        self.refusals[key] = reason
        log.warning("move %s refused: %s", key[1], reason)


def _failure(cost: GraphCost) -> str:
    """What made a price infinite."""
    return f"kernel {cost.failed[0]}" if cost.failed else "the cost model"
