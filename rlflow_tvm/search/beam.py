"""Beam search: the cheapest few states of each level are expanded."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult, successors


@dataclass
class Beam:
    """All successors of a level's states are priced, the `width` cheapest that nobody has seen make the next level.

    It ends after more than `patience` levels without a better state, or when nothing new is left.
    """

    width: int = 4
    patience: int = 8
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        seen, level, idle = {problem.start.structural_hash}, [problem.start], 0
        while level and idle <= self.patience and not best.exhausted:
            before = best.run_secs
            found: list[tuple[float, GraphState, RewriteAction]] = []
            for state in level:
                for action, after, run_secs in successors(best, state, seen):
                    best.offer(after, run_secs)
                    found.append((run_secs, state, action))
            # again, for the few that are kept: all the states of a level would fill the memory
            kept = heapq.nsmallest(self.width, found, key=lambda each: each[0])
            level = [state.apply(action) for _, state, action in kept]
            idle = 0 if best.run_secs < before else idle + 1
        return best.result()
