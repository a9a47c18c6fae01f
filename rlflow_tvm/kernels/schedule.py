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
WRITTEN_RULE = "scheduled by its writer"
"""In place of a rule's name, for a function that a module brings along scheduled."""

SCHEDULED_ATTR = "tirx.is_scheduled"

Scheduler = Callable[[tirx.PrimFunc, Target], tuple[str, tirx.PrimFunc] | None]

SCHEDULERS: dict[str, Scheduler] = {"llvm": schedule_llvm, "cuda": schedule_cuda}
"""By the kind of a target."""


def schedule_kernel(func: tirx.PrimFunc, target: Target, choices: Choices = BY_SHAPE) -> tirx.PrimFunc:
    """`func` scheduled for `target`: as `choices` has it, or by the first rule that takes it.

    Attribute `rlflow.schedule_rule` names the rule. A function that carries `tirx.is_scheduled` is returned as it is.
    KernelError if no rule takes it, or a rule that would needs to know its extents.
    """
    if func.attrs is not None and func.attrs.get(SCHEDULED_ATTR):
        return func
    tuned = choices.schedule(func)
    if tuned is not None:
        return tuned
    try:
        found = SCHEDULERS[target.kind.name](without_unit_axes(func), target)
    except TypeError:  # rules read extents as numbers
        check_extents(func)
        raise
    if found is None:
        raise KernelError(f"no schedule rule takes {_name(func)}: report its operator")
    rule, scheduled = found
    return with_unit_axes(scheduled, func).with_attrs({SCHEDULED_ATTR: True, RULE_ATTR: rule})


def check_extents(func: tirx.PrimFunc) -> None:
    """KernelError if an extent of a parameter of `func` is no number."""
    unknown = symbolic_extents(func)
    if unknown:
        raise KernelError(
            f"{_name(func)} has symbolic extents ({', '.join(unknown)}), and kernels are scheduled for known ones: "
            f'bind them first, with relax.transform.BindSymbolicVars({{"{unknown[0]}": ...}}) or '
            "from_onnx(..., shapes={...})"
        )


def symbolic_extents(func: tirx.PrimFunc) -> list[str]:
    """The names of the variables in the shapes of the parameters of `func`, each once, in order."""
    shapes = [param.ty.shape for param in func.params if isinstance(param.ty, tirx.BufferType)]
    names = (var.name for shape in shapes for extent in shape for var in tirx.analysis.undefined_vars(extent))
    return list(dict.fromkeys(names))


def _name(func: tirx.PrimFunc) -> str:
    return f"the kernel {func.attrs['global_symbol']}" if "global_symbol" in func.attrs else "a kernel"
