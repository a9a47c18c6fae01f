"""Kernels over nothing: arrays of no elements, and sums of none."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.target import Target

from ..loops import leaf_blocks, loop_kinds


class Empty(CPUScheduleRule):
    """Functions with a loop of no turns, which TVM does not make vectors of.

    A reduction's start value is set outside its loop: inside, it would never be.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where every loop has a turn."""
        extents: list[bool] = []
        tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: extents.append(_is_zero(loop.extent))))
        if not any(extents):
            return None
        sch = s_tir.Schedule(func)
        for block in leaf_blocks(sch):
            loops = sch.get_loops(block)
            kinds = loop_kinds(sch, block, loops)
            if "R" in kinds:
                sch.decompose_reduction(block, loops[kinds.index("R")])
        return sch


def _is_zero(extent: tvm.ir.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 0
