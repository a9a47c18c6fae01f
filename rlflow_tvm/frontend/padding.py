"""`auto_pad` of convolutions and pools, and `output_shape` of transposed ones, written out as numbers, which static
shapes allow, and `ceil_mode` of the pools that ONNX's shape inference or TVM gets wrong."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.graph import Graph, attributes, inputs_of

_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_WINDOWED = _POOLS | {"Conv"}
_CEIL_OPSET = 22
"""From here on the standard, and ONNX's inference with it, leaves out windows that start in the end padding."""


def resolve_padding(graph: Graph) -> None:
    """Replace `auto_pad` by `pads` (needs `graph.types`), by the formula of ONNX's MaxPool:
    total = (ceil(extent / stride) - 1) * stride + (kernel - 1) * dilation + 1 - extent, the odd one at the end for
    SAME_UPPER and at the beginning for SAME_LOWER. TVM and ONNX Runtime (1.32) leave the dilation of pools out. Of
    transposed convolutions by that of ONNX's ConvTranspose."""
    for node in graph.model.graph.node:
        if node.op_type == "ConvTranspose" and not node.domain:
            _resolve_transposed(graph, node)
            continue
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
        _replace(node, ("auto_pad", "pads"), pads=[*begin, *end])


def _resolve_transposed(graph: Graph, node: onnx.NodeProto) -> None:
    """What is too much of stride * (extent - 1) + output_padding + (kernel - 1) * dilation + 1 is padding, what is
    missing more output padding. The odd one is at the end for SAME_UPPER, else at the beginning; without
    `output_shape` SAME means stride * extent."""
    attrs = attributes(node)
    mode, wanted = attrs.get("auto_pad", b"NOTSET"), attrs.get("output_shape")
    shape, weight = graph.shape(node.input[0]), graph.shape(node.input[1])
    if shape is None or weight is None or (mode == b"NOTSET" and wanted is None):
        return
    rank = len(shape) - 2
    ones = [1] * rank
    strides, dilations = attrs.get("strides", ones), attrs.get("dilations", ones)
    if mode == b"VALID" and wanted is None:
        return _replace(node, ("auto_pad", "pads"), pads=[0] * 2 * rank)
    sizes = [extent * stride for extent, stride in zip(shape[2:], strides, strict=True)] if wanted is None else wanted
    begin, end, behind = [], [], []
    for extent, size, kernel, stride, dilation, beyond in zip(
        shape[2:], sizes[-rank:], weight[2:], strides, dilations, attrs.get("output_padding", [0] * rank), strict=True
    ):
        total = stride * (extent - 1) + beyond + (kernel - 1) * dilation + 1 - size
        less, more = max(total, 0) // 2, max(total, 0) - max(total, 0) // 2
        begin.append(less if mode == b"SAME_UPPER" else more)
        end.append(more if mode == b"SAME_UPPER" else less)
        behind.append(beyond + max(-total, 0))
    names = "auto_pad", "output_shape", "pads", "output_padding"
    return _replace(node, names, pads=[*begin, *end], output_padding=behind)


def resolve_ceil_mode(graph: Graph) -> bool:
    """Rewrite pools (needs `graph.types`) whose `ceil_mode` gives a window that starts in the end padding, without
    `ceil_mode`; whether there was one. Before opset 22 ONNX's inference (1.23) counts that window, which ONNX Runtime
    and TVM leave out for every set: shapes behind such a pool are wrong, and pools there stay, until they are inferred
    again. Of `LpPool` any with `ceil_mode`: TVM multiplies an average by the whole window's size, also where the window
    ends outside.

    Raises:
        FrontendError: an average that counts padding, of windows of which others need `ceil_mode`: the end padding that
            stands for it would be counted.
    """
    wrong: set[str] = set()
    for node in graph.nodes:
        if not wrong.isdisjoint(inputs_of(node)):
            wrong.update(node.output)
            continue
        attrs = attributes(node)
        shape = graph.shape(node.input[0]) if node.input else None
        mode = attrs.get("auto_pad", b"NOTSET")
        if node.op_type not in _POOLS or not attrs.get("ceil_mode", 0) or shape is None:
            continue
        if mode not in (b"NOTSET", b"VALID"):
            continue
        none = [0, 0] * len(shape[2:])
        given = none if mode == b"VALID" else attrs.get("pads", none)
        pads, fewer = _without_ceil_mode(shape[2:], given, attrs)
        if not (fewer and graph.opset < _CEIL_OPSET) and node.op_type != "LpPool":
            continue
        if attrs.get("count_include_pad", 0) and pads != given:
            raise FrontendError(
                f"{graph.label}: node {node.name!r} ({node.op_type}) counts the padding of windows that only some of "
                "its dimensions have by ceil_mode: export the model with that padding written out, without ceil_mode"
            )
        _replace(node, ("auto_pad", "ceil_mode", "pads"), ceil_mode=0, pads=pads)
        wrong.update(node.output)
    return bool(wrong)


def _without_ceil_mode(spatial: tuple[int, ...], pads: list[int], attrs: dict[str, Any]) -> tuple[list[int], bool]:
    """The `pads` that give the windows of `ceil_mode` without it, less those that start in the end padding; and whether
    any does. As they are where the attributes do not fit each other."""
    rank = len(spatial)
    kernel = attrs.get("kernel_shape", [])
    strides, dilations = attrs.get("strides", [1] * rank), attrs.get("dilations", [1] * rank)
    if {len(kernel), len(strides), len(dilations), len(pads) / 2} != {rank} or any(s < 1 for s in strides):
        return pads, False
    end, fewer = [], False
    for i, extent in enumerate(spatial):
        window = (kernel[i] - 1) * dilations[i] + 1
        last = -(-(extent + pads[i] + pads[rank + i] - window) // strides[i]) * strides[i]  # where that window starts
        if last >= extent + pads[i]:
            last, fewer = last - strides[i], True
        end.append(max(pads[rank + i], last + window - extent - pads[i]))
    return [*pads[:rank], *end], fewer


def _replace(node: onnx.NodeProto, names: tuple[str, ...], **fresh: Any) -> None:
    """Give the node the attributes `fresh` in the place of those that `names` names."""
    kept = [a for a in node.attribute if a.name not in names]
    made = [helper.make_attribute(name, value) for name, value in fresh.items()]
    copies = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in [*kept, *made]]
    del node.attribute[:]
    node.attribute.extend(copies)
