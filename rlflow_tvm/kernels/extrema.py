"""Greatest and least elements along axes, for any target, with infinity where all elements are infinite.

TVM starts its maxima at the least finite number, so that of -inf alone it answers -3.4e38. Its schedules know no
reduction that starts at -inf (`rfactor` asks for the identity it knows), so a second one beside it looks whether there
is any other element.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from tvm import relax, te, tirx, topi

LegalizeFunc = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def _extremum(name: str, reduce: Callable[..., te.Tensor], empty: float) -> LegalizeFunc:
    """Legalise a `relax.max` or `relax.min`, whose result over nothing is `empty`."""

    def compute(data: te.Tensor, axis: list | None, keepdims: bool) -> te.Tensor:
        found = reduce(data, axis, keepdims)
        if not str(data.dtype).startswith(("float", "bfloat")):
            return found
        start = tirx.const(empty, data.dtype)
        zero, one = (tirx.const(value, data.dtype) for value in (0.0, 1.0))
        other = te.compute(
            data.shape, lambda *i: tirx.Select(tirx.Not(tirx.EQ(data(*i), start)), one, zero), name="other"
        )
        others = topi.max(other, axis, keepdims)
        return te.compute(
            found.shape, lambda *i: tirx.Select(tirx.GT(others(*i), zero), found(*i), start), name=f"T_{name}"
        )

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        axis = None if call.attrs.axis is None else [int(a) for a in call.attrs.axis]
        return builder.call_te(compute, call.args[0], axis, bool(call.attrs.keepdims), primfunc_name_hint=name)

    return legalize


EXTREMA: dict[str, LegalizeFunc] = {
    "relax.max": _extremum("max", topi.max, -inf),
    "relax.min": _extremum("min", topi.min, inf),
}
