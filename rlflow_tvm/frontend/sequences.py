"""Sequences of known tensors: who takes one out at a known place reads that tensor itself, and who joins them joins
these. So torch's exporters write `split`, `unbind` and lists."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.expansion import Expansion
from rlflow_tvm.frontend.graph import Graph

_MOST_PARTS = 1024
_Sequence = tuple[str, ...]
"""Names of the tensors."""


def taken_apart(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that a node which reads a sequence comes to; None for others, and while it is not known what that
    holds.

    Nodes that make sequences stay, and are dropped with all that nobody reads: what they make is told to
    `graph.sequences`.

    Raises:
        FrontendError: a place is outside of its sequence, or parts do not fit what is split, or are too many.
    """
    if node.domain or not node.output or node.output[0] in graph.sequences:
        return None
    sequence = graph.sequences.get(node.input[0]) if node.input else None
    if node.op_type == "SplitToSequence":
        return _split(graph, node)
    if node.op_type in _READERS:
        return None if sequence is None else _READERS[node.op_type](graph, node, sequence)
    if node.op_type in _MAKERS:
        made = _MAKERS[node.op_type](graph, node, sequence)
        if made is not None:
            graph.sequences[node.output[0]] = made
    return None


def _split(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    e = Expansion(graph, node)
    x, axis = e.required(0), e.attribute("axis", 0)
    shape, given = graph.shape(x), graph.constants.get(e.input(1))
    if shape is None or (e.input(1) and given is None):
        return None
    parts = _parts(shape[axis], given)
    if len(parts) > _MOST_PARTS:
        e.refuse(f"with {len(parts)} parts, more than {_MOST_PARTS}", "export the model without sequences")
    if sum(parts) != shape[axis] or min(parts, default=0) < 0:
        e.refuse(f"with parts of {sum(parts)} in all of the {shape[axis]} along axis {axis}", "check the model")
    names = e.split(x, axis, parts) if parts else []
    if given is None and not e.attribute("keepdims", 1):
        names = [e.squeeze(name, axis) for name in names]
    graph.sequences[node.output[0]] = tuple(names)
    return [*e.nodes, node]


def _parts(extent: int, given: np.ndarray | None) -> list[int]:
    """Extents of parts of one, of parts of a given extent but for the last, or of those given."""
    if given is not None and given.ndim:
        return [int(part) for part in given]
    size = 1 if given is None else int(given.item())
    return [min(size, extent - begin) for begin in range(0, extent, size)] if size > 0 else []


def _construct(graph: Graph, node: onnx.NodeProto, _: _Sequence | None) -> _Sequence:
    return tuple(node.input)


def _identity(graph: Graph, node: onnx.NodeProto, sequence: _Sequence | None) -> _Sequence | None:
    return sequence


def _insert(graph: Graph, node: onnx.NodeProto, sequence: _Sequence | None) -> _Sequence | None:
    if sequence is None:
        return None
    place = _place(graph, node, 2, len(sequence), behind=1)
    return None if place is None else (*sequence[:place], node.input[1], *sequence[place:])


def _erase(graph: Graph, node: onnx.NodeProto, sequence: _Sequence | None) -> _Sequence | None:
    if sequence is None:
        return None
    place = _place(graph, node, 1, len(sequence))
    return None if place is None else (*sequence[:place], *sequence[place + 1 :])


def _at(graph: Graph, node: onnx.NodeProto, sequence: _Sequence) -> list[onnx.NodeProto] | None:
    place = _place(graph, node, 1, len(sequence))
    return None if place is None else _given(Expansion(graph, node), sequence[place])


def _length(graph: Graph, node: onnx.NodeProto, sequence: _Sequence) -> list[onnx.NodeProto]:
    e = Expansion(graph, node)
    return _given(e, e.tensor(len(sequence), np.int64))


def _concat(graph: Graph, node: onnx.NodeProto, sequence: _Sequence) -> list[onnx.NodeProto]:
    e = Expansion(graph, node)
    if not sequence:
        e.refuse("of no tensors", "check the model")
    axis = e.needed("axis")
    parts = [e.unsqueeze(name, axis) for name in sequence] if e.attribute("new_axis", 0) else sequence
    return _given(e, e.add("Concat", *parts, axis=axis))


def _given(e: Expansion, name: str) -> list[onnx.NodeProto]:
    e.give(0, name)
    return e.nodes


def _place(graph: Graph, node: onnx.NodeProto, number: int, length: int, behind: int = 0) -> int | None:
    """The place that a node's input of that number says, the last one where it is left out; None while it is not known.

    behind: how many places there are behind those of the sequence.
    """
    name = node.input[number] if number < len(node.input) else ""
    given = graph.constants.get(name)
    if name and given is None:
        return None
    if given is not None and given.size != 1:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} ({node.op_type}) uses {given.size} places as one: check the model"
        )
    place = length - 1 + behind if given is None else int(given.item())
    if not -length <= place < length + behind:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} ({node.op_type}) uses place {place} of a sequence of {length}: "
            "check the model"
        )
    return place + length if place < 0 else place


_MAKERS: dict[str, Callable[[Graph, onnx.NodeProto, _Sequence | None], _Sequence | None]] = {
    "Identity": _identity,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
}
_READERS: dict[str, Callable[[Graph, onnx.NodeProto, _Sequence], list[onnx.NodeProto] | None]] = {
    "ConcatFromSequence": _concat,
    "SequenceAt": _at,
    "SequenceLength": _length,
}
