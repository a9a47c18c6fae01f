"""Which schedule rule takes which kernel of a graph."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.target import Target

from .choice import BY_SHAPE, Choices
from .extract import Kernel, Lowering
from .schedule import RULE_ATTR, WRITTEN_RULE, check_extents, schedule_kernel
from .target import as_target


@dataclass(frozen=True)
class KernelRule:
    """One kernel and the schedule rule that takes it.

    `name`, `key`, `count`: as in `Kernel`. `rule`: a name in the `RULES` of the target's `rules.py`, or
    "scheduled by its writer" for a PrimFunc that the module brought along so. `shapes`: of its parameters, the results
    last.
    """

    name: str
    rule: str
    count: int
    shapes: tuple[tuple[int, ...], ...]
    key: str


def explain(mod: tvm.IRModule, target: Target | str | dict, choices: Choices = BY_SHAPE) -> list[KernelRule]:
    """The kernels that `mod` compiles to for `target`, in the order of their first launch, and their schedule rules.

    Without the weight-only work. KernelError for an operator without a kernel and for a kernel without a rule.
    """
    rows, target = [], as_target(target)
    for kernel in Lowering(target, choices.implementation).kernels(mod):
        rows.append(explain_kernel(kernel, target, choices))
    return rows


def explain_kernel(kernel: Kernel, target: Target, choices: Choices = BY_SHAPE) -> KernelRule:
    """The same of one kernel; KernelError where no rule takes it."""
    check_extents(kernel.func)
    rule = str(schedule_kernel(kernel.func, target, choices).attrs.get(RULE_ATTR, WRITTEN_RULE))
    return KernelRule(kernel.name, rule, kernel.count, _shapes(kernel.func), kernel.key)


def _shapes(func: tirx.PrimFunc) -> tuple[tuple[int, ...], ...]:
    buffers = [param.ty for param in func.params if isinstance(param.ty, tirx.BufferType)]
    return tuple(tuple(int(extent) for extent in buffer.shape) for buffer in buffers)
