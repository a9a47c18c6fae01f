"""RLFlow's environment: choose a substitution rule and where to apply it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from rlflow_tvm.envs.episode import RewritingEnv, StepResult
from rlflow_tvm.envs.observation import LOCATIONS, observation_space, observe
from rlflow_tvm.passes import RewriteAction


class GraphRewriteEnv(RewritingEnv[np.ndarray]):
    """Rewrite one graph, one substitution a step; episodes, rewards and arguments as in `RewritingEnv`.

    Action `(rule, location)`: the rule's number, and which of its first 200 sites; rule R (one past the last) stops.
    Observation: see `rlflow_tvm.envs.observation.observe`.
    """

    @classmethod
    def observations(cls, rules: int) -> gymnasium.Space[dict[str, Any]]:
        return observation_space(rules)

    def _spaces(self) -> tuple[gymnasium.Space[dict[str, Any]], gymnasium.Space[np.ndarray]]:
        rules = len(self.rule_names)
        return self.observations(rules), gymnasium.spaces.MultiDiscrete([rules + 1, LOCATIONS])

    @property
    def stop(self) -> int:
        """The number of the rule that stops."""
        return len(self.rule_names)

    def step(self, action: np.ndarray) -> StepResult:
        rule, location = (int(a) for a in action)
        if rule == self.stop and location == 0:
            return self._stop()
        move = self.action_of(rule, location)
        if move is None:
            return self._refuse((*self.rule_names, "stop")[rule] if 0 <= rule <= self.stop else "none")
        return self._take(move)

    def _observe(self) -> tuple[dict[str, Any], bool]:
        observation = observe(self.state, self._refused, self.whole_work)
        return observation, bool(observation["rule_mask"][: self.stop].any())

    def action_of(self, rule: int, location: int) -> RewriteAction | None:
        """The rewrite that (rule, location) means in the state now; None if it is not legal."""
        if not 0 <= rule < self.stop or not 0 <= location < LOCATIONS:
            return None
        sites = self.state.sites[self.rule_names[rule]]
        if location >= len(sites):
            return None
        action = RewriteAction(self.rule_names[rule], sites[location])
        return None if action in self._refused else action

    def _info(self, rule: str) -> dict[str, Any]:
        dropped = sum(max(0, len(sites) - LOCATIONS) for sites in self.state.sites.values())
        return super()._info(rule) | {"sites_dropped": dropped}
