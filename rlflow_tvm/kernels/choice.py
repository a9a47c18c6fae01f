"""Several implementations of one operator, several schedules of one kernel, and who chooses among them.

An implementation is a legalisation of the operator with a name and a condition. A chooser is asked once for each
distinct call: `heuristic_choice` answers from shapes alone; `rlflow_tvm.cost.MeasuredChoice` measures.
A tuned schedule takes the place of the schedule rules' where one is known to be faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.target import Target

LegalizeFunc = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    `takes(call, weight, target)`: whether it computes this call; `weight` says that the second operand is known at
    compile time. `legalize(target)`: what `LegalizeOps` does with the call. `cost(call, target)`: an estimate in
    cycles by which `heuristic_choice` compares the implementations of one call.
    """

    name: str
    takes: Callable[[relax.Call, bool, Target], bool]
    legalize: Callable[[Target], LegalizeFunc]
    cost: Callable[[relax.Call, Target], float]


@dataclass(frozen=True)
class Choice:
    """A call with several implementations, `call`'s arguments being variables or constants; `weight` as above."""

    call: relax.Call
    weight: bool
    target: Target
    options: tuple[Implementation, ...]

    def module(self) -> tvm.IRModule:
        """The call alone, as a module in working form: its second operand a weight if it is one."""
        params = [arg for arg in self.call.args if isinstance(arg, relax.Var)]
        builder = relax.BlockBuilder()
        attrs = {"num_input": 1 if self.weight else len(params)}
        with builder.function("main", params, attrs=attrs):
            with builder.dataflow():
                output = builder.emit_output(self.call)
            builder.emit_func_output(output)
        return builder.finalize()


Chooser = Callable[[Choice], str]
"""Gives the name of one of a choice's options."""


def heuristic_choice(choice: Choice) -> str:
    """The option with the lowest estimated cost, the first of equal ones."""
    return min(choice.options, key=lambda option: option.cost(choice.call, choice.target)).name


def no_schedule(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """No kernel has a tuned schedule."""
    del func
    return None


@dataclass(frozen=True)
class Choices:
    """What is decided by measuring, where something was measured.

    `implementation`: for each call of an operator that has several. `schedule`: a fused, unscheduled PrimFunc by a
    schedule that was found to be faster than the schedule rules', or None where there is none.
    """

    implementation: Chooser = heuristic_choice
    schedule: Callable[[tirx.PrimFunc], tirx.PrimFunc | None] = no_schedule


BY_SHAPE = Choices()
"""Everything decided from shapes alone."""
