"""Products and convolutions of 8-bit integers, by standard operators of float32 and yet exactly.

float32 holds every whole number up to 2^24, and with them every sum of whole numbers whose magnitudes add up to no
more, in whichever order it is taken. A longer sum is taken in parts that keep below, and these are added as int32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlflow_tvm.frontend.expansion import Expansion

_EXACT = 2**24
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@dataclass(frozen=True)
class Whole:
    """A tensor of whole numbers in float32, zero at 0."""

    name: str
    shape: tuple[int, ...]
    most: float
    """No element's magnitude is above."""
    magnitudes: np.ndarray | None
    """Of the elements, where they are known."""


def centred(e: Expansion, x: str, zero: str, along: int | None = None) -> Whole:
    """x - zero. `along`: of the axis along which there may be a zero for each element, None where the numbers of zeros
    are broadcast to those of x."""
    shape, dtype = e.shape(x), e.dtype(x)
    if dtype not in (np.int8, np.uint8):
        e.refuse(f"of {dtype}", "only int8 and uint8 are supported, quantise the model to one of these")
    if zero and along is not None and len(e.shape(zero)) == 1 and e.shape(zero)[0] > 1:
        zero = aligned(e, zero, along, len(shape))
    values, point = e.constant(x), np.int32(0) if not zero else e.constant(zero)
    if values is not None and point is not None:
        whole = values.astype(np.int32) - point.astype(np.int32)
        magnitudes = np.abs(whole)
        return Whole(e.tensor(whole, np.float32), shape, float(magnitudes.max(initial=0)), magnitudes)
    bounds = np.iinfo(dtype)
    most = 255 if point is None else max(bounds.max - int(point.min()), int(point.max()) - bounds.min)
    wide = e.cast(x, np.float32)
    if point is None or point.any():
        wide = e.add("Sub", wide, e.cast(zero, np.float32))
    return Whole(wide, shape, most, None)


def aligned(e: Expansion, vector: str, axis: int, rank: int) -> str:
    """A vector, in the shape in which it goes along `axis` of a tensor; other shapes are left."""
    shape = e.shape(vector)
    if len(shape) != 1 or shape[0] == 1:
        return vector
    behind = rank - 1 - axis % rank
    values = e.constant(vector)
    if values is not None:
        return e.tensor(values.reshape([-1] + [1] * behind), values.dtype)
    return e.reshape(vector, [-1] + [1] * behind)


def exact_matmul(e: Expansion, a: Whole, b: Whole) -> str:
    """A B, int32."""
    axis = max(len(b.shape) - 2, 0)
    inner = b.shape[axis]
    if b.magnitudes is not None:
        sums = np.moveaxis(b.magnitudes, axis, -1).reshape(-1, inner) * a.most
    elif a.magnitudes is not None:
        sums = a.magnitudes.reshape(-1, inner) * b.most
    else:
        sums = np.full((1, inner), a.most * b.most)
    found = []
    for begin, end in _parts(e, sums):
        operands = [a.name, b.name]
        if end - begin < inner:
            operands = [e.slice(a.name, len(a.shape) - 1, begin, end), e.slice(b.name, axis, begin, end)]
        found.append(e.cast(e.add("MatMul", *operands), np.int32))
    return _added(e, found)


def exact_conv(e: Expansion, x: Whole, w: Whole) -> str:
    """The convolution of `x` with filters `w`, by the node's own attributes, int32."""
    attrs = e.passed(*_CONV)
    groups, inner = attrs.get("group", 1), w.shape[1]
    magnitudes = np.full((1, *w.shape[1:]), w.most) if w.magnitudes is None else w.magnitudes
    sums = magnitudes.reshape(len(magnitudes), inner, -1).sum(-1) * x.most
    found = []
    for begin, end in _parts(e, sums):
        image, filters = x.name, w.name
        if end - begin < inner:
            channels = np.arange(groups)[:, None] * inner + np.arange(begin, end)
            image = e.add("Gather", image, e.tensor(channels.reshape(-1), np.int64), axis=1)
            filters = e.slice(filters, 1, begin, end)
        found.append(e.cast(e.add("Conv", image, filters, **attrs), np.int32))
    return _added(e, found)


def _parts(e: Expansion, sums: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of columns, as few as can be, whose sums in each row are exact."""
    bounds, total = [0], np.zeros(len(sums))
    for i, column in enumerate(sums.T):
        if column.max() > _EXACT:
            e.refuse("with filters whose sums may be above 2^24 in one channel", "leave it in float32")
        total = total + column
        if total.max() > _EXACT:
            bounds.append(i)
            total = column
    bounds.append(sums.shape[1])
    return list(itertools.pairwise(bounds))


def _added(e: Expansion, names: Sequence[str]) -> str:
    total = names[0]
    for name in names[1:]:
        total = e.add("Add", total, name)
    return total


def _conv_integer(e: Expansion) -> None:
    e.give(0, exact_conv(e, centred(e, e.required(0), e.input(2)), centred(e, e.required(1), e.input(3), 0)))


def _matmul_integer(e: Expansion) -> None:
    """A vector of zeros is one for each row of A, and one for each column of B."""
    e.give(0, exact_matmul(e, centred(e, e.required(0), e.input(2), -2), centred(e, e.required(1), e.input(3), -1)))


def _factor(e: Expansion, first: str, second: str, below: str = "") -> str:
    """first * second / below, in float32 and in the order in which ONNX Runtime takes them."""
    product = e.add("Mul", first, second)
    return e.add("Div", product, below) if below else product


def rescaled(e: Expansion, whole: str, factor: str, zero: str) -> str:
    """int32 * factor + zero, rounded half to even and saturated."""
    scaled = e.add("Mul", e.cast(whole, np.float32), factor)
    return e.add("QuantizeLinear", scaled, e.tensor(1, np.float32), zero)


def _qlinear_conv(e: Expansion) -> None:
    """x, scale, zero, w, scale, zero, scale and zero of the result, bias as int32."""
    x, w, bias = e.required(0), e.required(3), e.input(8)
    rank = len(e.shape(x))
    last = bool(e.attribute("channels_last", 0))
    image = centred(e, x, e.required(2))
    if last:
        turned = e.add("Transpose", image.name, perm=[0, rank - 1, *range(1, rank - 1)])
        image = Whole(turned, (), image.most, None)
    whole = exact_conv(e, image, centred(e, w, e.required(5), 0))
    if bias:
        whole = e.add("Add", whole, aligned(e, bias, 1, rank))
    factor = _factor(e, e.required(1), aligned(e, e.required(4), 1, rank), e.required(6))
    found = rescaled(e, whole, factor, e.required(7))
    e.give(0, e.add("Transpose", found, perm=[0, *range(2, rank), 1]) if last else found)


def _qlinear_matmul(e: Expansion) -> None:
    """a, scale, zero, b, scale, zero, scale and zero of the result."""
    a, b = e.required(0), e.required(3)
    if any(math.prod(e.shape(e.required(place))) != 1 for place in (6, 7)):
        e.refuse("with a scale or a zero of each row of its result", "quantise the model with one for all")
    whole = exact_matmul(e, centred(e, a, e.required(2), -2), centred(e, b, e.required(5), -1))
    rows = aligned(e, e.required(1), -2, len(e.shape(a)))
    e.give(0, rescaled(e, whole, _factor(e, rows, e.required(4), e.required(6)), e.required(7)))


def _qgemm(e: Expansion) -> None:
    """alpha A B + C of a, scale, zero, b, scale, zero, C as int32; quantised where a scale and a zero follow."""
    operands = []
    for place, flag, columns in ((0, "transA", False), (3, "transB", True)):
        name, zero = e.required(place), e.required(place + 2)
        turned = bool(e.attribute(flag, 0))
        found = centred(e, name, zero, 0 if columns and turned else 1 if columns else 0)
        if turned:
            seen = None if found.magnitudes is None else found.magnitudes.T
            found = Whole(e.add("Transpose", found.name, perm=[1, 0]), found.shape[::-1], found.most, seen)
        operands.append(found)
    whole = exact_matmul(e, *operands)
    if e.input(6):
        whole = e.add("Add", whole, e.input(6))
    scale = e.add("Mul", e.required(1), e.tensor(e.attribute("alpha", 1.0), np.float32))
    factor = _factor(e, scale, e.required(4), e.input(7))
    if e.input(7):
        e.give(0, rescaled(e, whole, factor, e.required(8)))
    else:
        e.give(0, e.add("Mul", e.cast(whole, np.float32), factor))


def product_in_floats(e: Expansion, a: Whole, b: Whole, first: str, second: str, bias: str) -> str:
    """A B * first * second + bias, float32."""
    found = e.add("Mul", e.cast(exact_matmul(e, a, b), np.float32), _factor(e, first, second))
    return e.add("Add", found, bias) if bias else found


def _matmul_integer_to_float(e: Expansion) -> None:
    """A, B, their scales, their zeros, bias."""
    a, b = centred(e, e.required(0), e.input(4)), centred(e, e.required(1), e.input(5), -1)
    e.give(0, product_in_floats(e, a, b, e.required(2), e.required(3), e.input(6)))


def _dynamic_quantize_matmul(e: Expansion) -> None:
    """A in float32, quantised by what it holds; B, its scale, its zero, bias."""
    x = e.required(0)
    numbers, scale, zero = e.add("DynamicQuantizeLinear", x, outputs=3)
    wide = e.add("Sub", e.cast(numbers, np.float32), e.cast(zero, np.float32))
    b = centred(e, e.required(1), e.input(3), -1)
    e.give(0, product_in_floats(e, Whole(wide, e.shape(x), 255, None), b, scale, e.required(2), e.input(4)))


QUANTISED: dict[str, Callable[[Expansion], None]] = {
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
"""The standard's operators."""

QUANTISED_PRODUCTS: dict[str, Callable[[Expansion], None]] = {
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "QGemm": _qgemm,
    "QLinearConv": _qlinear_conv,
}
"""Operators of com.microsoft."""
