"""The GPU's schedule rules in the order in which they are tried."""

from __future__ import annotations

from itertools import takewhile

import tvm_ffi
from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from rlflow_tvm.errors import KernelError

from ..loops import has_empty_loop, leaf_blocks
from .matmul import Matmul
from .tensor_core import TensorCore
from .threads import Elementwise, Reduction, ThreadReduction

_MOST_BLOCKS = 65535  # of a grid along y and z, on all devices

# the most special first; Fallback takes whatever is left, such as sorting
RULES: dict[str, ScheduleRule] = {
    "tensor_core": TensorCore(),
    "matmul": Matmul(),
    "gemv": gpu.GEMV(),
    "elementwise": Elementwise(),
    "window": ThreadReduction(),
    "reduction": Reduction(),
    "general_reduction": gpu.GeneralReduction(),
    "thread_reduction": ThreadReduction(always=True),
    "fallback": gpu.Fallback(),
}


def schedule(func: tirx.PrimFunc, target: Target) -> tuple[str, tirx.PrimFunc] | None:
    """The name of the first rule that takes `func`, and what it makes of it; None where none does.

    What would be launched again and again, as dlight's `general_reduction` does with a whole tensor's variance, is left
    to later rules, and taken where none of them does. KernelError for loops of no turns: no GPU launches such a grid.
    """
    if has_empty_loop(func):
        name = func.attrs.get("global_symbol", "a kernel")
        raise KernelError(f"{name} has a loop of no turns, and a GPU launches no such grid: take the empty tensor out")
    often: tuple[str, tirx.PrimFunc] | None = None
    for name, rule in RULES.items():
        try:
            found = rule.apply(func, target, False)
        except (s_tir.ScheduleError, AssertionError, InternalError):
            # a primitive proves each of its steps and refuses the others, or fails a check of TVM's own where it does
            # not foresee a loop nest, and dlight asserts what it takes for granted: the kernel is none of this rule's
            continue
        if isinstance(found, list):  # a rule may give several; the first is the one it would choose itself
            found = found[0] if found else None
        if found is None or not _is_launched_at_all(found):
            continue
        if not _is_launched_often(found):
            return name, found.mod["main"]
        often = often or (name, found.mod["main"])
    return often


def _is_launched_often(sch: s_tir.Schedule) -> bool:
    """Whether a block's threads lie inside a loop that has none, which becomes one on the host."""
    for block in leaf_blocks(sch):
        loops = [sch.get(loop) for loop in sch.get_loops(block)]
        outside = list(takewhile(lambda loop: loop.kind != tirx.ForKind.THREAD_BINDING, loops))
        if len(outside) < len(loops) and any(int(loop.extent) > 1 for loop in outside):
            return True
    return False


def _is_launched_at_all(sch: s_tir.Schedule) -> bool:
    """Whether its grids are none that the driver refuses: batches of products are along y or z."""
    extents: list[int] = []

    def note(loop: tirx.For) -> None:
        if loop.thread_binding is not None and str(loop.thread_binding.thread_tag) in ("blockIdx.y", "blockIdx.z"):
            extents.append(int(loop.extent))

    tvm_ffi.structural_walk(sch.mod["main"].body, (tirx.For, note))
    return max(extents, default=0) <= _MOST_BLOCKS
