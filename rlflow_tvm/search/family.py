"""Search by families: settle a whole family of rules first, then descend."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from operator import itemgetter

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.greedy import Greedy
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult

log = logging.getLogger("rlflow_tvm")


@dataclass
class FamilySearch:
    """Greedy search from the start graph and from each graph in which a terminating family of rules is exhausted, the
    cheapest first.

    A blocked layout pays once most of a network is in it, and costs until then: no descent gets there. Applying all
    of the family's rules wherever they apply does, without pricing the graphs on the way. All starts are priced before
    the first descent, which may take all of the budget.
    """

    descent: Greedy = field(default_factory=Greedy)
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        starts = {problem.start.structural_hash: (problem.start_secs, problem.start)}
        for family in TERMINATING_FAMILIES.values():
            start = exhausted(problem.start, family)
            if best.exhausted or start.graph.is_empty or start.structural_hash in starts:
                continue
            cost = problem.cost(start, confirmed=True)
            if not math.isfinite(cost.run_secs):
                log.warning("a family's graph is passed over: %s fails", ", ".join(cost.failed))
                continue
            best.offer(start, cost.run_secs)
            starts[start.structural_hash] = cost.run_secs, start
        for _, start in sorted(starts.values(), key=itemgetter(0)):
            if not best.exhausted:
                self.descent.descend(best, start)
        return best.result()


def exhausted(state: GraphState, rules: tuple[str, ...]) -> GraphState:
    """`state` after applying `rules` until none applies, earlier ones first, each at its first site."""
    refused: set[tuple[int, RewriteAction]] = set()
    while True:
        actions = (RewriteAction(rule, site) for rule in rules for site in state.sites.get(rule, ()))
        action = next((a for a in actions if (state.structural_hash, a) not in refused), None)
        if action is None:
            return state
        try:
            state = state.apply(action)
        except RewriteError:  # a site that cannot be rewritten is passed over, as it is in `RewriteProblem`
            refused.add((state.structural_hash, action))
