"""The schedule rules in the order in which they are tried, and their application to one PrimFunc."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from rlflow_tvm.errors import KernelError

from .llvm.conv import Conv2d
from .llvm.elementwise import Elementwise, Fallback
from .llvm.empty import Empty
from .llvm.matmul import Matmul
from .llvm.pool import Pool2d
from .llvm.reduction import Reduction
from .llvm.tails import peel_tails
from .llvm.vector_math import vectorisable_math

RULE_ATTR = "rlflow.schedule_rule"
_SCHEDULED_ATTR = "tirx.is_scheduled"

# the most special first; Fallback takes whatever is left
RULES: dict[str, ScheduleRule] = {
    "empty": Empty(),
    "conv2d": Conv2d(),
    "pool2d": Pool2d(),
    "matmul": Matmul(),
    "reduction": Reduction(),
    "elementwise": Elementwise(),
    "fallback": Fallback(),
}

_OWN_TAILS = frozenset({"conv2d", "pool2d"})  # these see to their last tiles themselves


def schedule_kernel(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """`func` scheduled for `target` by the first rule that takes it; attribute `rlflow.schedule_rule` names the rule.

    A function that carries `tirx.is_scheduled` is returned as it is. KernelError if no rule takes it.
    """
    if func.attrs is not None and func.attrs.get(_SCHEDULED_ATTR):
        return func
    func = vectorisable_math(func)
    for name, rule in RULES.items():
        try:
            schedule = rule.apply(func, target, False)
        except s_tir.ScheduleError:
            # a primitive proves each of its steps and refuses the others: the kernel is none of this rule's
            continue
        if schedule is not None:
            scheduled = schedule.mod["main"]
            if name not in _OWN_TAILS:
                scheduled = peel_tails(scheduled)
            return scheduled.with_attrs({_SCHEDULED_ATTR: True, RULE_ATTR: name})
    raise KernelError(f"no schedule rule takes the kernel {func.attrs.get('global_symbol', '')}: report its operator")
