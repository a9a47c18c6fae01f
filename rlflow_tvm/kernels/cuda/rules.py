"""The GPU's schedule rules in the order in which they are tried."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from .matmul import Matmul
from .tensor_core import TensorCore
from .threads import Elementwise, Reduction, ThreadReduction

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
    """The name of the first rule that takes `func`, and what it makes of it; None where none does."""
    for name, rule in RULES.items():
        try:
            found = rule.apply(func, target, False)
        except (s_tir.ScheduleError, AssertionError):
            # a primitive proves each of its steps and refuses the others, and dlight asserts what it takes for granted:
            # the kernel is none of this rule's
            continue
        if isinstance(found, list):  # a rule may give several; the first is the one it would choose itself
            found = found[0] if found else None
        if found is not None:
            return name, found.mod["main"]
    return None
