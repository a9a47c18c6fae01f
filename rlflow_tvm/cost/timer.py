"""Seconds for kernels: from memory, from the database, else measured in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import tvm
from tvm import tirx

from rlflow_tvm.cost.database import KernelDatabase
from rlflow_tvm.cost.machine import check_device, cores, target_key
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.worker_process import (
    WorkerCrashError,
    WorkerKilledError,
    WorkerProcess,
    WorkerTimeoutError,
)
from rlflow_tvm.errors import CostError

DEFAULT_SCHEDULE = "rlflow_tvm.kernels:schedule_kernel"
LAUNCH_KEY = "launch-overhead"  # reserved: no structural hash looks like this
_LAUNCH_VERSION = "1"
_METHOD = 2  # of measuring: part of the version, as times of different methods are not to be added up
_WORKER = "rlflow_tvm.cost.worker"
_START_LIMIT_SECS = 120.0
_LAUNCH_LIMIT_SECS = 60.0


class MeasurableKernel(Protocol):
    """What the timer needs of a kernel (`rlflow_tvm.kernels.Kernel` has it, and says what these are)."""

    @property
    def func(self) -> tirx.PrimFunc: ...
    @property
    def key(self) -> str: ...
    @property
    def cold(self) -> str: ...


class KernelTimer:
    """Measures kernels one after the other in a worker process that has the machine's cores to itself.

    The worker schedules the kernel with `schedule` ("module:function" of (PrimFunc, Target)), builds it, and times it
    with its operands as warm as the kernel says. What is known already, from memory or `database`, is not measured
    again; a kernel that failed is not tried again either, unless its worker was killed (SIGKILL), which is not stored.
    What an earlier process measured while the machine was disturbed is measured once more. A kernel that takes too
    long, or whose worker is killed, has a second try. `version` names what the times depend on beside kernel and
    target: by default the kernel pipeline's version, for another `schedule` that function's name. `timeout_secs`
    bounds building and running of one kernel together. `quiet`: entered while measuring, where other processes of this
    machine use the database for the same purpose at the same time (`QuietMachine.measuring`): what one has measured
    stands for all, disturbed or not. A context manager; `close` ends the worker.
    Not for use from several threads. CostError at construction for a GPU's target on a machine without one.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        database: KernelDatabase | None = None,
        timeout_secs: float = 30.0,
        *,
        schedule: str = DEFAULT_SCHEDULE,
        version: str | None = None,
        quiet: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        check_device(target)
        self.target = target
        self.target_key = target_key(target)
        self.database = database
        self.timeout_secs = timeout_secs
        self.schedule = schedule
        self.quiet = quiet
        self.version = version if version is not None else _version_of(schedule)
        self.measured = 0
        """Kernels measured in the worker so far (the rest came from memory or the database)."""
        self._known: dict[str, Measurement] = {}
        self._fresh: set[str] = set()
        self._launch: Measurement | None = None
        self._worker = WorkerProcess(_WORKER, cores(target))

    def measure(
        self, kernels: Sequence[MeasurableKernel], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Measurement]:
        """A measurement for each of `kernels`, in their order; errors are among them as values.

        `on_progress(done, total)` is called after each kernel that had to be measured, `total` being their number.
        CostError when the worker cannot be started.
        """
        todo = {known_as(kernel): kernel for kernel in kernels if self._wanted(kernel)}
        if todo and self.quiet is not None:
            with self.quiet():  # others may have measured some while this one waited
                self._measure_all({key: kernel for key, kernel in todo.items() if self._wanted(kernel)}, on_progress)
        else:
            self._measure_all(todo, on_progress)
        return [self._known[known_as(kernel)] for kernel in kernels]

    def _measure_all(self, todo: dict[str, MeasurableKernel], on_progress: Callable[[int, int], None] | None) -> None:
        for done, (key, kernel) in enumerate(todo.items(), start=1):
            try:
                measurement = self._measure(kernel)
                self._store(key, self.version, measurement)
            except WorkerKilledError as error:  # nothing that the kernel did: the next process tries again
                measurement = Measurement(error=str(error), error_kind="crash")
            self.measured += 1
            self._known[key] = measurement
            self._fresh.add(key)
            if on_progress is not None:
                on_progress(done, len(todo))

    def lookup(self, kernel: MeasurableKernel) -> Measurement | None:
        """What is known of a kernel, without measuring."""
        key = known_as(kernel)
        if key not in self._known and self.database is not None:
            stored = self.database.get(key, self.target_key, self.version)
            if stored is not None:
                self._known[key] = stored
        return self._known.get(key)

    def _wanted(self, kernel: MeasurableKernel) -> bool:
        """Whether `kernel` is not known, or only from an earlier process and a disturbed machine."""
        known = self.lookup(kernel)
        return known is None or (self.quiet is None and known.disturbed and known_as(kernel) not in self._fresh)

    def time(self, func: tirx.PrimFunc, limit_secs: float | None = None, cold: str = "") -> Measurement:
        """Measure `func` (scheduled by the worker, unless it carries `tirx.is_scheduled`); nothing is remembered.

        `cold` as in `Kernel`.
        """
        try:
            request = {"op": "measure", "func": tvm.ir.save_json(func), "cold": cold}
            return self._ask(request, limit_secs or self.timeout_secs)
        except WorkerKilledError as error:
            return Measurement(error=str(error), error_kind="crash")

    def difference(self, func: tirx.PrimFunc, other: tirx.PrimFunc) -> float | None:
        """Greatest difference between what the two write on the same inputs, as a share of `func`'s range.

        Both as in `time`. None where one of them fails.
        """
        try:
            answer = self._answer(
                {"op": "difference", "func": tvm.ir.save_json(func), "other": tvm.ir.save_json(other)},
                self.timeout_secs,
            )
        except (WorkerTimeoutError, WorkerCrashError):
            return None
        return answer.get("difference")

    def launch_secs(self) -> float:
        """Seconds that launching one kernel costs in the Relax VM beside its own run time; measured once per target.

        CostError when it cannot be measured.
        """
        if self._launch is None and self.database is not None:
            self._launch = self.database.get(LAUNCH_KEY, self.target_key, _LAUNCH_VERSION)
        if self._launch is None:
            try:
                measurement = self._ask({"op": "launch"}, _LAUNCH_LIMIT_SECS)
            except WorkerKilledError as error:
                measurement = Measurement(error=str(error), error_kind="crash")
            if measurement.run_secs is None:
                raise CostError(
                    f"the launch overhead could not be measured for {self.target_key} ({measurement.error}): "
                    "try again, and check that the target is this machine's"
                )
            self._store(LAUNCH_KEY, _LAUNCH_VERSION, measurement)
            self._launch = measurement
        assert self._launch.run_secs is not None, "only seconds are stored"
        return self._launch.run_secs

    def close(self) -> None:
        """End the worker; the database stays open, it belongs to the caller. The timer may be used again."""
        self._worker.kill()

    def __enter__(self) -> KernelTimer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _measure(self, kernel: MeasurableKernel) -> Measurement:
        request = {"op": "measure", "func": tvm.ir.save_json(kernel.func), "cold": kernel.cold}
        try:
            first = self._ask(request, self.timeout_secs)
        except WorkerKilledError:
            return self._ask(request, self.timeout_secs)
        # a busy machine makes timeouts too: what is remembered for good has happened twice
        return self._ask(request, self.timeout_secs) if first.error_kind == "timeout" else first

    def _ask(self, request: dict, limit_secs: float) -> Measurement:
        """The answer as a measurement. WorkerKilledError if somebody killed the worker."""
        try:
            answer = self._answer(request, limit_secs)
        except WorkerTimeoutError as error:
            return Measurement(error=str(error), error_kind="timeout")
        except WorkerKilledError:
            raise
        except WorkerCrashError as error:
            return Measurement(error=str(error), error_kind="crash")
        return Measurement(**answer)

    def _answer(self, request: dict, limit_secs: float) -> dict:
        if not self._worker.running:
            self._start()
        return self._worker.call({**request, "limit_secs": limit_secs}, limit_secs)

    def _start(self) -> None:
        request = {"op": "start", "target": tvm.ir.save_json(self.target), "schedule": self.schedule}
        try:
            self._worker.call(request, _START_LIMIT_SECS)
        except (WorkerCrashError, WorkerTimeoutError) as error:
            raise CostError(
                f"the measuring worker cannot use schedule {self.schedule!r} and target {self.target} ({error}): "
                'give the schedule as "module:function", importable in a new process'
            ) from error

    def _store(self, key: str, version: str, measurement: Measurement) -> None:
        if self.database is not None:
            self.database.put(key, self.target_key, version, measurement, tvm.__version__)


def known_as(kernel: MeasurableKernel) -> str:
    """What a measurement of `kernel` is kept under: its key and its operands' temperatures."""
    return f"{kernel.key}/{kernel.cold}" if kernel.cold else kernel.key


def _version_of(schedule: str) -> str:
    if schedule != DEFAULT_SCHEDULE:
        return schedule
    from rlflow_tvm.kernels import PIPELINE_VERSION  # here, as it is not needed with a schedule of one's own

    return f"{PIPELINE_VERSION}.{_METHOD}"
