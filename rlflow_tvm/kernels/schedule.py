"""The application of a target's schedule rules to one PrimFunc."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.target import Target

from rlflow_tvm.errors import KernelError

from .choice import BY_SHAPE, Choices
from .cuda.rules import schedule as schedule_cuda
from .llvm.rules import schedule as schedule_llvm
from .unit_axes import with_unit_axes, without_unit_axes

RULE_ATTR = "rlflow.schedule_rule"
SCHEDULED_ATTR = "tirx.is_scheduled"

Scheduler = Callable[[tirx.PrimFunc, Target], tuple[str, tirx.PrimFunc] | None]

SCHEDULERS: dict[str, Scheduler] = {"llvm": schedule_llvm, "cuda": schedule_cuda}
"""By the kind of a target."""


def schedule_kernel(func: tirx.PrimFunc, target: Target, choices: Choices = BY_SHAPE) -> tirx.PrimFunc:
    """`func` scheduled for `target`: as `choices` has it, or by the first rule that takes it.

    Attribute `rlflow.schedule_rule` names the rule. A function that carries `tirx.is_scheduled` is returned as it is.
    KernelError if no rule takes it.
    """
    if func.attrs is not None and func.attrs.get(SCHEDULED_ATTR):
        return func
    tuned = choices.schedule(func)
    if tuned is not None:
        return tuned
    found = SCHEDULERS[target.kind.name](without_unit_axes(func), target)
    if found is None:
        name = func.attrs.get("global_symbol", "") if func.attrs is not None else ""
        raise KernelError(f"no schedule rule takes the kernel {name}: report its operator")
    rule, scheduled = found
    return with_unit_axes(scheduled, func).with_attrs({SCHEDULED_ATTR: True, RULE_ATTR: rule})
