"""What a search hands back, and the bookkeeping that all searches share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, Plan

Progress = Callable[[int, int, float], None]
"""Called as `progress(env_steps, budget, best_run_secs)`."""


@dataclass(frozen=True)
class SearchResult:
    """The best state that a search found.

    `env_steps` counts the moves tried, `kernels_predicted` the times used that nobody measured (none of them in
    `run_secs_after`), `curve` holds (env_steps, best run_secs) at each improvement.
    """

    state: GraphState
    run_secs_before: float
    run_secs_after: float
    env_steps: int
    kernels_measured: int
    kernels_predicted: int
    wall_secs: float
    curve: tuple[tuple[int, float], ...]

    @property
    def plan(self) -> Plan:
        return self.state.plan


class Incumbent:
    """The best state so far, and what was spent on finding it."""

    def __init__(
        self, problem: RewriteProblem, budget: int, progress: Progress | None, start: GraphState | None = None
    ) -> None:
        self.problem, self.budget, self._progress = problem, budget, progress
        self.state = problem.start if start is None else start
        self.run_secs = problem.cost(self.state, measured=True).run_secs
        self._moves_before, self._measured_before = problem.moves, problem.cost_model.measured
        self._predicted_before = problem.cost_model.predicted
        self._started = time.monotonic()
        self._curve = [(0, problem.start_secs)]

    @property
    def spent(self) -> int:
        return self.problem.moves - self._moves_before

    @property
    def exhausted(self) -> bool:
        return self.spent >= self.budget

    def offer(self, state: GraphState, run_secs: float) -> bool:
        """Take `state` if it costs less than the best so far, by measurement; says whether it did."""
        if run_secs < self.run_secs:
            run_secs = self.problem.cost(state, measured=True).run_secs
        better = run_secs < self.run_secs
        if better:
            self.state, self.run_secs = state, run_secs
            self._curve.append((self.spent, run_secs))
        return better

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self.spent, self.budget, self.run_secs)

    def result(self) -> SearchResult:
        """What was found; the last report says so too."""
        self.report()
        return SearchResult(
            self.state,
            self.problem.start_secs,
            self.run_secs,
            self.spent,
            self.problem.cost_model.measured - self._measured_before,
            self.problem.cost_model.predicted - self._predicted_before,
            time.monotonic() - self._started,
            tuple(self._curve),
        )
