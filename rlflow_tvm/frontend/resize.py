"""What TVM's `Resize` gets wrong: TVM computes with the ratio of the extents, ONNX with the scale given, which is
refused where it differs; TVM leaves the first two dimensions as they are, so others are brought there; and it takes
elements by way of float32, so those that this does not hold are picked here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from rlflow_tvm.frontend.writer import dtype_of

_WIDE = ("int32", "int64", "uint32", "uint64", "float64")
_HALF = Fraction(1, 2)
_NEAREST = {
    b"round_prefer_floor": lambda place: math.ceil(place - _HALF),
    b"round_prefer_ceil": lambda place: math.floor(place + _HALF),
    b"floor": math.floor,
    b"ceil": math.ceil,
}
_NOT_OF_ONE = (b"align_corners", b"tf_crop_and_resize")
"""Coordinates that TVM divides by zero for, or that say what is cropped, where an extent is 1."""
_WHOLE = 1e-4  # how far from a whole number a scaled extent may be, of rounding


def check_resize(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """A converter that leaves the work to TVM's, on turned dimensions where it must; ValueError where the two would
    differ."""
    mode = attrs.get("coordinate_transformation_mode", b"half_pixel")
    if mode == b"half_pixel_symmetric":
        raise ValueError("TVM has no coordinate_transformation_mode half_pixel_symmetric")
    if isinstance(inputs[2], tvm.ir.GenericConst) and not inputs[2].value.numpy().size:
        inputs[2] = None  # so exporters of opset 11 say that the sizes are given
    axes = attrs.get("axes")
    if axes is not None:
        _spell_out_axes(inputs, axes)
    given = inputs[2] if inputs[3] is None else inputs[3]
    if not isinstance(given, tvm.ir.GenericConst):
        return None
    sizes = given.value.numpy()
    extents = [int(extent) for extent in inputs[0].ty.shape.values]
    if len(sizes) != len(extents):
        raise ValueError(f"it has {len(sizes)} scales or sizes for {len(extents)} dimensions")
    if inputs[3] is None:
        sizes = sizes * np.array(extents, sizes.dtype)
        for i, size in enumerate(sizes):
            if int(size) != round(float(size)) or abs(size - int(size)) > _WHOLE:
                raise ValueError(
                    f"dimension {i} of {extents[i]} times its scale is {size:g}: TVM rounds that before it resizes, "
                    "ONNX does not; export the model with a scale that gives a whole number, or with sizes"
                )
    whole = [int(size) for size in sizes]
    cropped, one_more = mode == b"tf_crop_and_resize", len(extents) == 3  # the latter TVM resizes in loops
    if attrs.get("mode", b"nearest") == b"nearest" and (dtype_of(inputs[0]) in _WIDE or one_more) and not cropped:
        return _picked(bb, inputs[0], whole, mode.decode(), attrs.get("nearest_mode", b"round_prefer_floor"))
    order = _order(extents, whole, cropped)
    if mode == b"align_corners" and any(whole[i] == 1 for i in order[2:]):
        raise ValueError("TVM divides by zero where coordinates are by align_corners and an output extent is 1")
    if order == sorted(order):
        return _as_image(bb, inputs[0], whole, attrs, opset) if one_more and mode not in _NOT_OF_ONE else None
    turned = bb.normalize(relax.op.permute_dims(inputs[0], order))
    resized = [turned, None, None, relax.const(np.array(whole)[order], "int64")]
    found = bb.normalize(onnx_frontend.Resize.get_converter(opset)(bb, resized, attrs, [{}, {}]))
    return relax.op.permute_dims(found, [order.index(i) for i in range(len(order))])


def _as_image(bb: relax.BlockBuilder, data: relax.Expr, sizes: list[int], attrs: Mapping, opset: int) -> relax.Expr:
    """A row of pixels as an image of that row, for which Relax has an operator."""
    image = bb.normalize(relax.op.expand_dims(data, 2))
    wanted = relax.const(np.array([*sizes[:2], 1, sizes[2]], np.int64))
    resized = bb.normalize(onnx_frontend.Resize.get_converter(opset)(bb, [image, None, None, wanted], attrs, [{}, {}]))
    return relax.op.squeeze(resized, [2])


def _picked(bb: relax.BlockBuilder, data: relax.Expr, sizes: list[int], coordinates: str, how: bytes) -> relax.Expr:
    """The nearest elements along each dimension."""
    for axis, size in enumerate(sizes):
        extent = int(data.ty.shape[axis])
        if size != extent:
            places = [_NEAREST[how](place) for place in places_along(extent, size, coordinates)]
            picked = np.clip(np.array(places, np.int64), 0, extent - 1)
            data = bb.normalize(relax.op.take(data, relax.const(picked), axis))
    return data


def places_along(extent: int, out: int, coordinates: str) -> list[Fraction]:
    """Where each of `out` elements comes from along an axis of `extent`."""
    if coordinates == "align_corners":
        return [Fraction(i * (extent - 1), max(out - 1, 1)) for i in range(out)]
    if coordinates == "asymmetric":
        return [Fraction(i * extent, out) for i in range(out)]
    if coordinates == "pytorch_half_pixel" and out == 1:
        return [Fraction(0)]
    if coordinates == "tf_half_pixel_for_nn":
        return [Fraction((2 * i + 1) * extent, 2 * out) for i in range(out)]
    return [Fraction((2 * i + 1) * extent - out, 2 * out) for i in range(out)]


def _spell_out_axes(inputs: list, axes: Sequence[int]) -> None:
    """Scales or sizes of all dimensions in the place of those of some."""
    extents = [int(extent) for extent in inputs[0].ty.shape.values]
    if inputs[1] is not None and (not isinstance(inputs[1], tvm.ir.GenericConst) or inputs[1].value.numpy().size):
        raise ValueError("it crops along some dimensions only: export the model with a region of all")
    for i, usual in ((2, np.ones(len(extents), np.float32)), (3, np.array(extents, np.int64))):
        if inputs[i] is None:
            continue
        if not isinstance(inputs[i], tvm.ir.GenericConst):
            raise ValueError("the scales or sizes of some dimensions are computed at run time")
        usual[[axis % len(extents) for axis in axes]] = inputs[i].value.numpy()
        inputs[i] = relax.const(usual)


def _order(extents: list[int], sizes: list[int], cropped: bool) -> list[int]:
    """The dimensions with two that stay as they are in front, as those of NHWC are not: TVM resizes the others."""
    if sizes[:2] == extents[:2]:
        return list(range(len(extents)))
    staying = [i for i, extent in enumerate(extents) if sizes[i] == extent][:2]
    if len(staying) < 2 or cropped:
        raise ValueError(
            f"it resizes {extents} to {sizes}: TVM leaves the first two dimensions as they are, and others are brought "
            "there only where two stay as they are and nothing is cropped"
        )
    return [*staying, *(i for i in range(len(extents)) if i not in staying)]
