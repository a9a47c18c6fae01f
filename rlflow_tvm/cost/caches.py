"""The caches as a kernel finds them inside a model: some of its operands were touched just before, others long ago."""

from __future__ import annotations

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, te
from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.temperature import megabytes

_NAME = "rlflow_tvm.prepare_caches"
_UNKNOWN = "3"
_RECENT = 2  # a sweep of this many megabytes, as `megabytes` counts, leaves no private cache as it was
_VECTOR = 16
_PARTS = 2  # of a tensor, each written by another thread


class Caches:
    """Puts a kernel's operands where a model's launch finds them, before each timed run.

    `name`: of a global function, for `time_evaluator`'s `f_preproc`; "" on a GPU, where nothing is done. `cold`: the
    operands' temperatures, a digit each (see `temperature`); "": all were last touched 64 MiB ago.

    Other data is read, as much as the model touches between two uses; operands touched since are then written with
    what they hold, as the launch before would have done. All of it runs on TVM's thread pool: each core evicts its own
    caches, and the threads are as awake as inside a model. Flushing the operands would drop them from the last-level
    cache too, wherever that is large enough for the model. Evicting by writing would leave lines behind that have to be
    stored before a cold one can be loaded: a tenth more time for kernels with many weights, which no model takes.
    """

    def __init__(self, target: Target) -> None:
        self.cold = ""
        self.name = ""
        if target.kind.name != "llvm":
            return
        self.name = _NAME
        self._read, self._write = _reader(target), _writer(target)
        self._parts = max(_PARTS, cores(target))
        self._others: dict[int, tvm.runtime.Tensor] = {}
        self._sums = tvm.runtime.tensor(np.zeros((self._parts, _VECTOR), "int32"))
        self._zero = tvm.runtime.tensor(np.zeros(1, "int32"))
        tvm_ffi.register_global_func(_NAME, self._prepare, override=True)

    def _prepare(self, *operands: tvm.runtime.Tensor) -> None:
        cold = (self.cold or _UNKNOWN).ljust(len(operands), self.cold[-1:] or _UNKNOWN)
        far = max(map(int, cold))
        if far > 1:
            self._sweep(far)
        recent = [operand for operand, digit in zip(operands, cold, strict=False) if digit == "1"]
        for operand in recent:
            self._touch(operand)
        if recent:
            self._sweep(_RECENT)
        for operand, digit in zip(operands, cold, strict=False):
            if digit == "0":
                self._touch(operand)

    def _sweep(self, digit: int) -> None:
        if digit not in self._others:
            rows = (megabytes(digit) << 20) // (4 * _VECTOR * self._parts)
            self._others[digit] = tvm.runtime.tensor(np.zeros((self._parts, rows, _VECTOR), "int32"))
        self._read(self._others[digit], self._sums)

    def _touch(self, operand: tvm.runtime.Tensor) -> None:
        size = int(np.prod(operand.shape)) * ((tvm.DataType(str(operand.dtype)).bits + 7) // 8)
        rows = size // (4 * _VECTOR * _PARTS)
        if rows:  # the rest is less than two cache lines
            view = operand._create_view((_PARTS, rows, _VECTOR), "int32")
            self._write(view, self._zero, view)


def _reader(target: Target) -> tvm.runtime.Module:
    """Sums what it is given, one part a thread."""
    parts, rows = (tvm.tirx.Var(name, "int64") for name in ("parts", "rows"))
    x = te.placeholder((parts, rows, _VECTOR), "int32", name="x")
    row = te.reduce_axis((0, rows), name="row")
    y = te.compute((parts, _VECTOR), lambda p, j: te.sum(x[p, row, j], axis=row), name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    part, lane, step = schedule.get_loops(schedule.get_sblock("y"))
    schedule.reorder(part, step, lane)
    schedule.parallel(part)
    schedule.vectorize(lane)
    return tvm.compile(schedule.mod, target=target).jit()["main"]


def _writer(target: Target) -> tvm.runtime.Module:
    """Writes x + zero: what is there already, where output and input are the same memory."""
    rows = tvm.tirx.Var("rows", "int64")
    x = te.placeholder((_PARTS, rows, _VECTOR), "int32", name="x")
    zero = te.placeholder((1,), "int32", name="zero")
    y = te.compute((_PARTS, rows, _VECTOR), lambda p, i, j: x[p, i, j] + zero[0], name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, zero, y]))
    part, _row, lane = schedule.get_loops(schedule.get_sblock("y"))
    schedule.parallel(part)
    schedule.vectorize(lane)
    return tvm.compile(schedule.mod, target=target).jit()["main"]
