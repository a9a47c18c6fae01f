"""How fast the machine is while kernels are timed: a fixed piece of work, timed beside them.

On a shared machine the speed of a core moves by a tenth and more from one second to the next, and all kernels' with
it: times that were taken in a slow second and in a fast one differ by more than most rewrites save. So times are
reckoned to one and the same speed, the machine's usual one.
"""

from __future__ import annotations

import time

import numpy as np
import tvm
from tvm import s_tir, te
from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.place import Place

_ROWS, _DEPTH, _WIDTH, _VECTOR = 32, 1024, 128, 16  # about a tenth of a millisecond, its operands in private caches
_RUNS = 5
_FIRST = 10  # times, before the first answer
_USUAL_SECS = 1.0  # for which it is timed, to find the usual speed
_SHARE = 0.75
"""Of what slows the reference kernel down, in logarithms, what slows others down: part of their time is spent waiting
for memory. On a shared machine, one core, all launches of a graph timed for 40 s, the deviation of the graph's time
from second to second was 3.3 % for SqueezeNet 1.1, 2.7 % for ResNet-18 and 2.5 % for BERT-Base with 0, 1.7, 1.7 and
1.1 % with 1, 1.7, 0.9 and 1.1 % with this."""

MOST = 2.0
"""As many times faster or slower than usual a machine may be. Work of which one measurement says more was interrupted,
and says nothing of what others take."""


class Reference:
    """A product on every core, timed when asked for."""

    def __init__(self, target: Target, place: Place) -> None:
        parts = cores(target)
        module = place.load(tvm.compile(_product(parts), target=target))
        self._time = module.time_evaluator("main", place.processor, number=1, repeat=_RUNS)
        shapes = (parts, _ROWS, _DEPTH), (_DEPTH, _WIDTH), (parts, _ROWS, _WIDTH)
        self._operands = [tvm.runtime.tensor(np.ones(shape, "float32"), place.processor) for shape in shapes]
        self._best = min(self.secs() for _ in range(_FIRST))

    def slowdown(self, usual_secs: float | None = None) -> float:
        """Its time now over the usual one, or where none is given over its best so far; about 1 if nobody disturbs."""
        secs = self.secs()
        self._best = min(self._best, secs)
        return secs / (self._best if usual_secs is None else usual_secs)

    def secs(self) -> float:
        """Its time now."""
        return float(np.median(self._time(*self._operands).results))

    def usual(self) -> list[float]:
        """Its times for a second or so."""
        end = time.perf_counter() + _USUAL_SECS
        found = [self.secs()]
        while time.perf_counter() < end:
            found.append(self.secs())
        return found


def rescaled(ours: float, theirs: float) -> float:
    """What seconds reckoned to a reference kernel of `theirs` are to be multiplied by, to be reckoned to `ours`."""
    return (ours / theirs) ** _SHARE


class Pace:
    """What seconds are to be multiplied by, to be those of the usual speed: asked before the first that are timed, and
    after each.

    Args:
        reference: timed when asked.
        usual_secs: what it takes at the usual speed; None: seconds are to stay what they are.
    """

    def __init__(self, reference: Reference, usual_secs: float | None) -> None:
        self._reference, self._usual_secs = reference, usual_secs
        self._before: float | None = None

    def __call__(self) -> float:
        """Of what was timed since the last call."""
        if self._usual_secs is None:
            return 1.0
        now = self._reference.secs()
        before = now if self._before is None else self._before
        self._before = now
        around = float(np.clip((before + now) / 2.0, self._usual_secs / MOST, self._usual_secs * MOST))
        return rescaled(self._usual_secs, around)


def _product(parts: int) -> tvm.IRModule:
    a = te.placeholder((parts, _ROWS, _DEPTH), "float32", name="a")
    b = te.placeholder((_DEPTH, _WIDTH), "float32", name="b")
    k = te.reduce_axis((0, _DEPTH), "k")
    c = te.compute((parts, _ROWS, _WIDTH), lambda p, i, j: te.sum(a[p, i, k] * b[k, j], axis=k), name="c")
    schedule = s_tir.Schedule(te.create_prim_func([a, b, c]))
    block = schedule.get_sblock("c")
    part, row, column, step = schedule.get_loops(block)
    column, lane = schedule.split(column, [None, _VECTOR])
    schedule.reorder(part, row, step, column, lane)
    schedule.parallel(part)
    schedule.unroll(column)
    schedule.vectorize(lane)
    return schedule.mod
