"""The heads of a two-step policy: from embeddings of sites, rules and graphs to log-probabilities and values.

p(rule, location) = p(rule) p(location | rule). Only legal actions have logits at all (see `observation`), so a masked
action's probability is exactly 0 and acting and updating cannot disagree about masks. The rule head sees, for each
rule, the pooled embeddings of that rule's sites, and the value those of all sites.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rlflow_tvm.agents.observation import ObservationSizes, SiteBatch, SiteKinds
from rlflow_tvm.agents.prior import Prior
from rlflow_tvm.agents.segments import segment_max, segment_sum

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
    """What a policy says of a batch (B graphs, S legal actions, called sites); logs are natural."""

    log_probs: torch.Tensor  # (S,)
    values: torch.Tensor  # (B,)
    entropy: torch.Tensor  # (B,)


@dataclass(frozen=True, eq=False)
class TwoStepOutput(PolicyOutput):
    """That of a policy in two steps (P (graph, rule) pairs); `entropy` is of the joint distribution,
    H(rule) + sum_r p(r) H(location | r)."""

    rule_log_probs: torch.Tensor  # (P,) log p(rule)
    location_log_probs: torch.Tensor  # (S,) log p(location | rule); log_probs is the sum of the two


def entropies(log_probs: torch.Tensor, segment: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Of the distribution in each segment of log-probabilities (n,)."""
    return torch.zeros(num_segments).index_add(0, segment, -log_probs.exp() * log_probs)


def two_step_output(
    batch: SiteBatch, rule_logits: torch.Tensor, location_logits: torch.Tensor, values: torch.Tensor
) -> TwoStepOutput:
    """p(rule, location) = p(rule) p(location | rule) of logits (P,) and (S,), with values (B,)."""
    rule_log_probs = segment_log_softmax(rule_logits, batch.pair_graph, batch.num_graphs)
    location_log_probs = segment_log_softmax(location_logits, batch.site_pair, batch.num_pairs)
    log_probs = rule_log_probs.index_select(0, batch.site_pair) + location_log_probs
    graph = batch.pair_graph[batch.site_pair]
    entropy = entropies(log_probs, graph, batch.num_graphs)
    return TwoStepOutput(log_probs, values, entropy, rule_log_probs, location_log_probs)


class TwoStepHeads(nn.Module):
    """Rule head, location head and value head, and the prior of what is known of places.

    Args:
        sizes: of the rules there are, among others.
        hidden: width of the sites' embeddings, and of all that is made of them.
        rule_width: width of what is told of each rule.
        graph_width: width of what is told of each graph.
    """

    def __init__(self, sizes: ObservationSizes, hidden: int, rule_width: int, graph_width: int) -> None:
        super().__init__()
        self.site_body = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.location_head = nn.Linear(hidden, 1)
        self.rule_body = nn.Sequential(nn.Linear(2 * hidden + rule_width, hidden), nn.ReLU())
        self.rule_head = nn.Linear(hidden, 1)
        self.value_body = nn.Sequential(nn.Linear(hidden + graph_width, hidden), nn.ReLU())
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
        self.prior = Prior()

    def forward(
        self,
        batch: SiteBatch,
        sites: torch.Tensor,
        rules: torch.Tensor,
        graphs: torch.Tensor,
        known: torch.Tensor,
        kinds: SiteKinds,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of rules (P,) and of locations (S,), and what the value head gives, (B, 1).

        Args:
            batch: the legal actions.
            sites: embeddings of their kinds, before the first activation, (K, hidden).
            rules: what is told of each (graph, rule) pair, (P, rule_width).
            graphs: what is told of each graph, (B, graph_width).
            known: of the places of each kind, (K, 2P+1).
            kinds: which sites are alike.
        """
        sites, expected = self.site_body(sites), self.prior(known)
        location_logits = (self.location_head(sites).squeeze(1) + expected).index_select(0, kinds.of_site)
        rows = torch.bincount(kinds.pair, minlength=batch.num_pairs)
        shares = kinds.sizes / batch.pair_sizes.index_select(0, kinds.pair)
        mean = segment_sum(sites * shares.unsqueeze(1), rows)
        graph_rows = torch.bincount(batch.pair_graph.index_select(0, kinds.pair), minlength=batch.num_graphs)
        most = segment_max(sites, rows)
        promise = segment_max(expected.unsqueeze(1), rows).squeeze(1)
        rule_logits = self.rule_head(self.rule_body(torch.cat([mean, most, rules], dim=1))).squeeze(1)
        rule_logits = rule_logits + self.rule_bias[batch.pair_rule] + promise
        best = segment_max(sites, graph_rows)
        values = self.value_head(self.value_body(torch.cat([graphs, best], dim=1)))
        return rule_logits, location_logits, values
