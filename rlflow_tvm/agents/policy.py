"""The two-step masked policy: first a rule, then one of that rule's locations; and the value of a graph.

p(rule, location) = p(rule) p(location | rule). Only legal actions have logits at all (see `observation`), so a masked
action's probability is exactly 0 and acting and updating cannot disagree about masks. A site is scored from the
embeddings of its own nodes and what is known of its place (`places`), with its rule and the graph's readout as context:
neither its index nor the order of the sites enters. The rule head sees, for each rule, the pooled embeddings of that
rule's sites, and the value those of all sites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.encoder import GraphEncoder
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
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.prior import Prior, features

STOP_BIAS = -3.0
"""Of the logit of stop in a new policy."""


def segment_log_softmax(logits: torch.Tensor, segment: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Log-softmax within each segment: logits (n,), `segment` (n,) the segment of each; every segment non-empty."""
    top = torch.full((num_segments,), -torch.inf).scatter_reduce(0, segment, logits.detach(), "amax")
    shifted = logits - top[segment]
    total = torch.zeros(num_segments).index_add(0, segment, shifted.exp())
    return shifted - total.log()[segment]


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What the policy says of a batch (B graphs, P (graph, rule) pairs, S sites); logs are natural."""

    rule_log_probs: torch.Tensor  # (P,) log p(rule)
    location_log_probs: torch.Tensor  # (S,) log p(location | rule)
    log_probs: torch.Tensor  # (S,) log p(rule, location), the sum of the two
    values: torch.Tensor  # (B,)
    entropy: torch.Tensor  # (B,) of the joint distribution: H(rule) + sum_r p(r) H(location | r)


def two_step_output(
    batch: SiteBatch, rule_logits: torch.Tensor, location_logits: torch.Tensor, values: torch.Tensor
) -> PolicyOutput:
    """p(rule, location) = p(rule) p(location | rule) of logits (P,) and (S,), with values (B,)."""
    rule_log_probs = segment_log_softmax(rule_logits, batch.pair_graph, batch.num_graphs)
    location_log_probs = segment_log_softmax(location_logits, batch.site_pair, batch.num_pairs)
    log_probs = rule_log_probs.index_select(0, batch.site_pair) + location_log_probs
    graph = batch.pair_graph[batch.site_pair]
    surprise = torch.zeros(batch.num_graphs).index_add(0, graph, -log_probs.exp() * log_probs)
    return PolicyOutput(rule_log_probs, location_log_probs, log_probs, values, surprise)


ObservationT = TypeVar("ObservationT", bound=HasSites)
BatchT = TypeVar("BatchT", bound=SiteBatch)


class Acting(Protocol):
    """What collecting an episode takes of a policy."""

    def begin_episode(self, rng: np.random.Generator) -> None: ...
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
    value_head: nn.Linear
    value_mean: torch.Tensor  # ()
    value_deviation: torch.Tensor  # ()

    def __init__(self, sizes: ObservationSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_deviation", torch.ones(()))

    def told_value(self, head: torch.Tensor) -> torch.Tensor:
        """Values (B,) of what `value_head` gives, (B, 1): it tells them in units of `value_deviation`."""
        return self.value_mean + self.value_deviation * head.squeeze(1)

    @torch.no_grad()
    def normalise_values(self, mean: float, deviation: float) -> None:
        """Take other units for what `value_head` gives, and change it so that the values stay what they are (PopArt,
        van Hasselt et al. 2016)."""
        self.value_head.weight *= self.value_deviation / deviation
        self.value_head.bias.copy_((self.value_deviation * self.value_head.bias + self.value_mean - mean) / deviation)
        self.value_mean.fill_(mean)
        self.value_deviation.fill_(deviation)

    def begin_episode(self, rng: np.random.Generator) -> None:
        """A new episode, of which `rng` are the random numbers."""

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
        informed_share: of the episodes, those in which it looks at what it knows of places. In the others it finds
            what pays late, and what is known leads away from.
    """

    places: Places

    def __init__(self, sizes: ObservationSizes, hidden: int, rounds: int, informed_share: float = 1.0) -> None:
        super().__init__(sizes)
        self.informed_share, self._informed = informed_share, True
        self.encoder = GraphEncoder(sizes, hidden, rounds)
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.site_nodes = nn.Linear(hidden, hidden)
        self.site_rule = nn.Linear(hidden, hidden, bias=False)
        self.site_graph = nn.Linear(hidden, hidden, bias=False)
        self.site_known = nn.Linear(2 * sizes.keys_per_location, hidden, bias=False)
        self.site_body = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.location_head = nn.Linear(hidden, 1)
        self.rule_body = nn.Sequential(nn.Linear(4 * hidden + 1, hidden), nn.ReLU())
        self.rule_head = nn.Linear(hidden, 1)
        self.value_body = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU())
        self.value_head = nn.Linear(hidden, 1)
        # A nearly uniform policy to begin with (Andrychowicz et al. 2021, "What matters in on-policy RL?").
        for head, gain in ((self.location_head, 0.01), (self.rule_head, 0.01), (self.value_head, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        # Nearly, but for stop: under a uniform policy it would end episodes after a handful of steps, and what pays
        # only after twenty would never be seen.
        self.rule_bias = nn.Parameter(torch.zeros(sizes.num_rules))
        with torch.no_grad():
            self.rule_bias[sizes.stop_rule] = STOP_BIAS
        self.places = Places()
        self.prior = Prior()

    def forward(self, batch: GraphBatch) -> PolicyOutput:
        """Log-probabilities of all legal actions, joint entropy and value of each graph."""
        h, readout = self.encoder(batch)
        pair_graph, pair_rule, site_pair = batch.pair_graph, batch.pair_rule, batch.site_pair
        # The mean over a site's nodes; a site without nodes (stop) gets zeros.
        own = functional.embedding_bag(batch.member_nodes, self.site_nodes(h), batch.member_offsets, mode="mean")
        context = self.site_rule(self.rule.weight)[pair_rule] + self.site_graph(readout)[pair_graph]
        known = self.site_known(features(batch.site_known))
        sites = self.site_body(own + known + context.index_select(0, site_pair))
        expected = self.prior(batch.site_known)
        location_logits = self.location_head(sites).squeeze(1) + expected

        pooled = [dgl.ops.segment_reduce(batch.pair_sizes, sites, reducer) for reducer in ("mean", "max")]
        number = batch.pair_sizes.float().log1p().unsqueeze(1) / 6.0  # about 1 for 400 sites
        seen_by_rule = torch.cat([*pooled, self.rule(pair_rule), readout.index_select(0, pair_graph), number], dim=1)
        promise = dgl.ops.segment_reduce(batch.pair_sizes, expected.unsqueeze(1), "max").squeeze(1)
        rule_logits = self.rule_head(self.rule_body(seen_by_rule)).squeeze(1) + self.rule_bias[pair_rule] + promise
        best = dgl.ops.segment_reduce(torch.from_numpy(np.diff(batch.site_offsets)), sites, "max")
        values = self.told_value(self.value_head(self.value_body(torch.cat([readout, best], dim=1))))
        return two_step_output(batch, rule_logits, location_logits, values)

    def compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        """See `observation.compact`."""
        return compact(observation, self.sizes, self.places if self._informed else None)

    def begin_episode(self, rng: np.random.Generator) -> None:
        self._informed = bool(rng.random() < self.informed_share)

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
