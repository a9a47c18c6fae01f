"""One-dimensional convolutions and pools as two-dimensional ones, over images of one line.

A row (N, C, W) and its image (N, C, 1, W) are the same bytes, so going from one to the other costs nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Node, bound
from rlflow_tvm.ir import known_shape
from rlflow_tvm.lifting import CONCAT, ELEMENTWISE, Lifter, is_plain

_CONVS = {"relax.nn.conv1d": "OIW", "relax.nn.conv1d_transpose": "IOW"}
"""Operator -> the layout of its weights."""

_POOLS = {"relax.nn.max_pool1d": relax.op.nn.max_pool2d, "relax.nn.avg_pool1d": relax.op.nn.avg_pool2d}
_RANK = 3


class RowLifter(Lifter):
    """Lifts rows to images of one line."""

    def begins(self, node: Node) -> bool:
        return is_plain(node, _CONVS, _POOLS, "NCW")

    def goes_over(self, node: Node) -> bool:
        if node.op != CONCAT and node.op not in ELEMENTWISE:
            return False
        shape = known_shape(node.var.ty)
        return shape is not None and len(shape) == _RANK and all(known_shape(var.ty) is not None for var in node.inputs)

    def operand(self, node: Node, var: relax.Var, name: str) -> list[Node]:
        shape = known_shape(var.ty)
        assert shape is not None  # `begins` and `goes_over` have seen to that
        if len(shape) < 2:  # what has one axis, or none, is broadcast along an image as along a row
            return []
        view = relax.DataflowVar(name, _image_type(var.ty))
        return [_view(view, var, view.ty)]

    def on_images(self, node: Node, value: relax.Expr, name: str) -> list[Node]:
        image = relax.DataflowVar(name, _image_type(node.var.ty))
        return [bound(image, _in_two_dimensions(node, value), image.ty)]

    def back(self, var: relax.Var, image: relax.Var) -> list[Node]:
        return [_view(var, image, var.ty)]


def _in_two_dimensions(node: Node, call: relax.Call) -> relax.Call:
    """The call in two dimensions; the one given has the attributes of one, and images for operands."""
    attrs = node.value.attrs
    if node.op == CONCAT:
        axis = int(attrs.axis) % _RANK
        return relax.op.concat(list(map(_constant_as_image, call.args[0].fields)), axis + (axis == _RANK - 1))
    if node.op in ELEMENTWISE:  # a constant's one element is broadcast whatever its rank
        return call
    args = list(map(_constant_as_image, call.args))
    strides, dilation = ((1, int(values[0])) for values in (attrs.strides, attrs.dilation))
    left, right = (int(side) for side in attrs.padding)
    window = {"strides": strides, "padding": (0, left, 0, right), "dilation": dilation}
    if node.op in _CONVS:
        kept = {"groups": int(attrs.groups), "out_dtype": attrs.out_dtype or None}
        if node.op == "relax.nn.conv1d":
            return relax.op.nn.conv2d(*args, **window, **kept)
        behind = (0, int(attrs.output_padding[0]))
        return relax.op.nn.conv2d_transpose(*args, output_padding=behind, **window, **kept)
    size = (1, int(attrs.pool_size[0]))
    kept = {"ceil_mode": bool(attrs.ceil_mode), "count_include_pad": bool(attrs.count_include_pad)}
    return _POOLS[node.op](args[0], size, **window, **kept)


def _constant_as_image(operand: relax.Expr) -> relax.Expr:
    """The operand; of a constant its image. Those of one element stay in the function (see `rlflow_tvm.ir`)."""
    if not isinstance(operand, tvm.ir.GenericConst):
        return operand
    array = operand.value.numpy()
    return relax.const(array.reshape(*array.shape[:-1], 1, array.shape[-1]), str(operand.ty.dtype))


def _image_type(ty: relax.TensorType) -> relax.TensorType:
    """With the axis of the one line before the last one."""
    shape = known_shape(ty)
    assert shape is not None
    return relax.TensorType([*shape[:-1], 1, shape[-1]], str(ty.dtype))


def _view(var: relax.Var, source: relax.Var, ty: relax.TensorType) -> Node:
    return bound(var, relax.op.reshape(source, ty.shape), ty)
