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


class MessageRound(nn.Module):
    """One round: h' = LayerNorm(h + MLP(h, mean of messages from producers, mean of messages from consumers)).

    The message along an edge u -> v is relu(W h_u + e_uv); against it, with weights of its own, relu(W' h_v + e'_uv).
    """

    def __init__(self, hidden: int, edge_features: int) -> None:
        super().__init__()
        self.send = nn.Linear(hidden, 2 * hidden)  # both directions' W in one product
        self.edge = nn.Linear(edge_features, 2 * hidden)
        self.update = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, graph: dgl.DGLGraph, reverse: dgl.DGLGraph, h: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Node embeddings (N, hidden) -> (N, hidden); `reverse` is `graph` with its edges turned, in the same order."""
        sent_down, sent_up = self.send(h).chunk(2, dim=1)
        edge_down, edge_up = self.edge(edges).chunk(2, dim=1)
        from_producers = dgl.ops.copy_e_mean(graph, torch.relu(dgl.ops.u_add_e(graph, sent_down, edge_down)))
        from_consumers = dgl.ops.copy_e_mean(reverse, torch.relu(dgl.ops.u_add_e(reverse, sent_up, edge_up)))
        return self.norm(h + self.update(torch.cat([h, from_producers, from_consumers], dim=1)))


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
        reverse = dgl.reverse(graph)
        # Messages are averaged, so the number of producers and consumers is told apart here.
        degrees = torch.stack([graph.in_degrees(), graph.out_degrees()], dim=1).float().log1p()
        h = self.operator(graph.ndata["operator"])
        h = torch.relu(h + self.features(torch.cat([graph.ndata["features"], degrees], dim=1)))
        for message_round in self.rounds:
            h = message_round(graph, reverse, h, graph.edata["features"])
        counts = graph.batch_num_nodes()
        pooled = [dgl.ops.segment_reduce(counts, h, reducer) for reducer in ("mean", "max")]
        size = counts.float().log1p().unsqueeze(1) / 6.0  # about 1 for 400 nodes
        return h, self.readout(torch.cat([*pooled, size], dim=1))
