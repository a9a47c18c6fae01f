"""Candidate graphs as arrays: the graph now, and beside it what each rewrite would add and remove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from tvm import relax

from rlflow_tvm.envs.observation import (
    EDGE_FEATURES,
    IS_OUTPUT,
    NODE_FEATURES,
    READS_WEIGHT,
    USERS,
    WORK,
    graph_arrays,
    graph_space,
    located,
    node_features,
    tensor_bytes,
    users_feature,
)
from rlflow_tvm.envs.places import KEYS, place_keys
from rlflow_tvm.passes import RewriteAction
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import Match

_INDEX = 2**30


@dataclass(frozen=True, eq=False)
class Change:
    """What a rewrite changes of what is computed at run time (n nodes added).

    `nodes` (n, NODE_FEATURES) float32, work absolute; `links`: of the edges from and to added nodes, (source,
    destination), an added node by its number, one of the graph by its variable; `edges`: their features as bytes;
    `removed`: variables.
    """

    nodes: np.ndarray
    links: tuple[tuple[int | relax.Var, int | relax.Var], ...]
    edges: bytes
    removed: tuple[relax.Var, ...]

    @staticmethod
    def of(graph: Graph, difference: Difference) -> Change:
        known = set(graph.weight_only)  # what is computed from weights alone is free, and left out
        added = []
        for node in difference.added:
            if known.issuperset(expr for expr in difference.read_by(node) if isinstance(expr, relax.Var)):
                known.add(node.var)
            else:
                added.append(node)
        number: dict[relax.Expr, int] = {node.var: i for i, node in enumerate(added)}
        users = [0] * len(added)
        links: list[tuple[int | relax.Var, int | relax.Var]] = []
        edges: list[bytes] = []
        told = [node_features(node) for node in added]
        nodes = np.frombuffer(b"".join(row for row, _ in told), np.float32).reshape(-1, NODE_FEATURES).copy()
        for i, node in enumerate(added):
            nodes[i, WORK] = told[i][1]
            read = [expr for expr in difference.read_by(node) if isinstance(expr, relax.Var)]
            nodes[i, READS_WEIGHT] = not known.isdisjoint(read)
            for var in read:
                if var not in known:
                    links.append((number.get(var, var), i))
                    edges.append(tensor_bytes(var))
            for source in {number[var] for var in read if var in number}:
                users[source] += 1
        for root, expr in difference.ends.items():
            end = number.get(expr)
            if end is None:
                continue
            readers = [user for user in graph.users.get(root, ()) if user.var not in difference.removed]
            users[end] += len(readers)
            nodes[end, IS_OUTPUT] = nodes[end, IS_OUTPUT] or root in graph.outputs
            reads = [user.var for user in readers for var in user.inputs if var is root]
            links += [(end, reader) for reader in reads]
            edges += [tensor_bytes(root)] * len(reads)
        nodes[:, USERS] = users_feature(users) if users else 0.0
        removed = tuple(var for var in difference.removed if var not in graph.weight_only)
        return Change(nodes, tuple(links), b"".join(edges), removed)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A graph one rewrite away."""

    action: RewriteAction
    rule: int
    match: Match
    change: Change


def candidate_space(rules: int, most: int) -> spaces.Dict:
    """The space of `observe_candidates`' results for `rules` rules and up to `most` candidates."""
    return spaces.Dict(
        {
            "graph": graph_space(),
            "node_candidate": spaces.Sequence(spaces.Discrete(most + 1, start=-1), stack=True),
            "removed": spaces.Sequence(spaces.Box(0, _INDEX, (2,), np.int32), stack=True),
            "candidate_mask": spaces.MultiBinary(most + 1),
            "candidate_rules": spaces.Box(-1, rules, (most + 1,), np.int16),
            "candidate_places": spaces.Box(-(2**63), 2**63 - 1, (most + 1, KEYS), np.int64),
        }
    )


def observe_candidates(
    graph: Graph, candidates: Sequence[Candidate], rules: int, most: int, whole: float | None = None
) -> dict[str, Any]:
    """A graph and its candidates as an observation; candidate number `most` is to stop. `whole`: see
    `observation.observe`.

    Returns:
        graph: the nodes and edges of the graph as `observation.observe` has them, and after them each candidate's added
            nodes, with edges from what they read and to what will read them in a removed node's stead.
        node_candidate: (N,) int32, the candidate that adds a node, -1 for those of the graph itself.
        removed: (K, 2) int32, (candidate, node) for each node of the graph that a candidate removes.
        candidate_mask: (most + 1,) int8, the candidates that there are.
        candidate_rules: (most + 1,) int16, each one's rule, `rules` to stop, -1 for none.
        candidate_places: (most + 1, P) int64, the keys of where its rule matches (`places.place_keys`), 0 for none.
    """
    arrays = graph_arrays(graph, whole)
    index, first = arrays.index, len(arrays.nodes)
    nodes, counts, edges = [arrays.nodes], [len(each.change.nodes) for each in candidates], list[bytes]()
    links: list[tuple[int, int]] = []
    removed: list[tuple[int, int]] = []
    for number, (each, count) in enumerate(zip(candidates, counts, strict=True)):
        change = each.change
        for source, destination in change.links:
            links.append(
                (
                    first + source if isinstance(source, int) else index[source],
                    first + destination if isinstance(destination, int) else index[destination],
                )
            )
        edges.append(change.edges)
        nodes.append(change.nodes)
        removed += [(number, index[var]) for var in change.removed]
        first += count
    joined = np.concatenate(nodes)
    joined[len(arrays.nodes) :, WORK] = np.minimum(joined[len(arrays.nodes) :, WORK] / arrays.whole, 1.0)
    found = len(candidates)
    mask = np.zeros(most + 1, np.int8)
    mask[:found] = mask[most] = 1
    ruled = np.full(most + 1, -1, np.int16)
    ruled[:found], ruled[most] = [each.rule for each in candidates], rules
    places = np.zeros((most + 1, KEYS), np.int64)
    if found:
        sites = np.array([located([index[v] for v in each.match.reads if v in index]) for each in candidates], np.int32)
        places[:found] = place_keys(arrays.kinds, arrays.links, ruled[:found], sites)
    added = np.frombuffer(b"".join(edges), np.float32).reshape(-1, EDGE_FEATURES)
    return {
        "graph": spaces.GraphInstance(
            nodes=joined,
            edges=np.concatenate([arrays.edges, added]),
            edge_links=np.concatenate([arrays.links, np.array(links, np.int64).reshape(-1, 2)]),
        ),
        "node_candidate": np.repeat(np.arange(-1, found, dtype=np.int32), [len(arrays.nodes), *counts]),
        "removed": np.array(removed, np.int32).reshape(-1, 2),
        "candidate_mask": mask,
        "candidate_rules": ruled,
        "candidate_places": places,
    }
