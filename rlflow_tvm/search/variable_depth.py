"""Variable-depth search: descent, then short chains of moves that first cost more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.greedy import Greedy
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult, successors


@dataclass(frozen=True)
class _Step:
    """A state on a chain, its cost, and the state before it."""

    state: GraphState
    run_secs: float
    before: GraphState


@dataclass
class VariableDepth:
    """Greedy descent; where it is stuck, chains of up to `depth` moves whose first may raise the cost.

    After the first move of a chain only moves at or next to what the one before changed are tried, and the `width`
    cheapest of them are gone on from: so all chains are a few times the moves there are, not a power of them (Kernighan
    and Lin 1970 and 1973 bind their chains alike). Short chains come first, and among them those with the cheapest
    first moves; at the first that ends below the best state descent goes on. No state on a chain may cost more than
    (1 + `tolerance`) times the best.
    """

    descent: Greedy = field(default_factory=lambda: Greedy(patience=0))
    depth: int = 4
    width: int = 2
    tolerance: float = 0.1
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        climbed = True
        while climbed and not best.exhausted:
            self.descent.descend(best, best.state)
            climbed = self._climb_out(best)
        return best.result()

    def _climb_out(self, best: Incumbent) -> bool:
        """Look for a chain that ends below the best state; says whether one was found (it is the best now)."""
        seen = {best.state.structural_hash}
        level = self._cheapest(best, best.state, None, seen)
        for _ in range(self.depth - 1):
            following: list[_Step] = []
            for step in level:
                ends = self._cheapest(best, step.state, opened(step.before, step.state), seen)
                if any(best.offer(end.state, end.run_secs) for end in ends):
                    return True
                following += ends[: self.width]
            level = sorted(following, key=lambda step: step.run_secs)
        return False

    def _cheapest(
        self, best: Incumbent, state: GraphState, actions: Iterable[RewriteAction] | None, seen: set[int]
    ) -> list[_Step]:
        """What `actions` (None: all) lead to that was not seen before and costs little enough, the cheapest first."""
        found = [
            _Step(after, run_secs, state)
            for _, after, run_secs in successors(best, state, seen, actions)
            if run_secs <= (1 + self.tolerance) * best.run_secs
        ]
        return sorted(found, key=lambda step: step.run_secs)


def opened(before: GraphState, after: GraphState) -> Iterator[RewriteAction]:
    """The moves from `after` at what the move from `before` changed, or next to it: those whose matches read a node
    that is new or has new operands, or an operand of such a node."""
    known = set(map(id, before.graph.nodes))  # a rewrite shares the nodes that it does not touch
    changed = [node for node in after.graph.nodes if id(node) not in known]
    near = {node.var for node in changed}.union(*(node.inputs for node in changed))
    for rule in after.sites:
        for site, match in after.located(rule):
            if not near.isdisjoint(match.reads):
                yield RewriteAction(rule, site)
