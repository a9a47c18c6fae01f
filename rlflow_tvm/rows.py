"""One-dimensional convolutions and pools as two-dimensional ones, over images of one line.

What is known of convolutions (implementations, schedules, packed weights, layouts) is known of two-dimensional ones. A
row (N, C, W) and its image (N, C, 1, W) are the same bytes, so going from one to the other costs nothing; but nothing
is fused across it. So element-wise operators behind a convolution go over to images too, up to the first operator that
wants the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node, bound, substitute
from rlflow_tvm.ir import known_shape

_CONVS = {"relax.nn.conv1d": "OIW", "relax.nn.conv1d_transpose": "IOW"}
"""Operator -> the layout of its weights."""

_POOLS = {"relax.nn.max_pool1d": relax.op.nn.max_pool2d, "relax.nn.avg_pool1d": relax.op.nn.avg_pool2d}
_CONCAT = "relax.concat"
_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("abs", "add", "astype", "ceil", "clip", "cos", "divide", "equal", "erf", "exp", "floor", "greater"),
        *("greater_equal", "less", "less_equal", "log", "logical_and", "logical_not", "logical_or", "maximum"),
        *("minimum", "multiply", "negative", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.silu"),
        *("not_equal", "power", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "subtract", "tanh"),
        "where",
    )
)
_RANK = 3
_REMEMBERED = 50_000


class RowLifter:
    """Lifts functions in working form; remembers what it made: equal nodes stay the same objects over graphs."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Node, ...]] = {}

    def __call__(self, flow: Dataflow) -> Dataflow:
        """`flow` without one-dimensional convolutions and pools, as far as shapes and layouts are known; it computes
        the same. The same object where it has none."""
        if not any(_begins(node) for node in flow.nodes):
            return flow
        if len(self._made) > _REMEMBERED:
            self._made.clear()
        return _Lifting(flow, self._made).lifted()


class _Lifting:
    """One function's lifting. `images`: of the rows that were lifted, the variables of their images."""

    def __init__(self, flow: Dataflow, made: dict[tuple, tuple[Node, ...]]) -> None:
        self.flow, self.made = flow, made
        self.images: dict[relax.Var, relax.Var] = {}
        self.nodes: list[Node] = []
        self.rows: set[relax.Var] = set()  # rows of lifted nodes that are there as well

    def lifted(self) -> Dataflow:
        for node in self.flow.nodes:
            if _begins(node) or (not self.images.keys().isdisjoint(node.inputs) and _goes_over(node)):
                self._lift(node)
            else:
                self._give_rows(node.reads)
                self.nodes.append(node)
        self._give_rows(self.flow.outputs)
        flow = self.flow
        return Dataflow(flow.params, flow.inputs, self.nodes, flow.output, flow.attrs, flow.prim_funcs)

    def _give_rows(self, variables: Sequence[relax.Var]) -> None:
        """Bind those of `variables` that are there as images alone."""
        for var in variables:
            image = self.images.get(var)
            if image is not None and var not in self.rows:
                self.rows.add(var)
                self._add((var, image), partial(_rows, var, image))

    def _lift(self, node: Node) -> None:
        self._add((node, *map(self.images.get, node.inputs)), partial(_lift, node, self.images))
        self.images[node.var] = self.nodes[-1].var

    def _add(self, key: tuple, make: Callable[[], Sequence[Node]]) -> None:
        if key not in self.made:
            self.made[key] = tuple(make())
        self.nodes += self.made[key]


def _rows(var: relax.Var, image: relax.Var) -> list[Node]:
    return [_view(var, image, var.ty)]


def _begins(node: Node) -> bool:
    """Whether it is a one-dimensional convolution or pool that can be lifted."""
    if node.op in _CONVS:
        attrs = node.value.attrs
        layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
        plain = layouts == ("NCW", _CONVS[node.op], "NCW")
    elif node.op in _POOLS:
        plain = node.value.attrs.layout == "NCW" and node.value.attrs.out_layout in ("", "NCW")
    else:
        return False
    return plain and all(known_shape(arg.ty) is not None for arg in (node.var, *node.inputs))


def _goes_over(node: Node) -> bool:
    """Whether an operator with a lifted operand does to images what it does to rows."""
    if node.op != _CONCAT and node.op not in _ELEMENTWISE:
        return False
    shape = known_shape(node.var.ty)
    return shape is not None and len(shape) == _RANK and all(known_shape(var.ty) is not None for var in node.inputs)


def _lift(node: Node, images: Mapping[relax.Var, relax.Var]) -> list[Node]:
    """The nodes that compute the image of what `node` computes, that image last."""
    nodes: list[Node] = []
    operands: dict[relax.Var, relax.Expr] = {}
    for i, var in enumerate(node.reads):
        shape = known_shape(var.ty)
        assert shape is not None  # `_begins` and `_goes_over` have seen to that
        if var in images:
            operands[var] = images[var]
        elif len(shape) > 1:  # what has one axis, or none, is broadcast along an image as along a row
            view = relax.DataflowVar(f"{node.var.name}_operand{i}", _image_type(var.ty))
            nodes.append(_view(view, var, view.ty))
            operands[var] = view
    image = relax.DataflowVar(f"{node.var.name}_image", _image_type(node.var.ty))
    nodes.append(bound(image, _on_images(node, substitute(node.value, operands)), image.ty))
    return nodes


def _on_images(node: Node, call: relax.Call) -> relax.Call:
    """The call in two dimensions; the one given has the attributes of one, and images for operands."""
    attrs = node.value.attrs
    if node.op == _CONCAT:
        axis = int(attrs.axis) % _RANK
        return relax.op.concat(list(map(_constant_as_image, call.args[0].fields)), axis + (axis == _RANK - 1))
    if node.op in _ELEMENTWISE:  # a constant's one element is broadcast whatever its rank
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
