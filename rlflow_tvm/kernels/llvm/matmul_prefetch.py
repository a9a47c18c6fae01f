"""Prefetching of packed weights: while the rows go by one panel, the next one comes into the second-level cache.

A panel is read once from memory and then once for each tile of rows from the cache. Left to the hardware, the first
of these readings waits for memory while the arithmetic units do nothing, and the others leave the memory idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx.stmt import Stmt

PREFETCH_ATTR = "rlflow.prefetch"
"""On the loop over the chunks of a packed product's depth: the fields of `Prefetch` in order."""

_LINE = 16  # floats in a cache line
_READ, _SECOND_CACHE, _DATA = 0, 2, 1  # the arguments of llvm.prefetch


@dataclass(frozen=True)
class Prefetch:
    """Shapes that tell which lines of the next panel belong to which chunk of which tile.

    `lines`: cache lines a chunk prefetches. `chunks`: chunks in a block of the depth, `depth` the block's depth.
    `tile_rows`, `block_rows`: rows of a tile and of a block. `panels`: panels that follow each other before the
    next block of the depth (0: the depth is not divided).
    """

    lines: int
    chunks: int
    depth: int
    tile_rows: int
    block_rows: int
    panels: int

    def fields(self) -> list[int]:
        """The value of `PREFETCH_ATTR`."""
        return [self.lines, self.chunks, self.depth, self.tile_rows, self.block_rows, self.panels]


def insert_prefetches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` (scheduled, its tails peeled) with a prefetch before every chunk of the loops that carry the attribute."""

    def insert(loop: tirx.For) -> Stmt:
        if PREFETCH_ATTR not in loop.annotations:
            return loop
        prefetch = Prefetch(*(int(field) for field in loop.annotations[PREFETCH_ATTR]))
        annotations = {key: value for key, value in loop.annotations.items() if key != PREFETCH_ATTR}
        body = tirx.SeqStmt([*_prefetches(loop, prefetch), loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, annotations, loop.step
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, insert)))


def _prefetches(loop: tirx.For, prefetch: Prefetch) -> list[Stmt]:
    """The prefetches of one turn of `loop`: consecutive lines of the panel that comes next."""
    inner: list[tirx.Var] = []
    found: list[s_tir.SBlockRealize] = []
    tvm_ffi.structural_walk(
        loop.body,
        [(tirx.For, lambda child: inner.append(child.loop_var)), (s_tir.SBlockRealize, found.append)],
    )
    realize = found[0]
    row, panel, _, depth = (_zeroed(value, inner) for value in realize.iter_values)
    weights = realize.block.body.value.b.b.source
    # how many tiles of this block of rows came before on this panel
    tile = row % prefetch.block_rows // prefetch.tile_rows
    line = (tile * prefetch.chunks + loop.loop_var) * prefetch.lines
    start, following = _zeroed(depth, [loop.loop_var]), panel + 1
    if prefetch.panels:
        last = panel % prefetch.panels == prefetch.panels - 1
        following = tirx.Select(last, panel - (prefetch.panels - 1), following)
        start = tirx.Select(last, start + prefetch.depth, start)
    calls: list[Stmt] = []
    for i in range(prefetch.lines):
        # an address behind the weights does no harm: a prefetch never faults
        address = tirx.address_of(weights[following, start, (line + i) * _LINE])
        calls.append(tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, _READ, _SECOND_CACHE, _DATA)))
    return calls


def _zeroed(expr: tvm.ir.Expr, variables: list[tirx.Var]) -> tvm.ir.Expr:
    zero = tirx.const(0, "int64")
    return tvm_ffi.structural_map(
        expr, (tirx.Var, lambda var: zero if any(var.same_as(other) for other in variables) else var)
    )
