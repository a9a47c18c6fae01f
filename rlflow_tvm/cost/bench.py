"""Building and timing kernels, one at a time, in a place that has nothing else to do meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from rlflow_tvm.cost.caches import Caches
from rlflow_tvm.cost.calibration import most_tries
from rlflow_tvm.cost.launch import idle_secs, launch_timer
from rlflow_tvm.cost.measurement import DISTURBED
from rlflow_tvm.cost.metrics import kernel_buffers
from rlflow_tvm.cost.operands import divisors, plain_array, plain_ones
from rlflow_tvm.cost.place import Here, Place
from rlflow_tvm.cost.reference import Pace, Reference
from rlflow_tvm.cost.rehearsal import stretched
from rlflow_tvm.kernels import tir_pipeline

ENTRY = "kernel"
# Runs are repeated until they have taken this long, preparing the caches included, within these bounds. The median of
# five cold runs of a small kernel varies by a few per cent, that of fifty hardly; slow kernels vary less.
_BUDGET_SECS = 0.2
_MIN_REPEATS = 7
_MAX_REPEATS = 50
_SLOW_SECS = 0.4
_SLOW_REPEATS = 2
_VERY_SLOW_SECS = 2.0
_LAUNCH_TRIES = 3
# On a GPU: as many launches behind each other as take this long, so that none waits for this process.
_QUEUE_SECS = 1e-3
_QUEUES_SECS = 0.1  # for all of them
_MOST_QUEUED = 200
_LEAST_SHARE = 0.05  # of its time, which a kernel keeps when what launching it takes is subtracted
_TRIES_SECS = 4.0  # for all tries of one kernel: a process is given 10 s and more, in which it builds it too
_PAUSE_SECS = 0.2  # between two, in which whatever disturbed may end
_IN_VAIN = 3  # kernels in a row for which all tries were disturbed: on a machine that is always busy one must do

Schedule = Callable[[tirx.PrimFunc, Target], tirx.PrimFunc]
T = TypeVar("T")


def schedule_named(name: str) -> Schedule:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


class Bench:
    """Times kernels for `target`, scheduled by `schedule`, in `place`, of which `caches` are.

    What goes wrong is raised as it is.
    """

    def __init__(self, target: Target, schedule: Schedule, place: Place, caches: Caches) -> None:
        self.target = target
        self.device = place.device
        self._schedule = schedule
        self._place = place
        self._caches = caches
        self._reference = Reference(target, place) if target.kind.name == "llvm" else None
        self._tries, self._in_vain = most_tries(), 0
        self._idle_secs: float | None = None

    def build(self, func: tirx.PrimFunc) -> tvm.runtime.Module:
        """`func`, scheduled unless it is already, and loaded."""
        scheduled = self._schedule(func, self.target).with_attr("global_symbol", ENTRY)
        module = tvm.IRModule({ENTRY: scheduled})
        return self._place.load(tvm.compile(module, target=self.target, tir_pipeline=tir_pipeline(self.target)))

    def time(
        self, func: tirx.PrimFunc, built: tvm.runtime.Module, cold: str, usual_secs: float | None = None
    ) -> dict[str, Any]:
        """Seconds of `built`, as a `Measurement` has them: of the first series in which the machine was not disturbed,
        or else of the least disturbed; of a GPU's kernel as they come, as the processor's speed is not the GPU's.
        `cold` as in `Kernel`, `usual_secs` as in `Pace`."""
        arguments = self.arguments(func)
        if self.target.kind.name != "llvm":
            return _summary(queued_secs(built, arguments, self.device, self._idle()))
        self._caches.set(cold)
        pace = self.pace(usual_secs)

        def series() -> tuple[dict[str, Any], float]:
            pace()
            samples = _time(built, arguments, self.device, self._caches.name)
            share = pace()
            return _summary([share * each for each in samples]), 1.0

        found, slowdown = self.undisturbed(series, usual_secs, _TRIES_SECS)
        return {**found, "slowdown": slowdown}

    def _idle(self) -> float:
        """What a launch takes that waits in a GPU's queue, and `launch` counts."""
        if self._idle_secs is None:
            self._idle_secs = idle_secs(self.target, self._place, _MOST_QUEUED)
        return self._idle_secs

    @property
    def reference(self) -> Reference:
        """The reference kernel; there is none for a GPU."""
        assert self._reference is not None, "a processor's speed is not a GPU's"
        return self._reference

    def pace(self, usual_secs: float | None) -> Pace:
        """By the reference kernel."""
        return Pace(self.reference, usual_secs)

    def usual(self) -> dict[str, Any]:
        """Seconds of the reference kernel, as a `Measurement` has them."""
        return self._once(self.reference.usual)

    def launch(self) -> dict[str, Any]:
        """Seconds of one launch, as a `Measurement` has them."""
        timed = launch_timer(self.target, self._place)
        return self._once(lambda: _launch_samples(timed))

    def _once(self, samples: Callable[[], list[float]]) -> dict[str, Any]:
        """What stands for good: of the first try in which neither the machine was slow nor this thread had to wait for
        a processor, or else of the least disturbed. On a GPU as it comes; a server's threads are not seen from here."""
        if self._reference is None:
            return _summary(samples())

        def series() -> tuple[dict[str, Any], float]:
            before, had_before = time.perf_counter(), time.thread_time()
            found = _summary(samples())
            had, wall = time.thread_time() - had_before, time.perf_counter() - before
            return found, stretched(wall, had) if isinstance(self._place, Here) else 1.0

        found, slowdown = self.undisturbed(series)
        return {**found, "slowdown": slowdown}

    def undisturbed(
        self, series: Callable[[], tuple[T, float]], usual_secs: float | None = None, most_secs: float = math.inf
    ) -> tuple[T, float]:
        """What `series` gives while nothing disturbs the machine, and the slowdown, by the reference kernel or by what
        it says itself; after some tries in vain what it gave when least was. None is begun that might go on beyond
        `most_secs`. `usual_secs` as in `Pace`."""
        best: tuple[T, float] | None = None
        started = time.perf_counter()
        for turn in range(1 if self._in_vain >= _IN_VAIN else self._tries):
            if turn:
                time.sleep(_PAUSE_SECS)
            before = self.reference.slowdown(usual_secs)
            found, own = series()
            slowdown = max(before, self.reference.slowdown(usual_secs), own)
            if best is None or slowdown < best[1]:
                best = found, slowdown
            if slowdown <= DISTURBED:
                self._in_vain = 0
                return best
            spent = time.perf_counter() - started
            if spent * (turn + 2) / (turn + 1) > most_secs:
                return best
        self._in_vain += 1
        assert best is not None, "there is one try at least"
        return best

    def difference(self, func: tirx.PrimFunc, other: tirx.PrimFunc) -> float:
        """Greatest difference of a value in any buffer after a run of either, as a share of the buffer's range; where
        NaN and the infinities are not in the same places, infinite."""
        after = []
        for each in (func, other):
            arguments = self.arguments(func)
            self.build(each)[ENTRY](*arguments)
            after.append([argument.numpy().astype("float64") for argument in arguments])
        worst = 0.0
        for a, b in zip(*after, strict=True):
            finite = np.isfinite(a)
            if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
                return float("inf")
            if finite.any():
                a, b = a[finite], b[finite]
                extent = float(np.ptp(a)) if a.size > 1 else float(np.abs(a).max())  # one number has no range
                worst = max(worst, float(np.abs(a - b).max()) / max(extent, 1e-30))
        return worst

    def arguments(self, func: tirx.PrimFunc) -> list[tvm.runtime.Tensor]:
        """Inputs and outputs for `func`."""
        ones = divisors(func)
        arrays = [(plain_ones if i in ones else plain_array)(*each) for i, each in enumerate(kernel_buffers(func))]
        return [tvm.runtime.tensor(array, self.device) for array in arrays]


def _time(
    module: tvm.runtime.Module, arguments: list[tvm.runtime.Tensor], device: tvm.runtime.Device, prepare: str
) -> list[float]:
    """Seconds of each timed run: one call a run, `prepare` (a global function) called before each.

    Each evaluator makes one run before it starts to time (lazy loading, waking the thread pool), unprepared.
    """

    def evaluator(repeats: int) -> Callable[..., Any]:
        return module.time_evaluator(ENTRY, device, number=1, repeat=repeats, f_preproc=prepare)

    once = evaluator(1)  # LLVM generates the code here
    started = time.perf_counter()
    samples = list(once(*arguments).results)
    wall = time.perf_counter() - started - samples[0]  # what is left is a run and what comes before it
    if wall > _VERY_SLOW_SECS:
        return samples
    if wall > _SLOW_SECS:
        return samples + list(evaluator(_SLOW_REPEATS)(*arguments).results)
    repeats = min(max(int(_BUDGET_SECS / wall), _MIN_REPEATS), _MAX_REPEATS)
    return samples + list(evaluator(repeats - 1)(*arguments).results)


def queued_secs(
    module: tvm.runtime.Module, arguments: list[tvm.runtime.Tensor], device: tvm.runtime.Device, idle: float
) -> list[float]:
    """Seconds of a GPU's kernel in each timed run, without the `idle` seconds of a launch that has nothing to do.

    Launches are queued behind each other: a single one between two events takes 2 to 4 us longer, whatever it computes,
    and a graph of launches that is replayed does not (`zoo:demo` on an H200: 0.120 ms; its 18 kernels one by one 0.200
    ms, queued 0.147 ms, of which 0.065 ms are 18 idle launches). Operands are where the last launch left them.
    """

    def samples(number: int, repeats: int) -> list[float]:
        return list(module.time_evaluator(ENTRY, device, number=number, repeat=repeats)(*arguments).results)

    (once,) = samples(1, 1)
    number = min(max(round(_QUEUE_SECS / once), 1), _MOST_QUEUED)
    repeats = min(max(round(_QUEUES_SECS / (number * once)), _MIN_REPEATS), _MAX_REPEATS)
    return [max(secs - idle, _LEAST_SHARE * secs) for secs in samples(number, repeats)]


def _launch_samples(timed: Callable[[], list[float]]) -> list[float]:
    """Seconds of one launch: differences of times, which noise can make negative. Then once more, and in the end
    without those."""
    samples: list[float] = []
    for _ in range(_LAUNCH_TRIES):
        samples += timed()
        if np.median(samples) > 0:
            return samples
    return [secs for secs in samples if secs > 0] or samples


def _summary(samples: list[float]) -> dict[str, Any]:
    low, median, high = np.percentile(samples, [25, 50, 75])
    if median <= 0:
        raise ValueError(f"the clock gave {median} s for a run")
    return {"run_secs": float(median), "repeats": len(samples), "spread": float((high - low) / median)}
