"""The controller: a small two-step policy over [z, h], the same in a dream and before the real graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlflow_tvm.agents.observation import (
    CompactObservation,
    ObservationSizes,
    SiteBatch,
    actions_at,
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
        return two_step_output(batch, rule_logits, location_logits, self.told_value(self.value_head(trunk)))

    def compact(self, observation: Mapping[str, Any]) -> LatentObservation:
        """Of what `DreamEnv` shows: {"latent", "rule_mask", "location_mask"}."""
        return LatentObservation(np.asarray(observation["latent"], np.float32), *legal_sites(observation, self.sizes))

    def collate(self, observations: Sequence[LatentObservation]) -> LatentBatch:
        locations = np.concatenate([observation.site_locations for observation in observations]).astype(np.int64)
        return LatentBatch(
            **vars(collate_sites(observations)),
            vectors=torch.from_numpy(np.stack([observation.vector for observation in observations])),
            site_locations=torch.from_numpy(locations),
        )


def latent_space(sizes: ObservationSizes, width: int) -> spaces.Dict:
    """The observation space of `DreamEnv`."""
    most = np.finfo(np.float32).max
    return spaces.Dict(
        {
            "latent": spaces.Box(-most, most, (width,), np.float32),
            "rule_mask": spaces.MultiBinary(sizes.num_rules),
            "location_mask": spaces.MultiBinary((sizes.num_rules, sizes.num_locations)),
        }
    )


class Eyes:
    """[z, h] along episodes of a real environment, one or several at once."""

    def __init__(self, sizes: ObservationSizes, vision: Vision, memory: Memory) -> None:
        self.sizes, self.vision, self.memory = sizes, vision, memory
        self.begin()

    def begin(self, number: int = 1) -> None:
        """So many new episodes."""
        self._state: Recurrent = self.memory.begin(number)

    @torch.inference_mode()
    def see(self, kept: Sequence[CompactObservation], episodes: Sequence[int] = (0,)) -> list[LatentObservation]:
        """What the controller sees of graphs, one of each of the episodes."""
        self._episodes = torch.tensor(episodes)
        self._latents = self.vision(collate(kept))
        self._counts = torch.from_numpy(site_counts(kept, self.sizes)).float()
        vectors = torch.cat([self._latents, self._state.h[self._episodes]], dim=1).numpy()
        pairs = zip(vectors, kept, strict=True)
        return [LatentObservation(vector, each.site_rules, each.site_locations) for vector, each in pairs]

    @torch.inference_mode()
    def acted(self, actions: np.ndarray) -> None:
        """Remember what was done to the graphs seen last: (rule, location) of each."""
        rules, locations = torch.from_numpy(actions).long().T
        rows = self._episodes
        steps = Steps(self._latents, self._counts, rules, locations)
        _, after = self.memory.step(steps, Recurrent(self._state.h[rows], self._state.c[rows]))
        self._state.h[rows], self._state.c[rows] = after.h, after.c


class SeeingPolicy:
    """The controller in a real environment: graphs are seen through V, what is done through M.

    It acts as a `SitePolicy` of graphs does, and remembers what it chose: `begin` before each episode.
    """

    def __init__(self, controller: SitePolicy[LatentObservation, Any], eyes: Eyes) -> None:
        self.controller, self._eyes = controller, eyes

    def begin(self, number: int = 1) -> None:
        """A new episode, or several to be acted in by `draw` alone."""
        self._eyes.begin(number)

    def begin_episode(self, rng: np.random.Generator) -> None:
        """See `SitePolicy.begin_episode`."""
        self.begin()

    def compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        """See `observation.compact`."""
        return compact(observation, self._eyes.sizes)

    def choose(self, observation: CompactObservation, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """See `SitePolicy.choose`; the action is taken to be done."""
        chosen = self.controller.choose(self._eyes.see([observation])[0], rng)
        self._eyes.acted(actions_at([observation], [chosen[0]]))
        return chosen

    def draw(
        self, observations: Sequence[CompactObservation], rng: np.random.Generator, episodes: Sequence[int]
    ) -> np.ndarray:
        """See `SitePolicy.draw`: one for each of some episodes, taken to be done."""
        chosen = self.controller.draw(self._eyes.see(observations, episodes), rng)
        self._eyes.acted(chosen)
        return chosen

    def value(self, observation: CompactObservation) -> float:
        """See `SitePolicy.value`."""
        return self.controller.value(self._eyes.see([observation])[0])
