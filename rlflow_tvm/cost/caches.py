"""The caches as a kernel finds them inside a model: some of its operands were touched just before, others long ago."""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.metrics import tensor_bytes
from rlflow_tvm.cost.place import linked, processor_of
from rlflow_tvm.cost.temperature import megabytes

_NAME = "rlflow_tvm.prepare_caches"  # as in caches.cc, as are the next but one
_UNKNOWN = "4"
_VECTOR = 16
_PARTS = 2  # of a tensor, each written by another thread
_PRIVATE = 2  # megabytes of a core's own caches, generously; what a sweep reads is shared out among the cores


class Caches(Protocol):
    """Puts a kernel's operands where a model's launch finds them, before each timed run.

    `name`: of a global function of the process that times, for `time_evaluator`'s `f_preproc`; "" on a GPU, where
    nothing is done.

    Other data is read, as much as the model touches between two uses; operands touched since are then written with
    what they hold, as the launch before would have done. All of it runs on TVM's thread pool: each core evicts its own
    caches, and the threads are as awake as inside a model. Flushing the operands would drop them from the last-level
    cache too, wherever that is large enough for the model. Evicting by writing would leave lines behind that have to be
    stored before a cold one can be loaded: a tenth more time for kernels with many weights, which no model takes.
    """

    name: str

    def set(self, cold: str) -> None:
        """The operands' temperatures, a digit each (see `temperature`), from now on; the last digit is that of all
        further ones. "": all were last touched 64 MiB ago."""


class SentCaches:
    """`Caches` of another process, which has `library`, `helpers` loaded there."""

    def __init__(self, target: Target, library: tvm.runtime.Module) -> None:
        self.name = _NAME if target.kind.name == "llvm" else ""
        self._library = library
        parts = max(_PARTS, cores(processor_of(target)))
        library["start"](parts, _recent(parts))

    def set(self, cold: str) -> None:
        """As in `Caches`."""
        self._library["cold"](*map(int, cold or _UNKNOWN))


class LocalCaches:
    """`Caches` of this process: what caches.cc does, without a C++ compiler, which not every machine has."""

    def __init__(self, target: Target) -> None:
        self.name = _NAME if target.kind.name == "llvm" else ""
        self._cold = _UNKNOWN
        if not self.name:
            return
        self._read, self._write = (tvm.compile(func, target=target).jit()["main"] for func in (_reader(), _writer()))
        self._parts = max(_PARTS, cores(target))
        self._recent = _recent(self._parts)
        self._others: dict[int, tvm.runtime.Tensor] = {}
        self._sums = tvm.runtime.tensor(np.zeros((self._parts, _VECTOR), "int32"))
        self._zero = tvm.runtime.tensor(np.zeros(1, "int32"))
        tvm_ffi.register_global_func(_NAME, self._prepare, override=True)

    def set(self, cold: str) -> None:
        """As in `Caches`."""
        self._cold = cold or _UNKNOWN
        if not self.name:
            return
        # what is swept is made now, so that no timed run has to wait for it
        if (far := max(map(int, self._cold))) > 1:
            self._other(far)
        if "1" in self._cold:
            self._other(self._recent)

    def _prepare(self, *operands: tvm.runtime.Tensor) -> None:
        cold = self._cold.ljust(len(operands), self._cold[-1])[: len(operands)]
        far = max(map(int, cold))
        if far > 1:
            self._sweep(far)
        for digit in "10":
            for operand, own in zip(operands, cold, strict=True):
                if own == digit:
                    self._touch(operand)
            if digit == "1" and "1" in cold:
                self._sweep(self._recent)

    def _sweep(self, digit: int) -> None:
        self._read(self._other(digit), self._sums)

    def _other(self, digit: int) -> tvm.runtime.Tensor:
        """What a sweep reads."""
        if digit not in self._others:
            rows = (megabytes(digit) << 20) // (4 * _VECTOR * self._parts)
            self._others[digit] = tvm.runtime.tensor(np.zeros((self._parts, rows, _VECTOR), "int32"))
        return self._others[digit]

    def _touch(self, operand: tvm.runtime.Tensor) -> None:
        rows = tensor_bytes(tuple(operand.shape), str(operand.dtype)) // (4 * _VECTOR * _PARTS)
        if rows:  # the rest is less than two cache lines
            view = operand._create_view((_PARTS, rows, _VECTOR), "int32")
            self._write(view, self._zero, view)


def _recent(processors: int) -> int:
    """The digit of the smallest sweep, 2 or more as `megabytes` counts, that leaves none of so many processors' private
    caches as it was."""
    return next(digit for digit in count(2) if megabytes(digit) >= _PRIVATE * processors)


def helpers(target: Target) -> bytes:
    """A library of the functions in `caches.cc` and `session.cc`, for the process that times kernels for `target`; it
    needs nothing but TVM there."""
    return _library(tvm.ir.save_json(processor_of(target)))


@cache
def _library(target: str) -> bytes:
    functions = {"read": _reader(), "write": _writer()}
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in functions.items()})
    executable = tvm.compile(mod, target=tvm.ir.load_json(target))
    sources = [str(Path(__file__).with_name(name)) for name in ("caches.cc", "session.cc")]
    headers = [f"-I{folder}" for folder in tvm_ffi.libinfo.include_paths()]
    return linked(executable, addons=sources, options=["-std=c++17", "-O2", "-pthread", *headers])


def _reader() -> tirx.PrimFunc:
    """Sums what it is given, one part a thread."""
    parts, rows = (tirx.Var(name, "int64") for name in ("parts", "rows"))
    x = te.placeholder((parts, rows, _VECTOR), "int32", name="x")
    row = te.reduce_axis((0, rows), name="row")
    y = te.compute((parts, _VECTOR), lambda p, j: te.sum(x[p, row, j], axis=row), name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    part, lane, step = schedule.get_loops(schedule.get_sblock("y"))
    schedule.reorder(part, step, lane)
    schedule.parallel(part)
    schedule.vectorize(lane)
    return schedule.mod["main"]


def _writer() -> tirx.PrimFunc:
    """Writes x + zero: what is there already, where output and input are the same memory."""
    rows = tirx.Var("rows", "int64")
    x = te.placeholder((_PARTS, rows, _VECTOR), "int32", name="x")
    zero = te.placeholder((1,), "int32", name="zero")
    y = te.compute((_PARTS, rows, _VECTOR), lambda p, i, j: x[p, i, j] + zero[0], name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, zero, y]))
    part, _row, lane = schedule.get_loops(schedule.get_sblock("y"))
    schedule.parallel(part)
    schedule.vectorize(lane)
    return schedule.mod["main"]
