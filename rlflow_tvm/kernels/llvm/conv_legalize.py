"""Legalisation of `relax.nn.conv2d` and the 2-D pools, blocked layouts included.

`CONV_LEGALIZE` goes to `relax.transform.LegalizeOps(customize_legalize_map=...)`. A convolution becomes two calls: the
packing of its weights (weights alone: the pipeline's `WeightSplitter` has that done once) and the convolution.
Calls whose layout or shape is not handled here (NHWC, unknown sizes) go to TVM's own legalisation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax

from .conv_compute import ConvShape, convolution, depthwise, four_sides, pack_weights, pair
from .pool_legalize import POOL_LEGALIZE

Legalizer = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _block(layout: str, pattern: str) -> int | None:
    """The block size in `layout` (0: unblocked), or None where it is not of the form `pattern`."""
    match = re.fullmatch(pattern, layout)
    if match is None:
        return None
    return int(match.group(1) or 0)


def _static(expr: relax.Expr) -> list[int] | None:
    """The shape of `expr` as integers, or None where a size is unknown."""
    shape = expr.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(d, tvm.tirx.IntImm) for d in shape.values):
        return None
    return [int(d) for d in shape.values]


def conv_shape(call: relax.Call) -> ConvShape | None:
    """The sizes of a `relax.nn.conv2d` call, or None where its layout or shape is not handled here."""
    attrs = call.attrs
    data_block = _block(attrs.data_layout, r"NCHW(?:(\d+)c)?")
    kernel_block = _block(attrs.kernel_layout, r"OIHW(?:(\d+)o)?")
    out_block = _block(attrs.out_layout or attrs.data_layout, r"NCHW(?:(\d+)c)?")
    data, kernel = (_static(arg) for arg in call.args)
    if data_block is None or kernel_block is None or out_block is None or data is None or kernel is None:
        return None
    out_channels = kernel[0] * (kernel_block or 1)
    groups = int(attrs.groups)
    if out_block and out_channels % out_block:
        return None
    return ConvShape(
        batch=data[0],
        in_channels=kernel[1] * groups,
        height=data[2],
        width=data[3],
        out_channels=out_channels,
        kernel=(kernel[2], kernel[3]),
        strides=pair(attrs.strides),
        padding=four_sides(attrs.padding),
        dilation=pair(attrs.dilation),
        groups=groups,
        data_block=data_block,
        kernel_block=kernel_block,
        out_block=out_block,
        dtype=str(attrs.out_dtype or call.args[0].ty.dtype),
    )


def legalize_conv2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.conv2d` as a call of a PrimFunc (two where the weights need packing)."""
    shape = conv_shape(call)
    if shape is None:
        return tvm.ir.Op.get("relax.nn.conv2d").get_attr("FLegalize")(bb, call)
    data, kernel = call.args
    if shape.is_depthwise:
        return bb.call_te(partial(depthwise, shape=shape), data, kernel, primfunc_name_hint="depthwise_conv2d")
    packed = bb.emit(bb.call_te(partial(pack_weights, shape=shape), kernel, primfunc_name_hint="pack_weights"))
    return bb.call_te(partial(convolution, shape=shape), data, packed, primfunc_name_hint="conv2d")


CONV_LEGALIZE: dict[str, Legalizer] = {"relax.nn.conv2d": legalize_conv2d, **POOL_LEGALIZE}
