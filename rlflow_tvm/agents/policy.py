"""The two-step masked policy: first a rule, then one of that rule's locations; and the value of a graph.

A site is scored (`heads`) from the embeddings of its own nodes and what is known of its place (`places`), with its rule
and the graph's readout as context: neither its index nor the order of the sites enters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.encoder import GraphEncoder
from rlflow_tvm.agents.graph_policy import GraphPolicy, Told, pick
from rlflow_tvm.agents.heads import STOP_BIAS, TwoStepHeads, TwoStepOutput, two_step_output
from rlflow_tvm.agents.observation import (
    CompactObservation,
    GraphBatch,
    HasSites,
    ObservationSizes,
    SiteBatch,
    actions_at,
    collate,
    collate_sites,
    compact,
)
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.prior import features


class _Kept(HasSites, Protocol):
    @property
    def num_sites(self) -> int: ...


SitesT = TypeVar("SitesT", bound=_Kept)
SiteBatchT = TypeVar("SiteBatchT", bound=SiteBatch)


class SitePolicy(GraphPolicy[SitesT, SiteBatchT]):
    """A policy over rules and locations, in two steps.

    Args:
        sizes: of the rules and locations there are, among others.
        informed_share: see `GraphPolicy`.
    """

    sizes: ObservationSizes
    heads: TwoStepHeads

    @property
    def value_head(self) -> nn.Linear:  # type: ignore[override]
        return self.heads.value_head

    def output(self, batch: SiteBatch, *told: Any) -> TwoStepOutput:
        """What the heads make of what they are told."""
        rule_logits, location_logits, values = self.heads(batch, *told)
        return two_step_output(batch, rule_logits, location_logits, self.scaled(values))

    def action(self, observation: SitesT, site: int) -> np.ndarray:
        """(rule, location), int64 (2,)."""
        return actions_at([observation], [site])[0]

    def place(self, observation: Mapping[str, Any], action: np.ndarray) -> np.ndarray:
        return observation["location_places"][tuple(action)]

    @torch.inference_mode()
    def probabilities(self, observation: SitesT) -> np.ndarray:
        """p(rule, location) as a dense float64 array (R+1, L); exactly 0 where the masks forbid the action."""
        dense = np.zeros((self.sizes.num_rules, self.sizes.num_locations))
        log_probs = self(self.collate([observation])).log_probs.double().numpy()
        dense[observation.site_rules, observation.site_locations] = np.exp(log_probs)
        return dense

    @torch.inference_mode()
    def choose(self, observation: SitesT, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """One action: (index of the site, log p(rule, location), value of the observation).

        With a generator rule and location are sampled; with None the likeliest rule is taken and then its likeliest
        location (which need not be the likeliest pair: a rule is not punished for having many locations).
        """
        batch = self.collate([observation])
        output = self(batch)
        pair = pick(output.rule_log_probs.double().numpy(), rng)
        begin = int(batch.pair_sizes[:pair].sum())
        own = output.location_log_probs[begin : begin + int(batch.pair_sizes[pair])]
        site = begin + pick(own.double().numpy(), rng)
        return site, float(output.log_probs[site]), float(output.values[0])


class TwoStepPolicy(SitePolicy[CompactObservation, GraphBatch]):
    """Encoder, rule head, location head and value head over one shared trunk.

    Args:
        sizes: widths of the observation, from `ObservationSizes.from_space`.
        hidden: width of all embeddings.
        rounds: message rounds of the encoder.
        informed_share: see `GraphPolicy`.
    """

    places: Places

    def __init__(self, sizes: ObservationSizes, hidden: int, rounds: int, informed_share: float | None = None) -> None:
        super().__init__(sizes, informed_share)
        self.encoder = GraphEncoder(sizes, hidden, rounds)
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.site_nodes = nn.Linear(hidden, hidden)
        self.site_rule = nn.Linear(hidden, hidden, bias=False)
        self.site_graph = nn.Linear(hidden, hidden, bias=False)
        self.site_known = nn.Linear(sizes.num_known - 1, hidden, bias=False)
        self.heads = TwoStepHeads(sizes, hidden, 2 * hidden + 1, hidden)
        self.places = Places()

    def forward(self, batch: GraphBatch) -> TwoStepOutput:
        """Log-probabilities of all legal actions, joint entropy and value of each graph."""
        h, readout = self.encoder(batch)
        pair_graph, pair_rule, kinds = batch.pair_graph, batch.pair_rule, batch.kinds
        # The mean over a site's nodes; a site without nodes (stop) gets zeros.
        own = functional.embedding_bag(batch.member_nodes, self.site_nodes(h), batch.member_offsets, mode="mean")
        context = self.site_rule(self.rule.weight)[pair_rule] + self.site_graph(readout)[pair_graph]
        sites = own + self.site_known(features(batch.kind_known)) + context.index_select(0, kinds.pair)
        number = batch.pair_sizes.float().log1p().unsqueeze(1) / 6.0  # about 1 for 400 sites
        rules = torch.cat([self.rule(pair_rule), readout.index_select(0, pair_graph), number], dim=1)
        return self.output(batch, sites, rules, readout, batch.kind_known, kinds)

    def compact(self, observation: Mapping[str, Any], told: Told | None = None) -> CompactObservation:
        """See `observation.compact`."""
        return compact(observation, self.sizes, told or self.told)

    def collate(self, observations: Sequence[CompactObservation]) -> GraphBatch:
        """See `observation.collate`."""
        return collate(observations, self.encoder.reach)


class UniformPolicy(SitePolicy[CompactObservation, SiteBatch]):
    """A uniformly random rule, then a uniformly random site of it; stop is drawn as seldom as by a new policy."""

    def compact(self, observation: Mapping[str, Any], told: Told | None = None) -> CompactObservation:
        return compact(observation, self.sizes, told)

    def collate(self, observations: Sequence[CompactObservation]) -> SiteBatch:
        return collate_sites(observations)

    def forward(self, batch: SiteBatch) -> TwoStepOutput:
        rules = STOP_BIAS * (batch.pair_rule == self.sizes.stop_rule).float()
        return two_step_output(batch, rules, torch.zeros(len(batch.site_pair)), torch.zeros(batch.num_graphs))
