"""Several models in one training: each episode is on one of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium

from rlflow_tvm.envs.episode import RewritingEnv
from rlflow_tvm.errors import EnvError
from rlflow_tvm.passes import GraphState, Plan

log = logging.getLogger("rlflow_tvm")

_CONFIRMED = 4
"""Of an episode, the graphs that are confirmed at most: the one that seems cheapest was mostly told too low."""


class _Met(NamedTuple):
    """A graph of an episode."""

    step: int
    run_secs: float
    state: GraphState


class ManyModelsEnv(gymnasium.Env[dict[str, Any], Any]):
    """Chooses one environment at each reset, uniformly by the reset's seed, so that a resumed training meets the same.

    `model` is the name of the one in use, `current` the environment itself. All must have the same rules. The last info
    of an episode holds as `episode` its cheapest graph by times that are confirmed: {"model", "run_secs", "plan",
    "step", "start_secs"}, the plan's fields as JSON, the episode's step that led to it, 0 where that is its first
    graph, and what the model's own graph costs here, as seconds of another machine are others. As `reset`'s option
    "start" it is where an episode begins, if it can be priced here; {"model"} alone, where those of that model do.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own convention

    def __init__(self, envs: Mapping[str, RewritingEnv[Any]]) -> None:
        if not envs or len({env.rule_names for env in envs.values()}) != 1:
            raise EnvError("several models in one training need one rule set: give at least one, all for one target")
        self._envs = dict(envs)
        self.model = next(iter(self._envs))
        self.observation_space = self.current.observation_space
        self.action_space = self.current.action_space
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._first = _Met(0, self.current.run_secs, self.current.state)
        self._cheapest: list[_Met] = []  # those that seem cheaper than it, the cheapest first

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all of them."""
        return tuple(self._envs)

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
        own = {name: value for name, value in (options or {}).items() if name != "start"}
        if start is not None and "plan" in start:
            own["plan"] = Plan.of(start["plan"])
        try:
            reset = self.current.reset(seed=seed, options=own or None)
        except EnvError as error:
            if "plan" not in own:
                raise
            # a kernel may fail on one machine and not on another, and a training is not to end with it
            log.warning("an episode begins where those of %s do, not at a remembered graph: %s", self.model, error)
            del own["plan"]
            reset = self.current.reset(seed=seed, options=own or None)
        self._begin()
        return reset

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.current.step(action)
        self._step += 1
        self._note(_Met(self._step, info["run_secs"], self.current.state))
        if terminated or truncated:
            info["episode"] = self._summary()
        return observation, float(reward), terminated, truncated, info

    def _note(self, met: _Met) -> None:
        known = (each.state.structural_hash for each in self._cheapest)
        if met.run_secs < self._first.run_secs and met.state.structural_hash not in known:
            self._cheapest = sorted([*self._cheapest, met], key=lambda each: each.run_secs)[:_CONFIRMED]

    def _summary(self) -> dict[str, Any]:
        best = self._first
        for each in self._cheapest:
            if each.run_secs >= best.run_secs:  # by times that are confirmed
                break
            secs = self.current.problem.cost(each.state, confirmed=True).run_secs
            best = min(best, each._replace(run_secs=secs), key=lambda met: met.run_secs)
        plan = dataclasses.asdict(best.state.plan)
        told = {"model": self.model, "run_secs": best.run_secs, "plan": plan, "step": best.step}
        return {**told, "start_secs": self.current.problem.start_secs}

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
