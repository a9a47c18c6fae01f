"""Greatest and least elements along axes, for any target: infinity where all elements are infinite, NaN where one is;
and where they are.

TVM starts its maxima at the least finite number, so that of -inf alone it answers -3.4e38, and a NaN counts or does not
by what comes after it. Its schedules know no reduction that starts at -inf (`rfactor` asks for the identity it knows),
so a second one beside it looks whether there is any other element, or a NaN. Its index of the greatest starts at -1
with the least finite number, of which none but a greater one takes the place: of elements that are all as small it
answers -1, which is the first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

from tvm import relax, te, tirx, topi

from .choice import LegalizeFunc

_INFINITE, _FINITE, _NAN = 0.0, 1.0, 2.0
"""What an element is, the greatest of which says what the extremum is; "finite" is short for "not that infinity"."""


def _extremum(name: str, reduce: Callable[..., te.Tensor], empty: float) -> LegalizeFunc:
    """Legalise a `relax.max` or `relax.min`, whose result over nothing is `empty`."""

    def kinds(data: te.Tensor) -> te.Tensor:
        infinite, finite, not_a_number = (tirx.const(kind, data.dtype) for kind in (_INFINITE, _FINITE, _NAN))

        def kind(*i: tirx.Expr) -> tirx.Expr:
            value, start, least = data(*i), *(tirx.const(each, data.dtype) for each in (empty, -inf))
            # not `isnan`: the schedule rules take a call for work not to be repeated
            other = tirx.Select(tirx.GE(value, least), finite, not_a_number)
            return tirx.Select(tirx.EQ(value, start), infinite, other)

        return te.compute(data.shape, kind, name="kind")

    def compute(data: te.Tensor, axis: list | None, keepdims: bool) -> te.Tensor:
        found, kind = reduce(data, axis, keepdims), topi.max(kinds(data), axis, keepdims)
        start, none = (tirx.const(value, found.dtype) for value in (empty, nan))
        infinite, finite = (tirx.const(value, found.dtype) for value in (_INFINITE, _FINITE))

        def value(*i: tirx.Expr) -> tirx.Expr:
            number = tirx.Select(tirx.GT(kind(*i), infinite), found(*i), start)
            return tirx.Select(tirx.GT(kind(*i), finite), none, number)

        return te.compute(found.shape, value, name=f"T_{name}")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        (data,), keepdims = call.args, bool(call.attrs.keepdims)
        axis = None if call.attrs.axis is None else [int(a) for a in call.attrs.axis]
        if not str(data.ty.dtype).startswith(("float", "bfloat")):
            return builder.call_te(reduce, data, axis, keepdims, primfunc_name_hint=name)
        return builder.call_te(compute, data, axis, keepdims, primfunc_name_hint=name)

    return legalize


def _index(name: str, reduce: Callable[..., te.Tensor]) -> LegalizeFunc:
    """Legalise a `relax.argmax` or `relax.argmin`."""

    def compute(data: te.Tensor, axis: int | None, keepdims: bool) -> te.Tensor:
        found = reduce(data, axis, keepdims)
        first = tirx.const(0, found.dtype)
        return te.compute(found.shape, lambda *i: tirx.max(found(*i), first), name=f"T_{name}")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        axis = None if call.attrs.axis is None else int(call.attrs.axis)
        return builder.call_te(compute, call.args[0], axis, bool(call.attrs.keepdims), primfunc_name_hint=name)

    return legalize


EXTREMA: dict[str, LegalizeFunc] = {
    "relax.argmax": _index("argmax", topi.argmax),
    "relax.argmin": _index("argmin", topi.argmin),
    "relax.max": _extremum("max", topi.max, -inf),
    "relax.min": _extremum("min", topi.min, inf),
}
