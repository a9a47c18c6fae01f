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

from rlflow_tvm.agents.alike import JoinedKinds, NodeKinds, alike, rows_hashed
from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.observation import graph_copied
from rlflow_tvm.agents.places import Places
from rlflow_tvm.errors import AgentError
from rlflow_tvm.hashing import mixed, refined

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

    def kinds(self, reach: tuple[int, int] | None) -> CandidateKinds:
        """What of it is told apart so many edges far, from the graph's nodes and from added ones; worked out once, for
        an update asks in each of its passes."""
        known: dict[tuple[int, int] | None, CandidateKinds] = vars(self).setdefault("_kinds", {})
        if reach not in known:
            known[reach] = CandidateKinds.of(self, reach)
        return known[reach]


@dataclass(frozen=True, eq=False)
class CandidateKinds:
    """The nodes of an observation's graph and its sites, alike ones once (U kinds of nodes; K of sites: candidates of
    one rule that add and remove the same, and of whose places the same is known)."""

    nodes: NodeKinds
    of_site: np.ndarray  # int64 (S,), each site's kind
    number: int  # K
    added: np.ndarray  # float32 (M, F), the nodes that those add
    added_site: np.ndarray  # int64 (M,), by which kind
    links: np.ndarray  # int64 (E, 2), edges to and from them: the graph's kinds of nodes first, these from U on
    edges: np.ndarray  # float32 (E, Fe)
    removed: np.ndarray  # int64 (R, 2), (kind of site, kind of node)
    stops: np.ndarray  # float32 (K,), 1 for stop
    known: np.ndarray  # float32 (K, 2P+1)

    @staticmethod
    def of(seen: CandidateObservation, reach: tuple[int, int] | None) -> CandidateKinds:
        """Those of an observation, of what looks the same so many edges far, from the graph's nodes and from added
        ones; None: all is told apart."""
        own = int((seen.node_candidate < 0).sum())
        links = seen.edge_links.astype(np.int64)
        inner = (links < own).all(axis=1)
        nodes = NodeKinds.of(seen.nodes[:own], seen.edges[inner], links[inner], None if reach is None else reach[0])
        owner, links, edges = seen.node_candidate[own:].astype(np.int64), links[~inner], seen.edges[~inner]
        if reach is None or nodes.names is None:
            first = of_site = np.arange(seen.num_sites)
        else:
            graph = nodes.names[nodes.of_node]
            look = np.concatenate([graph, rows_hashed(seen.nodes[own:])])
            told = rows_hashed(edges)
            for _ in range(reach[1]):  # the graph's own stay as they are
                look[own:] = refined(look, links, told)[own:]
            differs = np.zeros(seen.num_sites, np.uint64)
            np.add.at(differs, owner, mixed(look[own:]))
            np.add.at(differs, seen.removed[:, 0], mixed(~graph[seen.removed[:, 1]]))
            stops = np.arange(seen.num_sites) == seen.num_sites - 1
            first, of_site = alike(stops, seen.site_rules, differs, seen.site_known)
        # what candidates of which there is another add and remove is left out
        number_of = np.full(seen.num_sites, -1)
        number_of[first] = np.arange(len(first))
        kept = number_of[owner] >= 0
        place = np.concatenate([nodes.of_node, np.cumsum(kept) - 1 + len(nodes.sizes)])
        is_there = np.concatenate([np.ones(own, bool), kept])[links].all(axis=1)
        gone = seen.removed[number_of[seen.removed[:, 0]] >= 0]
        return CandidateKinds(
            nodes=nodes,
            of_site=of_site,
            number=len(first),
            added=seen.nodes[own:][kept],
            added_site=number_of[owner[kept]],
            links=place[links[is_there]],
            edges=edges[is_there],
            removed=np.stack([number_of[gone[:, 0]], nodes.of_node[gone[:, 1]]], axis=1),
            stops=(first == seen.num_sites - 1).astype(np.float32),
            known=seen.site_known[first],
        )


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
    """Several observations (B of them), alike nodes and alike sites once (N kinds of nodes of the graphs, M nodes that
    are added, K kinds of sites), as two DGL graphs: of the N, and of these with the M after them.

    Attributes:
        graph: edges into one node of each kind, from its producers and consumers, and one from each to itself;
            `ndata`: "operator" int64 (N,), "features" (N, F-1), "made" (N, Fe), the sum of the features of the edges
            from producers.
        changes: the edges from or to added nodes; `edata["features"]`.
        graph_kinds: kinds of nodes of each graph, one graph after another, (R,).
        graph_sizes: nodes of each, (R,).
        kind_counts: kinds of each graph, (B,).
    """

    graph: dgl.DGLGraph
    changes: dgl.DGLGraph
    graph_kinds: torch.Tensor
    graph_sizes: torch.Tensor
    kind_counts: torch.Tensor
    added_operator: torch.Tensor  # (M,)
    added_features: torch.Tensor  # (M, F-1)
    added_site: torch.Tensor  # (M,), kinds
    removed_node: torch.Tensor  # (L,), kinds
    removed_site: torch.Tensor  # (L,), kinds
    kind_graph: torch.Tensor  # (K,)
    kind_sites: torch.Tensor  # (B,) kinds of sites of each graph
    kind_known: torch.Tensor  # (K, 2P+1)
    kind_stops: torch.Tensor  # (K,) 1 for stop
    site_kind: torch.Tensor  # (S,)
    site_graph: torch.Tensor  # (S,)
    site_offsets: np.ndarray  # (B+1,) where each graph's sites begin
    site_rule: torch.Tensor  # (S,) numbers, from 0, of the rules of each graph: the same for its sites of one rule

    @property
    def num_graphs(self) -> int:
        return len(self.kind_counts)


def collate(observations: Sequence[CandidateObservation], reach: tuple[int, int] | None = None) -> CandidateBatch:
    """One batch of the given observations, in their order; what looks the same so many edges far, from the graph's
    nodes and from added ones, is in it once (None: all is told apart)."""
    each = [observation.kinds(reach) for observation in observations]
    joined = JoinedKinds.of([kinds.nodes for kinds in each])
    total = len(joined.nodes)
    site_offsets = np.cumsum([0, *(observation.num_sites for observation in observations)])
    site_graph = np.repeat(np.arange(len(observations)), np.diff(site_offsets))
    rules = site_graph * 2**16 + np.concatenate([observation.site_rules for observation in observations])
    kind_starts = np.cumsum([0, *(kinds.number for kinds in each)])
    links, removed, added = [], [], 0
    for number, kinds in enumerate(each):
        # the graph's kinds come first in each, and are some of all graphs'; what is added comes after all of those
        own = joined.kinds[joined.starts[number] : joined.starts[number + 1]]
        links.append(np.concatenate([own, total + added + np.arange(len(kinds.added))])[kinds.links])
        removed.append(np.stack([kinds.removed[:, 0] + kind_starts[number], own[kinds.removed[:, 1]]], axis=1))
        added += len(kinds.added)
    gone = torch.from_numpy(np.concatenate(removed))
    new = torch.from_numpy(np.concatenate([kinds.added for kinds in each]))
    starting = list(zip(each, kind_starts, strict=False))
    return CandidateBatch(
        graph=_attended(joined),
        changes=_graph(np.concatenate(links), total + added, np.concatenate([kinds.edges for kinds in each])),
        graph_kinds=torch.from_numpy(joined.kinds),
        graph_sizes=torch.from_numpy(joined.sizes),
        kind_counts=torch.from_numpy(np.diff(joined.starts)),
        added_operator=new[:, 0].long(),
        added_features=new[:, 1:],
        added_site=torch.from_numpy(np.concatenate([kinds.added_site + start for kinds, start in starting])),
        removed_node=gone[:, 1],
        removed_site=gone[:, 0],
        kind_graph=torch.from_numpy(np.repeat(np.arange(len(each)), np.diff(kind_starts))),
        kind_sites=torch.from_numpy(np.diff(kind_starts)),
        kind_known=torch.from_numpy(np.concatenate([kinds.known for kinds in each])),
        kind_stops=torch.from_numpy(np.concatenate([kinds.stops for kinds in each])),
        site_kind=torch.from_numpy(np.concatenate([kinds.of_site + start for kinds, start in starting])),
        site_graph=torch.from_numpy(site_graph),
        site_offsets=site_offsets,
        site_rule=torch.from_numpy(np.unique(rules, return_inverse=True)[1]),
    )


def _graph(links: np.ndarray, nodes: int, edges: np.ndarray) -> dgl.DGLGraph:
    ends = torch.from_numpy(links)
    graph = dgl.graph((ends[:, 0], ends[:, 1]), num_nodes=nodes)
    graph.edata["features"] = torch.from_numpy(edges)
    return graph


def _attended(joined: JoinedKinds) -> dgl.DGLGraph:
    """Graphs' nodes as `CandidateBatch.graph` has them."""
    itself = np.arange(len(joined.nodes))
    ends = torch.from_numpy(np.concatenate([*joined.heard, np.stack([itself, itself], axis=1)]))
    graph = dgl.graph((ends[:, 0], ends[:, 1]), num_nodes=len(itself))
    nodes, edges = torch.from_numpy(joined.nodes), torch.from_numpy(joined.edges[0])
    graph.ndata["operator"], graph.ndata["features"] = nodes[:, 0].long(), nodes[:, 1:]
    destinations = torch.from_numpy(joined.heard[0][:, 1])
    graph.ndata["made"] = torch.zeros(len(itself), edges.shape[1]).index_add(0, destinations, edges)
    return graph
