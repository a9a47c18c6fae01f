"""Tiles that do not fill their axis: the last one is split off, so that no other has to ask where the axis ends.

A split by a factor that does not divide leaves a predicate `base + inner < limit` on every block. In a vector loop
that means one scalar branch a lane, and under a register tile it keeps the tile out of the registers. `peel_tails`
runs after scheduling: the full tiles get code without the predicate, the last one gets loops of shorter extents.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm.tirx.stmt import Stmt


@dataclass(frozen=True)
class Bound:
    """A predicate `expr < limit` in which `expr - base` runs over [0, tile) in the loops inside."""

    expr: tvm.ir.Expr
    limit: int
    base: tvm.ir.Expr
    tile: int


LIMIT_ATTR = "rlflow.limit"
"""On a block: [outer, inner, factor, limit], two axes by name. It runs where outer * factor + inner < limit."""


def peel_tails(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` (scheduled) with the predicates of its blocks turned into loops of their own wherever that can be done."""
    body = _in_ranges(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, _state_limit)))
    if not _predicates(body):
        return func
    placing = [s_tir.transform.LowerInitBlock(), s_tir.transform.PlanAndUpdateBufferAllocationLocation()]
    placed = tvm.transform.Sequential(placing)(_module(func.with_body(body)))["main"]
    return distinct_variables(placed.with_body(_visit(placed.body)))


def distinct_variables(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with each variable defined once, where code that defines some is there twice."""
    return tirx.transform.ConvertSSA()(_module(func))["main"]


def _module(func: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({tvm.ir.GlobalVar("main"): func})


def _in_ranges(stmt: Stmt) -> Stmt:
    """The predicates without what the ranges of the loops say anyway: `i % 7 * 8 < 50` where i runs to 7."""
    analyzer = Analyzer()
    for var, extent in _inner_extents(stmt).items():
        analyzer.bind(var, tvm.ir.Range(0, extent))

    def simplified(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        return s_tir.SBlockRealize(realize.iter_values, analyzer.simplify(realize.predicate), realize.block)

    return tvm_ffi.structural_map(stmt, (s_tir.SBlockRealize, simplified))


def _own_buffers(stmt: Stmt) -> Stmt:
    """A second copy of a statement with buffers of its own for those that it allocates. With those of the first they
    would be as large as both want together: whole rows where a tile would do."""
    own: dict[tirx.Buffer, tirx.Buffer] = {}

    def note(block: s_tir.SBlock) -> None:
        for buffer in block.alloc_buffers:
            own[buffer] = tirx.decl_buffer(
                buffer.shape, buffer.dtype, buffer.name, scope=buffer.scope(), layout=buffer.layout
            )

    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, note))
    return tvm_ffi.structural_map(stmt, (tirx.Buffer, lambda buffer: own.get(buffer, buffer)))


def _state_limit(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
    """The block with what its LIMIT_ATTR says as a predicate."""
    block = realize.block
    if LIMIT_ATTR not in block.annotations:
        return realize
    outer, inner, factor, limit = block.annotations[LIMIT_ATTR]
    values = {axis.var.name: value for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)}
    annotations = {key: value for key, value in block.annotations.items() if key != LIMIT_ATTR}
    plain = s_tir.SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, block.alloc_buffers,
        block.match_buffers, annotations,
    )  # fmt: skip
    if outer not in values:  # the block that sets the partial sums to their start value
        return s_tir.SBlockRealize(realize.iter_values, realize.predicate, plain)
    inside = values[outer] * int(factor) + values[inner] < int(limit)
    predicate = Analyzer().simplify(tirx.all(realize.predicate, inside))
    return s_tir.SBlockRealize(realize.iter_values, predicate, plain)


def _visit(stmt: Stmt) -> Stmt:
    if isinstance(stmt, tirx.For):
        return _visit_loop(stmt)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_visit(child) for child in stmt.seq])
    if isinstance(stmt, tirx.IfThenElse):
        otherwise = None if stmt.else_case is None else _visit(stmt.else_case)
        return tirx.IfThenElse(stmt.condition, _visit(stmt.then_case), otherwise)
    if isinstance(stmt, s_tir.SBlockRealize):
        block = stmt.block
        inner = s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, _visit(block.body), block.init,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, inner)
    return stmt


def _visit_loop(loop: tirx.For) -> Stmt:
    found = _first_bound(loop)
    if found is None:
        return _with_body(loop, _visit(loop.body))
    factor = _factor(found.base, loop.loop_var)
    if factor is not None and loop.kind != tirx.ForKind.PARALLEL:
        return _visit_pieces(_peel(loop, found, factor))
    last = (-(-found.limit // found.tile) - 1) * found.tile
    rest = found.expr - found.base
    full = _assume(loop.body, found, None)
    tail = _own_buffers(_assume(loop.body, found, Analyzer().simplify(rest) < (found.limit - last)))
    # bases are multiples of the tile: above limit - tile there is the last one, and those that lie beyond the limit,
    # where there is nothing to do
    if not _within(found, loop):
        tail = tirx.IfThenElse(found.base < tirx.const(found.limit, found.base.ty.dtype), tail, None)
    body = tirx.IfThenElse(found.base <= tirx.const(found.limit - found.tile, found.base.ty.dtype), full, tail)
    return _visit(_with_body(loop, body))


def _peel(loop: tirx.For, bound: Bound, factor: int) -> list[Stmt]:
    """The loop over the full tiles, and the body for the last one; either may be missing."""
    full, rest = divmod(bound.limit, factor)
    pieces: list[Stmt] = []
    if full:
        extent = tirx.const(full, loop.loop_var.ty.dtype)
        pieces.append(_with_body(loop, _assume(loop.body, bound, None), extent))
    if rest:
        inner = Analyzer().simplify(bound.expr - bound.base)
        tail = _assume(loop.body, bound, inner < rest)
        pieces.append(_own_buffers(substitute(tail, loop.loop_var, tirx.const(full, loop.loop_var.ty.dtype))))
    return pieces


def _visit_pieces(pieces: list[Stmt]) -> Stmt:
    visited = [_visit(piece) for piece in pieces]
    return visited[0] if len(visited) == 1 else tirx.SeqStmt(visited)


def _first_bound(loop: tirx.For) -> Bound | None:
    """A predicate inside `loop` that `loop`'s own variable decides, with the loops further inside filling one tile."""
    extents = _inner_extents(loop.body)
    for predicate in _predicates(loop.body):
        variables = tirx.analysis.undefined_vars(predicate.a)
        if not any(var.same_as(loop.loop_var) for var in variables):
            continue
        inner = {var: extents[var] for var in variables if var in extents}
        base, tile = _split_base(predicate.a, inner)
        if tile is None:
            continue
        bound = Bound(predicate.a, int(predicate.b), base, tile)
        factor = _factor(base, loop.loop_var)
        if factor is not None and loop.kind != tirx.ForKind.PARALLEL:
            if factor >= tile and int(loop.extent) * factor >= bound.limit:
                return bound
        elif tile > 1 and _is_multiple(base, tile):
            return bound
    return None


def _split_base(expr: tvm.ir.Expr, inner: dict[tirx.Var, int]) -> tuple[tvm.ir.Expr, int | None]:
    """`expr` with its inner variables zero, and over how many values they move it (None: not linear in them)."""
    base, tile = expr, 1
    if inner:
        coefficients = detect_linear_equation(expr, list(inner))
        if not coefficients or not all(isinstance(c, tirx.IntImm) and int(c) > 0 for c in coefficients[:-1]):
            return expr, None
        tile = 1 + sum(int(c) * (extent - 1) for c, extent in zip(coefficients, inner.values(), strict=False))
        base = coefficients[-1]
    return Analyzer().simplify(base), tile


def _factor(base: tvm.ir.Expr, var: tirx.Var) -> int | None:
    """a, where `base` is a * var and nothing else."""
    coefficients = detect_linear_equation(base, [var])
    if not coefficients or not all(isinstance(c, tirx.IntImm) for c in coefficients):
        return None
    factor, rest = (int(c) for c in coefficients)
    return factor if rest == 0 and factor > 0 else None


def _within(bound: Bound, loop: tirx.For) -> bool:
    """Whether the base, moved by `loop` alone, never reaches the limit."""
    coefficients = detect_linear_equation(bound.base, [loop.loop_var])
    if not coefficients or not all(isinstance(c, tirx.IntImm) for c in coefficients):
        return False
    factor, start = (int(c) for c in coefficients)
    return max(0, factor) * (int(loop.extent) - 1) + start < bound.limit


def _is_multiple(base: tvm.ir.Expr, tile: int) -> bool:
    modular = Analyzer().modular_set(base)
    return int(modular.coeff) % tile == 0 and int(modular.base) % tile == 0


def _predicates(stmt: Stmt) -> list[tirx.LT]:
    """The conjuncts `expr < constant` of the predicates of all blocks inside."""
    found: list[tirx.LT] = []

    def note(realize: s_tir.SBlockRealize) -> None:
        found.extend(c for c in _conjuncts(realize.predicate) if _is_bound(c))

    tvm_ffi.structural_walk(stmt, (s_tir.SBlockRealize, note))
    return found


def _is_bound(conjunct: tvm.ir.Expr) -> bool:
    return isinstance(conjunct, tirx.LT) and isinstance(conjunct.b, tirx.IntImm)


def _conjuncts(predicate: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    if isinstance(predicate, tirx.And):
        return [*_conjuncts(predicate.a), *_conjuncts(predicate.b)]
    return [predicate]


def _inner_extents(stmt: Stmt) -> dict[tirx.Var, int]:
    extents: dict[tirx.Var, int] = {}

    def note(loop: tirx.For) -> None:
        if isinstance(loop.extent, tirx.IntImm):
            extents[loop.loop_var] = int(loop.extent)

    tvm_ffi.structural_walk(stmt, (tirx.For, note))
    return extents


def _assume(stmt: Stmt, bound: Bound, instead: tvm.ir.Expr | None) -> Stmt:
    """Replace the predicates over `bound`'s base and limit: by nothing, or by what is left of them in the last tile."""
    extents = _inner_extents(stmt)

    def replaced(conjunct: tvm.ir.Expr) -> tvm.ir.Expr | None:
        if not _is_bound(conjunct) or int(conjunct.b) != bound.limit:
            return conjunct
        variables = tirx.analysis.undefined_vars(conjunct.a)
        base, tile = _split_base(conjunct.a, {var: extents[var] for var in variables if var in extents})
        if tile is None or tile > bound.tile or not tvm_ffi.structural_equal(base, bound.base, map_free_vars=False):
            return conjunct
        if instead is None:
            return None
        rest = Analyzer().simplify(conjunct.a - base)
        return rest < instead.b

    def rewrite(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        kept = [new for old in _conjuncts(realize.predicate) if (new := replaced(old)) is not None]
        predicate = tirx.const(True, "bool")
        for conjunct in kept:
            predicate = tirx.all(predicate, conjunct)
        return s_tir.SBlockRealize(realize.iter_values, Analyzer().simplify(predicate), realize.block)

    return tvm_ffi.structural_map(stmt, (s_tir.SBlockRealize, rewrite))


def substitute(stmt: Stmt, var: tirx.Var, value: tvm.ir.Expr) -> Stmt:
    """`stmt` with `value` in place of `var`."""
    return tvm_ffi.structural_map(stmt, (tirx.Var, lambda found: value if found.same_as(var) else found))


def _with_body(loop: tirx.For, body: Stmt, extent: tvm.ir.Expr | None = None) -> tirx.For:
    return tirx.For(
        loop.loop_var, loop.min, loop.extent if extent is None else extent, loop.kind, body, loop.thread_binding,
        loop.annotations, loop.step,
    )  # fmt: skip
