"""Observations of a candidate environment: their sizes, what is kept of them, and batches.

A graph comes with the nodes that each candidate would add to it, with edges to and from those of the graph, and with a
list of what each removes. The legal actions, here too called sites, are the candidates in their order, and stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.observation import graph_copied
from rlflow_tvm.agents.places import Places
from rlflow_tvm.errors import AgentError

_PARTS = {"node_candidate", "candidate_rules"}


@dataclass(frozen=True)
class CandidateSizes:
    """What a policy's parameters depend on; the number of candidates is not among it.

    `node_features`: the real features beside the operator's index (F-1).
    """

    num_operators: int
    node_features: int
    edge_features: int
    keys_per_place: int

    @staticmethod
    def from_space(space: spaces.Space[Any]) -> CandidateSizes:
        """The sizes of an environment's `observation_space`; AgentError if it is not one of a candidate environment."""
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        graph, places = parts.get("graph"), parts.get("candidate_places")
        if not isinstance(graph, spaces.Graph) or not isinstance(places, spaces.Box) or not parts.keys() >= _PARTS:
            raise AgentError(
                f"observation space {type(space).__name__}({', '.join(parts)}) is not a candidate environment's; it "
                "needs graph, node_candidate, removed, candidate_mask, candidate_rules and candidate_places: use "
                "CandidateEnv"
            )
        nodes, edges = graph.node_space, graph.edge_space
        if not isinstance(nodes, spaces.Box) or not isinstance(edges, spaces.Box):
            raise AgentError("observation space: node_space and edge_space must be Box; use CandidateEnv")
        return CandidateSizes(int(nodes.high[0]) + 1, nodes.shape[0] - 1, edges.shape[0], places.shape[-1])

    @property
    def num_known(self) -> int:
        """How many numbers tell what is known of a place (2P+1, see `places`)."""
        return 2 * self.keys_per_place + 1


@dataclass(frozen=True, eq=False)
class CandidateObservation:
    """One observation (N nodes of the graph, M added ones, E edges, S sites: candidates, and stop as the last)."""

    nodes: np.ndarray  # float32 (N+M, F), column 0 the operator's index
    edges: np.ndarray  # float32 (E, Fe)
    edge_links: np.ndarray  # int32 (E, 2), (source, destination)
    node_candidate: np.ndarray  # int32 (N+M,), the candidate that adds a node, ascending; -1 first, for the graph's
    removed: np.ndarray  # int32 (K, 2), (candidate, node)
    site_numbers: np.ndarray  # int32 (S,), the actions
    site_rules: np.ndarray  # int16 (S,), of the candidates
    site_places: np.ndarray  # int64 (S, P), see `places`
    site_known: np.ndarray  # float32 (S, 2P+1), what the policy was told of them

    @property
    def num_sites(self) -> int:
        """How many actions are legal."""
        return len(self.site_numbers)


def compact(
    observation: Mapping[str, Any], sizes: CandidateSizes, told: Callable[[np.ndarray], np.ndarray] | None = None
) -> CandidateObservation:
    """What is kept of an environment's observation, with what is `told` of places, (S, P) -> (S, 2P+1) (by default
    nothing); AgentError where it does not fit `sizes` or its parts clash."""
    nodes, edges, links = graph_copied(observation["graph"], sizes.edge_features)
    if (nodes.shape[1], edges.shape[1]) != (sizes.node_features + 1, sizes.edge_features) or not (
        0 <= nodes[:, 0].min() <= nodes[:, 0].max() < sizes.num_operators
    ):
        raise AgentError(
            f"observation has (node columns, edge columns) {(nodes.shape[1], edges.shape[1])}, the agent expects "
            f"{(sizes.node_features + 1, sizes.edge_features)} and operators below {sizes.num_operators}: use the "
            "environment it was trained on, or train anew"
        )
    numbers = np.flatnonzero(observation["candidate_mask"]).astype(np.int32)
    owner = np.asarray(observation["node_candidate"], np.int32).reshape(-1)
    stop = len(observation["candidate_mask"]) - 1
    if not len(numbers) or numbers[-1] != stop or (numbers[:-1] != np.arange(len(numbers) - 1)).any():
        raise AgentError("observation: candidate_mask must allow candidates from 0 on, and stop; mend the environment")
    if (np.diff(owner) < 0).any() or owner.max(initial=-1) >= len(numbers) - 1:
        raise AgentError("observation: node_candidate must ascend, below the candidates' number; mend the environment")
    places = np.asarray(observation["candidate_places"])[numbers].astype(np.int64)
    return CandidateObservation(
        nodes=nodes,
        edges=edges,
        edge_links=links,
        node_candidate=owner,
        removed=np.array(observation["removed"], np.int32).reshape(-1, 2),
        site_numbers=numbers,
        site_rules=np.asarray(observation["candidate_rules"])[numbers].astype(np.int16),
        site_places=places,
        site_known=(Places().known if told is None else told)(places),
    )


@dataclass(frozen=True, eq=False)
class CandidateBatch:
    """Several observations (B of them) as two DGL graphs: all of their graphs' N nodes, and these with the M added ones
    after them.

    Attributes:
        graph: edges both ways, and one from each node to itself; `ndata`: "operator" int64 (N,), "features" (N, F-1),
            "made" (N, Fe), the sum of the features of the edges into a node.
        changes: the edges from or to added nodes; `edata["features"]`.
    """

    graph: dgl.DGLGraph
    changes: dgl.DGLGraph
    node_counts: torch.Tensor  # (B,)
    added_operator: torch.Tensor  # (M,)
    added_features: torch.Tensor  # (M, F-1)
    added_site: torch.Tensor  # (M,), ascending
    removed_node: torch.Tensor  # (K,)
    removed_site: torch.Tensor  # (K,)
    site_graph: torch.Tensor  # (S,)
    site_offsets: np.ndarray  # (B+1,) where each graph's sites begin
    site_rule: torch.Tensor  # (S,) numbers, from 0, of the rules of each graph: the same for its sites of one rule
    site_known: torch.Tensor  # (S, 2P+1)
    site_stops: torch.Tensor  # (S,) 1 for stop

    @property
    def num_graphs(self) -> int:
        return len(self.node_counts)


def collate(observations: Sequence[CandidateObservation]) -> CandidateBatch:
    """One batch of the given observations, in their order."""
    own = [each.node_candidate < 0 for each in observations]
    node_counts, site_counts = [int(each.sum()) for each in own], [each.num_sites for each in observations]
    added_counts = [len(each) - count for each, count in zip(own, node_counts, strict=True)]
    node_starts, added_starts = np.cumsum([0, *node_counts]), np.cumsum([0, *added_counts]) + sum(node_counts)
    site_offsets, site_graph = np.cumsum([0, *site_counts]), np.repeat(np.arange(len(observations)), site_counts)
    rules = site_graph * 2**16 + np.concatenate([each.site_rules for each in observations])
    links, inner, removed = [], [], []
    for number, each in enumerate(observations):
        # the graph's nodes come first in each: node i of it is node `starts[0] + i`, or an added one
        count = node_counts[number]
        starts = np.array([node_starts[number], added_starts[number] - count])
        links.append(each.edge_links + starts[(each.edge_links >= count).astype(int)])
        inner.append((each.edge_links < count).all(axis=1))
        removed.append(each.removed + np.array([site_offsets[number], node_starts[number]]))
    nodes = np.concatenate([each.nodes[mask] for each, mask in zip(observations, own, strict=True)])
    added = np.concatenate([each.nodes[~mask] for each, mask in zip(observations, own, strict=True)])
    edges = torch.from_numpy(np.concatenate([each.edges for each in observations]))
    joined, within = np.concatenate(links).astype(np.int64), np.concatenate(inner)
    gone = torch.from_numpy(np.concatenate(removed).astype(np.int64))
    stops = torch.zeros(int(site_offsets[-1]))
    stops[site_offsets[1:] - 1] = 1.0
    added_site = [each.node_candidate[~mask] + start
                  for each, mask, start in zip(observations, own, site_offsets, strict=False)]  # fmt: skip
    return CandidateBatch(
        graph=_attended(nodes, torch.from_numpy(joined[within]), edges[torch.from_numpy(within)]),
        changes=_graph(torch.from_numpy(joined[~within]), len(nodes) + len(added), edges[torch.from_numpy(~within)]),
        node_counts=torch.tensor(node_counts),
        added_operator=torch.from_numpy(added[:, 0]).long(),
        added_features=torch.from_numpy(added[:, 1:]),
        added_site=torch.from_numpy(np.concatenate(added_site).astype(np.int64)),
        removed_node=gone[:, 1],
        removed_site=gone[:, 0],
        site_graph=torch.from_numpy(site_graph),
        site_offsets=site_offsets,
        site_rule=torch.from_numpy(np.unique(rules, return_inverse=True)[1]),
        site_known=torch.from_numpy(np.concatenate([each.site_known for each in observations])),
        site_stops=stops,
    )


def _graph(links: torch.Tensor, nodes: int, edges: torch.Tensor) -> dgl.DGLGraph:
    graph = dgl.graph((links[:, 0], links[:, 1]), num_nodes=nodes)
    graph.edata["features"] = edges
    return graph


def _attended(nodes: np.ndarray, links: torch.Tensor, edges: torch.Tensor) -> dgl.DGLGraph:
    """A graph's nodes as `CandidateBatch.graph` has them."""
    each = torch.arange(len(nodes))
    sources, destinations = links[:, 0], links[:, 1]
    graph = dgl.graph(
        (torch.cat([sources, destinations, each]), torch.cat([destinations, sources, each])), num_nodes=len(nodes)
    )
    graph.ndata["operator"] = torch.from_numpy(nodes[:, 0]).long()
    graph.ndata["features"] = torch.from_numpy(nodes[:, 1:])
    graph.ndata["made"] = torch.zeros(len(nodes), edges.shape[1]).index_add(0, destinations, edges)
    return graph
