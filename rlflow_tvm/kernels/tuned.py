"""Schedules found by MetaSchedule: what it is given to schedule, and how what it found is applied again."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import Target

from rlflow_tvm.errors import KernelError

from .llvm.vector_math import vectorisable_math
from .llvm.winograd_legalize import WINOGRAD_ATTR
from .schedule import RULE_ATTR, SCHEDULED_ATTR
from .unit_axes import with_unit_axes, without_unit_axes

TUNED_RULE = "metaschedule"
"""The name of a tuned schedule among those of the schedule rules."""


def tunable(func: tirx.PrimFunc) -> bool:
    """Whether MetaSchedule can do anything for `func` (fused).

    Not for a Winograd convolution: its rule writes its loops out, which no sequence of primitives comes near, and the
    search through its many blocks takes twenty seconds a trial. Nor where nothing is computed in loops, or it was
    scheduled by whoever wrote it.
    """
    if func.attrs is not None and func.attrs.get(SCHEDULED_ATTR):
        return False
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, blocks.append))
    return len(blocks) > 1 and not any(WINOGRAD_ATTR in block.annotations for block in blocks)


def workload(func: tirx.PrimFunc, target: Target) -> tvm.IRModule:
    """`func` (fused, not scheduled) as the schedule rules see it, alone in a module, its blocks named by their place.

    A schedule finds blocks by name, and equal kernels may have different ones.
    """
    func = without_unit_axes(func)
    if target.kind.name == "llvm":
        func = vectorisable_math(func)
    count = 0

    def renamed(block: s_tir.SBlock) -> s_tir.SBlock:
        nonlocal count
        if block.name_hint == "root":
            return block
        count += 1
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, f"block{count}", block.body, block.init, block.alloc_buffers,
            block.match_buffers, block.annotations,
        )  # fmt: skip

    body = tvm_ffi.structural_map(func.body, (s_tir.SBlock, renamed))
    return tvm.IRModule({"main": func.with_body(body).with_attr("global_symbol", "main")})


def apply_trace(func: tirx.PrimFunc, target: Target, trace: Any) -> tirx.PrimFunc:
    """`func` (fused, not scheduled) after the instructions of `trace`, the JSON form of a schedule's trace.

    The instructions are TVM's schedule primitives, each of which proves that it changes no result. KernelError where
    they are not for this function.
    """
    sch = s_tir.Schedule(workload(func, target))
    try:
        s_tir.schedule.Trace.apply_json_to_schedule(trace, sch)
    except (s_tir.ScheduleError, RuntimeError, ValueError, TypeError, IndexError) as error:
        last = str(error).strip().splitlines()[-1]
        raise KernelError(f"the tuned schedule of {_symbol(func)} does not fit it ({last}): tune again") from error
    return marked(with_unit_axes(sch.mod["main"], func)).with_attr("global_symbol", _symbol(func))


def marked(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function scheduled by a tuned schedule as what it is: no rule schedules it again."""
    return func.with_attrs({SCHEDULED_ATTR: True, RULE_ATTR: TUNED_RULE})


def _symbol(func: tirx.PrimFunc) -> str:
    return str(func.attrs["global_symbol"]) if func.attrs is not None and "global_symbol" in func.attrs else "main"
