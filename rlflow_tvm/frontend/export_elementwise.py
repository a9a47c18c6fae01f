"""Element-wise operators of Relax in ONNX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isinf, prod, sqrt
from typing import Any

from tvm import relax

from rlflow_tvm.frontend.inputs import numpy_dtype
from rlflow_tvm.frontend.writer import Writer, dtype_of, shape_of

Exporter = Callable[[Writer, relax.Call, list[Any]], Any]
"""(writer, call, arguments) -> the name of the call's value, a tuple of names for a tuple. Arguments are names, tuples
of names, and what is no tensor as it stands in the call."""

_SAME = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "add": "Add", "asin": "Asin", "asinh": "Asinh", "atan": "Atan",
    "atanh": "Atanh", "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "divide": "Div", "equal": "Equal", "erf": "Erf",
    "exp": "Exp", "floor": "Floor", "greater": "Greater", "greater_equal": "GreaterOrEqual", "isinf": "IsInf",
    "isnan": "IsNaN", "less": "Less", "less_equal": "LessOrEqual", "log": "Log", "logical_and": "And",
    "logical_not": "Not", "logical_or": "Or", "logical_xor": "Xor", "maximum": "Max", "minimum": "Min",
    "multiply": "Mul", "negative": "Neg", "nn.relu": "Relu", "nn.selu": "Selu", "power": "Pow", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt", "subtract": "Sub", "tan": "Tan",
    "tanh": "Tanh", "where": "Where",
}  # fmt: skip
"""Relax's name -> ONNX's, where they mean the same."""

_BITWISE = {"and": "And", "or": "Or", "xor": "Xor", "not": "Not"}
_ROOT_OF_2 = sqrt(2.0)
_GELU_OPSET = 20
_ALMOST_LINEAR = 15.0  # from here on log(1 + exp(x)) is x in float32


def _same(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node(op, *args)


def _bitwise(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node(op if dtype_of(call) == "bool" else f"Bitwise{op}", *args)


def _shift(direction: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    if not dtype_of(call).startswith("uint"):
        raise w.refusal(f"it shifts {dtype_of(call)}, ONNX shifts unsigned integers only: cast to one first")
    return w.node("BitShift", *args, direction=direction)


def _floor_divide(w: Writer, call: relax.Call, args: list[Any]) -> str:
    a, b = args
    if _is_float(call):
        return w.node("Floor", w.node("Div", a, b))
    return w.node("Div", w.node("Sub", a, w.node("Mod", a, b)), b)  # Div rounds towards zero: there is nothing left


def _floor_mod(w: Writer, call: relax.Call, args: list[Any]) -> str:
    a, b = args
    if _is_float(call):
        return w.node("Sub", a, w.node("Mul", w.node("Floor", w.node("Div", a, b)), b))
    return w.node("Mod", a, b)


def _mod(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Mod", *args, fmod=1)


def _not_equal(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Not", w.node("Equal", *args))


def _isfinite(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Not", w.node("Or", w.node("IsInf", args[0]), w.node("IsNaN", args[0])))


def _rsqrt(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Reciprocal", w.node("Sqrt", args[0]))


def _square(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Mul", args[0], args[0])


def _trunc(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Mul", w.node("Sign", args[0]), w.node("Floor", w.node("Abs", args[0])))


def _silu(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Mul", args[0], w.node("Sigmoid", args[0]))


def _gelu(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016), as exporters write it and runtimes recognise it."""
    x, dtype = args[0], dtype_of(call)
    if w.opset >= _GELU_OPSET:
        return w.node("Gelu", x)
    gate = w.node("Add", w.node("Erf", w.node("Div", x, w.number(_ROOT_OF_2, dtype))), w.number(1, dtype))
    return w.node("Mul", w.node("Mul", x, gate), w.number(0.5, dtype))


def _gelu_tanh(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))"""
    x, dtype = args[0], dtype_of(call)
    if w.opset >= _GELU_OPSET:
        return w.node("Gelu", x, approximate="tanh")
    cube = w.node("Mul", w.node("Mul", x, w.node("Mul", x, x)), w.number(0.044715, dtype))
    inner = w.node("Mul", w.node("Add", x, cube), w.number(0.7978845608028654, dtype))
    gate = w.node("Add", w.node("Tanh", inner), w.number(1, dtype))
    return w.node("Mul", w.node("Mul", x, gate), w.number(0.5, dtype))


def _leaky_relu(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("LeakyRelu", args[0], alpha=float(call.attrs.alpha))


def _softplus(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold: there it is that to within rounding,
    unless the threshold is low."""
    x, dtype = args[0], dtype_of(call)
    beta, threshold = float(call.attrs.beta), float(call.attrs.threshold)
    number = w.number(beta, dtype)
    scaled = x if beta == 1 else w.node("Mul", x, number)
    result = w.node("Softplus", scaled)
    result = result if beta == 1 else w.node("Div", result, number)
    if threshold >= _ALMOST_LINEAR:
        return result
    return w.node("Where", w.node("Greater", scaled, w.number(threshold, dtype)), x, result)


def _prelu(w: Writer, call: relax.Call, args: list[Any]) -> str:
    x, slope = args
    rank, extents = len(shape_of(call.args[0])), shape_of(call.args[1])
    if len(extents) == 1:
        slope = w.reshape(slope, [*extents, *[1] * (rank - 1 - int(call.attrs.axis) % rank)])
    return w.node("PRelu", x, slope)


def _clip(w: Writer, call: relax.Call, args: list[Any]) -> str:
    dtype = dtype_of(call)
    bounds = [float(bound.value) for bound in call.args[1:]]
    kept = [bound != none for bound, none in zip(bounds, (-inf, inf), strict=True)]
    if not _is_float(call):
        limits = numpy_dtype(dtype)
        if any(
            keep and (isinf(bound) or limits.type(bound) != bound) for keep, bound in zip(kept, bounds, strict=True)
        ):
            raise w.refusal(f"its bounds {bounds} are no numbers of {limits}")
    # where the result is infinite both are given: without one ONNX Runtime stops at the largest float
    kept = [True, True] if any(keep and isinf(b) for keep, b in zip(kept, bounds, strict=True)) else kept
    low, high = (w.number(bound, dtype) if keep else "" for keep, bound in zip(kept, bounds, strict=True))
    return w.node("Clip", args[0], low, high)


def _cast(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.cast(args[0], dtype_of(call))


def _dropout(w: Writer, call: relax.Call, args: list[Any]) -> tuple[str, str]:
    """In inference: what comes in, and a mask of ones."""
    one = w.number(1, dtype_of(call.args[0]))
    return args[0], w.node("Expand", one, w.ints(shape_of(call.args[0])))


def _quantize(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    data, scale, point = call.args
    narrow = dtype_of(call if op == "QuantizeLinear" else data)
    wide = {dtype_of(scale), dtype_of(data if op == "QuantizeLinear" else call)}
    if narrow not in ("int8", "uint8") or dtype_of(point) != narrow or wide != {"float32"}:
        raise w.refusal(
            f"it takes {dtype_of(data)} by {dtype_of(scale)} and {dtype_of(point)} to {dtype_of(call)}, ONNX Runtime "
            "float32 to int8 or uint8, and back"
        )
    shape = max((shape_of(each) for each in (scale, point)), key=prod)
    if prod(shape) == 1:
        parameters = [w.reshape(name, ()) for name in args[1:]]
    else:  # one of them may be a single number
        parameters = [w.node("Expand", name, w.ints(shape)) for name in args[1:]]
    axis = int(call.attrs.axis) % max(len(shape_of(data)), 1)
    return w.node(op, args[0], *parameters, axis=None if prod(shape) == 1 else axis)


def _is_float(call: relax.Call) -> bool:
    return "float" in dtype_of(call)


ELEMENTWISE: dict[str, Exporter] = {
    **{name: partial(_same, op) for name, op in _SAME.items()},
    **{f"bitwise_{name}": partial(_bitwise, op) for name, op in _BITWISE.items()},
    "astype": _cast,
    "clip": _clip,
    "dequantize": partial(_quantize, "DequantizeLinear"),
    "floor_divide": _floor_divide,
    "floor_mod": _floor_mod,
    "isfinite": _isfinite,
    "left_shift": partial(_shift, "LEFT"),
    "mod": _mod,
    "nn.dropout": _dropout,
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.leakyrelu": _leaky_relu,
    "nn.prelu": _prelu,
    "nn.silu": _silu,
    "nn.softplus": _softplus,
    "not_equal": _not_equal,
    "quantize": partial(_quantize, "QuantizeLinear"),
    "right_shift": partial(_shift, "RIGHT"),
    "rsqrt": _rsqrt,
    "square": _square,
    "trunc": _trunc,
}
