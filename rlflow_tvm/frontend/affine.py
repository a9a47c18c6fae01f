"""Batch normalisation in inference is `y = scale * x + shift` for each channel: folded into the convolution before
it where that convolution has no other user, and otherwise written as one multiplication and one addition.

scale = gamma / sqrt(var + epsilon), shift = beta - mean * scale (Ioffe and Szegedy 2015, algorithm 2, line 11).
Multiplications and additions of a constant for each channel that follow (Caffe's Scale layer) are taken along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.graph import Graph, attributes


@dataclass(frozen=True)
class ChannelAffine:
    """`y = scale * x + shift`, both float64 of shape (channels,)."""

    scale: np.ndarray
    shift: np.ndarray

    def then(self, after: ChannelAffine) -> ChannelAffine:
        """This map followed by `after`."""
        return ChannelAffine(self.scale * after.scale, self.shift * after.scale + after.shift)


def fold_affine(graph: Graph, *, as_norm: bool = False) -> None:
    """Fold per-channel affine nodes (needs `graph.types`). A chain begins at a convolution with constant weights or
    at a batch normalisation, and runs on as long as the value has one reader and that reader is affine. A batch
    normalisation of unknown rank (behind an operator that ONNX's inference does not know) is left to TVM's importer.

    `as_norm`: what goes into no convolution is written as one batch normalisation, and a chain of two nodes or more may
    begin at any of them.
    """
    nodes = graph.nodes
    reader = _only_readers(graph)
    place = {output: i for i, node in enumerate(nodes) for output in node.output if output}
    new: dict[int, list[onnx.NodeProto]] = {}
    for i, node in enumerate(nodes):
        if i in new:
            continue
        if node.op_type == "Conv" and _constant_weights(graph, node):
            chain, affine = _chain(graph, node, reader, None)
            if affine is not None and not _in_range(graph.constants[node.input[1]], affine.scale):
                continue
        elif node.op_type == "BatchNormalization":
            affine = None if graph.rank(node.output[0]) is None else _batch_norm(graph, node)
            chain, affine = ([], None) if affine is None else _chain(graph, node, reader, affine)
        elif as_norm and (affine := _image_step(graph, node)) is not None:
            chain, affine = _chain(graph, node, reader, affine)
            affine = affine if chain else None
        else:
            continue
        if affine is None:
            continue
        end = chain[-1].output[0] if chain else node.output[0]
        new.update({place[n.output[0]]: [] for n in chain})
        write = _into_conv if node.op_type == "Conv" else _as_norm if as_norm else _as_nodes
        new[i] = write(graph, node, affine, end)
    if new:
        graph.nodes = [n for i, node in enumerate(nodes) for n in new.get(i, [node])]


def _only_readers(graph: Graph) -> dict[str, onnx.NodeProto]:
    """Value -> its reader, for the values that are read once, and by a node."""
    uses = graph.uses()
    return {name: node for node in graph.nodes for name in node.input if uses[name] == 1}


def _constant_weights(graph: Graph, conv: onnx.NodeProto) -> bool:
    return all(graph.is_constant(name) for name in conv.input[1:]) and conv.input[1] in graph.constants


def _chain(
    graph: Graph, start: onnx.NodeProto, reader: dict[str, onnx.NodeProto], affine: ChannelAffine | None
) -> tuple[list[onnx.NodeProto], ChannelAffine | None]:
    chain: list[onnx.NodeProto] = []
    value = start.output[0]
    shape = graph.shape(value)
    while shape is not None and len(shape) > 1 and value in reader:
        node = reader[value]
        step = _batch_norm(graph, node) if node.op_type == "BatchNormalization" else _constant_step(graph, node, value)
        if step is None or list(node.input).count(value) != 1 or graph.shape(node.output[0]) != shape:
            break
        affine = step if affine is None else affine.then(step)
        chain.append(node)
        value = node.output[0]
    return chain, affine


def _batch_norm(graph: Graph, node: onnx.NodeProto) -> ChannelAffine | None:
    attrs = attributes(node)
    if attrs.get("training_mode", 0) or not attrs.get("spatial", 1) or any(node.output[1:]):
        return None
    if not all(name in graph.constants for name in node.input[1:5]):
        return None
    parts = [graph.constants[name] for name in node.input[1:5]]
    _check_lengths(graph, node, parts)
    gamma, beta, mean, var = (part.astype(np.float64) for part in parts)
    scale = gamma / np.sqrt(var + attrs.get("epsilon", 1e-5))
    return ChannelAffine(scale, beta - mean * scale)


def _check_lengths(graph: Graph, node: onnx.NodeProto, parts: Sequence[np.ndarray]) -> None:
    """All of `parts` are vectors with a number for each channel of the node's output."""
    shape = graph.shape(node.output[0])
    channels = len(parts[0].ravel()) if shape is None or len(shape) < 2 else shape[1]
    wrong = next((part for part in parts if part.shape != (channels,)), None)
    if wrong is not None:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} ({node.op_type}) has {channels} channels and a parameter of shape "
            f"{wrong.shape}: the model is damaged, export it again"
        )


def _constant_step(graph: Graph, node: onnx.NodeProto, value: str) -> ChannelAffine | None:
    if node.op_type not in ("Mul", "Add", "Sub", "Div"):
        return None
    if node.op_type in ("Sub", "Div") and node.input[0] != value:
        return None
    other = node.input[1] if node.input[0] == value else node.input[0]
    shape = graph.shape(value)
    if other not in graph.constants or shape is None:
        return None
    array = graph.constants[other]
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if len(full) != len(shape) or any(d != 1 for i, d in enumerate(full) if i != 1):
        return None
    if full[1] not in (1, shape[1]):  # makes several channels of one
        return None
    operand = np.broadcast_to(array.reshape(-1).astype(np.float64), (shape[1],))
    one, zero = np.ones(shape[1]), np.zeros(shape[1])
    if node.op_type == "Mul":
        return ChannelAffine(operand, zero)
    if node.op_type == "Div":
        return ChannelAffine(one / operand, zero)
    return ChannelAffine(one, operand if node.op_type == "Add" else -operand)


def _image_step(graph: Graph, node: onnx.NodeProto) -> ChannelAffine | None:
    """What a multiplication or an addition does to an image in float32, by a number for each of its channels."""
    for value in node.input:
        shape = graph.shape(value)
        if value in graph.constants or shape is None or len(shape) < 4 or list(node.input).count(value) != 1:
            continue
        numbers = [graph.constants[name].size for name in node.input if name in graph.constants]
        if numbers == [shape[1]] and graph.types[value].elem_type == onnx.TensorProto.FLOAT:
            return _constant_step(graph, node, value)
    return None


def _in_range(weight: np.ndarray, scale: np.ndarray) -> bool:
    """Whether weights in float16 have a place among its numbers once they are scaled: none infinite, and of no output
    channel all below the least normal one."""
    if weight.dtype != np.float16 or weight.shape[0] != scale.size:  # the latter is told where they are folded
        return True
    size = np.abs(weight.reshape(len(weight), -1)).max(axis=1, initial=0.0) * np.abs(scale)
    limits = np.finfo(np.float16)
    return bool(((size == 0) | ((size >= float(limits.tiny)) & (size <= float(limits.max)))).all())


def _into_conv(graph: Graph, conv: onnx.NodeProto, affine: ChannelAffine, output: str) -> list[onnx.NodeProto]:
    weight = graph.constants[conv.input[1]]
    bias = graph.constants[conv.input[2]] if len(conv.input) > 2 and conv.input[2] else np.zeros(weight.shape[0])
    _check_lengths(graph, conv, [bias, affine.scale])
    kernel, shift = conv.input[1], graph.fresh_name(f"{conv.output[0]}.bias")
    graph.constants[shift] = (bias * affine.scale + affine.shift).astype(weight.dtype)
    if (affine.scale != 1).any():  # else the weights stay those that other convolutions may share
        kernel = graph.fresh_name(f"{conv.input[1]}.folded")
        graph.constants[kernel] = (weight * affine.scale.reshape(-1, *[1] * (weight.ndim - 1))).astype(weight.dtype)
    folded = onnx.NodeProto()
    folded.CopyFrom(conv)
    del folded.input[:]
    folded.input.extend([conv.input[0], kernel, shift])
    folded.output[0] = output
    return [folded]


def _as_nodes(graph: Graph, node: onnx.NodeProto, affine: ChannelAffine, output: str) -> list[onnx.NodeProto]:
    """In the data's type; where the parameters have another one (from operator set 15 on), in float32 or wider."""
    elem_type, rank = graph.types[node.output[0]].elem_type, graph.rank(node.output[0])
    assert rank is not None  # `fold_affine` has seen to that
    data, given = helper.tensor_dtype_to_np_dtype(elem_type), graph.constants[node.input[1]].dtype
    dtype = data if data == given else max(data, given, np.dtype(np.float32), key=lambda each: each.itemsize)
    scale, shift = (graph.fresh_name(f"{node.output[0]}.{part}") for part in ("scale", "shift"))
    for name, array in ((scale, affine.scale), (shift, affine.shift)):
        # of an image with its batch axis, as a convolution's bias, by which rules know what goes along channels
        graph.constants[name] = array.astype(dtype).reshape(*[1] * (rank > 2), -1, *[1] * (rank - 2))
    image, scaled, shifted = node.input[0], graph.fresh_name(f"{node.output[0]}.scaled"), output
    widen, narrowed = [], []
    if dtype != data:
        image, shifted = (graph.fresh_name(f"{node.output[0]}.{part}") for part in ("wide", "shifted"))
        to = helper.np_dtype_to_tensor_dtype(dtype)
        widen = [helper.make_node("Cast", [node.input[0]], [image], name=f"{node.name}.wide", to=to)]
        narrowed = [helper.make_node("Cast", [shifted], [output], name=f"{node.name}.narrow", to=elem_type)]
    return [
        *widen,
        helper.make_node("Mul", [image, scale], [scaled], name=f"{node.name}.scale"),
        helper.make_node("Add", [scaled, shift], [shifted], name=f"{node.name}.shift"),
        *narrowed,
    ]


def _as_norm(graph: Graph, node: onnx.NodeProto, affine: ChannelAffine, output: str) -> list[onnx.NodeProto]:
    """Of mean 0 and variance 1."""
    image = next(name for name in node.input if name not in graph.constants)
    dtype = helper.tensor_dtype_to_np_dtype(graph.types[output].elem_type)
    parameters = []
    for part, values in (
        ("scale", affine.scale),
        ("shift", affine.shift),
        ("mean", np.zeros_like(affine.shift)),
        ("variance", np.ones_like(affine.scale)),
    ):
        parameters.append(graph.fresh_name(f"{output}.{part}"))
        graph.constants[parameters[-1]] = values.astype(dtype)
    return [
        helper.make_node("BatchNormalization", [image, *parameters], [output], name=f"{node.name}.norm", epsilon=0.0)
    ]
