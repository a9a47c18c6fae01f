"""Message passing over computation graphs, with DGL.

A node begins as the embedding of its operator plus a projection of its real features and degrees. Each round sends
messages both ways along every edge, from producer to consumer and back, because what a rewrite is worth depends on
who reads a value as much as on who makes it; the edge's features (the tensor's shape) enter the message. This is the
scheme of X-RLflow (He et al., MLSys 2023, section 3.3) with edge features in each round and a residual update with
layer normalisation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.observation import GraphBatch, ObservationSizes
from rlflow_tvm.agents.segments import segment_max, segment_sum


class BothWays:
    """What nodes hear along edges and against them, and what all message rounds ask of that alike.

    Args:
        along: the edges into each node, from its producers.
        against: those out of it, turned, from its consumers.

    Attributes:
        producers, consumers: numbers of those edges, int64 (N,).
    """

    def __init__(self, along: dgl.DGLGraph, against: dgl.DGLGraph) -> None:
        self.along, self.against = along, against
        self.producers, self.consumers = along.in_degrees(), against.in_degrees()
        # (`dgl.ops.copy_e_mean` would count them anew each time)
        self._divisors = [each.clamp(min=1).float().unsqueeze(1) for each in (self.producers, self.consumers)]

    @property
    def features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the edges, (E, Fe) each."""
        return self.along.edata["features"], self.against.edata["features"]

    def means(
        self, sent: tuple[torch.Tensor, torch.Tensor], edges: tuple[torch.Tensor, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Of each node the mean of relu(what the other node sent + what its edge says), (N, hidden): from producers,
        and from consumers."""
        parts = zip((self.along, self.against), sent, edges, self._divisors, strict=True)
        return [
            # in place, as below: the gradient asks for what comes out alone, and memory is half of what these cost
            dgl.ops.copy_e_sum(graph, torch.relu_(dgl.ops.u_add_e(graph, nodes, told))) / divisor
            for graph, nodes, told, divisor in parts
        ]


class MessageRound(nn.Module):
    """One round: h' = LayerNorm(h + MLP(h, mean of messages from producers, mean of messages from consumers)).

    The message along an edge u -> v is relu(W h_u + e_uv); against it, with weights of its own, relu(W' h_v + e'_uv).
    """

    def __init__(self, hidden: int, edge_features: int) -> None:
        super().__init__()
        self.send = nn.Linear(hidden, 2 * hidden)  # both directions' W in one product
        self.edge = nn.Linear(edge_features, 2 * hidden)
        self.update = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, links: BothWays, h: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Node embeddings (N, hidden) -> those of the nodes from `first` on, (N - first, hidden)."""
        weights, biases = self.edge.weight.chunk(2), self.edge.bias.chunk(2)
        along, against = map(functional.linear, links.features, weights, biases)
        heard = links.means(self.send(h).chunk(2, dim=1), (along, against))
        new = h[first:]
        return self.norm(new + self.update(torch.cat([new, *(each[first:] for each in heard)], dim=1)))


class GraphEncoder(nn.Module):
    """Embeddings of nodes, alike ones once, and one readout for each graph.

    Args:
        sizes: widths of the inputs.
        hidden: width of all embeddings.
        rounds: how many message rounds, that is how many edges far a node sees (at least 1).
    """

    def __init__(self, sizes: ObservationSizes, hidden: int, rounds: int) -> None:
        super().__init__()
        self.operator = nn.Embedding(sizes.num_operators, hidden)
        self.features = nn.Linear(sizes.node_features + 2, hidden)
        self.rounds = nn.ModuleList(MessageRound(hidden, sizes.edge_features) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(2 * hidden + 1, hidden), nn.ReLU())

    @property
    def reach(self) -> int:
        """How many edges far a node's embedding depends on what is there: the ends' degrees are told with them."""
        return len(self.rounds) + 1

    def forward(self, batch: GraphBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the kinds of nodes (N, hidden), and readouts (B, hidden)."""
        links = BothWays(batch.into, batch.out_of)
        # Messages are averaged, so the number of producers and consumers is told apart here.
        degrees = torch.stack([links.producers, links.consumers], dim=1).float().log1p()
        h = torch.relu(self.operator(batch.operator) + self.features(torch.cat([batch.features, degrees], dim=1)))
        for message_round in self.rounds:
            h = message_round(links, h)
        return h, self.readout(pooled(h, batch.graph_kinds, batch.graph_sizes, batch.kind_counts))


def pooled(h: torch.Tensor, kinds: torch.Tensor, sizes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean and maximum of the nodes of each graph, and how many they are, (B, 2 hidden + 1).

    Args:
        h: embeddings of kinds of nodes, (N, hidden).
        kinds: those of each graph, one graph after another, (R,).
        sizes: nodes of each, (R,).
        counts: kinds of each graph, (B,).
    """
    rows, weights = h.index_select(0, kinds), sizes.to(h.dtype).unsqueeze(1)
    numbers = segment_sum(weights, counts)
    size = numbers.log1p() / 6.0  # about 1 for 400 nodes
    return torch.cat([segment_sum(rows * weights, counts) / numbers, segment_max(rows, counts), size], dim=1)
