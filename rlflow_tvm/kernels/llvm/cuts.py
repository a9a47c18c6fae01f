"""Rows cut where the conditions inside them change, each piece in vectors of its own.

What joins, pads or shifts tensors asks at every element where it comes from. A vector in which the answer changes is
computed lane by lane, and so is one of a join under other work even where it does not change: twenty times slower than
a copy. Between the cuts the conditions are the same for all elements, and are simplified away.
"""

from __future__ import annotations

from itertools import pairwise

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym import detect_linear_equation
from tvm.tirx.stmt import Stmt

from ..loops import extent
from .tails import distinct_variables, substitute

_ATTR = "rlflow.cuts"
"""On a loop: the lanes of a vector, then where to cut."""
_MOST_CUTS = 7
_COMPARISONS: tuple[type, ...] = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def cut_points(sch: s_tir.Schedule, block: SBlockRV) -> list[int]:
    """Where along the last axis of `block` the conditions on its values change; none for more than a few places."""
    stmt = sch.get(block)
    axis = stmt.iter_vars[-1]
    found: set[int] = set()

    def note(comparison: tvm.ir.Expr) -> None:
        coefficients = detect_linear_equation(comparison.a - comparison.b, [axis.var])
        if not coefficients or not all(isinstance(c, tirx.IntImm) for c in coefficients):
            return
        factor, rest = (int(c) for c in coefficients)
        if abs(factor) == 1:
            place = -rest * factor  # the two sides are equal there
            strict = isinstance(comparison, tirx.LT | tirx.GT)
            rises = factor > 0 if isinstance(comparison, tirx.GT | tirx.GE) else factor < 0
            found.add(place + 1 if strict == rises else place)

    tvm_ffi.structural_walk(stmt.body, (_COMPARISONS, note))
    inside = sorted(place for place in found if 0 < place < int(axis.dom.extent))
    return inside if len(inside) <= _MOST_CUTS else []


def mark(sch: s_tir.Schedule, loop: LoopRV, cuts: list[int], lanes: int) -> None:
    """Have `cut_loops` cut the innermost loop and run its pieces in vectors."""
    assert all(0 < cut < extent(sch, loop) for cut in cuts), "cuts lie inside the loop"
    sch.annotate(loop, _ATTR, [lanes, *cuts])


def cut_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` (scheduled) with the marked loops cut."""
    marked = False

    def cut(loop: tirx.For) -> Stmt:
        nonlocal marked
        if _ATTR not in loop.annotations:
            return loop
        marked = True
        lanes, *cuts = (int(number) for number in loop.annotations[_ATTR])
        bounds = [0, *cuts, int(loop.extent)]
        pieces = [p for a, b in pairwise(bounds) for p in _in_vectors(loop, a, b - a, lanes)]
        return tirx.SeqStmt(pieces)

    body = tvm_ffi.structural_map(func.body, (tirx.For, cut))
    return distinct_variables(func.with_body(body)) if marked else func


def _in_vectors(loop: tirx.For, start: int, count: int, lanes: int) -> list[Stmt]:
    """`count` turns of `loop` from `start` on: whole vectors, and a shorter one for what is left."""
    full, rest = divmod(count, lanes)
    dtype = loop.loop_var.ty.dtype
    pieces: list[Stmt] = []
    if full:
        turn = tirx.Var(f"{loop.loop_var.name}_turn", dtype)
        first = tirx.const(start, dtype) + turn * tirx.const(lanes, dtype)
        pieces.append(_loop(turn, full, tirx.ForKind.SERIAL, _vector(loop, first, lanes)))
    if rest:
        pieces.append(_vector(loop, tirx.const(start + full * lanes, dtype), rest))
    return pieces


def _vector(loop: tirx.For, first: tvm.ir.Expr, lanes: int) -> Stmt:
    lane = tirx.Var(f"{loop.loop_var.name}_lane", loop.loop_var.ty.dtype)
    return _loop(lane, lanes, tirx.ForKind.VECTORIZED, substitute(loop.body, loop.loop_var, first + lane))


def _loop(var: tirx.Var, count: int, kind: int, body: Stmt) -> tirx.For:
    return tirx.For(var, tirx.const(0, var.ty.dtype), tirx.const(count, var.ty.dtype), kind, body)
