"""Random search: uniformly random legal moves, again and again from the beginning, or from the best graphs met too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search.budget import Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult
from rlflow_tvm.search.settled import beginnings

DEFAULT_WALKS = Budget(1_000)
"""Random search does not end by itself."""
_SHARE = 0.75
"""Of the walks, those from remembered graphs: as of an agent's episodes."""


@dataclass
class RandomSearch:
    """Walks of at most `horizon` moves: first a rule among those that apply, then one of its sites, both uniformly.

    `stop` is one more rule, as it is for an agent whose policy is uniform under the masks. With `remembered`, most
    walks begin at one of so many cheapest graphs met (as in Go-Explore, Ecoffet et al. 2021), and a walk is given up
    where a graph costs more than `limit` times its first. All other walks begin at the start, or where they are
    `settled` at the cheapest of `beginnings`. Remembered, limited and settled, it is what is left of an agent that
    learns nothing.
    """

    seed: int = 0
    horizon: int = 200
    remembered: int = 0
    settled: bool = False
    limit: float = math.inf
    budget: Budget = DEFAULT_WALKS

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start` until the budget is spent; deterministic for given seed and costs."""
        rng = np.random.default_rng(self.seed)
        best = Incumbent(problem, self.budget, progress)
        start = problem.start
        if self.settled:
            begin = beginnings(problem)[0]
            start = begin.state
            best.offer(start, begin.run_secs)
        kept: list[tuple[float, GraphState]] = []  # cheapest first, no two of one cost
        while not best.exhausted:
            state = kept[int(rng.integers(len(kept)))][1] if kept and rng.random() < _SHARE else start
            before = best.spent
            first = problem.cost(state).run_secs
            lowest = first, state
            for _ in range(self.horizon):
                action = random_action(state, rng)
                if action is None or best.exhausted:
                    break
                following = problem.successor(state, action)
                if following is None:
                    continue
                state, cost = following
                best.offer(state, cost.run_secs)
                best.report()
                lowest = min(lowest, (cost.run_secs, state), key=lambda each: each[0])
                if cost.run_secs > self.limit * first:
                    break
            if self.remembered and lowest[0] < first:  # as agents: from one that costs more walks lead back at best
                secs = problem.cost(lowest[1], confirmed=True).run_secs
                if secs <= first and secs not in [each[0] for each in kept]:
                    kept = sorted([*kept, (secs, lowest[1])], key=lambda each: each[0])[: self.remembered]
            if best.spent == before and not any(start.sites.values()):
                break  # nothing applies where walks begin: none will ever move
        return best.result()


def random_action(state: GraphState, rng: np.random.Generator) -> RewriteAction | None:
    """A uniformly random rule (or stop: None), then a uniformly random site of it."""
    rules = [rule for rule, sites in state.sites.items() if sites]
    choice = int(rng.integers(len(rules) + 1))
    if choice == len(rules):
        return None
    sites = state.sites[rules[choice]]
    return RewriteAction(rules[choice], sites[int(rng.integers(len(sites)))])


def random_states(state: GraphState, steps: int, rng: np.random.Generator) -> Iterator[GraphState]:
    """The states that `steps` random moves from `state` lead through, unpriced; moves that cannot be made are passed
    over."""
    for _ in range(steps):
        action = random_action(state, rng)
        if action is None:
            continue
        try:
            state = state.apply(action)
        except RewriteError:
            continue
        yield state
