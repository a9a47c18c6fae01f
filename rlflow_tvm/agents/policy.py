"""The two-step masked policy: first a rule, then one of that rule's locations; and the value of a graph.

A site is scored (`heads`) from the embeddings of its own nodes and what is known of its place (`places`), with its rule
and the graph's readout as context: neither its index nor the order of the sites enters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.encoder import GraphEncoder
from rlflow_tvm.agents.heads import STOP_BIAS, PolicyOutput, TwoStepHeads, two_step_output
from rlflow_tvm.agents.observation import (
    CompactObservation,
    GraphBatch,
    HasSites,
    ObservationSizes,
    SiteBatch,
    collate,
    collate_sites,
    compact,
)
from rlflow_tvm.agents.places import Outlook, Places
from rlflow_tvm.agents.prior import features

ObservationT = TypeVar("ObservationT", bound=HasSites)
BatchT = TypeVar("BatchT", bound=SiteBatch)


class Acting(Protocol):
    """What collecting an episode takes of a policy."""

    def begin_episode(self, rng: np.random.Generator) -> None: ...
    def tried(self, observation: Any, site: int, saved: float) -> None: ...
    def compact(self, observation: Mapping[str, Any]) -> Any: ...
    def choose(self, observation: Any, rng: np.random.Generator | None) -> tuple[int, float, float]: ...
    def value(self, observation: Any) -> float: ...


class SitePolicy(nn.Module, Generic[ObservationT, BatchT], ABC):
    """A policy over the legal actions of an observation, whatever the observation is made of.

    Args:
        sizes: of the rules and locations there are, among others.

    Attributes:
        places: what it knows of places, if it looks at that: saved with the parameters, though it is none.
    """

    places: Places | None = None
    heads: TwoStepHeads
    value_mean: torch.Tensor  # ()
    value_deviation: torch.Tensor  # ()
    value_weight: torch.Tensor  # () of the returns that both were taken from; 0 in a new policy

    def __init__(self, sizes: ObservationSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_deviation", torch.ones(()))
        self.register_buffer("value_weight", torch.zeros(()))

    def output(self, batch: SiteBatch, *told: Any) -> PolicyOutput:
        """What the heads make of what they are told; the value head tells values in units of `value_deviation`."""
        rule_logits, location_logits, values = self.heads(batch, *told)
        values = self.value_mean + self.value_deviation * values.squeeze(1)
        return two_step_output(batch, rule_logits, location_logits, values)

    @torch.no_grad()
    def normalise_values(self, mean: float, deviation: float) -> None:
        """Take other units for what the value head gives, and change it so that the values stay what they are (PopArt,
        van Hasselt et al. 2016)."""
        head = self.heads.value_head
        head.weight *= self.value_deviation / deviation
        head.bias.copy_((self.value_deviation * head.bias + self.value_mean - mean) / deviation)
        self.value_mean.fill_(mean)
        self.value_deviation.fill_(deviation)

    def begin_episode(self, rng: np.random.Generator) -> None:
        """A new episode of a training, of which `rng` are the random numbers."""

    def tried(self, observation: ObservationT, site: int, saved: float) -> None:
        """What a step of the episode saved, in percent of its first graph."""

    @abstractmethod
    def compact(self, observation: Mapping[str, Any]) -> ObservationT:
        """What is kept of an environment's observation; AgentError where it does not fit."""

    @abstractmethod
    def collate(self, observations: Sequence[ObservationT]) -> BatchT:
        """One batch of kept observations, in their order."""

    @abstractmethod
    def forward(self, batch: BatchT) -> PolicyOutput:
        """Log-probabilities of all legal actions, joint entropy and value of each graph."""

    @torch.inference_mode()
    def probabilities(self, observation: ObservationT) -> np.ndarray:
        """p(rule, location) as a dense float64 array (R+1, L); exactly 0 where the masks forbid the action."""
        dense = np.zeros((self.sizes.num_rules, self.sizes.num_locations))
        log_probs = self(self.collate([observation])).log_probs.double().numpy()
        dense[observation.site_rules, observation.site_locations] = np.exp(log_probs)
        return dense

    @torch.inference_mode()
    def value(self, observation: ObservationT) -> float:
        """The value of one observation."""
        return float(self(self.collate([observation])).values[0])

    @torch.inference_mode()
    def choose(self, observation: ObservationT, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """One action: (index of the site, log p(rule, location), value of the observation).

        With a generator rule and location are sampled; with None the likeliest rule is taken and then its likeliest
        location (which need not be the likeliest pair: a rule is not punished for having many locations).
        """
        batch = self.collate([observation])
        output = self(batch)
        pair = _pick(output.rule_log_probs.double().numpy(), rng)
        begin = int(batch.pair_sizes[:pair].sum())
        own = output.location_log_probs[begin : begin + int(batch.pair_sizes[pair])]
        site = begin + _pick(own.double().numpy(), rng)
        return site, float(output.log_probs[site]), float(output.values[0])

    @torch.inference_mode()
    def choose_all(self, batch: BatchT, output: PolicyOutput, rng: np.random.Generator) -> np.ndarray:
        """One action for each observation of a batch, drawn: indices of sites, int64 (B,)."""
        return _pick_each(output.log_probs.double().numpy(), batch.site_offsets, rng)

    @torch.inference_mode()
    def draw(self, observations: Sequence[ObservationT], rng: np.random.Generator) -> np.ndarray:
        """One action for each, drawn: indices of sites, int64 (B,)."""
        batch = self.collate(observations)
        return self.choose_all(batch, self(batch), rng)


class TwoStepPolicy(SitePolicy[CompactObservation, GraphBatch]):
    """Encoder, rule head, location head and value head over one shared trunk.

    Args:
        sizes: widths of the observation, from `ObservationSizes.from_space`.
        hidden: width of all embeddings.
        rounds: message rounds of the encoder.
        informed_share: of a training's episodes, those in which it looks at what it knows of places, or in half of
            them at what it imagines, given that. In the others it finds what pays late, and what is known leads away
            from. None: it is told what is known in all of them.
    """

    places: Places

    def __init__(self, sizes: ObservationSizes, hidden: int, rounds: int, informed_share: float | None = None) -> None:
        super().__init__(sizes)
        self.informed_share = informed_share
        self._outlook: Outlook | None = None
        self.encoder = GraphEncoder(sizes, hidden, rounds)
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.site_nodes = nn.Linear(hidden, hidden)
        self.site_rule = nn.Linear(hidden, hidden, bias=False)
        self.site_graph = nn.Linear(hidden, hidden, bias=False)
        self.site_known = nn.Linear(sizes.num_known - 1, hidden, bias=False)
        self.heads = TwoStepHeads(sizes, hidden, 2 * hidden + 1, hidden)
        self.places = Places()

    def forward(self, batch: GraphBatch) -> PolicyOutput:
        """Log-probabilities of all legal actions, joint entropy and value of each graph."""
        h, readout = self.encoder(batch)
        pair_graph, pair_rule, site_pair = batch.pair_graph, batch.pair_rule, batch.site_pair
        # The mean over a site's nodes; a site without nodes (stop) gets zeros.
        own = functional.embedding_bag(batch.member_nodes, self.site_nodes(h), batch.member_offsets, mode="mean")
        context = self.site_rule(self.rule.weight)[pair_rule] + self.site_graph(readout)[pair_graph]
        known = self.site_known(features(batch.site_known))
        number = batch.pair_sizes.float().log1p().unsqueeze(1) / 6.0  # about 1 for 400 sites
        rules = torch.cat([self.rule(pair_rule), readout.index_select(0, pair_graph), number], dim=1)
        return self.output(batch, own + known + context.index_select(0, site_pair), rules, readout, batch.site_known)

    def compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        """See `observation.compact`."""
        return compact(observation, self.sizes, self.places.known if self._outlook is None else self._outlook.told)

    def begin_episode(self, rng: np.random.Generator) -> None:
        share = self.informed_share
        self._outlook = None if share is None else Outlook.of(self.places, share, rng)

    def tried(self, observation: CompactObservation, site: int, saved: float) -> None:
        if self._outlook is not None:
            self._outlook.tried(observation.site_places[site], saved)

    def collate(self, observations: Sequence[CompactObservation]) -> GraphBatch:
        """See `observation.collate`."""
        return collate(observations)


class UniformPolicy(SitePolicy[CompactObservation, SiteBatch]):
    """A uniformly random rule, then a uniformly random site of it; stop is drawn as seldom as by a new policy."""

    def compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        return compact(observation, self.sizes)

    def collate(self, observations: Sequence[CompactObservation]) -> SiteBatch:
        return collate_sites(observations)

    def forward(self, batch: SiteBatch) -> PolicyOutput:
        rules = STOP_BIAS * (batch.pair_rule == self.sizes.stop_rule).float()
        return two_step_output(batch, rules, torch.zeros(len(batch.site_pair)), torch.zeros(batch.num_graphs))


def _pick_each(log_probs: np.ndarray, offsets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An index drawn within each segment of log-probabilities (S,), which begin at offsets (B+1,)."""
    cumulative = np.cumsum(np.exp(log_probs))
    before = np.concatenate([[0.0], cumulative])[offsets]
    drawn = before[:-1] + rng.random(len(offsets) - 1) * np.diff(before)
    # rounding must not lead into a neighbour
    return np.clip(np.searchsorted(cumulative, drawn, side="right"), offsets[:-1], offsets[1:] - 1) - offsets[:-1]


def _pick(log_probs: np.ndarray, rng: np.random.Generator | None) -> int:
    """An index drawn with the given log-probabilities (n,), or the likeliest one without a generator."""
    if rng is None:
        return int(np.argmax(log_probs))
    cumulative = np.cumsum(np.exp(log_probs))
    # the sum is 1 up to rounding; scaled by it the draw stays below the last entry
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
