"""V: a graph's latent, trained to tell what matters of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.encoder import GraphEncoder
from rlflow_tvm.agents.observation import CompactObservation, GraphBatch, ObservationSizes, collate

_LEAST_SECS = 1e-9
"""Below any kernel's: what a graph counts as that costs nothing."""


@dataclass(frozen=True, eq=False)
class GraphFacts:
    """What V is trained to tell of graphs (B of them), all float32."""

    operators: torch.Tensor  # (B, O) log(1 + nodes of each operator)
    nodes: torch.Tensor  # (B,) log(1 + nodes)
    log_cost: torch.Tensor  # (B,) log of the seconds of a run, at least _LEAST_SECS
    counts: torch.Tensor  # (B, R+1) sites of each rule, stop included

    def __getitem__(self, rows: np.ndarray) -> GraphFacts:
        return GraphFacts(self.operators[rows], self.nodes[rows], self.log_cost[rows], self.counts[rows])

    @staticmethod
    def of(
        observations: Sequence[CompactObservation], run_secs: Sequence[float], sizes: ObservationSizes
    ) -> GraphFacts:
        histograms = [np.bincount(o.nodes[:, 0].astype(int), minlength=sizes.num_operators) for o in observations]
        return GraphFacts(
            operators=torch.from_numpy(np.log1p(histograms)).float(),
            nodes=torch.from_numpy(np.log1p([len(o.nodes) for o in observations])).float(),
            log_cost=torch.from_numpy(np.log(np.maximum(run_secs, _LEAST_SECS))).float(),
            counts=torch.from_numpy(site_counts(observations, sizes)).float(),
        )


@dataclass(frozen=True, eq=False)
class Actions:
    """What was done to B graphs: rule, location, what was known of the place, what it saved (squeezed: `savings`)."""

    rules: torch.Tensor  # int64 (B,)
    locations: torch.Tensor  # int64 (B,)
    known: torch.Tensor  # float32 (B, 2P+1)
    rewards: torch.Tensor  # float32 (B,)

    def __getitem__(self, rows: np.ndarray) -> Actions:
        return Actions(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def site_counts(observations: Sequence[CompactObservation], sizes: ObservationSizes) -> np.ndarray:
    """How many sites each rule has, int64 (B, R+1)."""
    return np.stack([np.bincount(o.site_rules.astype(int), minlength=sizes.num_rules) for o in observations])


def site_number(observation: CompactObservation, site: int) -> int:
    """Of one of its rule's sites, from 0: its location in dreams, where the masks have no holes."""
    return int(site - np.searchsorted(observation.site_rules, observation.site_rules[site]))


class Vision(nn.Module):
    """An encoder to a latent of zero mean and unit deviation, and a decoder that training alone needs.

    Args:
        sizes: of the observations.
        latent: width of the latent (RLFlow: 32).
        hidden: width of all embeddings.
        rounds: message rounds of the encoder.
    """

    cost_mean: torch.Tensor  # ()
    cost_deviation: torch.Tensor  # ()
    reward_deviation: torch.Tensor  # ()

    def __init__(self, sizes: ObservationSizes, latent: int, hidden: int, rounds: int) -> None:
        super().__init__()
        self.width = latent
        self.encoder = GraphEncoder(sizes, hidden, rounds)
        self.to_latent = nn.Linear(hidden, latent)
        # Known bounds: the mixture's deviations mean the same for every graph, and a dream cannot run away.
        self.norm = nn.LayerNorm(latent, elementwise_affine=False)
        self.decoder = nn.Sequential(nn.Linear(latent, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, hidden), nn.ReLU())
        self.operators = nn.Linear(hidden, sizes.num_operators)
        self.nodes = nn.Linear(hidden, 1)
        self.log_cost = nn.Linear(hidden, 1)
        self.rules = nn.Linear(hidden, sizes.num_rules)
        self.counts = nn.Linear(hidden, sizes.num_rules)
        self.rule = nn.Embedding(sizes.num_rules, hidden)
        self.location = nn.Embedding(sizes.num_locations, hidden)
        self.reward = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        # The costs of one model's graphs differ by percents: what is learnt is the distance from their mean.
        self.register_buffer("cost_mean", torch.zeros(()))
        self.register_buffer("cost_deviation", torch.ones(()))
        self.register_buffer("reward_deviation", torch.ones(()))

    def forward(self, batch: GraphBatch) -> torch.Tensor:
        """Latents (B, Z)."""
        _, readout = self.encoder(batch)
        return self.norm(self.to_latent(readout))

    def see(self, observations: Sequence[CompactObservation]) -> torch.Tensor:
        """Latents of some observations, (B, Z)."""
        latents: torch.Tensor = self(collate(observations, self.encoder.reach))
        return latents

    def losses(self, latents: torch.Tensor, facts: GraphFacts) -> dict[str, torch.Tensor]:
        """What is told wrongly from latents (B, Z), by kinds, each a mean."""
        told = self.decoder(latents)
        cost = (facts.log_cost - self.cost_mean) / self.cost_deviation
        legal = facts.counts > 0
        wrong = functional.smooth_l1_loss(self.counts(told), facts.counts.log1p(), reduction="none")
        return {
            "operators": functional.mse_loss(self.operators(told), facts.operators),
            "nodes": functional.mse_loss(self.nodes(told).squeeze(1), facts.nodes),
            "cost": functional.mse_loss(self.log_cost(told).squeeze(1), cost),
            "rules": functional.binary_cross_entropy_with_logits(self.rules(told), legal.float()),
            "locations": (wrong * legal).sum() / legal.sum().clamp(min=1),
        }

    def reward_loss(self, latents: torch.Tensor, actions: Actions) -> torch.Tensor:
        """What is told wrongly of what an action saves: a latent must know the graph as far as that depends on it."""
        told = self.decoder(latents) + self.rule(actions.rules) + self.location(actions.locations)
        return functional.mse_loss(self.reward(told).squeeze(1), actions.rewards / self.reward_deviation)
