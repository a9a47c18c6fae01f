"""Several models in one training: each episode is on one of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import gymnasium

from rlflow_tvm.envs.episode import RewritingEnv
from rlflow_tvm.errors import EnvError
from rlflow_tvm.passes import Plan


class ManyModelsEnv(gymnasium.Env[dict[str, Any], Any]):
    """Chooses one environment at each reset, uniformly by the reset's seed, so that a resumed training meets the same.

    `model` is the name of the one in use, `current` the environment itself. All must have the same rules. The last info
    of an episode holds as `episode` its cheapest graph, confirmed: {"model", "run_secs", "plan"}, the plan's fields as
    JSON. As `reset`'s option "start" it is where an episode begins.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own convention

    def __init__(self, envs: Mapping[str, RewritingEnv[Any]]) -> None:
        if not envs or len({env.rule_names for env in envs.values()}) != 1:
            raise EnvError("several models in one training need one rule set: give at least one, all for one target")
        self._envs = dict(envs)
        self.model = next(iter(self._envs))
        self.observation_space = self.current.observation_space
        self.action_space = self.current.action_space
        self._best = math.inf, self.current.state

    @property
    def limit(self) -> float:
        """Of a graph's cost over that of the episode's first, where the episode ends."""
        return self.current.limit

    @property
    def current(self) -> RewritingEnv[Any]:
        return self._envs[self.model]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        start = (options or {}).get("start")
        drawn = list(self._envs)[int(self.np_random.integers(len(self._envs)))]
        self.model = drawn if start is None else start["model"]
        if self.model not in self._envs:
            raise EnvError(
                f"reset: there is no model {self.model} here to start from; there are: {', '.join(self._envs)}"
            )
        reset = self.current.reset(seed=seed, options=None if start is None else {"plan": Plan.of(start["plan"])})
        self._best = math.inf, self.current.state
        return reset

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.current.step(action)
        if info["run_secs"] < self._best[0]:
            self._best = info["run_secs"], self.current.state
        if terminated or truncated:
            state = self._best[1]
            run_secs = self.current.problem.cost(state, confirmed=True).run_secs
            info["episode"] = {"model": self.model, "run_secs": run_secs, "plan": dataclasses.asdict(state.plan)}
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
