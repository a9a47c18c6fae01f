"""`exp`, `log`, `erf`, `tanh`, `sigmoid` and powers with a constant exponent in forms that vectorise.

The code generator turns these intrinsics into one scalar library call an element; polynomials run in vector registers.
Only float32 is rewritten. Greatest errors over all finite inputs, measured against double precision:

| function | form | greatest error |
|---|---|---|
| exp | Cephes `expf`: 2^n * p(r), degree 5 | 2e-7 relative; 0 below -86.98, infinite above 88.72 |
| erf | Eigen `generic_fast_erf_float`: odd rational 13/8 | 5e-7 absolute |
| tanh | Eigen `generic_fast_tanh_float`: odd rational 13/6 | 5e-7 absolute |
| sigmoid | 1 / (1 + exp(-x)) | 3e-7 absolute; 1.6e-38 below -87 |
| log | Cephes `logf`: exponent * ln 2 + p(mantissa), degree 8 | 2e-7 relative and absolute; as at 1.18e-38 below it |
| pow, exponent 1, 2, 3, 4, 0.5 | products, square root | rounding |
| pow, other exponent, no integer | exp(exponent * log(x)) | (1 + 2 abs(exponent * ln x)) * 2e-7 relative |
Quotients are products with a reciprocal by Newton's method, which takes a quarter of a division's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import tirx

Unary = Callable[[tvm.ir.Expr], tvm.ir.Expr]

_LOG2_E = 1.44269504088896341
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MIN, _EXP_MAX = -87.6, 88.8  # 2^(n-1) has an exponent field from 0 (which is zero) to 254 there
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127

_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SQRT2 = 1.41421356237309505
_LARGEST = 3.4028234e38
_SMALLEST_NORMAL = 1.17549435e-38
_MANTISSA_MASK, _BITS_OF_ONE = 0x007FFFFF, 0x3F800000

_ERF_LIMIT = 4.0
_ERF_ODD = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_EVEN = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
             -1.42647390514189e-02)  # fmt: skip

_SIGMOID_LIMIT = 87.0
_RECIPROCAL_START = 0x7EF311C7  # minus the bits of x > 0: the bits of 1/x to 12 %

_TANH_LIMIT = 9.0
_TANH_ODD = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
_TANH_EVEN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def vectorisable_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with the intrinsics above replaced, in all its blocks; as it is where it computes with bfloat16, of which
    LLVM ends the process beside such forms."""
    if _holds_bfloat16(func):
        return func

    def replace(call: tvm.ir.Call) -> tvm.ir.Expr:
        name = getattr(call.op, "name", "")
        if name not in _HANDLED or str(call.ty.dtype) != "float32":
            return call
        if name == "tirx.pow":
            return _power(call)
        return _FORMS[name](call.args[0])

    return tvm_ffi.structural_map(func, (tvm.ir.Call, replace))


def _holds_bfloat16(func: tirx.PrimFunc) -> bool:
    found: list[tirx.Cast] = []
    tvm_ffi.structural_walk(func.body, (tirx.Cast, found.append))
    return any("bfloat16" in (str(cast.ty.dtype), str(cast.value.ty.dtype)) for cast in found)


def exp(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """e^x: x = n ln 2 + r with |r| <= ln(2)/2; 2^(n-1), which is finite up to n = 128, is written as exponent bits."""

    def body(clamped: tirx.Var) -> tvm.ir.Expr:
        def scaled(n: tirx.Var) -> tvm.ir.Expr:
            def result(r: tirx.Var) -> tvm.ir.Expr:
                fraction = _horner(r, _EXP) * (r * r) + r + _f32(1.0)
                bits = tirx.shift_left(n.astype("int32") + (_EXPONENT_BIAS - 1), _i32(_MANTISSA_BITS))
                return fraction * _f32(2.0) * tirx.reinterpret("float32", bits)

            return _let(clamped - n * _f32(_LN2_HIGH) - n * _f32(_LN2_LOW), result)

        return _let(tirx.floor(clamped * _f32(_LOG2_E) + _f32(0.5)), scaled)

    return _let(_clamp(x, _EXP_MIN, _EXP_MAX), body)


def log(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """ln x: x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)). NaN below 0, -inf at 0, inf at inf."""

    def of(value: tirx.Var) -> tvm.ir.Expr:
        bits = tirx.reinterpret("int32", tirx.max(value, _f32(_SMALLEST_NORMAL)))

        def split(word: tirx.Var) -> tvm.ir.Expr:
            mantissa = tirx.reinterpret("float32", (word & _MANTISSA_MASK) | _BITS_OF_ONE)
            exponent = tirx.shift_right(word, tirx.const(_MANTISSA_BITS, "int32")) - _EXPONENT_BIAS

            def halved(m: tirx.Var) -> tvm.ir.Expr:
                large = m > _f32(_SQRT2)
                fraction = tirx.Select(large, m * _f32(0.5), m) - _f32(1.0)
                power = (exponent + tirx.Select(large, _i32(1), _i32(0))).astype("float32")

                def joined(f: tirx.Var, e: tirx.Var) -> tvm.ir.Expr:
                    square = f * f
                    tail = _horner(f, _LOG) * f * square + e * _f32(_LN2_LOW) - _f32(0.5) * square
                    return f + tail + e * _f32(_LN2_HIGH)

                return _let(fraction, lambda f: _let(power, lambda e: joined(f, e)))

            return _let(mantissa, halved)

        infinite = tirx.Select(value > _f32(_LARGEST), value, _let(bits, split, "int32"))
        at_zero = tirx.Select(value == _f32(0.0), _f32(float("-inf")), infinite)
        return tirx.Select(value >= _f32(0.0), at_zero, _f32(float("nan")))

    return _let(x, of)


def erf(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """The error function, as a quotient of polynomials on [-4, 4]."""
    return _odd_rational(x, _ERF_LIMIT, _ERF_ODD, _ERF_EVEN)


def tanh(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """The hyperbolic tangent, as a quotient of polynomials on [-9, 9]."""
    return _odd_rational(x, _TANH_LIMIT, _TANH_ODD, _TANH_EVEN)


def sigmoid(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """1 / (1 + e^-x)."""
    # below -87 the reciprocal would be no normal number
    return _reciprocal(_f32(1.0) + exp(tirx.min(_f32(_SIGMOID_LIMIT), _f32(0.0) - x)))


_FORMS: dict[str, Unary] = {
    "tirx.exp": exp,
    "tirx.log": log,
    "tirx.erf": erf,
    "tirx.tanh": tanh,
    "tirx.sigmoid": sigmoid,
}
_HANDLED = frozenset({*_FORMS, "tirx.pow"})


def _power(call: tvm.ir.Call) -> tvm.ir.Expr:
    base, exponent = call.args
    if not isinstance(exponent, tirx.FloatImm):
        return call
    value = float(exponent.value)
    if value == 0.5:
        return tirx.sqrt(base)
    if value not in (1.0, 2.0, 3.0, 4.0):
        # an integer exponent of a negative base has a value, which the logarithm cannot give
        return call if value.is_integer() else exp(log(base) * _f32(value))

    def product(x: tirx.Var) -> tvm.ir.Expr:
        square = x * x
        return {1.0: x, 2.0: square, 3.0: square * x, 4.0: square * square}[value]

    return _let(base, product)


def _odd_rational(x: tvm.ir.Expr, limit: float, odd: Sequence[float], even: Sequence[float]) -> tvm.ir.Expr:
    """x * odd(x^2) / even(x^2), x clamped to [-limit, limit]; coefficients from the highest power down, of one sign."""
    if even[0] < 0:  # `_reciprocal` wants a positive denominator
        odd, even = [-c for c in odd], [-c for c in even]

    def of_clamped(clamped: tirx.Var) -> tvm.ir.Expr:
        return _let(
            clamped * clamped, lambda square: clamped * _horner(square, odd) * _reciprocal(_horner(square, even))
        )

    return _let(_clamp(x, -limit, limit), of_clamped)


def _reciprocal(x: tvm.ir.Expr) -> tvm.ir.Expr:
    """1/x for 1e-37 < x < 1e38: three steps of Newton's method, each of which squares the relative error."""

    def of(value: tirx.Var) -> tvm.ir.Expr:
        def step(estimate: tvm.ir.Expr, left: int) -> tvm.ir.Expr:
            if not left:
                return estimate
            return _let(estimate, lambda y: step(y * (_f32(2.0) - value * y), left - 1))

        return step(tirx.reinterpret("float32", _i32(_RECIPROCAL_START) - tirx.reinterpret("int32", value)), 3)

    return _let(x, of)


def _horner(x: tvm.ir.Expr, coefficients: Sequence[float]) -> tvm.ir.Expr:
    value = _f32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _f32(coefficient)
    return value


def _clamp(x: tvm.ir.Expr, low: float, high: float) -> tvm.ir.Expr:
    # in this order of operands a NaN stays one: min(a, b) is `a < b ? a : b`
    return tirx.max(_f32(low), tirx.min(_f32(high), x))


def _let(value: tvm.ir.Expr, body: Unary, dtype: str = "float32") -> tvm.ir.Expr:
    var = tirx.Var("t", dtype)
    return tirx.Let(var, value, body(var))


def _f32(value: float) -> tirx.FloatImm:
    return tirx.const(value, "float32")


def _i32(value: int) -> tirx.IntImm:
    return tirx.const(value, "int32")
