"""Observations of a rewriting environment: their sizes, their compact form, and batches of them.

An environment's observation is a dictionary whose masks are dense: `location_mask` (R+1, L) and `location_nodes`
(R+1, L, K), nearly all of it unused. The agent keeps only the legal (rule, location) pairs, here called **sites**,
sorted by rule and then by location. Rule R is stop, and has one site, location 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.alike import JoinedKinds, NodeKinds, alike
from rlflow_tvm.agents.backend import dgl
from rlflow_tvm.agents.places import Places
from rlflow_tvm.errors import AgentError
from rlflow_tvm.hashing import mixed


@dataclass(frozen=True)
class ObservationSizes:
    """What a policy's parameters depend on; read from the observation space alone.

    `num_rules` counts stop as well (R+1), `node_features` the real features beside the operator's index (F-1).
    """

    num_operators: int
    node_features: int
    edge_features: int
    num_rules: int
    num_locations: int
    nodes_per_location: int
    keys_per_location: int

    @staticmethod
    def from_space(space: spaces.Space[Any]) -> ObservationSizes:
        """The sizes of an environment's `observation_space`; AgentError if it is not one of a rewriting environment."""
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        graph, location_nodes, places = (parts.get(name) for name in ("graph", "location_nodes", "location_places"))
        if not (
            isinstance(graph, spaces.Graph)
            and isinstance(location_nodes, spaces.Box)
            and isinstance(places, spaces.Box)
        ):
            raise AgentError(
                f"observation space {type(space).__name__}({', '.join(parts)}) is not a rewriting environment's; "
                "it needs graph, rule_mask, location_mask, location_nodes and location_places: use GraphRewriteEnv"
            )
        nodes, edges = graph.node_space, graph.edge_space
        if not isinstance(nodes, spaces.Box) or not isinstance(edges, spaces.Box) or len(location_nodes.shape) != 3:
            raise AgentError(
                "observation space: node_space and edge_space must be Box and location_nodes (R+1, L, K); "
                "use GraphRewriteEnv"
            )
        num_rules, num_locations, nodes_per_location = location_nodes.shape
        return ObservationSizes(
            num_operators=int(nodes.high[0]) + 1,
            node_features=nodes.shape[0] - 1,
            edge_features=edges.shape[0],
            num_rules=num_rules,
            num_locations=num_locations,
            nodes_per_location=nodes_per_location,
            keys_per_location=places.shape[-1],
        )

    @property
    def stop_rule(self) -> int:
        """The index of stop, the last rule."""
        return self.num_rules - 1

    @property
    def num_known(self) -> int:
        """How many numbers tell what is known of a place (2P+1, see `places`)."""
        return 2 * self.keys_per_location + 1


@dataclass(frozen=True, eq=False)
class CompactObservation:
    """One observation without its dense masks: what a rollout buffer holds (N nodes, E edges, S sites)."""

    nodes: np.ndarray  # float32 (N, F), column 0 the operator's index
    edges: np.ndarray  # float32 (E, Fe)
    edge_links: np.ndarray  # int32 (E, 2), (source, destination)
    site_rules: np.ndarray  # int16 (S,), ascending
    site_locations: np.ndarray  # int16 (S,), ascending within a rule
    site_nodes: np.ndarray  # int32 (S, K), -1 = none
    site_places: np.ndarray  # int64 (S, P), see `places`
    site_known: np.ndarray  # float32 (S, 2P+1), what the policy was told of them

    @property
    def num_sites(self) -> int:
        """How many actions are legal."""
        return len(self.site_rules)

    def kinds(self, reach: int | None) -> ObservationKinds:
        """What of it is told apart `reach` edges far; worked out once, for an update asks in each of its passes."""
        known: dict[int | None, ObservationKinds] = vars(self).setdefault("_kinds", {})
        if reach not in known:
            known[reach] = ObservationKinds.of(self, reach)
        return known[reach]


@dataclass(frozen=True, eq=False)
class ObservationKinds:
    """An observation's nodes and sites, alike ones once (U kinds of nodes, K of sites: sites of one rule, of nodes of
    the same kinds, of whose places the same is known)."""

    nodes: NodeKinds
    first: np.ndarray  # int64 (K,), a site of each kind, by rule
    of_site: np.ndarray  # int64 (S,), each site's kind
    members: np.ndarray  # int64 (M,), kinds of the nodes of those sites, one site after another
    member_counts: np.ndarray  # int64 (K,)
    known: np.ndarray  # float32 (K, 2P+1)

    @staticmethod
    def of(observation: CompactObservation, reach: int | None) -> ObservationKinds:
        """Those of an observation, of nodes that look the same `reach` edges far; None: all are told apart."""
        nodes = NodeKinds.of(observation.nodes, observation.edges, observation.edge_links, reach)
        present = observation.site_nodes >= 0
        member_kinds = nodes.of_node[observation.site_nodes.astype(np.int64)]  # of none the last node's
        if nodes.names is None:
            first = of_site = np.arange(observation.num_sites)
        else:
            # a sum, for a site is told by the mean of its nodes
            own = np.where(present, mixed(nodes.names[member_kinds]), np.uint64(0)).sum(axis=1, dtype=np.uint64)
            first, of_site = alike(observation.site_rules, own, observation.site_known)
        return ObservationKinds(
            nodes=nodes,
            first=first,
            of_site=of_site,
            members=member_kinds[first][present[first]],
            member_counts=present[first].sum(axis=1),
            known=observation.site_known[first],
        )


def compact(
    observation: Mapping[str, Any], sizes: ObservationSizes, known: Callable[[np.ndarray], np.ndarray] | None = None
) -> CompactObservation:
    """The compact form of an environment's observation, with what is `known` of places, (S, P) -> (S, 2P+1) (by default
    nothing); AgentError where it does not fit `sizes` or its masks clash."""
    location_nodes = np.asarray(observation["location_nodes"])
    nodes, edges, links = graph_copied(observation["graph"], sizes.edge_features)
    found = (location_nodes.shape, nodes.shape[1], edges.shape[1])
    expected = (
        (sizes.num_rules, sizes.num_locations, sizes.nodes_per_location),
        sizes.node_features + 1,
        sizes.edge_features,
    )
    if found != expected or not 0 <= nodes[:, 0].min() <= nodes[:, 0].max() < sizes.num_operators:
        raise AgentError(
            f"observation has (location_nodes, node columns, edge columns) {found}, the agent expects {expected} "
            f"and operators below {sizes.num_operators}: use the environment it was trained on, or train anew"
        )
    rules, locations = legal_sites(observation, sizes)
    site_places = np.asarray(observation["location_places"])[rules, locations].astype(np.int64)
    return CompactObservation(
        nodes=nodes,
        edges=edges,
        edge_links=links,
        site_rules=rules,
        site_locations=locations,
        site_nodes=location_nodes[rules, locations].astype(np.int32),
        site_places=site_places,
        site_known=(Places().known if known is None else known)(site_places),
    )


def graph_copied(graph: spaces.GraphInstance, edge_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, edges and links of an observed graph, float32, float32 and int32.

    Copies: an episode's observations are kept, and torch refuses read-only arrays. gymnasium gives a graph without
    edges as None.
    """
    edges = np.zeros((0, edge_features), np.float32) if graph.edges is None else np.array(graph.edges, np.float32)
    links = np.zeros((0, 2), np.int32) if graph.edge_links is None else np.array(graph.edge_links, np.int32)
    return np.array(graph.nodes, np.float32), edges, links


def legal_sites(observation: Mapping[str, Any], sizes: ObservationSizes) -> tuple[np.ndarray, np.ndarray]:
    """Rules and locations of the legal actions, int16 (S,) each, by rule and then by location; AgentError where the
    masks clash."""
    rule_mask = np.asarray(observation["rule_mask"], dtype=bool)
    location_mask = np.asarray(observation["location_mask"], dtype=bool) & rule_mask[:, None]
    # Stop has nothing to choose, whatever the environment writes into its row of the mask.
    location_mask[sizes.stop_rule] = False
    location_mask[sizes.stop_rule, 0] = rule_mask[sizes.stop_rule]
    lost = np.flatnonzero(rule_mask & ~location_mask.any(axis=1))
    if len(lost):
        raise AgentError(
            f"observation: rule_mask allows rule {lost[0]} but location_mask gives it no location; mend the environment"
        )
    rules, locations = np.nonzero(location_mask)
    return rules.astype(np.int16), locations.astype(np.int16)


class HasSites(Protocol):
    """What every kind of observation says of the legal actions (S of them), sorted by rule and then by location."""

    @property
    def site_rules(self) -> np.ndarray: ...  # int16 (S,)
    @property
    def site_locations(self) -> np.ndarray: ...  # int16 (S,)


def actions_at(observations: Sequence[HasSites], sites: Sequence[int] | np.ndarray) -> np.ndarray:
    """(rule, location) of one site of each observation, int64 (B, 2)."""
    pairs = zip(observations, sites, strict=True)
    return np.array([(each.site_rules[site], each.site_locations[site]) for each, site in pairs], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SiteBatch:
    """The legal actions of several observations (B graphs, S sites, P pairs).

    A **pair** is (graph, legal rule); sites are sorted by pair, so that each pair's sites lie together.
    """

    num_graphs: int
    site_pair: torch.Tensor  # (S,)
    site_offsets: np.ndarray  # (B+1,) where each graph's sites begin
    pair_graph: torch.Tensor  # (P,)
    pair_rule: torch.Tensor  # (P,)
    pair_sizes: torch.Tensor  # (P,) sites of each pair

    @property
    def num_pairs(self) -> int:
        """How many (graph, legal rule) pairs there are."""
        return len(self.pair_graph)


@dataclass(frozen=True, eq=False)
class SiteKinds:
    """The sites of a batch told apart no further than a policy does (K kinds, sorted by pair), so that each kind is
    worked out once."""

    of_site: torch.Tensor  # (S,) each site's kind
    sizes: torch.Tensor  # (K,) sites of each
    pair: torch.Tensor  # (K,) each kind's pair

    @staticmethod
    def joined(batch: SiteBatch, each: Sequence[tuple[np.ndarray, np.ndarray]]) -> SiteKinds:
        """Those of a batch's observations: of each a site of each kind, by rule, and each site's kind."""
        counts = np.array([len(first) for first, _ in each])
        first = np.concatenate([first for first, _ in each]) + np.repeat(batch.site_offsets[:-1], counts)
        of_site = np.concatenate([kind for _, kind in each])
        of_site += np.repeat(np.cumsum(counts) - counts, np.diff(batch.site_offsets))
        sizes = np.bincount(of_site, minlength=len(first))
        return SiteKinds(torch.from_numpy(of_site), torch.from_numpy(sizes), batch.site_pair[torch.from_numpy(first)])


@dataclass(frozen=True, eq=False)
class GraphBatch(SiteBatch):
    """Several observations with their sites, alike nodes and alike sites once (N kinds of nodes, K of sites).

    `into` and `out_of` are DGL graphs of the N kinds: the edges that lead into one node of each, from the kinds of its
    producers, and those out of it, from the kinds of its consumers; `edata["features"]` (E, Fe) each. An observation's
    graph is made of R kinds of nodes, `graph_kinds`, `graph_sizes` nodes of each.
    """

    operator: torch.Tensor  # (N,)
    features: torch.Tensor  # (N, F-1)
    into: dgl.DGLGraph
    out_of: dgl.DGLGraph
    graph_kinds: torch.Tensor  # (R,) one graph after another
    graph_sizes: torch.Tensor  # (R,)
    kind_counts: torch.Tensor  # (B,) kinds of each graph
    kinds: SiteKinds
    member_nodes: torch.Tensor  # (M,) kinds of the nodes of the K kinds of sites, one after another, none of them -1
    member_offsets: torch.Tensor  # (K,) where each one's begin in member_nodes
    kind_known: torch.Tensor  # (K, 2P+1)


def collate_sites(observations: Sequence[HasSites]) -> SiteBatch:
    """The sites of the given observations, in their order."""
    site_counts = np.array([len(observation.site_rules) for observation in observations])
    site_graph = np.repeat(np.arange(len(observations)), site_counts)
    site_rule = np.concatenate([observation.site_rules for observation in observations]).astype(np.int64)
    # a pair begins where the graph or the rule changes
    begins = np.ones(len(site_rule), dtype=bool)
    begins[1:] = (site_graph[1:] != site_graph[:-1]) | (site_rule[1:] != site_rule[:-1])
    first = np.flatnonzero(begins)
    return SiteBatch(
        num_graphs=len(observations),
        site_pair=torch.from_numpy(np.cumsum(begins) - 1),
        site_offsets=np.concatenate([[0], np.cumsum(site_counts)]),
        pair_graph=torch.from_numpy(site_graph[first]),
        pair_rule=torch.from_numpy(site_rule[first]),
        pair_sizes=torch.from_numpy(np.diff(np.append(first, len(site_rule)))),
    )


def collate(observations: Sequence[CompactObservation], reach: int | None = None) -> GraphBatch:
    """One batch of the given observations, in their order; nodes that look the same `reach` edges far, and sites of
    such nodes, are in it once (None: all are told apart)."""
    sites = collate_sites(observations)
    each = [observation.kinds(reach) for observation in observations]
    joined = JoinedKinds.of([kinds.nodes for kinds in each])
    into, out_of = (kinds_graph(joined, way) for way in (0, 1))
    member_counts = np.concatenate([kinds.member_counts for kinds in each])
    members = np.concatenate([kinds.members + start for kinds, start in zip(each, joined.starts, strict=False)])
    nodes = torch.from_numpy(joined.nodes)
    return GraphBatch(
        **vars(sites),
        operator=nodes[:, 0].long(),
        features=nodes[:, 1:],
        into=into,
        out_of=out_of,
        graph_kinds=torch.from_numpy(joined.kinds),
        graph_sizes=torch.from_numpy(joined.sizes),
        kind_counts=torch.from_numpy(np.diff(joined.starts)),
        kinds=SiteKinds.joined(sites, [(kinds.first, kinds.of_site) for kinds in each]),
        member_nodes=torch.from_numpy(joined.kinds[members]),
        member_offsets=torch.from_numpy(np.cumsum(member_counts) - member_counts),
        kind_known=torch.from_numpy(np.concatenate([kinds.known for kinds in each])),
    )


def kinds_graph(joined: JoinedKinds, way: int) -> dgl.DGLGraph:
    """What one node of each kind hears, 0: from its producers, 1: from its consumers; with `edata["features"]`."""
    # one graph at once, as `dgl.batch` would join those of each: making each of them takes several times longer
    ends = torch.from_numpy(joined.heard[way])
    graph = dgl.graph((ends[:, 0], ends[:, 1]), num_nodes=len(joined.nodes))
    graph.edata["features"] = torch.from_numpy(joined.edges[way])
    return graph
