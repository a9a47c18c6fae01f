"""Old operator sets brought to one that TVM's importer reads."""

from __future__ import annotations

import onnx
from onnx import version_converter

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.fold import infer_types
from rlflow_tvm.frontend.graph import Graph, attributes, name_nodes, split
from rlflow_tvm.frontend.load import one_line

OLDEST_OPSET = 7
"""From here on TVM's importer reads operators as the file means them (broadcasting, test mode of normalisation)."""

_TARGET_OPSET = 13


def convert(graph: Graph) -> None:
    """Convert the model to opset 13 in place, with ONNX's version converter.

    Raises:
        FrontendError: the converter cannot, or an old broadcast is of tensors of unknown rank.
    """
    infer_types(graph)
    for node in graph.nodes:
        _spell_out_broadcast(graph, node)
    skeleton, aside = graph.skeleton()
    try:
        converted = version_converter.convert_version(skeleton, _TARGET_OPSET)
    except (version_converter.ConvertError, RuntimeError, IndexError) as error:
        raise FrontendError(
            f"{graph.label}: operator set {graph.opset} cannot be converted to {_TARGET_OPSET} ({one_line(error)}): "
            f"export the model with opset {_TARGET_OPSET} or newer"
        ) from error
    fresh = split(converted, graph.label)
    kept = [i for i in fresh.model.graph.input if i.name not in aside]
    del fresh.model.graph.input[:]
    fresh.model.graph.input.extend(kept)
    name_nodes(fresh.model.graph)
    graph.model = fresh.model
    graph.constants = {**fresh.constants, **aside}


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
            f"opset {graph.opset}: export the model with opset {_TARGET_OPSET} or newer"
        )
    axis = attrs["axis"] % rank
    aligned = graph.fresh_name(f"{name}.aligned")
    graph.constants[aligned] = operand.reshape(operand.shape + (1,) * (rank - axis - operand.ndim))
    node.input[1] = aligned
    kept = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != "axis"]
    del node.attribute[:]
    node.attribute.extend(kept)
