"""A policy that chooses among candidate graphs, after X-RLflow (He et al., MLSys 2023, section 3.3).

The graph now is encoded whole, a candidate by its difference to it: the nodes that it would add, among the graph's own,
and those that it would remove. Its score is a function of the graph and of that, the same for all candidates and for
stop, which changes nothing: the order of the candidates does not matter, nor how many there are, but that those of one
rule share what a rule is drawn at first (`by_rule`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.candidate.config import CandidateConfig
from rlflow_tvm.agents.candidate.observation import (
    CandidateBatch,
    CandidateObservation,
    CandidateSizes,
    collate,
    compact,
)
from rlflow_tvm.agents.encoder import BothWays, MessageRound, pooled
from rlflow_tvm.agents.graph_policy import GraphPolicy, Told, pick
from rlflow_tvm.agents.heads import STOP_BIAS, PolicyOutput, entropies, segment_log_softmax
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.prior import Prior, features
from rlflow_tvm.agents.segments import segment_max


class AttentionEncoder(nn.Module):
    """X-RLflow's graph network: nodes learn of the edges into them, attend to their neighbours, and are read out.

    h' = relu(W (sum of the features of incoming edges || h)); then attention layers (GATv2, Brody et al. 2022) with
    residual connections and layer normalisation; then one vector for the graph. Attention goes along edges and against
    them: what a rewrite is worth depends on who reads a value as much as on who makes it.

    Args:
        sizes: widths of the inputs.
        hidden: width of the embeddings.
        layers: of attention.
        heads: of each layer.
    """

    def __init__(self, sizes: CandidateSizes, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.operator = nn.Embedding(sizes.num_operators, hidden)
        self.features = nn.Linear(sizes.node_features, hidden)
        self.edges = nn.Linear(sizes.edge_features + hidden, hidden)
        self.layers = nn.ModuleList(
            dgl.nn.GATv2Conv(hidden, hidden // heads, heads, residual=True, activation=torch.relu)
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(2 * hidden + 1, hidden), nn.ReLU())

    @property
    def reach(self) -> int:
        """How many edges far a node's embedding depends on what is there: one begins with the edges into it."""
        return len(self.layers) + 1

    def node(self, operator: torch.Tensor, described: torch.Tensor) -> torch.Tensor:
        """What nodes are for themselves, (n, hidden)."""
        return torch.relu(self.operator(operator) + self.features(described))

    def forward(self, batch: CandidateBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the kinds of nodes (N, hidden), and readouts (B, hidden)."""
        graph = batch.graph
        h = self.node(graph.ndata["operator"], graph.ndata["features"])
        h = torch.relu(self.edges(torch.cat([graph.ndata["made"], h], dim=1)))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = norm(layer(graph, h).flatten(1))
        return h, self.readout(pooled(h, batch.graph_kinds, batch.graph_sizes, batch.kind_counts))


class CandidatePolicy(GraphPolicy[CandidateObservation, CandidateBatch]):
    """Scores of candidates and the value of a graph over one shared encoder.

    Args:
        sizes: widths of the observation, from `CandidateSizes.from_space`.
        config: settings.
    """

    sizes: CandidateSizes
    places: Places

    def __init__(self, sizes: CandidateSizes, config: CandidateConfig) -> None:
        super().__init__(sizes, config.informed_share)
        hidden = config.hidden
        self.encoder = AttentionEncoder(sizes, hidden, config.rounds, config.heads)
        self.rounds = nn.ModuleList(MessageRound(hidden, sizes.edge_features) for _ in range(config.change_rounds))
        self.added = nn.Linear(hidden, hidden)
        self.removed = nn.Linear(hidden, hidden, bias=False)
        self.difference = nn.Linear(sizes.node_features + 2, hidden, bias=False)
        self.around = nn.Linear(hidden, hidden, bias=False)
        self.known = nn.Linear(sizes.num_known - 1, hidden, bias=False)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.score_head = nn.Linear(hidden, 1)
        self.value_body = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU())
        self.value_head = nn.Linear(hidden, 1)
        for head, gain in ((self.score_head, 0.01), (self.value_head, 1.0)):  # as in `heads`
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        self.by_rule = config.by_rule
        # drawn as often as a rule, stop would end episodes after a handful of steps
        self.stop_bias = nn.Parameter(torch.tensor(STOP_BIAS if config.by_rule else 0.0))
        self.prior = Prior()
        self.places = Places()

    def forward(self, batch: CandidateBatch) -> PolicyOutput:
        h, readout = self.encoder(batch)
        sites = self.body(self._candidates(batch, h) + self.around(readout).index_select(0, batch.kind_graph))
        prior = self.prior(batch.kind_known)
        scores = self.score_head(sites).squeeze(1) + prior + self.stop_bias * batch.kind_stops
        logits = scores.index_select(0, batch.site_kind)
        if self.by_rule:
            logits = logits - _shared(prior.index_select(0, batch.site_kind), batch.site_rule)
        log_probs = segment_log_softmax(logits, batch.site_graph, batch.num_graphs)
        best = segment_max(sites, batch.kind_sites)
        values = self.scaled(self.value_head(self.value_body(torch.cat([readout, best], dim=1))))
        return PolicyOutput(log_probs, values, entropies(log_probs, batch.site_graph, batch.num_graphs))

    def _candidates(self, batch: CandidateBatch, h: torch.Tensor) -> torch.Tensor:
        """Embeddings of the kinds of sites (K, hidden) as differences to their graphs, whose nodes' are `h`
        (N, hidden)."""
        new = self.encoder.node(batch.added_operator, batch.added_features)
        links = BothWays(batch.changes, dgl.reverse(batch.changes, copy_ndata=False, copy_edata=True))
        for each in self.rounds:  # the graph's own nodes stay as they are: no candidate is there yet
            new = each(links, torch.cat([h, new]), first=len(h))
        sites = len(batch.kind_graph)
        came, went = batch.added_site, batch.removed_site
        old = batch.graph.ndata["features"].index_select(0, batch.removed_node)
        counts = [torch.bincount(which, minlength=sites).float() for which in (came, went)]
        change = torch.zeros(sites, old.shape[1]).index_add(0, came, batch.added_features).index_add(0, went, -old)
        told = torch.cat([change, *(count.log1p().unsqueeze(1) for count in counts)], dim=1)
        return (
            self.added(_means(new, came, counts[0]))
            + self.removed(_means(h.index_select(0, batch.removed_node), went, counts[1]))
            + self.difference(told)
            + self.known(features(batch.kind_known))
        )

    def compact(self, observation: Mapping[str, Any], told: Told | None = None) -> CandidateObservation:
        """See `observation.compact`."""
        return compact(observation, self.sizes, told or self.told)

    def collate(self, observations: Sequence[CandidateObservation]) -> CandidateBatch:
        """See `observation.collate`."""
        return collate(observations, (self.encoder.reach, len(self.rounds)))

    @torch.inference_mode()
    def choose(self, observation: CandidateObservation, rng: np.random.Generator | None) -> tuple[int, float, float]:
        """One candidate: (index of the site, its log-probability, value of the observation).

        With a generator it is sampled; with None the likeliest is taken, `by_rule` that of the likeliest rule, as in
        two steps: a rule is not punished for having many candidates, among which it shares its weight.
        """
        output = self(self.collate([observation]))
        log_probs = output.log_probs.double().numpy()
        likeliest = rng is None and self.by_rule
        site = _of_likeliest_rule(log_probs, observation.site_rules) if likeliest else pick(log_probs, rng)
        return site, float(output.log_probs[site]), float(output.values[0])

    def action(self, observation: CandidateObservation, site: int) -> int:
        """The candidate's number."""
        return int(observation.site_numbers[site])

    def place(self, observation: Mapping[str, Any], action: int) -> np.ndarray:
        return observation["candidate_places"][action]

    @torch.inference_mode()
    def probabilities(self, observation: CandidateObservation) -> np.ndarray:
        """p(candidate), float64 (most + 1,) as the environment numbers them; exactly 0 where there is none."""
        dense = np.zeros(int(observation.site_numbers[-1]) + 1)
        dense[observation.site_numbers] = np.exp(self(self.collate([observation])).log_probs.double().numpy())
        return dense


def _shared(prior: torch.Tensor, rules: torch.Tensor) -> torch.Tensor:
    """What sites' logits are lowered by, (S,), for each rule to weigh as much as its most promising site would alone:
    the logarithm of the number of its sites where nothing is known.

    Args:
        prior: of what is known of their places, (S,).
        rules: numbers from 0, (S,).
    """
    number = int(rules.max()) + 1
    most = torch.full((number,), -torch.inf).scatter_reduce(0, rules, prior, "amax")
    weights = (prior - most.index_select(0, rules)).exp()
    return torch.zeros(number).index_add(0, rules, weights).log().index_select(0, rules)


def _of_likeliest_rule(log_probs: np.ndarray, rules: np.ndarray) -> int:
    """The likeliest site of the rule whose sites are together the likeliest, of log-probabilities (S,)."""
    numbers, which = np.unique(rules, return_inverse=True)
    likeliest = int(np.bincount(which, np.exp(log_probs), len(numbers)).argmax())
    return int(np.where(which == likeliest, log_probs, -np.inf).argmax())


def _means(rows: torch.Tensor, segment: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Means of rows (n, hidden) by segment (n,), of which there are as many as `counts`; 0 of none."""
    sums = torch.zeros(len(counts), rows.shape[1]).index_add(0, segment, rows)
    return sums / counts.clamp(min=1.0).unsqueeze(1)
