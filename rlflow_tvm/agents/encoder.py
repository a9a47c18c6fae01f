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

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.observation import GraphBatch, ObservationSizes
from rlflow_tvm.agents.segments import segment_max, segment_mean


class BothWays:
    """A graph's edges along and against their direction, and what all message rounds ask of them alike.

    Attributes:
        along, against: the graph, and with its edges turned, in the same order.
        producers, consumers: edges into and out of each node, int64 (N,).
    """

    def __init__(self, graph: dgl.DGLGraph) -> None:
        self.along, self.against = graph, dgl.reverse(graph, copy_ndata=False)
        self.producers, self.consumers = graph.in_degrees(), graph.out_degrees()
        # (`dgl.ops.copy_e_mean` would count them anew each time)
        self._divisors = [each.clamp(min=1).float().unsqueeze(1) for each in (self.producers, self.consumers)]

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

    def forward(self, links: BothWays, h: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Node embeddings (N, hidden) -> (N, hidden); `edges`: features of the edges, (E, Fe)."""
        heard = links.means(self.send(h).chunk(2, dim=1), self.edge(edges).chunk(2, dim=1))
        return self.norm(h + self.update(torch.cat([h, *heard], dim=1)))


class GraphEncoder(nn.Module):
    """Node embeddings and one readout for each graph.

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

    def forward(self, batch: GraphBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Node embeddings (N, hidden) and readouts (B, hidden)."""
        graph = batch.graph
        links = BothWays(graph)
        # Messages are averaged, so the number of producers and consumers is told apart here.
        degrees = torch.stack([links.producers, links.consumers], dim=1).float().log1p()
        h = self.operator(graph.ndata["operator"])
        h = torch.relu(h + self.features(torch.cat([graph.ndata["features"], degrees], dim=1)))
        for message_round in self.rounds:
            h = message_round(links, h, graph.edata["features"])
        counts = graph.batch_num_nodes()
        pooled = [segment_mean(h, counts), segment_max(h, counts)]
        size = counts.float().log1p().unsqueeze(1) / 6.0  # about 1 for 400 nodes
        return h, self.readout(torch.cat([*pooled, size], dim=1))
