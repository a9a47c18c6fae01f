"""Search by families: settle a whole family of rules first, then descend."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.greedy import Greedy
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult
from rlflow_tvm.search.settled import beginnings


@dataclass
class FamilySearch:
    """Greedy search from the start graph and from each graph in which a terminating family of rules is exhausted, the
    cheapest first.

    All beginnings are priced before the first descent, which may take all of the budget.
    """

    descent: Greedy = field(default_factory=Greedy)
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        found = beginnings(problem)
        for begin in found:
            best.offer(begin.state, begin.run_secs)
        for begin in found:
            if not best.exhausted:
                self.descent.descend(best, begin.state)
        return best.result()
