"""The controller: a small two-step policy over [z, h], the same in a dream and before the real graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlflow_tvm.agents.alike import alike
from rlflow_tvm.agents.graph_policy import Told
from rlflow_tvm.agents.heads import TwoStepHeads, TwoStepOutput
from rlflow_tvm.agents.observation import (
    CompactObservation,
    ObservationSizes,
    SiteBatch,
    SiteKinds,
    collate_sites,
    compact,
    legal_sites,
)
from rlflow_tvm.agents.opening import PLAIN, Opening
from rlflow_tvm.agents.places import Outlook, Places
from rlflow_tvm.agents.policy import SitePolicy
from rlflow_tvm.agents.prior import features
from rlflow_tvm.agents.world.memory import Memory, Recurrent, Steps
from rlflow_tvm.agents.world.vision import Vision, site_counts, site_number


@dataclass(frozen=True, eq=False)
class LatentObservation:
    """What the controller sees of a graph, in a dream or of the real one."""

    vector: np.ndarray  # float32 (Z+H,): [z, h]
    site_rules: np.ndarray  # int16 (S,), ascending
    site_locations: np.ndarray  # int16 (S,), ascending within a rule
    site_known: np.ndarray  # float32 (S, 2P+1), see `places`

    @property
    def num_sites(self) -> int:
        """How many actions are legal."""
        return len(self.site_rules)

    @cached_property
    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """One site of each kind, by rule, (K,), and of each site the number of its kind, (S,): alike are sites of one
        rule of whose places the same is known. A batch is made of the same observations many times over."""
        return alike(self.site_rules, self.site_known)


@dataclass(frozen=True, eq=False)
class LatentBatch(SiteBatch):
    """Several of them (B)."""

    vectors: torch.Tensor  # (B, Z+H)
    kinds: SiteKinds  # K of them
    kind_known: torch.Tensor  # (K, 2P+1)


class Controller(SitePolicy[LatentObservation, LatentBatch]):
    """Rule and location heads over one trunk; a location is what is known of its place, and no more.

    Sites of one rule of whose places the same is known are worked out together: of BERT-Base's some 470 a third differ
    when places are known, one for each rule when they are not.

    Args:
        sizes: of the real observations.
        width: of [z, h].
        hidden: width of the trunk.
    """

    def __init__(self, sizes: ObservationSizes, width: int, hidden: int) -> None:
        super().__init__(sizes)
        self.trunk = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.known = nn.Linear(sizes.num_known - 1, hidden, bias=False)
        self.heads = TwoStepHeads(sizes, hidden, hidden, hidden)

    def forward(self, batch: LatentBatch) -> TwoStepOutput:
        trunk = self.trunk(batch.vectors)
        pairs = trunk.index_select(0, batch.pair_graph) + self.rule(batch.pair_rule)
        kinds = pairs.index_select(0, batch.kinds.pair) + self.known(features(batch.kind_known))
        return self.output(batch, kinds, pairs, trunk, batch.kind_known, batch.kinds)

    def compact(self, observation: Mapping[str, Any], told: Told | None = None) -> LatentObservation:
        """What `DreamEnv` shows: {"latent", "rule_mask", "location_mask", "location_known"}."""
        del told
        rules, locations = legal_sites(observation, self.sizes)
        known = np.asarray(observation["location_known"], np.float32)[rules, locations]
        return LatentObservation(np.asarray(observation["latent"], np.float32), rules, locations, known)

    def collate(self, observations: Sequence[LatentObservation]) -> LatentBatch:
        sites = collate_sites(observations)
        return LatentBatch(
            **vars(sites),
            vectors=torch.from_numpy(np.stack([observation.vector for observation in observations])),
            kinds=SiteKinds.joined(sites, [observation.kinds for observation in observations]),
            kind_known=torch.from_numpy(np.concatenate([each.site_known[each.kinds[0]] for each in observations])),
        )


def latent_space(sizes: ObservationSizes, width: int) -> spaces.Dict:
    """The observation space of `DreamEnv`."""
    most = np.finfo(np.float32).max
    return spaces.Dict(
        {
            "latent": spaces.Box(-most, most, (width,), np.float32),
            "rule_mask": spaces.MultiBinary(sizes.num_rules),
            "location_mask": spaces.MultiBinary((sizes.num_rules, sizes.num_locations)),
            "location_known": spaces.Box(
                -most, most, (sizes.num_rules, sizes.num_locations, sizes.num_known), np.float32
            ),
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
    def see(
        self, kept: Sequence[CompactObservation], told: Sequence[np.ndarray], episodes: Sequence[int] = (0,)
    ) -> list[LatentObservation]:
        """What the controller sees of graphs, one of each of the episodes, and is `told` of places (S, 2P+1)."""
        self._episodes, self._seen = torch.tensor(episodes), kept
        self._latents = self.vision.see(kept)
        vectors = torch.cat([self._latents, self._state.h[self._episodes]], dim=1).numpy()
        return [
            LatentObservation(vector, each.site_rules, each.site_locations, known)
            for vector, each, known in zip(vectors, kept, told, strict=True)
        ]

    @torch.inference_mode()
    def acted(self, sites: Sequence[int] | np.ndarray) -> None:
        """Remember what was done to the graphs seen last: at which site of each."""
        chosen = list(zip(self._seen, sites, strict=True))
        steps = Steps(
            self._latents,
            torch.from_numpy(site_counts(self._seen, self.sizes)).float(),
            torch.tensor([int(seen.site_rules[site]) for seen, site in chosen]),
            torch.tensor([site_number(seen, site) for seen, site in chosen]),
            torch.from_numpy(np.stack([seen.site_known[site] for seen, site in chosen])),
        )
        rows = self._episodes
        _, after = self.memory.step(steps, Recurrent(self._state.h[rows], self._state.c[rows]))
        self._state.h[rows], self._state.c[rows] = after.h, after.c


class SeeingPolicy:
    """The controller in a real environment: graphs are seen through V, what is done through M.

    It acts as a `SitePolicy` of graphs does, and remembers what it chose: `begin` before each episode.

    Args:
        controller: what decides.
        eyes: what it sees with.
        places: what is known of them; it may become more meanwhile.
        informed_share: of a training's episodes, those in which it looks at what it imagines of places; 0: in none, nor
            outside of a training.
    """

    def __init__(
        self,
        controller: SitePolicy[Any, Any],
        eyes: Eyes,
        places: Places,
        informed_share: float | None = None,
    ) -> None:
        self.controller, self.places, self.informed_share = controller, places, informed_share
        self._eyes = eyes
        self._outlook: Outlook | None = None
        self._before = places.copy()

    def begin(self, number: int = 1) -> None:
        """A new episode, or several to be acted in by `draw` alone; the controller is told what is known of places, if
        it ever was."""
        self._eyes.begin(number)
        self._before = self.places.copy()  # M has learnt to foresee by what was known before an episode
        self._outlook = Outlook(self.places, False) if self.informed_share == 0.0 else None

    def begin_episode(self, rng: np.random.Generator, opening: Opening = PLAIN) -> None:
        """See `GraphPolicy.begin_episode`."""
        self.begin()
        if self.informed_share is not None:
            # each of them imagines, unlike a policy's: real episodes are few, and dreams act on what is known as it is
            informed, draw = bool(rng.random() < self.informed_share), int(rng.integers(2**63))
            self._outlook = (
                Outlook(self.places, self.informed_share > 0.0, by_rule=opening.gathers)
                if opening.likeliest
                else Outlook(self.places, informed, draw)
            )

    def tried(self, observation: CompactObservation, site: int, saved: float) -> None:
        """See `GraphPolicy.tried`."""
        if self._outlook is not None:
            self._outlook.tried(observation.site_places[site], saved)

    def compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        """See `observation.compact`; with what was known of places before the episode."""
        return compact(observation, self._eyes.sizes, self._before.known)

    def choose(self, observation: CompactObservation, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """See `SitePolicy.choose`; the action is taken to be done."""
        chosen = self.controller.choose(self._see([observation])[0], rng)
        self._eyes.acted([chosen[0]])
        return chosen

    def draw(
        self, observations: Sequence[CompactObservation], rng: np.random.Generator, episodes: Sequence[int]
    ) -> np.ndarray:
        """See `GraphPolicy.draw`: one for each of some episodes, taken to be done."""
        chosen = self.controller.draw(self._see(observations, episodes), rng)
        self._eyes.acted(chosen)
        return chosen

    def action(self, observation: CompactObservation, site: int) -> np.ndarray:
        """See `SitePolicy.action`."""
        return self.controller.action(observation, site)

    def value(self, observation: CompactObservation) -> float:
        """See `GraphPolicy.value`."""
        return self.controller.value(self._see([observation])[0])

    def _see(self, kept: Sequence[CompactObservation], episodes: Sequence[int] = (0,)) -> list[LatentObservation]:
        known = self.places.known if self._outlook is None else self._outlook.told
        told = [known(each.site_places) for each in kept]
        return self._eyes.see(kept, told, episodes)
