"""Pointwise convolutions of plain images with pixels in the lanes: C[o, p] = sum over c of W[o, c] * X[c, p].

Rows of a plain image lie in memory as vectors want them: data is loaded and results are stored as they lie, and each
weight is broadcast. The direct convolution has channels in the lanes: it writes a plain image float by float, and has
too few sums to hide the latency of an addition where there is one vector of channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax, te, tirx
from tvm.target import Target

from ..target import num_cores
from .conv_compute import PAD_ATTR, ConvShape
from .conv_legalize import conv_shape
from .pixel_tile import PixelProduct, PixelTile

PIXELS_ATTR = "rlflow.conv2d_pixels"  # on the products' block: [vectors of pixels in a tile, channels outside, groups]
_OUT_ELEMENTWISE_FUSIBLE = 4  # TVM's OpPatternKind: element-wise operators behind the product go into its kernel


def is_pixel_conv(call: relax.Call, _weight: bool, _target: Target) -> bool:
    """Whether `call` is a float32 convolution by a 1x1 window of a plain image into a plain image."""
    shape = conv_shape(call)
    return (
        shape is not None
        and shape.kernel == (1, 1)
        and not any(shape.padding)
        and shape.groups == 1
        and min(shape.batch, shape.in_channels, shape.out_channels, *shape.out_size) > 0
        and not (shape.data_block or shape.kernel_block or shape.out_block)
        and {shape.dtype, str(call.args[0].ty.dtype), str(call.args[1].ty.dtype)} == {"float32"}
    )


def pixel_tile(shape: ConvShape, target: Target) -> PixelTile:
    """The register tile of a convolution of this shape."""
    height, width = shape.out_size
    strided = shape.strides != (1, 1)
    product = PixelProduct(shape.batch, shape.out_channels, shape.in_channels, height * width, strided)
    return product.tile(target)


def pixel_cycles(shape: ConvShape, target: Target) -> float:
    """What it costs, in cycles summed over the cores."""
    return num_cores(target) * pixel_tile(shape, target).cycles


def make_pixel_conv(target: Target) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The legalisation of a call that `is_pixel_conv` takes."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = conv_shape(call)
        assert shape is not None  # `is_pixel_conv` has seen to that
        data, kernel = call.args
        tile = pixel_tile(shape, target)
        packed = bb.emit(bb.call_te(partial(_pack, rows=tile.rows), kernel, primfunc_name_hint="pack_weights"))
        return bb.call_te(
            partial(_convolution, shape=shape, tile=tile),
            data,
            packed,
            primfunc_name_hint="conv2d",
            primfunc_attrs={"op_pattern": _OUT_ELEMENTWISE_FUSIBLE},
        )

    return legalize


def _pack(kernel: te.Tensor, rows: int) -> te.Tensor:
    """Weights (O, I, 1, 1) in the order (tile, I, row of the tile), zero in the rows beyond the last channel."""
    channels, inputs = int(kernel.shape[0]), int(kernel.shape[1])

    def weight(tile: tirx.Var, i: tirx.Var, row: tirx.Var) -> tvm.ir.Expr:
        channel = tile * rows + row
        if channels % rows == 0:
            return kernel[channel, i, 0, 0]
        return tirx.if_then_else(channel < channels, kernel[channel, i, 0, 0], tirx.const(0.0, kernel.dtype))

    return te.compute((-(-channels // rows), inputs, rows), weight, name="pack_weights")


def _convolution(data: te.Tensor, packed: te.Tensor, shape: ConvShape, tile: PixelTile) -> te.Tensor:
    height, width = shape.out_size
    rows = tile.rows
    stride_h, stride_w = shape.strides
    if tile.groups:
        columns = te.compute(
            (shape.batch, shape.in_channels, height * width),
            lambda n, c, p: data[n, c, p // width * stride_h, p % width * stride_w],
            name="columns",
            attrs={PAD_ATTR: 1},
        )
    i = te.reduce_axis((0, shape.in_channels), "i")

    def products(n: tirx.Var, block: tirx.Var, row: tirx.Var, p: tirx.Var) -> tvm.ir.Expr:
        pixel = columns[n, i, p] if tile.groups else data[n, i, p // width, p % width]
        return te.sum(packed[block, i, row] * pixel, axis=i)

    result = te.compute(
        (shape.batch, int(packed.shape[0]), rows, height * width),
        products,
        name="conv2d",
        attrs={PIXELS_ATTR: [tile.vectors, int(tile.channels_outside), tile.groups]},
    )
    return te.compute(
        (shape.batch, shape.out_channels, height, width),
        lambda n, o, y, x: result[n, o // rows, o % rows, y * width + x],
        name="unpack",
    )
