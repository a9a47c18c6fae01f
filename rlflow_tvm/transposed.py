"""Transposed convolutions as plain ones.

With stride s an output row y = s q + r is made of the window's rows r, r + s, r + 2s, ... and of the input rows q,
q - 1, q - 2, ...: a plain convolution for each remainder r (Shi et al. 2016, "Is the deconvolution layer the same as a
convolutional layer?"). They read the same input, so one convolution with s times the channels computes all, and what
is left is to put its channels side by side. The window's rows are sorted by remainder, and turned round, when a model
is compiled: that is work on weights alone. Where s does not divide the window, zeros make it up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, te, tirx

from rlflow_tvm.dataflow import Dataflow, Node, Template, all_bindings
from rlflow_tvm.ir import known_shape

_OPERATOR = "relax.nn.conv2d_transpose"
_REMEMBERED = 50_000


@dataclass(frozen=True)
class _Axis:
    """One spatial axis: what the plain convolution over it is, and what of it is wanted.

    `stride`: of the transposed convolution. `taps`: of the plain one's window. `left`, `right`: its padding. Of the
    outputs of all remainders side by side, `size` from `begin` on are wanted, and not the `behind` last ones.
    """

    stride: int
    taps: int
    left: int
    right: int
    begin: int
    size: int
    behind: int

    @staticmethod
    def of(extent: int, window: int, stride: int, dilation: int, before: int, size: int) -> _Axis:
        """`extent` of the input, `before` its padding on the near side, `size` of the output."""
        taps = -(-window // stride)
        reach = (taps - 1) * dilation
        first = min(before // stride, reach)
        last = max((before + size - 1) // stride, extent - 1)
        begin = before - first * stride
        behind = (last - first + 1) * stride - begin - size
        return _Axis(stride, taps, reach - first, last + 1 - extent, begin, size, behind)

    @property
    def is_whole(self) -> bool:
        """Whether what the convolution gives is what is wanted, as it is."""
        return self.stride == 1 and self.begin == 0 and not self.behind


@dataclass(frozen=True)
class _Plain:
    """What a call (of data and weight) becomes, and the PrimFuncs that are called there."""

    template: Template
    prim_funcs: dict[tvm.ir.GlobalVar, tirx.PrimFunc]


class TransposedConvolutions:
    """Makes plain convolutions of a function's transposed ones; remembers them: equal nodes stay the same objects."""

    def __init__(self) -> None:
        self._made: dict[relax.Binding, tuple[_Plain, tuple[Node, ...]]] = {}
        self._known: dict[tuple, _Plain] = {}
        self._named = 0

    def __call__(self, flow: Dataflow) -> Dataflow:
        """`flow` without them, as far as shapes and layouts are known; it computes the same. The same object where it
        has none. Of those that are both strided and dilated along an axis none is taken."""
        if not any(_is_taken(node) for node in flow.nodes):
            return flow
        if len(self._made) > _REMEMBERED:
            self._made.clear()
        names = {global_var.name_hint for global_var in flow.prim_funcs}
        prim_funcs = dict(flow.prim_funcs)
        nodes: list[Node] = []
        for node in flow.nodes:
            if not _is_taken(node):
                nodes.append(node)
                continue
            known = self._made.get(node.binding)
            if known is None or any(global_var.name_hint in names for global_var in known[0].prim_funcs):
                plain = self._plain(node.value, names)
                known = self._made[node.binding] = plain, tuple(plain.template.in_place_of(node, node.value.args))
            nodes += known[1]
            prim_funcs |= known[0].prim_funcs
        return Dataflow(flow.params, flow.inputs, nodes, flow.output, flow.attrs, prim_funcs)

    def _plain(self, call: relax.Call, names: set[str]) -> _Plain:
        """What `call` becomes, calling no PrimFunc of one of the names."""
        key = (tvm_ffi.structural_hash(call.attrs), *((known_shape(arg.ty), str(arg.ty.dtype)) for arg in call.args))
        plain = self._known.get(key)
        while plain is None or any(global_var.name_hint in names for global_var in plain.prim_funcs):
            plain = self._known[key] = _make(call, f"interleave{self._named}")
            self._named += 1
        return plain


def _is_taken(node: Node) -> bool:
    if node.op != _OPERATOR or any(known_shape(var.ty) is None for var in (node.var, *node.inputs)):
        return False
    attrs = node.value.attrs
    layouts = attrs.data_layout == "NCHW" and attrs.kernel_layout == "IOHW" and attrs.out_layout in ("", "NCHW")
    steps = zip(attrs.strides, attrs.dilation, strict=True)
    return layouts and all(1 in (int(stride), int(dilation)) for stride, dilation in steps)


def _make(call: relax.Call, name: str) -> _Plain:
    """The plain convolution, and the PrimFunc `name` that puts its channels side by side where that is needed."""
    attrs, (data, weight) = call.attrs, call.args
    groups = int(attrs.groups)
    strides, dilation, before = (list(map(int, each)) for each in (attrs.strides, attrs.dilation, attrs.padding[:2]))
    extents, windows, sizes = (_sizes(expr)[2:] for expr in (data, weight, call))
    rows, columns = map(_Axis.of, extents, windows, strides, dilation, before, sizes)
    params = [relax.Var("data", data.ty), relax.Var("weight", weight.ty)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            sorted_weight = _sorted_by_remainder(builder, params[1], groups, rows, columns)
            padding = (rows.left, columns.left, rows.right, columns.right)
            plain = relax.op.nn.conv2d(
                params[0], sorted_weight, 1, padding, dilation, groups, out_dtype=attrs.out_dtype or None
            )
            if rows.is_whole and columns.is_whole:
                output = builder.emit_output(plain)
            else:
                put = partial(_interleaved, rows=rows, columns=columns)
                output = builder.emit_output(builder.call_te(put, builder.emit(plain), primfunc_name_hint=name))
        builder.emit_func_output(output)
    mod = builder.finalize()
    main = mod["main"]
    prim_funcs = {gv: func for gv, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    return _Plain(Template(tuple(main.params), tuple(all_bindings(main))), prim_funcs)


def _sorted_by_remainder(
    builder: relax.BlockBuilder, weight: relax.Var, groups: int, rows: _Axis, columns: _Axis
) -> relax.Var:
    """Weights (I, O/g, KH, KW) as those of the plain convolution, (O SH SW, I/g, TH, TW)."""
    inputs, outputs, *windows = _sizes(weight)
    missing = [axis.taps * axis.stride - window for axis, window in zip((rows, columns), windows, strict=True)]
    op, emit = relax.op, builder.emit
    if any(missing):
        weight = emit(op.nn.pad(weight, [0, 0, 0, 0, 0, missing[0], 0, missing[1]]))
    split = (groups, inputs // groups, outputs, rows.taps, rows.stride, columns.taps, columns.stride)
    turned = emit(op.flip(emit(op.flip(emit(op.reshape(weight, split)), 3)), 5))
    apart = emit(op.permute_dims(turned, [0, 2, 4, 6, 1, 3, 5]))
    channels = groups * outputs * rows.stride * columns.stride
    return emit(op.reshape(apart, (channels, inputs // groups, rows.taps, columns.taps)))


def _interleaved(plain: te.Tensor, rows: _Axis, columns: _Axis) -> te.Tensor:
    """(N, O SH SW, H, W) as (N, O, `rows.size`, `columns.size`)."""
    batch, channels = (int(extent) for extent in plain.shape[:2])

    def pixel(n: tirx.Var, o: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
        y, x = y + rows.begin, x + columns.begin
        channel = (o * rows.stride + y % rows.stride) * columns.stride + x % columns.stride
        return plain(n, channel, y // rows.stride, x // columns.stride)

    shape = (batch, channels // (rows.stride * columns.stride), rows.size, columns.size)
    return te.compute(shape, pixel, name="interleave")


def _sizes(tensor: relax.Expr) -> tuple[int, ...]:
    shape = known_shape(tensor.ty)
    assert shape is not None  # `_is_taken` has seen to that
    return shape
