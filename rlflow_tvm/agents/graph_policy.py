"""What all policies have in common: actions drawn from the legal ones, values in units of their own, and what they know
of places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from rlflow_tvm.agents.heads import PolicyOutput
from rlflow_tvm.agents.opening import PLAIN, Opening
from rlflow_tvm.agents.places import Outlook, Places

Told = Callable[[np.ndarray], np.ndarray]
"""Keys of places (S, P) -> what is known of them, (S, 2P+1)."""


class Kept(Protocol):
    """What every kind of kept observation says of the legal actions (S of them), called sites."""

    @property
    def num_sites(self) -> int: ...


class Batch(Protocol):
    """What every kind of batch says of them."""

    @property
    def site_offsets(self) -> np.ndarray: ...  # (B+1,) where each graph's sites begin


KeptT = TypeVar("KeptT", bound=Kept)
BatchT = TypeVar("BatchT", bound=Batch)


class Acting(Protocol):
    """What collecting an episode takes of a policy."""

    def begin_episode(self, rng: np.random.Generator, opening: Opening = PLAIN) -> None: ...
    def tried(self, observation: Any, site: int, saved: float) -> None: ...
    def compact(self, observation: Mapping[str, Any]) -> Any: ...
    def choose(self, observation: Any, rng: np.random.Generator | None) -> tuple[int, float, float]: ...
    def action(self, observation: Any, site: int) -> Any: ...
    def value(self, observation: Any) -> float: ...


class GraphPolicy(nn.Module, Generic[KeptT, BatchT], ABC):
    """A policy over the legal actions of an observation, whatever the observation is made of.

    Args:
        sizes: what its parameters depend on, read from the observation space.
        informed_share: of a training's episodes, those in which it looks at what it knows of places, or in half of
            them at what it imagines, given that. In the others it finds what pays late, and what is known leads away
            from. None: it is told what is known in all of them.

    Attributes:
        places: what it knows of places, if it looks at that: saved with the parameters, though it is none.
    """

    places: Places | None = None
    value_head: nn.Linear
    value_mean: torch.Tensor  # ()
    value_deviation: torch.Tensor  # ()
    value_weight: torch.Tensor  # () of the returns that both were taken from; 0 in a new policy

    def __init__(self, sizes: Any, informed_share: float | None = None) -> None:
        super().__init__()
        self.sizes, self.informed_share = sizes, informed_share
        self._outlook: Outlook | None = None
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_deviation", torch.ones(()))
        self.register_buffer("value_weight", torch.zeros(()))

    @abstractmethod
    def compact(self, observation: Mapping[str, Any], told: Told | None = None) -> KeptT:
        """What is kept of an environment's observation, with what is `told` of places, by default what the episode
        has it; AgentError where it does not fit."""

    @abstractmethod
    def collate(self, observations: Sequence[KeptT]) -> BatchT:
        """One batch of kept observations, in their order."""

    @abstractmethod
    def forward(self, batch: BatchT) -> PolicyOutput:
        """Log-probabilities of all legal actions, entropy and value of each graph."""

    @abstractmethod
    def choose(self, observation: KeptT, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """One action: (index of the site, its log-probability, value of the observation), drawn, or without a generator
        the likeliest."""

    @abstractmethod
    def action(self, observation: KeptT, site: int) -> Any:
        """A site as the environment takes it."""

    @abstractmethod
    def probabilities(self, observation: KeptT) -> np.ndarray:
        """Those of all actions, as a dense array in the environment's numbering; exactly 0 where masked."""

    @abstractmethod
    def place(self, observation: Mapping[str, Any], action: Any) -> np.ndarray:
        """The keys of the place of an action on an environment's observation, int64 (P,)."""

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """What the value head gives, (B, 1), as values, (B,): it tells them in units of `value_deviation`."""
        return self.value_mean + self.value_deviation * values.squeeze(1)

    @torch.no_grad()
    def normalise_values(self, mean: float, deviation: float) -> None:
        """Take other units for what the value head gives, and change it so that the values stay what they are (PopArt,
        van Hasselt et al. 2016)."""
        head = self.value_head
        head.weight *= self.value_deviation / deviation
        head.bias.copy_((self.value_deviation * head.bias + self.value_mean - mean) / deviation)
        self.value_mean.fill_(mean)
        self.value_deviation.fill_(deviation)

    def begin_episode(self, rng: np.random.Generator, opening: Opening = PLAIN) -> None:
        """A new episode of a training, of which `rng` are the random numbers; one of likeliest actions looks at what is
        known as it is, if any does."""
        if self.places is not None and self.informed_share is not None:
            self._outlook = (
                Outlook(self.places, self.informed_share > 0.0, by_rule=opening.gathers)
                if opening.likeliest
                else Outlook.of(self.places, self.informed_share, rng)
            )

    def tried(self, observation: KeptT, site: int, saved: float) -> None:
        """What a step of the episode saved, in percent of its first graph."""
        if self._outlook is not None:
            self._outlook.tried(observation.site_places[site], saved)  # type: ignore[attr-defined]

    @property
    def told(self) -> Told:
        """What the episode tells of places."""
        if self._outlook is not None:
            return self._outlook.told
        return (self.places or Places()).known

    @torch.inference_mode()
    def value(self, observation: KeptT) -> float:
        """The value of one observation."""
        return float(self(self.collate([observation])).values[0])

    @torch.inference_mode()
    def choose_all(self, batch: BatchT, output: PolicyOutput, rng: np.random.Generator) -> np.ndarray:
        """One action for each observation of a batch, drawn: indices of sites, int64 (B,)."""
        return _pick_each(output.log_probs.double().numpy(), batch.site_offsets, rng)

    @torch.inference_mode()
    def draw(self, observations: Sequence[KeptT], rng: np.random.Generator) -> np.ndarray:
        """One action for each, drawn: indices of sites, int64 (B,)."""
        batch = self.collate(observations)
        return self.choose_all(batch, self(batch), rng)


def _pick_each(log_probs: np.ndarray, offsets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An index drawn within each segment of log-probabilities (S,), which begin at offsets (B+1,)."""
    cumulative = np.cumsum(np.exp(log_probs))
    before = np.concatenate([[0.0], cumulative])[offsets]
    drawn = before[:-1] + rng.random(len(offsets) - 1) * np.diff(before)
    # rounding must not lead into a neighbour
    return np.clip(np.searchsorted(cumulative, drawn, side="right"), offsets[:-1], offsets[1:] - 1) - offsets[:-1]


def pick(log_probs: np.ndarray, rng: np.random.Generator | None) -> int:
    """An index drawn with the given log-probabilities (n,), or the likeliest one without a generator."""
    if rng is None:
        return int(np.argmax(log_probs))
    cumulative = np.cumsum(np.exp(log_probs))
    # the sum is 1 up to rounding; scaled by it the draw stays below the last entry
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
