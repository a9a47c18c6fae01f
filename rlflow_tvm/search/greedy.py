"""Greedy search: always the move that lowers the cost most, and short walks across plateaus."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search.budget import DEFAULT_BUDGET, Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult

Key = tuple[str, tuple[object, ...], tuple[int, ...]]  # a site that outlives rewrites elsewhere: rule, roots, variant


@dataclass
class Greedy:
    """Steepest descent with remembered gains.

    A rewrite changes the gains of few other sites, so gains are kept from step to step and only the seemingly best
    site is priced afresh (as in lazy greedy maximisation, Minoux 1978); before descent is given up, every site is.
    Where no move lowers the cost, up to `patience` moves that raise it by at most `tolerance` (a fraction of the
    cost now) are taken, those that the last rewrite opened first: a layout transform gains nothing while it moves,
    only when it meets its inverse. The best state seen is the result.

    Where the cost model predicts, a site's gain is told at its best, by a standard deviation. Before a site is taken,
    times that are predicted or of one measurement are measured.
    """

    patience: int = 8
    tolerance: float = 0.01
    budget: Budget = DEFAULT_BUDGET

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given costs."""
        best = Incumbent(problem, self.budget, progress)
        self.descend(best, best.state)
        return best.result()

    def descend(self, best: Incumbent, start: GraphState) -> None:
        """Search from `start` and offer what is found to `best`, whose budget it is."""
        walk = _Walk(best, start)
        lowest, plateau = walk.run_secs, 0
        while not best.exhausted:
            move = walk.best_move(0.0)
            # else gains are from earlier states: not to be trusted
            if move is None and plateau < self.patience and not best.exhausted:
                move = walk.plateau_move(self.tolerance)
            if move is None:
                break
            walk.take(move)
            best.offer(walk.state, walk.run_secs)
            plateau = 0 if walk.run_secs < lowest else plateau + 1
            lowest = min(lowest, walk.run_secs)
            best.report()


class _Walk:
    """A path through the states, with what is known of each site's gain."""

    def __init__(self, best: Incumbent, start: GraphState) -> None:
        self.problem, self._best = best.problem, best
        self.state, self.run_secs = start, best.problem.surest_cost(start).run_secs
        self._gains: dict[Key, float] = {}  # cost after minus cost before, when last priced; inf if refused
        self._fresh: set[Key] = set()  # priced in the state now
        self._confirmed: set[Key] = set()  # of those, the ones of which no time is predicted, or of one measurement
        self._opened: dict[Key, int] = {}  # the step at which the site appeared
        self._seen = {self.state.structural_hash}
        self._step = 0
        self._sites = self._list()

    def _list(self) -> dict[Key, RewriteAction]:
        sites = {}
        for rule, found in self.state.sites.items():
            for site in found:
                action = RewriteAction(rule, site)
                match = self.state.match(action)
                sites[rule, match.roots, match.variant] = action
        for key in sites:
            self._opened.setdefault(key, self._step)
        return sites

    def _price(self, key: Key, *, confirmed: bool = False) -> None:
        action, again = self._sites[key], key in self._fresh
        following = self.problem.successor(self.state, action, confirmed=confirmed, again=again)
        gain = float("inf")
        if following is not None and following[0].structural_hash not in self._seen:
            hoped = following[1].run_secs - following[1].deviation_secs
            self._best.hope(following[0], hoped)
            gain = hoped - self.run_secs
        self._gains[key] = gain
        self._fresh.add(key)
        if confirmed or following is None or following[1].confirmed:  # it would be asked for ever, if never confirmed
            self._confirmed.add(key)
        self._best.report()

    def best_move(self, limit: float) -> Key | None:
        """The site that changes the cost most, if by less than `limit`."""
        for site in self._sites:
            if site not in self._gains and not self._best.exhausted:
                self._price(site)
        while not self._best.exhausted:
            key = min(self._sites, key=lambda k: self._gains.get(k, float("inf")), default=None)
            if key is None:
                return None
            if key not in self._fresh:
                self._price(key)
            elif self._gains[key] < limit and key not in self._confirmed:
                self._price(key, confirmed=True)
            elif self._gains[key] < limit:
                return key
            elif not self._refresh():
                return None
        return None

    def _refresh(self) -> bool:
        """Price every site whose gain is from an earlier state; says whether there was any."""
        stale = [key for key in self._sites if key not in self._fresh]
        for key in stale:
            if self._best.exhausted:
                break
            self._price(key)
        return bool(stale)

    def plateau_move(self, tolerance: float) -> Key | None:
        """The site opened last among those that raise the cost by at most `tolerance` of it."""
        limit = tolerance * self.run_secs
        while not self._best.exhausted:
            allowed = [key for key in self._sites if self._gains.get(key, float("inf")) <= limit]
            key = min(allowed, key=lambda k: (-self._opened[k], self._gains[k]), default=None)
            if key is None or key in self._confirmed:
                return key
            self._price(key, confirmed=True)
        return None

    def take(self, key: Key) -> None:
        following = self.problem.successor(self.state, self._sites[key], confirmed=True, again=True)
        assert following is not None, "a move that was priced in this state is possible in it"
        self.state, cost = following
        self.run_secs = cost.run_secs
        self._seen.add(self.state.structural_hash)
        self._step += 1
        self._fresh, self._confirmed = set(), set()
        self._sites = self._list()
