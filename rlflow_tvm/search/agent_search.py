"""A trained agent as a search: it acts greedily once, then samples; the best state on the way is the result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.search.budget import Budget
from rlflow_tvm.search.result import Incumbent, Progress, SearchResult


class Policy(Protocol):
    """What is needed of an agent (`rlflow_tvm.agents.Agent` has it)."""

    def begin(self) -> None: ...
    def act(self, observation: dict[str, Any], deterministic: bool, rng: np.random.Generator) -> np.ndarray: ...


@dataclass
class AgentSearch:
    """One episode of the policy's most likely actions, then `samples` episodes of sampled ones, or with a budget as
    many as it allows."""

    policy: Policy
    seed: int = 0
    samples: int = 4
    horizon: int = 200
    budget: Budget | None = None

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """Search from `problem.start`; deterministic for given seed, weights and costs."""
        rng = np.random.default_rng(self.seed)
        episodes = range(1 + self.samples) if self.budget is None else itertools.count()
        best = Incumbent(problem, self.budget or Budget(self.horizon * (1 + self.samples)), progress)
        env = GraphRewriteEnv(problem=problem, horizon=self.horizon)
        for episode in episodes:
            observation, _ = env.reset(seed=self.seed + episode)
            self.policy.begin()
            over = best.exhausted
            if over:
                break
            while not over:
                action = self.policy.act(observation, deterministic=episode == 0, rng=rng)
                observation, _, terminated, truncated, _ = env.step(action)
                best.offer(env.state, env.run_secs)
                best.report()
                over = terminated or truncated or best.exhausted
        return best.result()
