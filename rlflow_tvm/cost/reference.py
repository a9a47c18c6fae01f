"""How fast the machine is while kernels are timed: a fixed piece of work, timed beside them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import s_tir, te
from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.place import Place, processor_of

_ROWS, _DEPTH, _WIDTH, _VECTOR = 32, 1024, 128, 16  # about a tenth of a millisecond, its operands in private caches
_RUNS = 5
_FIRST = 10  # times, before the first answer


class Reference:
    """A product on every core, timed when asked for. On a GPU its host's."""

    def __init__(self, target: Target, place: Place) -> None:
        host = processor_of(target)
        parts = cores(host)
        module = place.load(tvm.compile(_product(parts), target=host))
        self._time = module.time_evaluator("main", place.processor, number=1, repeat=_RUNS)
        shapes = (parts, _ROWS, _DEPTH), (_DEPTH, _WIDTH), (parts, _ROWS, _WIDTH)
        self._operands = [tvm.runtime.tensor(np.ones(shape, "float32"), place.processor) for shape in shapes]
        self._best = min(self._secs() for _ in range(_FIRST))

    def slowdown(self) -> float:
        """Its time now over its best so far; 1 or a little more on a machine that nobody disturbs."""
        secs = self._secs()
        self._best = min(self._best, secs)
        return secs / self._best

    def _secs(self) -> float:
        return float(np.median(self._time(*self._operands).results))


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
