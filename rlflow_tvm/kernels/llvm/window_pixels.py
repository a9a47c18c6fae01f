"""Convolutions of plain images into a few channels, with pixels in the lanes.

As a decoder's last layer, which makes an image of features, or a map of depths. The direct convolution has channels in
the lanes, of which most are empty there, and broadcasts each pixel for them. Here rows of the padded image are loaded
as they lie, one pixel further for each column of the window, and the weights are broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import tvm
from tvm import relax, te, tirx
from tvm.target import Target

from ..target import vector_lanes
from .conv_compute import ConvShape, pad_spatial
from .conv_legalize import conv_shape
from .conv_tile import ConvCost, most_sums
from .pixel_tile import ACROSS, LATENCY, LOOP

WINDOW_PIXELS_ATTR = "rlflow.conv2d_window_pixels"  # on the block of the products: how many vectors of pixels in a tile
_MOST_CHANNELS = 8  # of a tile, which holds all of them
_MOST_VECTORS = 8
_COPIES = 3  # times that an image goes to or from beyond the second cache where it is padded first


def is_window_pixels(call: relax.Call, weight: bool, _target: Target) -> bool:
    """Whether `call` is a float32 convolution by a window that moves by single pixels, of a plain image into a plain
    image of a few channels."""
    shape = conv_shape(call)
    return (
        weight
        and shape is not None
        and shape.kernel != (1, 1)
        and shape.strides[1] == 1
        and shape.groups == 1
        and shape.out_channels <= _MOST_CHANNELS
        and min(shape.batch, shape.in_channels, shape.out_channels, *shape.out_size) > 0
        and not (shape.data_block or shape.kernel_block or shape.out_block)
        and {shape.dtype, str(call.args[0].ty.dtype), str(call.args[1].ty.dtype)} == {"float32"}
    )


def window_pixels_cycles(shape: ConvShape, target: Target) -> float:
    """What it costs, in cycles summed over the cores."""
    height, _ = shape.out_size
    steps = shape.batch * height * shape.in_channels * prod(shape.kernel)
    image = 4 * shape.in_channels * shape.height * shape.width
    far = image > ConvCost.SECOND_CACHE and any(shape.padding)
    traffic = shape.batch * image * ConvCost.FAR_BYTE * (_COPIES if far else 0)
    return steps * _row_cycles(shape, _vectors(shape, target), target) + traffic


def _vectors(shape: ConvShape, target: Target) -> int:
    """Vectors of pixels in a tile: as many as take the fewest cycles a row."""
    counts = [v for v in range(1, _MOST_VECTORS + 1) if v == 1 or shape.out_channels <= most_sums(target)[v]]
    return min(counts, key=lambda vectors: _row_cycles(shape, vectors, target))


def _row_cycles(shape: ConvShape, vectors: int, target: Target) -> float:
    """Cycles of a row of the output for one weight of each channel."""
    whole, tail = divmod(shape.out_size[1], vectors * vector_lanes(target))
    return whole * _step(shape.out_channels, vectors) + (
        _step(shape.out_channels, -(-tail // vector_lanes(target))) if tail else 0.0
    )


def _step(rows: int, vectors: int) -> float:
    return max(rows * vectors / 2, (rows + ACROSS * vectors) / 2, LATENCY) + LOOP


def make_window_pixels(target: Target) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The legalisation of a call that `is_window_pixels` takes."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = conv_shape(call)
        assert shape is not None  # `is_window_pixels` has seen to that
        data, kernel = call.args
        packed = bb.emit(bb.call_te(_pack, kernel, primfunc_name_hint="pack_weights"))
        convolution = partial(_convolution, shape=shape, vectors=_vectors(shape, target))
        return bb.call_te(convolution, data, packed, primfunc_name_hint="conv2d")

    return legalize


def _pack(kernel: te.Tensor) -> te.Tensor:
    """Weights (O, I, KH, KW) in the order (I, KH, KW, O) in which they are read."""
    outputs, *rest = (int(extent) for extent in kernel.shape)
    return te.compute((*rest, outputs), lambda i, kh, kw, o: kernel[o, i, kh, kw], name="pack_weights")


def _convolution(data: te.Tensor, packed: te.Tensor, shape: ConvShape, vectors: int) -> te.Tensor:
    padded = pad_spatial(data, shape.padding, 0.0)
    i, kh, kw = (
        te.reduce_axis((0, extent), name)
        for extent, name in zip((shape.in_channels, *shape.kernel), ("i", "kh", "kw"), strict=True)
    )

    def products(n: tirx.Var, o: tirx.Var, y: tirx.Var, x: tirx.Var) -> tvm.ir.Expr:
        row, column = y * shape.strides[0] + kh * shape.dilation[0], x + kw * shape.dilation[1]
        return te.sum(packed[i, kh, kw, o] * padded[n, i, row, column], axis=[i, kh, kw])

    return te.compute(
        (shape.batch, shape.out_channels, *shape.out_size),
        products,
        name="conv2d",
        attrs={WINDOW_PIXELS_ATTR: vectors},
    )
