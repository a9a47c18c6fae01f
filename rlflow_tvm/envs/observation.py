"""A graph state as arrays: what an agent sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm_ffi
from gymnasium import spaces
from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.envs.places import KEYS, kind, place_keys
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.ops import OPERATORS

LOCATIONS = 200
"""Sites of one rule that an observation has room for (RLFlow's default)."""
NODES_PER_LOCATION = 4
NO_NODES = [-1] * NODES_PER_LOCATION

# Index 0 is every operator that no rule names, 1 a graph input; then Relax's operators in a fixed order.
OPERATOR_INDEX: dict[str, int] = {
    name: i + 2 for i, name in enumerate(dict.fromkeys(["getitem", *(o.relax_name for o in OPERATORS.values())]))
}
_INPUT = 1
_RANK = 6
NODE_FEATURES = 1 + _RANK + 7
EDGE_FEATURES = _RANK + 1
WORK, USERS, READS_WEIGHT, IS_OUTPUT = -5, -4, -2, -1
"""Columns of a node's features that depend on the graph around it."""
_MOST_USERS = 8
_LOG_EXTENT, _LOG_SIZE, _LOG_FLOPS = 12.0, 30.0, 36.0  # scales: log2 of the largest extent, size, work expected
_FLOPS_PER_BYTE = 16.0  # balance of a CPU's arithmetic and memory, for the share of work only


def observation_space(rules: int) -> spaces.Dict:
    """The space of `observe`'s results for `rules` rules."""
    return spaces.Dict(
        {
            "graph": graph_space(),
            "rule_mask": spaces.MultiBinary(rules + 1),
            "location_mask": spaces.MultiBinary((rules + 1, LOCATIONS)),
            "location_nodes": spaces.Box(-1, 2**30, (rules + 1, LOCATIONS, NODES_PER_LOCATION), np.int32),
            "location_places": spaces.Box(-(2**63), 2**63 - 1, (rules + 1, LOCATIONS, KEYS), np.int64),
        }
    )


def graph_space() -> spaces.Graph:
    """The space of graphs as arrays."""
    node_high = np.ones(NODE_FEATURES, dtype=np.float32)
    node_high[0] = max(OPERATOR_INDEX.values())
    return spaces.Graph(
        node_space=spaces.Box(np.zeros(NODE_FEATURES, dtype=np.float32), node_high),
        edge_space=spaces.Box(0.0, 1.0, (EDGE_FEATURES,), np.float32),
    )


def observe(
    state: GraphState,
    refused: set[RewriteAction] | frozenset[RewriteAction] = frozenset(),
    whole: float | None = None,
) -> dict[str, Any]:
    """`state` as an observation; actions in `refused` are masked. `whole`: the work that nodes' shares are told of, by
    default the graph's own.

    Returns:
        graph: nodes (N, NODE_FEATURES) float32, edges (E, EDGE_FEATURES) float32, edge_links (E, 2) int64, over the
            graph's inputs and everything that is computed at run time (weights and work on them are left out: free).
            Node features are the operator index; log extents of the shape; log size; log FLOPs; share of the
            `whole` work (roofline estimate); number of users; rank; whether it reads a weight; whether it is an output.
        rule_mask: (R + 1,) int8, the rules that have a site; number R is to stop.
        location_mask: (R + 1, LOCATIONS) int8, the sites that each has.
        location_nodes: (R + 1, LOCATIONS, NODES_PER_LOCATION) int32, the nodes that a site is told by, -1 for none.
        location_places: (R + 1, LOCATIONS, P) int64, the keys of each site's place (`places.place_keys`), 0 for none.
    """
    arrays = graph_arrays(state.graph, whole)
    index = arrays.index
    rules = len(state.ruleset.rules)
    location_mask = np.zeros((rules + 1, LOCATIONS), dtype=np.int8)
    location_nodes = np.full((rules + 1, LOCATIONS, NODES_PER_LOCATION), -1, dtype=np.int32)
    for number, rule in enumerate(state.ruleset.rules):
        rows = [
            NO_NODES
            if refused and RewriteAction(rule.name, site) in refused
            else located([index[var] for var in match.reads if var in index])
            for site, match in state.located(rule.name)[:LOCATIONS]
        ]
        if rows:
            location_nodes[number, : len(rows)] = rows
            location_mask[number, : len(rows)] = [row is not NO_NODES for row in rows]
    location_places = np.zeros((rules + 1, LOCATIONS, KEYS), dtype=np.int64)
    found = location_mask.nonzero()
    location_places[found] = place_keys(arrays.kinds, arrays.links, found[0], location_nodes[found])
    location_mask[rules, 0] = 1  # stop
    return {
        "graph": spaces.GraphInstance(nodes=arrays.nodes, edges=arrays.edges, edge_links=arrays.links),
        "rule_mask": location_mask.any(axis=1).astype(np.int8),
        "location_mask": location_mask,
        "location_nodes": location_nodes,
        "location_places": location_places,
    }


def located(nodes: list[int]) -> list[int]:
    """The nodes that a site is told by: as many as there is room for."""
    return (nodes + NO_NODES)[:NODES_PER_LOCATION]


@dataclass(frozen=True, eq=False)
class GraphArrays:
    """What is computed at run time, and the inputs before it, as arrays (N nodes, E edges).

    `nodes` (N, NODE_FEATURES) float32, `edges` (E, EDGE_FEATURES) float32, `links` (E, 2) int64, `index`: variable ->
    node, `kinds` (N,) uint64: what each node computes, for itself; `whole`: the work that their shares are told of.
    """

    nodes: np.ndarray
    edges: np.ndarray
    links: np.ndarray
    index: dict[relax.Var, int]
    kinds: np.ndarray
    whole: float


def graph_arrays(graph: Graph, whole: float | None = None) -> GraphArrays:
    """A graph as arrays. `whole`: the work that nodes' shares are told of, by default all of the graph's; that of the
    graph where all began leaves nodes as they are when others change, so that networks see them to be the same."""
    weights = graph.weight_only
    runtime = [node for node in graph.nodes if node.var not in weights]
    inputs = graph.params[: graph.inputs]
    index = {var: i for i, var in enumerate([*inputs, *(node.var for node in runtime)])}
    rows = [_input_features(param) for param in inputs]
    kinds = [_kind("input", param) for param in inputs]
    work = [0.0] * graph.inputs
    users = [0] * len(index)
    reads_weight = [False] * graph.inputs
    links: list[tuple[int, int]] = []
    edge_rows: list[bytes] = []
    for i, node in enumerate(runtime, graph.inputs):
        features, node_work = node_features(node)
        rows.append(features)
        kinds.append(_node_kind(node))
        work.append(node_work)
        reads_weight.append(not weights.isdisjoint(node.inputs))
        for var in node.inputs:
            source = index.get(var)
            if source is not None:
                links.append((source, i))
                edge_rows.append(tensor_bytes(var))
        for var in node.reads:
            if var in index:
                users[index[var]] += 1
    array = np.frombuffer(b"".join(rows), dtype=np.float32).reshape(len(rows), NODE_FEATURES).copy()
    whole = whole or sum(work) or 1.0
    array[:, WORK] = np.minimum(np.array(work, dtype=np.float64) / whole, 1.0)
    array[:, USERS] = users_feature(users)
    array[:, READS_WEIGHT] = reads_weight
    array[[index[var] for var in graph.outputs if var in index], IS_OUTPUT] = 1.0
    edges = np.frombuffer(b"".join(edge_rows), dtype=np.float32).reshape(len(edge_rows), EDGE_FEATURES).copy()
    links_array = np.array(links, dtype=np.int64).reshape(len(links), 2)
    return GraphArrays(array, edges, links_array, index, np.array(kinds, dtype=np.uint64), whole)


def users_feature(users: Sequence[int]) -> np.ndarray:
    """Numbers of users as a feature."""
    return np.minimum(users, _MOST_USERS) / _MOST_USERS


def _shape(ty: relax.Type) -> tuple[int, ...]:
    """Static shape; of a tuple type, its first field's."""
    while isinstance(ty, relax.TupleType):
        ty = ty.fields[0]
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return ()
    return tuple(int(extent) for extent in ty.shape.values)


def _row(values: Sequence[float]) -> bytes:
    return np.array(values, dtype=np.float32).tobytes()


def _tensor_features(var: relax.Var) -> tuple[float, ...]:
    shape = _shape(var.ty)
    padded = (0,) * (_RANK - len(shape)) + shape[-_RANK:]
    extents = [min(math.log2(extent + 1) / _LOG_EXTENT, 1.0) for extent in padded]
    return (*extents, min(math.log2(math.prod(shape) + 1) / _LOG_SIZE, 1.0))


@lru_cache(maxsize=65536)
def tensor_bytes(var: relax.Var) -> bytes:
    """The features of an edge that carries the variable, as bytes of float32."""
    return _row(_tensor_features(var))


@lru_cache(maxsize=1024)
def _input_features(var: relax.Var) -> bytes:
    rank = len(_shape(var.ty)) / _RANK
    return _row([_INPUT, *_tensor_features(var), 0.0, 0.0, 0.0, min(rank, 1.0), 0.0, 0.0])


@lru_cache(maxsize=65536)
def node_features(node: Node) -> tuple[bytes, float]:
    """The row of a node, as far as it does not depend on others, as bytes of float32, and its work."""
    shape = _shape(node.var.ty)
    flops = _flops(node, shape)
    tensors = [shape, *(_shape(var.ty) for var in node.inputs)]
    moved = sum(4 * math.prod(s) for s in tensors)
    operator = OPERATOR_INDEX.get(node.op, 0)
    row = [operator, *_tensor_features(node.var), min(math.log2(flops + 1) / _LOG_FLOPS, 1.0)]
    row += [0.0, 0.0, min(len(shape) / _RANK, 1.0), 0.0, 0.0]
    return _row(row), max(flops, moved * _FLOPS_PER_BYTE)


@lru_cache(maxsize=65536)
def _node_kind(node: Node) -> int:
    """What a node computes, for itself: operator, attributes, shapes that it makes and reads."""
    attrs = getattr(node.value, "attrs", None)
    return _kind(node.op, node.var, *node.inputs, attrs=0 if attrs is None else tvm_ffi.structural_hash(attrs))


def _kind(op: str, *tensors: relax.Var, attrs: int = 0) -> int:
    return kind(op, attrs, *(_shape(var.ty) for var in tensors))


def _flops(node: Node, shape: tuple[int, ...]) -> float:
    size = float(math.prod(shape))
    if node.op == "relax.matmul":
        return 2 * size * _shape(node.value.args[0].ty)[-1]
    if node.op == "relax.nn.conv2d":
        kernel = _shape(node.value.args[1].ty)  # OIHW or OIHW16o: what is reduced over is I x KH x KW
        return 2 * size * math.prod(kernel[1:4])
    return size
