"""What stands between blocked layouts, written in the plain one: then nothing has to be turned there and back.

Rules leave whole networks in blocks, where a convolution reads what an addition, a ReLU and a concatenation make of
another one's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from rlflow_tvm.frontend.export_elementwise import ELEMENTWISE, Exporter
from rlflow_tvm.frontend.layouts import parts_of, relayout, shape_in
from rlflow_tvm.frontend.writer import Turn, Writer, axes_of, shape_of

_BY_ELEMENT = frozenset(ELEMENTWISE) - {"nn.dropout", "nn.prelu"}  # these two look at their operand's shape
_REDUCED = {"max": "ReduceMax", "mean": "ReduceMean", "min": "ReduceMin", "sum": "ReduceSum"}


def export_unblocked(w: Writer, call: relax.Call, operator: str, args: list[Any], export: Exporter) -> str | None:
    """The value of a call over blocked tensors, computed from the plain ones and laid out in blocks at last (which is
    dropped if nobody reads it there); None for any other call, and where the plain ones are not known."""
    if operator == "concat" and isinstance(call.args[0], relax.Tuple):
        operands, exprs = list(args[0]), list(call.args[0].fields)
    elif operator in _BY_ELEMENT or (operator in _REDUCED and call.attrs.keepdims):
        operands, exprs = args, list(call.args)
    else:
        return None
    way = next((known[1] for x in operands if isinstance(x, str) and (known := w.unblocked(x))), None)
    if way is None:
        return None
    plain = [_plain(w, x, expr, way) for x, expr in zip(operands, exprs, strict=True)]
    if None in plain:
        return None
    if operator in _BY_ELEMENT:
        result = export(w, call, plain)
    else:
        given = call.attrs.axis
        axes = None if given is None else _plain_axes(axes_of(given, len(shape_of(call))), way, operator == "concat")
        if axes is None:
            return None
        if operator == "concat":
            result = w.node("Concat", *plain, axis=axes[0])
        else:
            result = w.node(_REDUCED[operator], *plain, w.ints(axes), keepdims=1)
    return relayout(w, result, shape_in(shape_of(call), way[1], way[0]), *way)


def _plain(w: Writer, x: Any, expr: relax.Expr, way: Turn) -> Any:
    """An operand in the plain layout; None where it is not known in it."""
    if not isinstance(x, str):
        return x
    known = w.unblocked(x)
    if known is not None:
        return known[0] if known[1] == way else None
    shape = shape_of(expr)
    if not shape:
        return x
    if x in w.constants and len(shape) == len(parts_of(way[1])):
        return _constant(w, x, shape, way)
    return None


def _constant(w: Writer, x: str, shape: Sequence[int], way: Turn) -> str | None:
    blocks = [(part, extent) for part, extent in zip(parts_of(way[1]), shape, strict=True) if not part.isupper()]
    return relayout(w, x, shape, way[1], way[0]) if all(int(part[:-1]) == n for part, n in blocks) else None


def _plain_axes(axes: list[int], way: Turn, outer: bool) -> list[int] | None:
    """Axes of the blocked layout in the plain one. With `outer` a blocked axis will do, along its blocks."""
    parts = parts_of(way[1])
    blocked = {part[-1].upper() for part in parts if not part.isupper()}
    named = [parts[axis] for axis in axes]
    if any(not part.isupper() or (part in blocked and not outer) for part in named):
        return None
    return [way[0].index(part) for part in named]
