"""Choosing among an operator's implementations by what their kernels take."""

from __future__ import annotations

import math

from rlflow_tvm.cost.temperature import Temperatures
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.kernels import Choice, Chooser, Kernel, Lowering, heuristic_choice

REACH = 7
"""The temperature of weights: the model that the operator belongs to is not known here; most touch some hundred MiB."""


class MeasuredChoice:
    """A chooser for `Lowering` and `pipeline`: the implementation whose kernels, for the operator alone, take least.

    Nothing is remembered but kernels' times: with a database the same times, and so the same choices, are found
    again by every process, at once. With `measure` off a call whose kernels are not all known is left to
    `heuristic_choice`, as is one of which every implementation failed.
    """

    def __init__(self, timer: KernelTimer, *, measure: bool = True) -> None:
        self._timer = timer
        self._measure = measure
        self._lowerings: dict[str, Lowering] = {}
        self._temperatures = Temperatures(timer.target)

    def __call__(self, choice: Choice) -> str:
        heuristic = heuristic_choice(choice)
        costs: dict[str, float] = {}
        for option in choice.options:
            launches = self._lowering(option.name).launches(choice.module())
            secs = self._secs(self._temperatures.kernels(launches, REACH, part=True))
            if secs is None:
                return heuristic
            costs[option.name] = secs
        # of equal ones (or where all failed) the heuristic's
        return min(costs, key=lambda name: (costs[name], name != heuristic))

    def _secs(self, kernels: list[Kernel]) -> float | None:
        """The kernels' times together, infinite where one failed; None where one is unknown and not to be measured."""
        measured = self._timer.measure(kernels) if self._measure else [self._timer.lookup(k) for k in kernels]
        total = 0.0
        for kernel, measurement in zip(kernels, measured, strict=True):
            if measurement is None:
                return None
            total += kernel.count * measurement.run_secs if measurement.run_secs is not None else math.inf
        return total

    def _lowering(self, name: str) -> Lowering:
        if name not in self._lowerings:
            self._lowerings[name] = Lowering(self._timer.target, _always(name))
        return self._lowerings[name]


def _always(name: str) -> Chooser:
    def choose(choice: Choice) -> str:
        return name if name in {option.name for option in choice.options} else heuristic_choice(choice)

    return choose
