"""Nodes that message rounds cannot tell apart, which are worked out once: of a network of equal blocks most are.

A network sees no positions. Nodes that are the same for themselves, and whose surroundings are the same as far as it
reaches, have one embedding (colour refinement; Morris et al. 2019): one node of each kind hears what it would hear,
from one node of each kind. Kinds have names, the same in every graph, so that graphs of a batch share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlflow_tvm.hashing import mixed, refined


def rows_hashed(rows: np.ndarray) -> np.ndarray:
    """A number for each row of float32, (n, width) -> uint64 (n,)."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32).astype(np.uint64)
    return mixed(
        mixed(bits + (np.arange(rows.shape[1], dtype=np.uint64) << np.uint64(32))).sum(axis=1, dtype=np.uint64)
    )


def alike(first: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row of each kind, int64 (K,), ascending by `first`, and the number of each row's kind, int64 (S,).

    Args:
        first: integers that are not negative, (S,).
        columns: what else rows must have in common to be alike, (S, width) each.
    """
    parts = [np.ascontiguousarray(column).reshape(len(first), -1) for column in columns]
    # bytes, the first number's first, its high byte first: their order is that of the numbers
    rows = np.empty(len(first), [("first", ">i8"), *((str(i), "V", part[0].nbytes) for i, part in enumerate(parts))])
    rows["first"] = first
    for i, part in enumerate(parts):
        rows[str(i)] = part.view(rows.dtype[str(i)])[:, 0]
    _, index, kind = np.unique(rows.view(f"V{rows.itemsize}"), return_index=True, return_inverse=True)
    return index, kind


@dataclass(frozen=True, eq=False)
class NodeKinds:
    """The kinds of nodes of one graph (N nodes in U kinds), and what one node of each hears.

    Attributes:
        names: uint64 (U,), of two graphs the same for the same kind; None where all nodes are told apart.
        nodes: features of one node of each, float32 (U, F).
        of_node: each node's kind, int64 (N,).
        sizes: nodes of each kind, int64 (U,).
        heard: edges into those nodes, and out of them, each (kind at the other end, kind), int64 (I, 2) and (O, 2).
        edges: their features, float32 (I, Fe) and (O, Fe).
    """

    names: np.ndarray | None
    nodes: np.ndarray
    of_node: np.ndarray
    sizes: np.ndarray
    heard: tuple[np.ndarray, np.ndarray]
    edges: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def of(nodes: np.ndarray, edges: np.ndarray, links: np.ndarray, reach: int | None) -> NodeKinds:
        """Of a graph's nodes (N, F), and edges (E, Fe) with their (source, destination) (E, 2): those that look the
        same `reach` edges far; None: all are told apart."""
        links = links.astype(np.int64)
        if reach is None:
            turned = links[:, ::-1]
            every = np.arange(len(nodes))
            return NodeKinds(None, nodes, every, np.ones_like(every), (links, turned), (edges, edges))
        look, told = rows_hashed(nodes), rows_hashed(edges)
        for _ in range(reach):
            look = refined(look, links, told)
        names, first, of_node, sizes = np.unique(look, return_index=True, return_inverse=True, return_counts=True)
        is_first = np.zeros(len(nodes), bool)
        is_first[first] = True
        into, out = is_first[links[:, 1]], is_first[links[:, 0]]
        heard = of_node[links[into]], of_node[links[out]][:, ::-1]
        return NodeKinds(names, nodes[first], of_node, sizes, heard, (edges[into], edges[out]))


@dataclass(frozen=True, eq=False)
class JoinedKinds:
    """Those of several graphs (B graphs, R kinds of them one graph after another, of which K differ).

    Attributes:
        nodes, heard, edges: as `NodeKinds`', of the K.
        kinds: which of them each is, int64 (R,).
        starts: where each graph's begin, int64 (B+1,).
        sizes: nodes of each, int64 (R,).
    """

    nodes: np.ndarray
    heard: tuple[np.ndarray, np.ndarray]
    edges: tuple[np.ndarray, np.ndarray]
    kinds: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def of(graphs: Sequence[NodeKinds]) -> JoinedKinds:
        """Those of the given graphs, in their order."""
        starts = np.cumsum([0, *(len(each.sizes) for each in graphs)])
        nodes = np.concatenate([each.nodes for each in graphs])
        named = [each.names for each in graphs if each.names is not None]
        if len(named) < len(graphs) or len(graphs) == 1:
            first, kinds = None, np.arange(starts[-1])
        else:
            _, first, kinds = np.unique(np.concatenate(named), return_index=True, return_inverse=True)
            is_first = np.zeros(len(kinds), bool)
            is_first[first] = True
        heard, edges = [], []
        for way in (0, 1):
            ends = np.concatenate([each.heard[way] + start for each, start in zip(graphs, starts, strict=False)])
            told = np.concatenate([each.edges[way] for each in graphs])
            if first is not None:
                kept = is_first[ends[:, 1]]
                ends, told = kinds[ends[kept]], told[kept]
            heard.append(ends)
            edges.append(told)
        return JoinedKinds(
            nodes if first is None else nodes[first],
            (heard[0], heard[1]),
            (edges[0], edges[1]),
            kinds,
            starts,
            np.concatenate([each.sizes for each in graphs]),
        )
