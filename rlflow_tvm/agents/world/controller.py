"""The controller: a small two-step policy over [z, h], the same in a dream and before the real graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlflow_tvm.agents.observation import (
    ObservationSizes,
    SiteBatch,
    collate,
    collate_sites,
    compact,
    legal_sites,
)
from rlflow_tvm.agents.policy import STOP_BIAS, PolicyOutput, SitePolicy, two_step_output
from rlflow_tvm.agents.world.memory import Memory, Recurrent, Steps
from rlflow_tvm.agents.world.vision import Vision, site_counts


@dataclass(frozen=True, eq=False)
class LatentObservation:
    """What the controller sees of a graph, in a dream or of the real one."""

    vector: np.ndarray  # float32 (Z+H,): [z, h]
    site_rules: np.ndarray  # int16 (S,), ascending
    site_locations: np.ndarray  # int16 (S,), ascending within a rule


@dataclass(frozen=True, eq=False)
class LatentBatch(SiteBatch):
    """Several of them (B)."""

    vectors: torch.Tensor  # (B, Z+H)
    site_locations: torch.Tensor  # (S,)


class Controller(SitePolicy[LatentObservation, LatentBatch]):
    """Rule and location heads over one trunk; a location is known by its number alone, as M knows it.

    Args:
        sizes: of the real observations.
        width: of [z, h].
        hidden: width of the trunk.
    """

    def __init__(self, sizes: ObservationSizes, width: int, hidden: int) -> None:
        super().__init__(sizes)
        self.trunk = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.rule_head = nn.Linear(hidden, sizes.num_rules)
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.location_body = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.location_head = nn.Linear(hidden, sizes.num_locations)
        self.value_head = nn.Linear(hidden, 1)
        for head, gain in ((self.location_head, 0.01), (self.rule_head, 0.01), (self.value_head, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        with torch.no_grad():
            self.rule_head.bias[sizes.stop_rule] = STOP_BIAS

    def forward(self, batch: LatentBatch) -> PolicyOutput:
        trunk = self.trunk(batch.vectors)
        rule_logits = self.rule_head(trunk)[batch.pair_graph, batch.pair_rule]
        pairs = self.location_body(trunk[batch.pair_graph] + self.rule(batch.pair_rule))
        location_logits = self.location_head(pairs)[batch.site_pair, batch.site_locations]
        return two_step_output(batch, rule_logits, location_logits, self.value_head(trunk).squeeze(1))

    def compact(self, observation: Mapping[str, Any]) -> LatentObservation:
        """Of what `DreamEnv` or `SeenEnv` show: {"latent", "rule_mask", "location_mask"}."""
        return LatentObservation(np.asarray(observation["latent"], np.float32), *legal_sites(observation, self.sizes))

    def collate(self, observations: Sequence[LatentObservation]) -> LatentBatch:
        locations = np.concatenate([observation.site_locations for observation in observations]).astype(np.int64)
        return LatentBatch(
            **vars(collate_sites(observations)),
            vectors=torch.from_numpy(np.stack([observation.vector for observation in observations])),
            site_locations=torch.from_numpy(locations),
        )


def latent_space(sizes: ObservationSizes, width: int) -> spaces.Dict:
    """The observation space of what the controller sees."""
    most = np.finfo(np.float32).max
    return spaces.Dict(
        {
            "latent": spaces.Box(-most, most, (width,), np.float32),
            "rule_mask": spaces.MultiBinary(sizes.num_rules),
            "location_mask": spaces.MultiBinary((sizes.num_rules, sizes.num_locations)),
        }
    )


class SeenEnv(gymnasium.ObservationWrapper):
    """A real environment as the controller sees it: graphs through V, what was done through M; masks as they are."""

    def __init__(self, env: gymnasium.Env, vision: Vision, memory: Memory) -> None:
        super().__init__(env)
        self.eyes = Eyes(ObservationSizes.from_space(env.observation_space), vision, memory)
        self.observation_space = latent_space(self.eyes.sizes, vision.width + memory.width)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.eyes.begin()
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.eyes.acted(int(action[0]), int(action[1]))
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward), terminated, truncated, info

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return self.eyes.see(observation)


class Eyes:
    """[z, h] along one episode of a real environment."""

    def __init__(self, sizes: ObservationSizes, vision: Vision, memory: Memory) -> None:
        self.sizes, self.vision, self.memory = sizes, vision, memory
        self.begin()

    def begin(self) -> None:
        """A new episode."""
        self._state: Recurrent = self.memory.begin(1)
        self._latent, self._counts = torch.zeros(1, self.vision.width), torch.zeros(1, self.sizes.num_rules)

    @torch.inference_mode()
    def see(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """What the controller sees of an observation."""
        kept = compact(observation, self.sizes)
        self._latent = self.vision(collate([kept]))
        self._counts = torch.from_numpy(site_counts([kept], self.sizes)).float()
        latent = torch.cat([self._latent, self._state.h], dim=1).squeeze(0).numpy()
        return {name: observation[name] for name in ("rule_mask", "location_mask")} | {"latent": latent}

    @torch.inference_mode()
    def acted(self, rule: int, location: int) -> None:
        """Remember what was done to the graph seen last."""
        action = torch.tensor([rule]), torch.tensor([location])
        _, self._state = self.memory.step(Steps(self._latent, self._counts, *action), self._state)
