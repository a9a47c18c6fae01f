"""A trained agent as a search: it acts greedily once, then samples; the best state on the way is the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlflow_tvm.envs import ENVIRONMENTS, Beginning, RewriteProblem
from rlflow_tvm.search.budget import Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult
from rlflow_tvm.search.settled import beginnings

_AT_ONCE = 16
_IDLE = 16
"""Times in a row that all episodes of a batch stop at once, which spends nothing, before the search ends."""


class Policy(Protocol):
    """What is needed of an agent (`rlflow_tvm.agents.Agent` has it)."""

    def fresh(self) -> Policy: ...
    def begin(self, number: int = 1) -> None: ...
    def act(self, observation: dict[str, Any], deterministic: bool) -> Any: ...
    def draw(
        self, observations: Sequence[dict[str, Any]], rng: np.random.Generator, episodes: Sequence[int]
    ) -> Sequence[Any]: ...
    def tried(self, observations: Sequence[dict[str, Any]], actions: Sequence[Any], saved: Sequence[float]) -> None: ...


@dataclass
class AgentSearch:
    """One episode of the policy's most likely actions, then `samples` episodes of sampled ones, or with a budget as
    many as it allows; those go on together, a step of each in turn. The policy is told what its actions saved, in
    percent of the graph that they begin with: the cheapest of `beginnings`, or where they are not `settled`, as the
    trainings of former versions had it, the start.

    `environment`: what the policy acts in, one of `envs.ENVIRONMENTS`.
    """

    policy: Policy
    seed: int = 0
    samples: int = _AT_ONCE
    horizon: int = 200
    budget: Budget | None = None
    environment: str = "rewriting"
    settled: bool = True

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given seed, weights and costs."""
        rng, policy = np.random.default_rng(self.seed), self.policy.fresh()
        left = self.samples if self.budget is None else math.inf
        best = Incumbent(problem, self.budget or Budget(self.horizon * (1 + self.samples)), progress)
        begin = beginnings(problem)[0] if self.settled else Beginning(problem.start_secs, problem.start)
        best.offer(begin.state, begin.run_secs)
        if begin.run_secs == 0.0:
            return best.result()
        self._play(policy, best, begin, None, 1)
        idle = 0
        while left > 0 and idle < _IDLE and not best.exhausted:
            number, before = int(min(left, _AT_ONCE)), best.spent
            self._play(policy, best, begin, rng, number)
            left -= number
            idle = idle + 1 if best.spent == before else 0
        return best.result()

    def _play(
        self, policy: Policy, best: Incumbent, begin: Beginning, rng: np.random.Generator | None, number: int
    ) -> None:
        """So many episodes at once; the likeliest actions of one without a generator."""
        make = ENVIRONMENTS[self.environment]
        plan = begin.state.plan or None
        envs = [make(problem=best.problem, horizon=self.horizon, begin=plan) for _ in range(number)]
        seen = {episode: env.reset(seed=self.seed)[0] for episode, env in enumerate(envs)}
        policy.begin(number)
        while seen and not best.exhausted:
            if rng is None:
                actions: Sequence[Any] = [policy.act(seen[0], deterministic=True)]
            else:
                actions = policy.draw(list(seen.values()), rng, list(seen))
            before, saved = list(seen.values()), list[float]()
            for episode, action in zip(list(seen), actions, strict=True):
                if best.exhausted:
                    break
                env = envs[episode]
                cost = env.run_secs
                observation, _, terminated, truncated, info = env.step(action)
                # what was wrong with the price before is not for this action: it may have been confirmed since
                saved.append(100.0 * (info.get("run_secs_before", cost) - env.run_secs) / begin.run_secs)
                best.offer(env.state, env.run_secs)
                best.report()
                seen[episode] = observation
                if terminated or truncated:
                    del seen[episode]
            if saved:  # none where the search was stopped while the policy computed
                policy.tried(before[: len(saved)], actions[: len(saved)], saved)
