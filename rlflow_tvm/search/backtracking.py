"""TASO's search: a priority queue by cost that also keeps what costs a little more than the best."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult, successors


@dataclass
class Backtracking:
    """Cost-based backtracking search (Jia et al. 2019, TASO, algorithm 2).

    The cheapest state of the queue is expanded; successors that nobody has seen (by structural hash), that cost less
    than `alpha` times the best, and that have at most `growth` times the operators of the start (work on weights
    apart) join the queue.
    """

    alpha: float = 1.05
    growth: float = 2.0
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        limit = self.growth * _operators(problem.start)
        seen = {problem.start.structural_hash}
        number = itertools.count()  # of two that cost the same the earlier goes first
        # What is queued is a state's parent and the move from it: the states themselves would fill the memory.
        queue: list[tuple[float, int, GraphState, RewriteAction | None]] = [
            (problem.start_secs, next(number), problem.start, None)
        ]
        while queue and not best.exhausted:
            secs, _, parent, move = heapq.heappop(queue)
            if secs > self.alpha * best.run_secs:
                break  # queued when the best was worse; all that follow cost more still
            state = parent if move is None else parent.apply(move)
            for action, after, run_secs in successors(best, state, seen):
                if _operators(after) <= limit and run_secs < self.alpha * best.run_secs:
                    best.offer(after, run_secs)
                    heapq.heappush(queue, (run_secs, next(number), state, action))
        return best.result()


def _operators(state: GraphState) -> int:
    """Operators at run time."""
    return sum(node.var not in state.graph.weight_only for node in state.graph.nodes)
