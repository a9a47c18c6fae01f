"""A graph state as arrays: what an agent sees."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import spaces
from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.ops import OPERATORS

LOCATIONS = 200
"""Sites of one rule that an observation has room for (RLFlow's default)."""
NODES_PER_LOCATION = 4

# Index 0 is every operator that no rule names, 1 a graph input; then Relax's operators in a fixed order.
OPERATOR_INDEX: dict[str, int] = {
    name: i + 2 for i, name in enumerate(dict.fromkeys(["getitem", *(o.relax_name for o in OPERATORS.values())]))
}
_INPUT = 1
_RANK = 6
NODE_FEATURES = 1 + _RANK + 7
EDGE_FEATURES = _RANK + 1
_LOG_EXTENT, _LOG_SIZE, _LOG_FLOPS = 12.0, 30.0, 36.0  # scales: log2 of the largest extent, size, work expected
_FLOPS_PER_BYTE = 16.0  # balance of a CPU's arithmetic and memory, for the share of work only


def observation_space(rules: int) -> spaces.Dict:
    """The space of `observe`'s results for `rules` rules."""
    node_high = np.ones(NODE_FEATURES, dtype=np.float32)
    node_high[0] = max(OPERATOR_INDEX.values())
    return spaces.Dict(
        {
            "graph": spaces.Graph(
                node_space=spaces.Box(np.zeros(NODE_FEATURES, dtype=np.float32), node_high),
                edge_space=spaces.Box(0.0, 1.0, (EDGE_FEATURES,), np.float32),
            ),
            "rule_mask": spaces.MultiBinary(rules + 1),
            "location_mask": spaces.MultiBinary((rules + 1, LOCATIONS)),
            "location_nodes": spaces.Box(-1, 2**30, (rules + 1, LOCATIONS, NODES_PER_LOCATION), np.int32),
        }
    )


def observe(state: GraphState, refused: set[RewriteAction] | frozenset[RewriteAction] = frozenset()) -> dict[str, Any]:
    """`state` as an observation; actions in `refused` are masked.

    graph: nodes (N, NODE_FEATURES) float32, edges (E, EDGE_FEATURES) float32, edge_links (E, 2) int64, over the
    graph's inputs and everything that is computed at run time (weights and work on them are left out: free).
    Node features: operator index; log extents of the shape; log size; log FLOPs; share of the graph's work
    (roofline estimate); number of users; rank; reads a weight; is an output.
    """
    graph = state.graph
    nodes, edges, links, index = _graph_arrays(graph)
    rules = len(state.ruleset.rules)
    location_mask = np.zeros((rules + 1, LOCATIONS), dtype=np.int8)
    location_nodes = np.full((rules + 1, LOCATIONS, NODES_PER_LOCATION), -1, dtype=np.int32)
    for number, rule in enumerate(state.ruleset.rules):
        for location, site in enumerate(state.sites[rule.name][:LOCATIONS]):
            action = RewriteAction(rule.name, site)
            if refused and action in refused:
                continue
            location_mask[number, location] = 1
            match = state.match(action)
            found = [index[var] for var in dict.fromkeys((*match.roots, *match.matched)) if var in index]
            found = found[:NODES_PER_LOCATION]
            location_nodes[number, location, : len(found)] = found
    location_mask[rules, 0] = 1  # stop
    return {
        "graph": spaces.GraphInstance(nodes=nodes, edges=edges, edge_links=links),
        "rule_mask": location_mask.any(axis=1).astype(np.int8),
        "location_mask": location_mask,
        "location_nodes": location_nodes,
    }


def _graph_arrays(graph: Graph) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[relax.Var, int]]:
    weights = graph.weight_only
    runtime = [node for node in graph.nodes if node.var not in weights]
    variables = [*graph.params[: graph.inputs], *(node.var for node in runtime)]
    index = {var: i for i, var in enumerate(variables)}
    outputs = set(graph.outputs)
    rows = [_input_features(param) for param in graph.params[: graph.inputs]]
    work = [0.0] * graph.inputs
    links: list[tuple[int, int]] = []
    edge_rows: list[tuple[float, ...]] = []
    for node in runtime:
        features, node_work = _node_features(node)
        rows.append(features)
        work.append(node_work)
        for var in node.inputs:
            if var in index:
                links.append((index[var], index[node.var]))
                edge_rows.append(_tensor_features(var))
    array = np.array(rows, dtype=np.float32).reshape(len(rows), NODE_FEATURES)
    total = sum(work) or 1.0
    array[:, -5] = np.array(work, dtype=np.float64) / total
    users = graph.users
    array[:, -4] = [min(len(users.get(var, ())), 8) / 8 for var in variables]
    array[graph.inputs :, -2] = [any(var in weights for var in node.inputs) for node in runtime]
    array[:, -1] = [var in outputs for var in variables]
    edges = np.array(edge_rows, dtype=np.float32).reshape(len(edge_rows), EDGE_FEATURES)
    return array, edges, np.array(links, dtype=np.int64).reshape(len(links), 2), index


def _shape(ty: relax.Type) -> tuple[int, ...]:
    """Static shape; of a tuple type, its first field's."""
    while isinstance(ty, relax.TupleType):
        ty = ty.fields[0]
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return ()
    return tuple(int(extent) for extent in ty.shape.values)


@lru_cache(maxsize=65536)
def _tensor_features(var: relax.Var) -> tuple[float, ...]:
    shape = _shape(var.ty)
    padded = (0,) * (_RANK - len(shape)) + shape[-_RANK:]
    extents = [min(math.log2(extent + 1) / _LOG_EXTENT, 1.0) for extent in padded]
    return (*extents, min(math.log2(math.prod(shape) + 1) / _LOG_SIZE, 1.0))


def _input_features(var: relax.Var) -> list[float]:
    rank = len(_shape(var.ty)) / _RANK
    return [_INPUT, *_tensor_features(var), 0.0, 0.0, 0.0, min(rank, 1.0), 0.0, 0.0]


@lru_cache(maxsize=65536)
def _node_features(node: Node) -> tuple[list[float], float]:
    shape = _shape(node.var.ty)
    flops = _flops(node, shape)
    tensors = [shape, *(_shape(var.ty) for var in node.inputs)]
    moved = sum(4 * math.prod(s) for s in tensors)
    operator = OPERATOR_INDEX.get(node.op, 0)
    row = [operator, *_tensor_features(node.var), min(math.log2(flops + 1) / _LOG_FLOPS, 1.0)]
    return [*row, 0.0, 0.0, min(len(shape) / _RANK, 1.0), 0.0, 0.0], max(flops, moved * _FLOPS_PER_BYTE)


def _flops(node: Node, shape: tuple[int, ...]) -> float:
    size = float(math.prod(shape))
    if node.op == "relax.matmul":
        return 2 * size * _shape(node.value.args[0].ty)[-1]
    if node.op == "relax.nn.conv2d":
        kernel = _shape(node.value.args[1].ty)  # OIHW or OIHW16o: what is reduced over is I x KH x KW
        return 2 * size * math.prod(kernel[1:4])
    return size
