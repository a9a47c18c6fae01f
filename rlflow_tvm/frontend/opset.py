"""Old operator sets brought to one that TVM's importer reads."""

from __future__ import annotations

import onnx
from onnx import helper, version_converter

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.fold import infer_types
from rlflow_tvm.frontend.graph import Graph, attributes, subgraphs
from rlflow_tvm.frontend.load import one_line

OLDEST_OPSET = 11
"""Before, TVM reads `Upsample`, `TopK`, `Slice` and `Resize` as if they were of later sets, or not at all."""


def convert(graph: Graph) -> None:
    """Convert the model to opset 11 in place, with ONNX's version converter.

    No further: to 13 the converter (1.23) takes `Hardmax` over, whose axis means another thing there.

    Raises:
        FrontendError: the converter cannot, an old broadcast is of tensors of unknown rank, or there is control flow.
    """
    infer_types(graph)
    nested = next((node for node in graph.nodes if subgraphs(node)), None)
    if nested is not None:  # the converter leaves what is inside as it is
        raise FrontendError(
            f"{graph.label}: node {nested.name!r} ({nested.op_type}) holds a graph of operator set {graph.opset}, "
            f"which is not converted: export the model with opset {OLDEST_OPSET} or newer"
        )
    for node in graph.nodes:
        _spell_out_broadcast(graph, node)
        _spell_out_slopes(graph, node)
        _drop_value(node)
    skeleton, aside = graph.skeleton()
    try:
        converted = version_converter.convert_version(skeleton, OLDEST_OPSET)
    except (version_converter.ConvertError, RuntimeError, IndexError) as error:
        raise FrontendError(
            f"{graph.label}: operator set {graph.opset} cannot be converted to {OLDEST_OPSET} ({one_line(error)}): "
            f"export the model with opset {OLDEST_OPSET} or newer"
        ) from error
    graph.replace(converted, aside)
    for node in graph.model.graph.node:
        if node.op_type == "Resize":  # the converter leaves the new default, half_pixel
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))


def spell_out_rounding(graph: Graph) -> None:
    """Resize of a converted model as it was before opset 11, by ONNX Runtime too: a dimension that shrinks takes the
    next element, others the one before. Once its scales are folded.

    Raises:
        FrontendError: they are computed at run time, or one dimension grows and another shrinks.
    """
    for node in graph.nodes:
        if node.op_type != "Resize" or attributes(node).get("mode", b"nearest") != b"nearest":
            continue
        scales = graph.constants.get(node.input[2])
        if scales is None or ((scales < 1).any() and (scales > 1).any()):
            how = "has scales computed at run time" if scales is None else "grows one dimension and shrinks another"
            raise FrontendError(
                f"{graph.label}: node {node.name!r} (Resize) {how} in the way of opset 10, which rounds them apart: "
                f"export the model with opset {OLDEST_OPSET} or newer"
            )
        node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if (scales < 1).any() else "floor"))


def _spell_out_broadcast(graph: Graph, node: onnx.NodeProto) -> None:
    """Before opset 7 `axis` aligned the second operand's dimensions with the first's from that axis on. ONNX's
    converter (1.23) appends one dimension too many there, so the operand is brought into its shape here."""
    attrs = attributes(node)
    if not attrs.get("broadcast", 0) or "axis" not in attrs:
        return
    name = node.input[1]
    rank, operand = graph.rank(node.input[0]), graph.constants.get(name)
    if rank is None or operand is None:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} ({node.op_type}) broadcasts {name!r} along an axis in the way of "
            f"opset {graph.opset}: export the model with opset {OLDEST_OPSET} or newer"
        )
    axis = attrs["axis"] % rank
    _align(graph, node, rank - axis)
    kept = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != "axis"]
    del node.attribute[:]
    node.attribute.extend(kept)


def _spell_out_slopes(graph: Graph, node: onnx.NodeProto) -> None:
    """Before opset 7 the slopes of `PRelu` were one, or one for each channel; since then they broadcast as usual."""
    if node.op_type != "PRelu" or graph.opset >= 7:
        return
    rank, slope = graph.rank(node.input[0]), graph.constants.get(node.input[1])
    if rank is None or slope is None:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} (PRelu) has its slopes in the way of opset {graph.opset}, computed at "
            f"run time: export the model with opset {OLDEST_OPSET} or newer"
        )
    if slope.ndim == 1 and slope.size > 1:
        _align(graph, node, rank - 1)


def _drop_value(node: onnx.NodeProto) -> None:
    """What `Pad` would pad with in another mode, which ONNX's converter (1.23) keeps as an attribute."""
    if node.op_type == "Pad" and attributes(node).get("mode", b"constant") != b"constant":
        kept = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != "value"]
        del node.attribute[:]
        node.attribute.extend(kept)


def _align(graph: Graph, node: onnx.NodeProto, rank: int) -> None:
    """Give the node's constant second operand dimensions of 1 behind its own, `rank` in all."""
    name = node.input[1]
    operand = graph.constants[name]
    aligned = graph.fresh_name(f"{name}.aligned")
    graph.constants[aligned] = operand.reshape(operand.shape + (1,) * (rank - operand.ndim))
    node.input[1] = aligned
