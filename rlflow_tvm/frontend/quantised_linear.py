"""Operators of com.microsoft that take and give 8-bit integers: dequantised, computed in float32, quantised.

Where ONNX Runtime computes in whole numbers, or takes a sum in another order, a result may be the neighbouring number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlflow_tvm.frontend.expansion import Expansion
from rlflow_tvm.frontend.fusions import embedding
from rlflow_tvm.frontend.fusions_attention import self_attention
from rlflow_tvm.frontend.quantised import aligned, centred, product_in_floats

_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides")


def _floats(e: Expansion, place: int) -> str:
    """(x - zero) scale of x, scale and zero at `place`."""
    return e.add("Mul", centred(e, e.required(place), e.input(place + 2)).name, e.required(place + 1))


def _quantised(e: Expansion, x: str, place: int, like: str) -> str:
    """`x` quantised by the scale and the zero at `place`, that may be left out, to the type of `like`."""
    return e.add("QuantizeLinear", x, e.required(place), e.input(place + 1) or e.tensor(0, e.dtype(like)))


def _qlinear_add(e: Expansion) -> None:
    """A, B and C as value, scale and zero, without the value of C."""
    e.give(0, _quantised(e, e.add("Add", _floats(e, 0), _floats(e, 3)), 6, e.required(0)))


def _qlinear_mul(e: Expansion) -> None:
    """As `_qlinear_add`; the product is one of whole numbers."""
    product = e.add("Mul", *(centred(e, e.required(at), e.input(at + 2)).name for at in (0, 3)))
    scale = e.add("Div", e.add("Mul", e.required(1), e.required(4)), e.required(6))
    zero = e.input(7) or e.tensor(0, e.dtype(e.required(0)))
    e.give(0, e.add("QuantizeLinear", e.add("Mul", product, scale), e.tensor(1, np.float32), zero))


def _qlinear_unary(e: Expansion) -> None:
    """x, scale, zero, scale and zero of the result."""
    operator = e.node.op_type.removeprefix("QLinear")
    found = e.add(operator, _floats(e, 0), **e.passed("alpha"))
    e.give(0, _quantised(e, found, 3, e.required(0)))


def _qlinear_softmax(e: Expansion) -> None:
    """As `_qlinear_unary`; before opset 13, and where the attribute says so, of all axes from one on."""
    x = e.required(0)
    rank = len(e.shape(x))
    axis = e.attribute("axis", -1) % rank
    if axis != rank - 1 and min(e.attribute("opset", 13), e.graph.opset) < 13:
        e.refuse(f"along axis {axis} of {rank}", "quantise the model with opset 13 or newer")
    e.attribute("opset")
    e.give(0, _quantised(e, e.add("Softmax", _floats(e, 0), axis=axis), 3, x))


def _qlinear_pool(e: Expansion) -> None:
    """Averages of windows."""
    x = e.required(0)
    rank = len(e.shape(x))
    last = bool(e.attribute("channels_last", 0))
    values = _floats(e, 0)
    if last:
        values = e.add("Transpose", values, perm=[0, rank - 1, *range(1, rank - 1)])
    found = _quantised(e, e.add("AveragePool", values, **e.passed(*_POOL)), 3, x)
    e.give(0, e.add("Transpose", found, perm=[0, *range(2, rank), 1]) if last else found)


def _max_pool_of_last(e: Expansion) -> None:
    """The greatest of windows, the channels in the last axis; float32 holds 8 bits, and before opset 12 only floats are
    pooled."""
    x = e.required(0)
    rank = len(e.shape(x))
    image = e.add("Transpose", e.cast(x, np.float32), perm=[0, rank - 1, *range(1, rank - 1)])
    found = e.add("MaxPool", image, **e.passed(*(name for name in _POOL if name != "count_include_pad")))
    e.give(0, e.cast(e.add("Transpose", found, perm=[0, *range(2, rank), 1]), e.dtype(x)))


def _qlinear_global_pool(e: Expansion) -> None:
    """The mean of an image's whole numbers, whose sum float32 holds up to 65 793 of them."""
    x = e.required(0)
    shape = e.shape(x)
    axes = list(range(1, len(shape) - 1) if e.attribute("channels_last", 0) else range(2, len(shape)))
    count = np.prod([shape[axis] for axis in axes], dtype=np.int64)
    total = e.sum(centred(e, x, e.input(2)).name, axes)
    scale = e.add("Div", e.required(1), e.add("Mul", e.required(3), e.tensor(count, np.float32)))
    zero = e.input(4) or e.tensor(0, e.dtype(x))
    e.give(0, e.add("QuantizeLinear", e.add("Mul", total, scale), e.tensor(1, np.float32), zero))


def _qlinear_concat(e: Expansion) -> None:
    """Scale and zero of the result, then each value with its own."""
    places = range(2, len(e.node.input), 3)
    joined = e.add("Concat", *(_floats(e, place) for place in places), axis=e.needed("axis"))
    e.give(0, _quantised(e, joined, 0, e.required(2)))


def _qlinear_where(e: Expansion) -> None:
    """Condition, x and y as value, scale and zero, scale and zero of the result."""
    found = e.add("Where", e.required(0), _floats(e, 1), _floats(e, 4))
    e.give(0, _quantised(e, found, 7, e.required(1)))


def _quantize(e: Expansion) -> None:
    """The standard's operator, in the domain of ONNX Runtime for the sake of types that come with opset 21; of halves
    in float32, which holds 16 bits."""
    x, scale = e.required(0), e.required(1)
    zero = e.input(2) or e.tensor(0, np.uint8)
    dtype, axis = e.dtype(zero), e.attribute("axis", 1)
    if dtype not in (np.int8, np.uint8, np.int16, np.uint16):
        e.refuse(f"to {dtype}")
    rank, bounds = len(e.shape(x)), np.iinfo(dtype)
    numbers, step = (e.cast(each, np.float32) for each in (x, aligned(e, scale, axis, rank)))
    steps = e.add("Round", e.add("Div", numbers, step))
    moved = e.add("Add", steps, e.cast(aligned(e, zero, axis, rank), np.float32))
    ends = (e.tensor(bound, np.float32) for bound in (bounds.min, bounds.max))
    e.give(0, e.cast(e.add("Clip", moved, *ends), dtype))


def _dequantize(e: Expansion) -> None:
    """As `_quantize`."""
    x, scale, zero = e.required(0), e.required(1), e.input(2)
    dtype, axis, rank = e.dtype(x), e.attribute("axis", 1), len(e.shape(x))
    if dtype not in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
        e.refuse(f"of {dtype}")
    whole = e.cast(x, np.int32)
    if zero:
        whole = e.add("Sub", whole, e.cast(aligned(e, zero, axis, rank), np.int32))
    e.give(0, e.add("Mul", e.cast(whole, e.dtype(scale)), aligned(e, scale, axis, rank)))


def _quantised_attention(e: Expansion) -> None:
    """`Attention` of input, weight, bias, their two scales, mask, their two zeros, past."""
    x, weight = e.required(0), e.required(1)
    a, b = centred(e, x, e.input(6)), centred(e, weight, e.input(7), -1)
    projected = product_in_floats(e, a, b, e.required(3), e.required(4), e.required(2))
    self_attention(e, projected, (*e.shape(x)[:2], e.shape(weight)[1]), np.dtype(np.float32), (5, 8, -1))


def _quantised_embedding(e: Expansion) -> None:
    """`EmbedLayerNormalization` with tables, scale and shift of 8 bits: theirs are inputs 2 to 6, their scales 8 to 12
    and their zeros 13 to 17."""
    tables = []
    for place in range(2, 7):
        name, scale, zero = e.input(place), e.input(place + 6), e.input(place + 11)
        tables.append(e.add("Mul", centred(e, name, zero).name, scale) if name else "")
    embedding(e, tables, "", np.dtype(np.float32))


def _matmul_of_bits(e: Expansion) -> None:
    """A W + bias, the weights in blocks of their own scale and zero along their first axis, 2, 4 or 8 bits each, the
    first in a byte's lowest. ONNX Runtime may round A to 8 bits (`accuracy_level` 4); here it is not."""
    x, inner, columns = e.required(0), e.needed("K"), e.needed("N")
    bits, block = e.attribute("bits", 4), e.needed("block_size")
    blocks = -(-inner // block)
    e.attribute("accuracy_level")
    if e.attribute("weight_prepacked", 0) or bits not in (2, 4, 8):
        e.refuse(f"with weights of {bits} bits, or packed for one GPU", "quantise the model to 4 or 8 bits anew")
    packed, scales, zeros = e.constant(e.required(1)), e.constant(e.required(2)), e.constant(e.input(3))
    if packed is None or scales is None or (e.input(3) and zeros is None):
        e.refuse("with weights that are computed at run time", "export the model with them as constants")
    if packed.size != columns * blocks * block * bits // 8:
        e.refuse(f"with {packed.size} bytes of weights", "the model is damaged, quantise it again")
    if zeros is None:
        zeros = np.full((columns, blocks), 2 ** (bits - 1))
    elif zeros.dtype == np.uint8:
        zeros = _unpacked(zeros.reshape(columns, -1), bits)[:, :blocks]
    numbers = _unpacked(packed.reshape(columns, blocks, -1), bits) - zeros.reshape(columns, blocks, 1).astype(
        np.float32
    )
    weights = (numbers * scales.reshape(columns, blocks, 1)).reshape(columns, -1)[:, :inner]
    found = e.add("MatMul", x, e.tensor(weights.T, e.dtype(x)))
    e.give(0, e.add("Add", found, e.input(5)) if e.input(5) else found)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of so many bits in each byte, along the last axis."""
    parts = [packed >> at & 2**bits - 1 for at in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


QUANTISED_LINEAR: dict[str, Callable[[Expansion], None]] = {
    "DequantizeLinear": _dequantize,
    "MatMulNBits": _matmul_of_bits,
    "NhwcMaxPool": _max_pool_of_last,
    "QAttention": _quantised_attention,
    "QEmbedLayerNormalization": _quantised_embedding,
    "QLinearAdd": _qlinear_add,
    "QLinearAveragePool": _qlinear_pool,
    "QLinearConcat": _qlinear_concat,
    "QLinearGlobalAveragePool": _qlinear_global_pool,
    "QLinearLeakyRelu": _qlinear_unary,
    "QLinearMul": _qlinear_mul,
    "QLinearSigmoid": _qlinear_unary,
    "QLinearSoftmax": _qlinear_softmax,
    "QLinearWhere": _qlinear_where,
    "QuantizeLinear": _quantize,
}
"""Operators of com.microsoft."""
