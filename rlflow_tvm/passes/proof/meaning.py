"""What each operator computes, in any domain: the semantics that rules are proved against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from rlflow_tvm.passes.proof.domains import Domain, Plane, Tensor, Unfit, check_room, each, shape_of
from rlflow_tvm.passes.proof.windows import (
    adaptive_avg_pool2d,
    avg_pool2d,
    conv2d,
    extreme,
    join_channels,
    max_pool2d,
    resize2d,
    split_channels,
)

Attributes = Mapping[str, Any]
Meaning = Callable[[Domain, list[Tensor], Attributes], Any]
"""(domain, operands, all attributes) -> a tensor, or a tuple of tensors where the operator gives several."""

ROOT_TWO = Fraction(1.4142135381698608)
"""The square root of 2 as a float32 holds it, which stands for it; exact arithmetic has none."""
_NAMED = ((2.0**0.5, ROOT_TWO), (0.5**0.5, 1 / ROOT_TWO))
_CLOSE = 1e-7  # what single precision does not tell from a named number is that number


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise Unfit(f"no axis {axis} of {rank}")
    return axis % rank


def _axes(axes: Any, rank: int) -> tuple[int, ...]:
    listed = range(rank) if axes is None else (axes,) if isinstance(axes, int) else axes
    found = tuple(_axis(axis, rank) for axis in listed)
    if len(set(found)) != len(found):
        raise Unfit(f"axes {axes} stand twice")
    return found


def number(domain: Domain, value: float | Fraction, like: Tensor) -> Tensor:
    if isinstance(value, float):
        value = next((exact for near, exact in _NAMED if abs(value - near) < _CLOSE), Fraction(value))
    return domain.constant(Fraction(value), like)


def negative(domain: Domain, x: Tensor) -> Tensor:
    dtype = x[0].dtype
    # of unsigned integers -1 is the greatest, and as such a number that they have
    return domain.multiply(x, number(domain, np.iinfo(dtype).max if dtype.kind == "u" else -1, x))


def _reciprocal(domain: Domain, x: Tensor) -> Tensor:
    return domain.divide(number(domain, 1, x), x)


def _sigmoid(domain: Domain, x: Tensor) -> Tensor:
    one = number(domain, 1, x)
    return domain.divide(one, domain.add(one, domain.exp(negative(domain, x))))


def _tanh(domain: Domain, x: Tensor) -> Tensor:
    one, twice = number(domain, 1, x), domain.exp(domain.add(x, x))
    return domain.divide(domain.add(twice, number(domain, -1, x)), domain.add(twice, one))


def _gelu(domain: Domain, x: Tensor) -> Tensor:
    erf = domain.function("erf", domain.divide(x, number(domain, ROOT_TWO, x)))
    half = domain.multiply(x, number(domain, Fraction(1, 2), x))
    return domain.multiply(half, domain.add(erf, number(domain, 1, x)))


def _gelu_tanh(domain: Domain, x: Tensor) -> Tensor:
    cubed = domain.multiply(number(domain, 0.044715, x), domain.multiply(x, domain.multiply(x, x)))
    tanh = _tanh(domain, domain.multiply(number(domain, (2 / np.pi) ** 0.5, x), domain.add(x, cubed)))
    half = domain.multiply(x, number(domain, Fraction(1, 2), x))
    return domain.multiply(half, domain.add(tanh, number(domain, 1, x)))


def _relu(domain: Domain, x: Tensor) -> Tensor:
    return domain.maximum(x, number(domain, 0, x))


def _leaky_relu(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    x = operands[0]
    below = negative(domain, _relu(domain, negative(domain, x)))
    return domain.add(_relu(domain, x), domain.multiply(below, number(domain, k["alpha"], x)))


UNARY: dict[str, Callable[[Domain, Tensor], Tensor]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda domain, x: domain.multiply(x, _sigmoid(domain, x)),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "exp": lambda domain, x: domain.exp(x),
    "erf": lambda domain, x: domain.function("erf", x),
    "sqrt": lambda domain, x: domain.function("sqrt", x),
    "rsqrt": lambda domain, x: _reciprocal(domain, domain.function("sqrt", x)),
    "negative": negative,
    "abs": lambda domain, x: x if x[0].dtype.kind == "u" else domain.maximum(x, negative(domain, x)),
}


BINARY: dict[str, Callable[[Domain, Tensor, Tensor], Tensor]] = {
    "add": lambda domain, a, b: domain.add(a, b),
    "subtract": lambda domain, a, b: domain.add(a, negative(domain, b)),
    "multiply": lambda domain, a, b: domain.multiply(a, b),
    "divide": lambda domain, a, b: domain.divide(a, b),
    "power": lambda domain, a, b: domain.function("power", a, b),
    "maximum": lambda domain, a, b: domain.maximum(a, b),
    "minimum": lambda domain, a, b: domain.minimum(a, b),
}


def _unary(name: str) -> Meaning:
    return lambda domain, operands, k: UNARY[name](domain, operands[0])


def _binary(name: str) -> Meaning:
    def meaning(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
        a, b = operands
        if a[0].dtype != b[0].dtype:
            raise Unfit(f"{name} of {a[0].dtype} and {b[0].dtype}")
        try:
            np.broadcast_shapes(shape_of(a), shape_of(b))
        except ValueError as error:
            raise Unfit(str(error)) from None
        return BINARY[name](domain, a, b)

    return meaning


def matmul(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    a, b = operands
    rows, columns = len(shape_of(a)) > 1, len(shape_of(b)) > 1
    if not shape_of(a) or not shape_of(b) or a[0].dtype != b[0].dtype:
        raise Unfit("a scalar, or two types, in a matrix product")
    if k["out_dtype"] not in (None, "", "void"):
        a, b = domain.cast(a, k["out_dtype"]), domain.cast(b, k["out_dtype"])
    a = a if rows else each(lambda plane: plane[None], a)
    b = b if columns else each(lambda plane: plane[:, None], b)
    if shape_of(a)[-1] != shape_of(b)[-2]:
        raise Unfit(f"{shape_of(a)} times {shape_of(b)}")
    try:
        np.broadcast_shapes(shape_of(a)[:-2], shape_of(b)[:-2])
    except ValueError as error:
        raise Unfit(str(error)) from None
    left, right = each(lambda plane: plane[..., None], a), each(lambda plane: plane[..., None, :, :], b)
    y = domain.total(domain.multiply(left, right), (-2,))
    dropped = tuple(axis for axis, kept in ((-2, rows), (-1, columns)) if not kept)
    return each(lambda plane: np.asarray(plane.squeeze(dropped), plane.dtype), y) if dropped else y


def reduce_sum(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,) = operands
    axes = _axes(k["axis"], len(shape_of(x)))
    total = domain.total(x, axes) if axes else x
    return each(lambda plane: np.expand_dims(plane, tuple(sorted(axes))), total) if k["keepdims"] else total


def reduce_mean(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    total = reduce_sum(domain, operands, k)
    count = prod(shape_of(operands[0])[axis] for axis in _axes(k["axis"], len(shape_of(operands[0]))))
    return domain.divide(total, number(domain, count, total))


def _extreme(name: str) -> Meaning:
    def meaning(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
        (x,) = operands
        axes = _axes(k["axis"], len(shape_of(x)))
        found = extreme(BINARY[name], domain, x, axes) if axes else x
        return each(lambda plane: np.expand_dims(plane, tuple(sorted(axes))), found) if k["keepdims"] else found

    return meaning


def _normalised(domain: Domain, x: Tensor, k: Attributes) -> Tensor:
    """`x` over the root of its mean square over the axes."""
    over = {"axis": k["axes"], "keepdims": True}
    power = domain.add(reduce_mean(domain, [domain.multiply(x, x)], over), number(domain, Fraction(k["epsilon"]), x))
    return domain.divide(x, domain.function("sqrt", power))


def _affine(x: Tensor, weight: Tensor, axes: tuple[int, ...]) -> None:
    if shape_of(weight) != tuple(shape_of(x)[axis] for axis in axes) or list(axes) != sorted(axes):
        raise Unfit(f"{shape_of(weight)} does not scale the axes {axes} of {shape_of(x)}")
    if axes != tuple(range(len(shape_of(x)) - len(axes), len(shape_of(x)))) or not axes:
        raise Unfit("only the last axes are normalised")
    if x[0].dtype != weight[0].dtype:
        raise Unfit("operands of several types")


def layer_norm(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    x, scale, shift = operands
    if not (k["center"] and k["scale"]):
        raise Unfit("TVM scales and shifts in any case")
    axes = _axes(k["axes"], len(shape_of(x)))
    _affine(x, scale, axes)
    _affine(x, shift, axes)
    mean = reduce_mean(domain, [x], {"axis": k["axes"], "keepdims": True})
    centred = domain.add(x, negative(domain, mean))
    return domain.add(domain.multiply(_normalised(domain, centred, k), scale), shift)


def rms_norm(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    x, scale = operands
    if len(shape_of(scale)) == len(shape_of(x)):
        raise Unfit("TVM makes no kernel of it")
    _affine(x, scale, _axes(k["axes"], len(shape_of(x))))
    return domain.multiply(_normalised(domain, x, k), scale)


def take(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    x, indices = operands
    axis = _axis(k["axis"], len(shape_of(x)))
    if indices[0].dtype != np.int64:
        raise Unfit(f"{indices[0].dtype} are no positions")
    # (NumPy's own wrapping subtracts the extent again and again)
    extent, positions = shape_of(x)[axis], indices[0]
    if k["mode"] == "wrap" and extent:
        positions = positions % extent
    elif k["mode"] == "clip" and extent:
        positions = np.clip(positions, 0, extent - 1)
    return each(lambda plane: np.asarray(plane.take(positions, axis), plane.dtype), x)


def broadcast_to(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,), shape = operands, k["shape"]
    try:
        fits = np.broadcast_shapes(shape_of(x), shape) == tuple(shape)
    except ValueError:
        fits = False
    if not fits:
        raise Unfit(f"{shape_of(x)} to {shape}")
    check_room(*shape)
    return each(lambda plane: np.broadcast_to(plane, shape), x)


def expand_dims(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,) = operands
    axes = _axes(k["axis"], len(shape_of(x)) + len(k["axis"]))
    return each(lambda plane: np.expand_dims(plane, axes), x)


def squeeze(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,) = operands
    axes = _axes(k["axis"], len(shape_of(x)))
    if any(shape_of(x)[axis] != 1 for axis in axes):
        raise Unfit(f"{shape_of(x)} without the axes {axes}")
    return each(lambda plane: np.asarray(plane.squeeze(axes), plane.dtype), x)


def softmax(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    exponentials = domain.exp(operands[0])
    total = reduce_sum(domain, [exponentials], {"axis": k["axis"], "keepdims": True})
    return domain.divide(exponentials, total)


def pad(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,) = operands
    widths, rank = k["pad_width"], len(shape_of(x))
    if k["pad_mode"] != "constant" or len(widths) != 2 * rank or any(width < 0 for width in widths):
        raise Unfit("only padding with a constant is known")
    value = number(domain, k["pad_value"], x)
    pairs = [(widths[2 * axis], widths[2 * axis + 1]) for axis in range(rank)]
    check_room(*(extent + sum(pair) for extent, pair in zip(shape_of(x), pairs, strict=True)))
    return each(lambda plane, filler: np.pad(plane, pairs, constant_values=filler[()]) if rank else plane, x, value)


def reshape(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,), shape = operands, k["shape"]
    if prod(shape) != prod(shape_of(x)) or any(extent < 1 for extent in shape):
        raise Unfit(f"{shape_of(x)} as {shape}")
    return each(lambda plane: plane.reshape(shape), x)


def permute_dims(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    (x,), axes = operands, k["axes"]
    if sorted(axes) != list(range(len(shape_of(x)))):
        raise Unfit(f"{axes} permute nothing of rank {len(shape_of(x))}")
    return each(lambda plane: plane.transpose(axes), x)


def split(domain: Domain, operands: list[Tensor], k: Attributes) -> tuple[Tensor, ...]:
    (x,) = operands
    axis = _axis(k["axis"], len(shape_of(x)))
    bounds = (0, *k["at"], shape_of(x)[axis])
    if any(a >= b for a, b in pairwise(bounds)):
        raise Unfit(f"{shape_of(x)} split at {k['at']}")
    before = (slice(None),) * axis
    return tuple(
        each(lambda plane, a=a, b=b: plane[(*before, slice(a, b))], x)  # type: ignore[misc]
        for a, b in pairwise(bounds)
    )


def concat(domain: Domain, operands: list[Tensor], k: Attributes) -> Tensor:
    ranks = {len(shape_of(x)) for x in operands}
    if len(ranks) != 1 or len({x[0].dtype for x in operands}) != 1:
        raise Unfit("operands of several ranks or types")
    axis = _axis(k["axis"], ranks.pop())
    if len({(*shape_of(x)[:axis], *shape_of(x)[axis + 1 :]) for x in operands}) != 1:
        raise Unfit("operands that differ along other axes")
    return each(lambda *planes: np.concatenate(planes, axis), *operands)


def _layout(move: Callable[[Plane, int], Plane]) -> Meaning:
    return lambda domain, operands, k: each(lambda plane: move(plane, k["block"]), operands[0])


def _unpacked(plane: Plane, block: int) -> Plane:
    if plane.ndim != 5 or plane.shape[-1] != block:
        raise Unfit(f"{plane.shape} is not blocked by {block}")
    return join_channels(plane)


MEANINGS: dict[str, Meaning] = {
    **{name: _unary(name) for name in UNARY},
    **{name: _binary(name) for name in BINARY},
    "leaky_relu": _leaky_relu,
    "matmul": matmul,
    "conv2d": conv2d,
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": adaptive_avg_pool2d,
    "resize2d": resize2d,
    "mean": reduce_mean,
    "sum": reduce_sum,
    "max": _extreme("maximum"),
    "min": _extreme("minimum"),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "take": take,
    "broadcast_to": broadcast_to,
    "expand_dims": expand_dims,
    "squeeze": squeeze,
    "softmax": softmax,
    "pad": pad,
    "reshape": reshape,
    "permute_dims": permute_dims,
    "split": split,
    "concat": concat,
    "pack": _layout(split_channels),
    "unpack": _layout(_unpacked),
    "pack_kernel": _layout(lambda plane, block: split_channels(plane, block, 0)),
}

ORDERED = frozenset({"relu", "leaky_relu", "abs", "maximum", "minimum", "max_pool2d", "max", "min"})
"""Operators that compare: not for prime fields."""

EXPONENTIAL = frozenset({"exp", "sigmoid", "silu", "tanh", "gelu_tanh", "softmax"})
"""Operators whose laws only the prime fields know."""


def meaning(name: str, domain: Domain, operands: Sequence[Tensor], attributes: Attributes) -> Any:
    """What the operator `name` gives. `Unfit` for operands or attributes that it does not take; `Undefined` for values
    that are none (division by zero, or an operator that the domain does not have)."""
    try:
        return MEANINGS[name](domain, list(operands), attributes)
    except (IndexError, OverflowError, TypeError, ValueError) as error:  # of positions, axes, numbers that do not fit
        raise Unfit(f"{name}: {error}") from error
