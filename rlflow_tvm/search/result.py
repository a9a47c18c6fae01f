"""What a search hands back, and the bookkeeping that all searches share."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlflow_tvm.envs import Beginning, RewriteProblem
from rlflow_tvm.passes import GraphState, Plan, RewriteAction
from rlflow_tvm.search.budget import Budget

log = logging.getLogger("rlflow_tvm")

Progress = Callable[[int, int, float], None]
"""Called as `progress(done, total, best_run_secs)`, in steps, or in seconds where the budget has no steps."""


_HOPED = 4
"""Graphs that are remembered until they are offered: of the cheapest the price may have been too low."""


@dataclass(frozen=True)
class SearchResult:
    """The best state that a search found.

    `env_steps` counts the moves tried, `kernels_predicted` the times used that nobody measured (none of them in
    `run_secs_after`), `curve` holds (env_steps, best run_secs) at each improvement; `settled`: see `RewriteProblem`.
    """

    state: GraphState
    run_secs_before: float
    run_secs_after: float
    env_steps: int
    kernels_measured: int
    kernels_predicted: int
    wall_secs: float
    curve: tuple[tuple[int, float], ...]
    settled: Beginning | None = None

    @property
    def plan(self) -> Plan:
        return self.state.plan


class Incumbent:
    """The best state so far, and what was spent on finding it."""

    def __init__(self, problem: RewriteProblem, budget: Budget, progress: Progress | None) -> None:
        self.problem, self.budget, self._progress = problem, budget, progress
        self.state, self.run_secs = problem.start, problem.start_secs
        self._unpriced: set[int] = set()  # structural hashes of graphs of which a kernel failed when measured again
        self._moves_before, self._measured_before = problem.moves, problem.cost_model.measured
        self._predicted_before = problem.cost_model.predicted
        self._measuring_before = problem.cost_model.measuring_secs
        self._started = time.monotonic()
        self._curve = [(0, problem.start_secs)]
        self._hoped: dict[int, tuple[float, GraphState]] = {}  # by structural hash

    @property
    def spent(self) -> int:
        return self.problem.moves - self._moves_before

    @property
    def exhausted(self) -> bool:
        return self.problem.stopped or self.spent >= self.budget.steps or self._secs >= self.budget.secs

    @property
    def _secs(self) -> float:
        return time.monotonic() - self._started

    def offer(self, state: GraphState, run_secs: float) -> bool:
        """Take `state` if it costs less than the best so far, by times that are confirmed; says whether it did."""
        self._hoped.pop(state.structural_hash, None)
        if state.structural_hash in self._unpriced:
            return False
        if run_secs < self.run_secs:
            run_secs = self.problem.cost(state, confirmed=True).run_secs
            if not math.isfinite(run_secs):  # it would be measured in vain at each offer
                self._unpriced.add(state.structural_hash)
        better = run_secs < self.run_secs
        if better:
            self.state = self.problem.best = state
            self.run_secs = run_secs
            self._curve.append((self.spent, run_secs))
        return better

    def hope(self, state: GraphState, run_secs: float) -> None:
        """Keep `state`, which is not offered yet, or what it costs by newer times, for the case that the budget ends
        before it is: the cheapest few of them are offered then, until one is taken."""
        self._hoped[state.structural_hash] = run_secs, state
        if len(self._hoped) > _HOPED:
            del self._hoped[max(self._hoped, key=lambda each: self._hoped[each][0])]

    def report(self) -> None:
        if self._progress is not None:
            counted = math.isfinite(self.budget.steps)
            done, total = (self.spent, self.budget.steps) if counted else (self._secs, self.budget.secs)
            self._progress(int(done), int(total if math.isfinite(total) else done), self.run_secs)

    def result(self) -> SearchResult:
        """What was found; the last report says so too. The log is told of time that went mostly into measuring."""
        if self.exhausted:
            for run_secs, state in sorted(self._hoped.values(), key=lambda each: each[0]):
                if self.offer(state, run_secs):
                    break
        self.report()
        measuring_secs = self.problem.cost_model.measuring_secs - self._measuring_before
        if self._secs >= self.budget.secs and 2 * measuring_secs > self._secs:
            log.warning(
                "%.0f of the search's %.0f s went into measuring kernels: what was measured is known now, so the same "
                "search gets further; more time does too, or predicting a share of a graph's time (0.3)",
                measuring_secs,
                self._secs,
            )
        return SearchResult(
            self.state,
            self.problem.start_secs,
            self.run_secs,
            self.spent,
            self.problem.cost_model.measured - self._measured_before,
            self.problem.cost_model.predicted - self._predicted_before,
            self._secs,
            tuple(self._curve),
            self.problem.settled,
        )


def moves(state: GraphState) -> list[RewriteAction]:
    """All moves from a state, rule by rule."""
    return [RewriteAction(rule, site) for rule, sites in state.sites.items() for site in sites]


def successors(
    best: Incumbent, state: GraphState, seen: set[int], actions: Iterable[RewriteAction] | None = None
) -> Iterator[tuple[RewriteAction, GraphState, float]]:
    """What `actions` (by default all moves from `state`) lead to that is not in `seen`, where it is put, and its cost,
    at its best where that is predicted; ends when `best` has no budget left."""
    for action in moves(state) if actions is None else actions:
        if best.exhausted:
            return
        following = best.problem.successor(state, action)
        best.report()
        if following is not None and following[0].structural_hash not in seen:
            after, cost = following
            seen.add(after.structural_hash)
            yield action, after, cost.run_secs - cost.deviation_secs
