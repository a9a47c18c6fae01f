"""Branches and loops that depend on no data, once shapes are static: a branch that is taken stands in the place of its
`If`, a `Loop` of known length is unrolled. So TorchScript's export asks whether a dimension to be squeezed is 1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.graph import Graph, array_of, attributes, rename_inputs

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
_MOST_NODES = 10_000


def unrolled(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that an `If` or a `Loop` comes to; None for other nodes, and where it depends on data.

    Raises:
        FrontendError: a loop would be too many nodes.
    """
    if node.domain or node.op_type not in ("If", "Loop"):
        return None
    nodes_and_results = _branch(graph, node) if node.op_type == "If" else _iterations(graph, node)
    if nodes_and_results is None:
        return None
    nodes, results = nodes_and_results
    named = [(result, name) for result, name in zip(results, node.output, strict=False) if name]
    return [*nodes, *(helper.make_node("Identity", [result], [name], f"{node.name}.{name}") for result, name in named)]


_Spliced = tuple[list[onnx.NodeProto], list[str]]
"""Nodes, and the names of their results."""


def _branch(graph: Graph, node: onnx.NodeProto) -> _Spliced | None:
    condition = graph.constants.get(node.input[0])
    if condition is None or condition.size != 1:
        return None
    branch = attributes(node)["then_branch" if condition.item() else "else_branch"]
    return _spliced(graph, node, branch, _weights(graph, branch))


def _iterations(graph: Graph, node: onnx.NodeProto) -> _Spliced | None:
    count, condition = (graph.constants.get(name) for name in node.input[:2])
    body = attributes(node)["body"]
    state = list(node.input[2:])
    if len(body.input) != 2 + len(state) or len(body.output) < 1 + len(state):
        raise FrontendError(
            f"{graph.label}: node {node.name!r} (Loop) hands {len(state)} values on to a body of "
            f"{len(body.input)} inputs and {len(body.output)} outputs: the model is damaged, export it again"
        )
    if count is None or (condition is None and node.input[1]):
        return None
    if any(each is not None and each.size != 1 for each in (count, condition)):
        raise FrontendError(
            f"{graph.label}: node {node.name!r} (Loop) takes several numbers for one: the model is damaged, export it "
            "again"
        )
    times = max(int(count.item()), 0) if condition is None or condition.item() else 0
    rows: list[list[str]] = [[] for _ in body.output[1 + len(state) :]]
    if (rows and not times) or (times and not _goes_on(graph, body)):
        return None
    if times * max(len(body.node), 1) > _MOST_NODES:  # a body may hold none, and hand its state on
        raise FrontendError(
            f"{graph.label}: node {node.name!r} (Loop) is {times} times {len(body.node)} nodes: more than "
            f"{_MOST_NODES} are refused, export the model with a shorter loop"
        )
    nodes: list[onnx.NodeProto] = []
    true, weights = _constant(graph, f"{node.name}.true", np.array(True)), _weights(graph, body)
    for i in range(times):
        given = [_constant(graph, f"{node.name}.{i}", np.array(i, np.int64)), true, *state]
        names = dict(zip((parameter.name for parameter in body.input), given, strict=True)) | weights
        made, (_, *results) = _spliced(graph, node, body, names)
        nodes += made
        for row, result in zip(rows, results[len(state) :], strict=True):
            row.append(_unsqueezed(graph, nodes, result))
        state = results[: len(state)]
    stacked = [graph.fresh_name(f"{node.name}.stacked") for _ in rows]
    nodes += [helper.make_node("Concat", row, [name], name, axis=0) for row, name in zip(rows, stacked, strict=True)]
    return nodes, [*state, *stacked]


def _goes_on(graph: Graph, body: onnx.GraphProto) -> bool:
    """Whether a loop that goes on once always does."""
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type in ("Cast", "Identity"):
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    if name in makers:
        tensor = attributes(makers[name]).get("value") if makers[name].op_type == "Constant" else None
    else:
        tensor = next((tensor for tensor in body.initializer if tensor.name == name), None)
    known = graph.constants.get(name) if tensor is None else array_of(tensor, graph.label)
    return known is not None and bool(known.all())


def _spliced(graph: Graph, node: onnx.NodeProto, body: onnx.GraphProto, given: Mapping[str, str]) -> _Spliced:
    """A branch or body of `node`, under names that nothing else has; `given`: what its inputs and weights are called
    outside."""
    names, nodes = dict(given), []
    for i, inner in enumerate(body.node):
        names |= {name: graph.fresh_name(name) for name in inner.output if name}
        copy = onnx.NodeProto.FromString(inner.SerializeToString())
        copy.name = f"{node.name}.{inner.name or f'{inner.op_type}_{i}'}"
        rename_inputs(copy, names)
        copy.output[:] = [names.get(name, "") for name in inner.output]
        nodes.append(copy)
    return nodes, [names.get(output.name, output.name) for output in body.output]


def _weights(graph: Graph, body: onnx.GraphProto) -> dict[str, str]:
    """What a branch's or body's weights are called outside: once, however often it is spliced in."""
    if body.sparse_initializer:
        raise FrontendError(f"{graph.label}: sparse weights are not supported: store them as dense tensors")
    return {t.name: _constant(graph, t.name, array_of(t, graph.label)) for t in body.initializer}


def _constant(graph: Graph, stem: str, array: np.ndarray) -> str:
    name = graph.fresh_name(stem)
    graph.constants[name] = array
    return name


def _unsqueezed(graph: Graph, nodes: list[onnx.NodeProto], name: str) -> str:
    """`name` with an axis more in front, by a node behind `nodes`."""
    row = graph.fresh_name(f"{name}.row")
    if graph.opset < 13:
        nodes.append(helper.make_node("Unsqueeze", [name], [row], row, axes=[0]))
    else:
        axes = _constant(graph, f"{name}.axes", np.array([0]))
        nodes.append(helper.make_node("Unsqueeze", [name, axes], [row], row))
    return row
