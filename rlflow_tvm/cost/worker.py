"""The measuring worker's side: builds and times one kernel at a time. Runs in its own process (see `worker_process`).

Requests are JSON objects with an "op":
- "start": `target` (TVM JSON), `schedule` ("module:function"): once, first
- "measure": `func` (TVM JSON of an unscheduled PrimFunc), `cold` (as in `Caches`), `limit_secs`
- "difference": `func`, `other` (as in "measure", the same parameters), `limit_secs`: do both write the same?
- "launch": seconds of one kernel launch in the Relax VM, `limit_secs`
Answers: {"run_secs", "repeats", "spread", "slowdown"}, {"difference"} or {"error", "error_kind"}.
"""

from __future__ import annotations

import gc
import json
import signal
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from rlflow_tvm.cost.caches import Caches
from rlflow_tvm.cost.launch import measure_launch
from rlflow_tvm.cost.machine import device_of
from rlflow_tvm.cost.measurement import DISTURBED
from rlflow_tvm.cost.metrics import kernel_buffers
from rlflow_tvm.cost.operands import plain_array
from rlflow_tvm.cost.reference import Reference
from rlflow_tvm.kernels import tir_pipeline

_ENTRY = "kernel"
# Runs are repeated until they have taken this long, preparing the caches included, within these bounds. The median of
# five cold runs of a small kernel varies by a few per cent, that of fifty hardly; slow kernels vary less.
_BUDGET_SECS = 0.3
_MIN_REPEATS = 7
_MAX_REPEATS = 50
_SLOW_SECS = 0.4
_SLOW_REPEATS = 2
_VERY_SLOW_SECS = 2.0
_LAUNCH_TRIES = 3
_TRIES = 3
_PAUSE_SECS = 0.2  # between two, in which whatever disturbed may end


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes the connection."""
    connection.send_bytes(b"{}")
    worker: _Worker | None = None
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if request["op"] == "start":
            worker = _Worker(request["target"], request["schedule"])
            answer: dict[str, Any] = {}
        else:
            assert worker is not None, "the first request must be start"
            answer = worker.answer(request)
        connection.send_bytes(json.dumps(answer).encode())


class _Worker:
    def __init__(self, target: str, schedule: str) -> None:
        self.target = tvm.ir.load_json(target)
        self.device = device_of(self.target)
        self.caches = Caches(self.target)
        self.reference = Reference(self.target)
        module, _, name = schedule.partition(":")
        self.schedule: Callable[[tirx.PrimFunc, tvm.target.Target], tirx.PrimFunc] = getattr(
            import_module(module), name
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds, or the error."""
        # The parent's time limit does not hold if the parent itself is killed while a kernel hangs: then SIGALRM,
        # whose default action ends the process, sees to it. A parent that was merely stopped takes
        # that for a timeout.
        signal.setitimer(signal.ITIMER_REAL, 1.5 * request["limit_secs"] + 2.0)
        kind = "build"
        try:
            if request["op"] == "launch":
                return _summary(_launch_samples(self.target))
            func = tvm.ir.load_json(request["func"])
            if request["op"] == "difference":
                return {"difference": self._difference(func, tvm.ir.load_json(request["other"]))}
            built = self._build(func)
            kind = "run"
            self.caches.cold = request["cold"]
            return self._undisturbed(built, _arguments(func, self.device))
        except Exception as error:  # noqa: BLE001  process boundary: whatever a kernel does wrong becomes a value
            return {"error": _one_line(error), "error_kind": kind}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            gc.collect()  # cycles (tracebacks) may hold the arguments, hundreds of megabytes of them

    def _undisturbed(self, built: tvm.runtime.Module, arguments: list[tvm.runtime.Tensor]) -> dict[str, Any]:
        """The summary of the first series in which the machine was not disturbed, or else of the least disturbed."""
        best: dict[str, Any] = {}
        for _ in range(_TRIES):
            before = self.reference.slowdown()
            found = _summary(_time(built, arguments, self.device, self.caches.name))
            found["slowdown"] = max(before, self.reference.slowdown())
            if not best or found["slowdown"] < best["slowdown"]:
                best = found
            if best["slowdown"] <= DISTURBED:
                break
            time.sleep(_PAUSE_SECS)
        return best

    def _build(self, func: tirx.PrimFunc) -> tvm.runtime.Module:
        scheduled = self.schedule(func, self.target).with_attr("global_symbol", _ENTRY)
        module = tvm.IRModule({_ENTRY: scheduled})
        return tvm.compile(module, target=self.target, tir_pipeline=tir_pipeline(self.target)).jit()

    def _difference(self, func: tirx.PrimFunc, other: tirx.PrimFunc) -> float:
        """Greatest difference of a value in any buffer after a run of either, as a share of the buffer's range."""
        after = []
        for each in (func, other):
            arguments = _arguments(func, self.device)
            self._build(each)[_ENTRY](*arguments)
            after.append([argument.numpy().astype("float64") for argument in arguments])
        shares = [
            float(np.abs(a - b).max()) / max(float(np.ptp(a)), 1e-30) for a, b in zip(*after, strict=True) if a.size
        ]
        return max(shares) if np.isfinite(shares).all() else float("inf")


def _time(
    module: tvm.runtime.Module, arguments: list[tvm.runtime.Tensor], device: tvm.runtime.Device, prepare: str
) -> list[float]:
    """Seconds of each timed run: one call a run, `prepare` (a global function) called before each.

    Each evaluator makes one run before it starts to time (lazy loading, waking the thread pool).
    """

    def evaluator(repeats: int) -> Callable[..., Any]:
        return module.time_evaluator(_ENTRY, device, number=1, repeat=repeats, f_preproc=prepare)

    once = evaluator(1)  # LLVM generates the code here
    started = time.perf_counter()
    samples = list(once(*arguments).results)
    wall = (time.perf_counter() - started) / 2
    if wall > _VERY_SLOW_SECS:
        return samples
    if wall > _SLOW_SECS:
        return samples + list(evaluator(_SLOW_REPEATS)(*arguments).results)
    repeats = min(max(int(_BUDGET_SECS / wall), _MIN_REPEATS), _MAX_REPEATS)
    return list(evaluator(repeats)(*arguments).results)


def _launch_samples(target: tvm.target.Target) -> list[float]:
    """Seconds of one launch: differences of times, which noise can make negative. Then once more, and in the end
    without those."""
    samples: list[float] = []
    for _ in range(_LAUNCH_TRIES):
        samples += measure_launch(target)
        if np.median(samples) > 0:
            return samples
    return [secs for secs in samples if secs > 0] or samples


def _summary(samples: list[float]) -> dict[str, Any]:
    low, median, high = np.percentile(samples, [25, 50, 75])
    if median <= 0:
        raise ValueError(f"the clock gave {median} s for a run")
    return {"run_secs": float(median), "repeats": len(samples), "spread": float((high - low) / median)}


def _arguments(func: tirx.PrimFunc, device: tvm.runtime.Device) -> list[tvm.runtime.Tensor]:
    """Inputs and outputs for `func`."""
    return [tvm.runtime.tensor(plain_array(shape, dtype), device) for shape, dtype in kernel_buffers(func)]


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]
