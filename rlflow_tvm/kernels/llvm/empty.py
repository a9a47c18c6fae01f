"""Kernels over nothing: arrays of no elements, and sums of none."""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.target import Target
from tvm.tirx.stmt import Stmt

from ..loops import has_empty_loop, is_nothing, leaf_blocks, loop_kinds


class Empty(CPUScheduleRule):
    """Functions with a loop of no turns, which TVM does not make vectors of.

    A reduction's start value is set outside its loop: inside, it would never be.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where every loop has a turn."""
        if not has_empty_loop(func):
            return None
        sch = s_tir.Schedule(func)
        for block in leaf_blocks(sch):
            loops = sch.get_loops(block)
            kinds = loop_kinds(sch, block, loops)
            if "R" in kinds:
                sch.decompose_reduction(block, loops[kinds.index("R")])
        return s_tir.Schedule(_without_nothing(sch.mod["main"]))


def _without_nothing(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` without loops of no turns. LLVM allocates no arrays of no elements: those in between get one, for what
    still names them (a join's branch that is never taken)."""
    empty = [b for b in func.body.block.alloc_buffers if any(is_nothing(extent) for extent in b.shape)]
    larger = [tirx.decl_buffer([max(1, int(e)) for e in b.shape], b.dtype, b.name) for b in empty]

    def emptied(loop: tirx.For) -> Stmt:
        return tirx.Evaluate(tirx.const(0, "int32")) if is_nothing(loop.extent) else loop

    def replaced(buffer: tirx.Buffer) -> tirx.Buffer:
        return next((new for old, new in zip(empty, larger, strict=True) if old.same_as(buffer)), buffer)

    body = tvm_ffi.structural_map(func.body, (tirx.For, emptied))
    return func.with_body(tvm_ffi.structural_map(body, (tirx.Buffer, replaced)))
