"""Legalisation of "NHWC" `relax.nn.conv2d` for GPUs.

A dense convolution is one block C[n, y, x, o] += A[n, y', x', i] * B[o, kh, kw, i] over a padded input: what dlight's
matmul rule takes for an implicit matrix product of (n, y, x) by o over (kh, kw, i). A grouped one has the group as an
axis of its own, the batch of that product. A depthwise one reads its weights with the channels last, so that
neighbouring threads read neighbouring weights; the transpose is weight-only work. Half-precision products are summed
in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax, te, tirx, topi

from ..half import CHANNELS_LAST, layouts_of
from .matmul_legalize import PRODUCT_ATTRS, sum_dtype

Sides = tuple[int, int, int, int]

_CONV = "relax.nn.conv2d"


@dataclass(frozen=True)
class Window:
    """Strides and dilation (height, width), padding (top, left, bottom, right), groups, and the result's dtype."""

    strides: tuple[int, int]
    padding: Sides
    dilation: tuple[int, int]
    groups: int
    dtype: str

    @property
    def sum_dtype(self) -> str:
        """The dtype in which products are summed."""
        return sum_dtype(self.dtype)


def legalize_conv2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.conv2d` as a call of a PrimFunc; TVM's own form for layouts and shapes that are not handled here."""
    attrs = call.attrs
    static = all(isinstance(extent, tirx.IntImm) for arg in (*call.args, call) for extent in arg.ty.shape.values)
    if layouts_of(call) != CHANNELS_LAST or not static:
        return tvm.ir.Op.get(_CONV).get_attr("FLegalize")(bb, call)
    top, left, bottom, right = (int(p) for p in attrs.padding)
    window = Window(
        strides=(int(attrs.strides[0]), int(attrs.strides[1])),
        padding=(top, left, bottom, right),
        dilation=(int(attrs.dilation[0]), int(attrs.dilation[1])),
        groups=int(attrs.groups),
        dtype=str(call.ty.dtype),
    )
    data, kernel = call.args
    if window.groups > 1 and int(kernel.ty.shape[3]) == 1:
        by_channel = bb.emit(bb.call_te(topi.transpose, kernel, [1, 2, 3, 0], primfunc_name_hint="transpose_weights"))
        compute, kernel, name = depthwise, by_channel, "depthwise_conv2d"
    else:
        compute, name = grouped if window.groups > 1 else dense, "conv2d"
    compute = partial(compute, window=window)
    return bb.call_te(compute, data, kernel, primfunc_name_hint=name, primfunc_attrs=PRODUCT_ATTRS)


def dense(data: te.Tensor, kernel: te.Tensor, window: Window) -> te.Tensor:
    """Convolution of (N, H, W, I) with (O, KH, KW, I)."""
    out_channels, kh_size, kw_size, in_channels = (int(d) for d in kernel.shape)
    padded = _pad(data, window.padding)
    kh, kw, i = _reduce_axes(kh_size, kw_size, in_channels)

    def pixel(n: tirx.Var, y: tirx.Var, x: tirx.Var, o: tirx.Var) -> tvm.ir.Expr:
        row, column = _position(window, y, x, kh, kw)
        return _sum_of_products(padded(n, row, column, i), kernel(o, kh, kw, i), [kh, kw, i], window)

    height, width = _out_size(padded, kernel.shape[1:3], window)
    result = te.compute((data.shape[0], height, width, out_channels), pixel, name="conv2d")
    return _cast(result, window.dtype)


def grouped(data: te.Tensor, kernel: te.Tensor, window: Window) -> te.Tensor:
    """Convolution of (N, H, W, groups * I) with (groups * O, KH, KW, I), group by group."""
    channels, kh_size, kw_size, in_channels = (int(d) for d in kernel.shape)
    own = channels // window.groups
    padded = _pad(data, window.padding)
    kh, kw, i = _reduce_axes(kh_size, kw_size, in_channels)

    def pixel(n: tirx.Var, y: tirx.Var, x: tirx.Var, group: tirx.Var, o: tirx.Var) -> tvm.ir.Expr:
        row, column = _position(window, y, x, kh, kw)
        left = padded(n, row, column, group * in_channels + i)
        return _sum_of_products(left, kernel(group * own + o, kh, kw, i), [kh, kw, i], window)

    height, width = _out_size(padded, kernel.shape[1:3], window)
    result = te.compute((data.shape[0], height, width, window.groups, own), pixel, name="conv2d")
    joined = te.compute(
        (data.shape[0], height, width, channels), lambda n, y, x, c: result(n, y, x, c // own, c % own), name="join"
    )
    return _cast(joined, window.dtype)


def depthwise(data: te.Tensor, kernel: te.Tensor, window: Window) -> te.Tensor:
    """Convolution of each channel of (N, H, W, I) with its own kernels in (KH, KW, 1, O)."""
    kh_size, kw_size, _, channels = (int(d) for d in kernel.shape)
    each = channels // window.groups
    padded = _pad(data, window.padding)
    kh, kw = te.reduce_axis((0, kh_size), "kh"), te.reduce_axis((0, kw_size), "kw")

    def pixel(n: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> tvm.ir.Expr:
        row, column = _position(window, y, x, kh, kw)
        return _sum_of_products(padded(n, row, column, c // each), kernel(kh, kw, 0, c), [kh, kw], window)

    height, width = _out_size(padded, kernel.shape[:2], window)
    result = te.compute((data.shape[0], height, width, channels), pixel, name="depthwise_conv2d")
    return _cast(result, window.dtype)


def _reduce_axes(height: int, width: int, channels: int) -> tuple[tirx.IterVar, tirx.IterVar, tirx.IterVar]:
    return te.reduce_axis((0, height), "kh"), te.reduce_axis((0, width), "kw"), te.reduce_axis((0, channels), "i")


def _position(
    window: Window, y: tirx.Var, x: tirx.Var, kh: tirx.IterVar, kw: tirx.IterVar
) -> tuple[tvm.ir.Expr, tvm.ir.Expr]:
    return (
        y * window.strides[0] + kh * window.dilation[0],
        x * window.strides[1] + kw * window.dilation[1],
    )


def _sum_of_products(left: tvm.ir.Expr, right: tvm.ir.Expr, axes: list[tirx.IterVar], window: Window) -> tvm.ir.Expr:
    dtype = window.sum_dtype
    return te.sum(left.astype(dtype) * right.astype(dtype), axis=axes)


def _out_size(padded: te.Tensor, kernel: list[tirx.IntImm], window: Window) -> tuple[int, int]:
    spans = [(int(size) - 1) * dilation + 1 for size, dilation in zip(kernel, window.dilation, strict=True)]
    height, width = (
        (int(padded.shape[1 + axis]) - span) // stride + 1
        for axis, (span, stride) in enumerate(zip(spans, window.strides, strict=True))
    )
    return height, width


def _pad(data: te.Tensor, padding: Sides) -> te.Tensor:
    """`data` (N, H, W, C) with zeros round the image; itself without padding. The schedule inlines it."""
    if not any(padding):
        return data
    top, left, bottom, right = padding
    batch, height, width, channels = (int(d) for d in data.shape)

    def pixel(n: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> tvm.ir.Expr:
        inside = [y >= top] * (top > 0) + [y < height + top] * (bottom > 0)
        inside += [x >= left] * (left > 0) + [x < width + left] * (right > 0)
        return tirx.if_then_else(tirx.all(*inside), data(n, y - top, x - left, c), tirx.const(0, data.dtype))

    return te.compute((batch, height + top + bottom, width + left + right, channels), pixel, name="pad")


def _cast(tensor: te.Tensor, dtype: str) -> te.Tensor:
    return tensor if tensor.dtype == dtype else topi.cast(tensor, dtype)
