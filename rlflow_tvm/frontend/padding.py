"""`auto_pad` of convolutions and pools written out as numbers, which static shapes allow."""

from __future__ import annotations

import onnx
from onnx import helper

from rlflow_tvm.frontend.graph import Graph, attributes

_WINDOWED = frozenset({"AveragePool", "Conv", "MaxPool"})


def resolve_padding(graph: Graph) -> None:
    """Replace `auto_pad` by `pads` (needs `graph.types`), by the formula of ONNX's MaxPool:
    total = (ceil(extent / stride) - 1) * stride + (kernel - 1) * dilation + 1 - extent, the odd one at the end for
    SAME_UPPER and at the beginning for SAME_LOWER."""
    for node in graph.model.graph.node:
        attrs = attributes(node)
        mode = attrs.get("auto_pad", b"NOTSET")
        shape = graph.shape(node.input[0]) if node.input else None
        if node.op_type not in _WINDOWED or mode == b"NOTSET" or shape is None:
            continue
        spatial = shape[2:]
        kernel = attrs.get("kernel_shape") or (graph.shape(node.input[1]) or ())[2:]
        strides = attrs.get("strides", [1] * len(spatial))
        dilations = attrs.get("dilations", [1] * len(spatial))
        begin, end = [], []
        for extent, size, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
            total = max((-(-extent // stride) - 1) * stride + (size - 1) * dilation + 1 - extent, 0)
            less, more = (0, 0) if mode == b"VALID" else (total // 2, total - total // 2)
            begin.append(more if mode == b"SAME_LOWER" else less)
            end.append(less if mode == b"SAME_LOWER" else more)
        kept = [a for a in node.attribute if a.name not in ("auto_pad", "pads")]
        fresh = [*kept, helper.make_attribute("pads", [*begin, *end])]
        copies = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in fresh]
        del node.attribute[:]
        node.attribute.extend(copies)
