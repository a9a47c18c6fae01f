"""The schedule rule of the 2-D pools."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from .conv_loops import (
    FEW_TAPS,
    divide_at_edges,
    fold_epilogue,
    in_threads,
    marked_blocks,
    narrowed,
    split_loops,
    steps,
)
from .pool_legalize import POOL_ATTR, ROWS_ATTR
from .pool_window import schedule_window


class Pool2d(CPUScheduleRule):
    """Schedules the functions that hold a pool of `pool_legalize`, known by the attribute its block carries."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where `func` holds no pool of this form."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(narrowed(func))
        pools = marked_blocks(sch, POOL_ATTR)
        if len(pools) != 1:
            return None
        rows = marked_blocks(sch, ROWS_ATTR)
        if rows:
            schedule_rows(sch, rows[0], pools[0], target)
        else:
            schedule_window(sch, pools[0], target)
        return sch


def schedule_rows(sch: s_tir.Schedule, rows: SBlockRV, pool: SBlockRV, target: Target) -> None:
    """One output row after the other: `rows` reduces the columns of its windows into a buffer, `pool` the buffer.

    LLVM makes the vectors: it turns strided reads of the buffer into shuffles, which TVM's vector loads are not.
    """
    work = steps(sch, rows) + steps(sch, pool)
    out = fold_epilogue(sch, pool, target, len(sch.get(pool).writes[0].region))
    *outer, column = sch.get_loops(out)
    row = sch.fuse(*outer)
    in_threads(sch, row, target, work, FEW_TAPS)
    divide_at_edges(sch, column)  # the edge is tested in copies of the loop's first turns
    sch.compute_at(pool, column, preserve_unit_loops=True)
    sch.compute_at(rows, row, preserve_unit_loops=True)
    for block, unrolled in ((rows, False), (pool, True)):
        spatial, reduction = split_loops(sch, block)
        sch.reorder(*reduction, *spatial)
        if unrolled:
            sch.unroll(reduction[0])
        sch.decompose_reduction(block, reduction[0])
