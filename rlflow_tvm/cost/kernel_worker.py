"""The parent's side of the measuring worker: requests, and what becomes of those that are not answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

import tvm
from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.worker_process import (
    WorkerCrashError,
    WorkerKilledError,
    WorkerProcess,
    WorkerTimeoutError,
)
from rlflow_tvm.errors import CostError

_WORKER = "rlflow_tvm.cost.worker"
_START_LIMIT_SECS = 120.0
DEFAULT_SCHEDULE = "rlflow_tvm.kernels:schedule_kernel"

Request = Mapping[str, Any]
Answer = dict[str, Any]
End = Literal["done", "timeout", "killed", "crash", "lost"]


class Workers(Protocol):
    """Whoever answers a timer's requests (see `worker`)."""

    def answers(self, requests: Sequence[Request], limit_secs: float, tries: int = 1) -> Generator[tuple[int, Answer]]:
        """(number, answer) of each request as it comes, once each; what failed is {"error", "error_kind"}.

        A request that took longer than `limit_secs`, or whose worker died, is made `tries` times, each in another
        worker: that which dies may have been spoilt by what it ran before. What was killed from outside, or failed for
        want of memory or disk, has "passing" in its answer: it says nothing of the kernel.
        CostError when nothing can be measured.
        """

    def close(self) -> None:
        """End the processes; the next request starts others."""


class Attempts:
    """Counts how often a request ended in which way, and says when that is all that can be said of it."""

    def __init__(self, tries: int) -> None:
        self._ended: Counter[End] = Counter()
        # one server may have died by itself: that of which two die is the kernel
        self._enough: dict[End, int] = {"done": 1, "timeout": tries, "killed": tries, "crash": tries, "lost": 2}

    def final(self, end: End) -> bool:
        """Whether, having ended in this way too, it is not to be tried again."""
        self._ended[end] += 1
        return self._ended[end] >= self._enough[end]


class KernelWorker:
    """A worker process that knows its target, its schedule and, if it is not to measure here, the devices."""

    def __init__(self, target: Target, schedule: str, remote: RpcDevices | None = None) -> None:
        self._target = target
        self._schedule = schedule
        self._remote = remote
        self.process = WorkerProcess(_WORKER, cores(target))

    def call(self, request: Request, limit_secs: float) -> Answer:
        """As `WorkerProcess.call`; CostError where the worker cannot work at all."""
        if not self.process.running:
            self._start()
        return self.process.call({**request, "limit_secs": limit_secs}, limit_secs)

    def attempt(self, request: Request, limit_secs: float) -> tuple[End, Answer]:
        """How `request` ended, and its answer."""
        try:
            answer = self.call(request, limit_secs)
        except WorkerTimeoutError as error:
            return "timeout", {"error": str(error), "error_kind": "timeout"}
        except WorkerKilledError as error:
            return "killed", {"error": str(error), "error_kind": "crash", "passing": True}
        except WorkerCrashError as error:
            return "crash", {"error": str(error), "error_kind": "crash"}
        if "lost" in answer:
            return "lost", {"error": f"it ended the sessions of two servers ({answer['lost']})", "error_kind": "crash"}
        return "done", answer

    def _start(self) -> None:
        request = {
            "op": "start",
            "target": tvm.ir.save_json(self._target),
            "schedule": self._schedule,
            "remote": None if self._remote is None else asdict(self._remote),
        }
        try:
            self.process.call(request, _START_LIMIT_SECS)
        except WorkerKilledError:
            raise
        except (WorkerCrashError, WorkerTimeoutError) as error:
            if self._schedule == DEFAULT_SCHEDULE and self._remote is None:
                raise CostError(
                    f"this machine cannot run code for target {self._target} ({error}): "
                    "measure on one that can (--rpc), or give another mcpu"
                ) from error
            raise CostError(
                f"the measuring worker cannot use schedule {self._schedule!r} and target {self._target} ({error}): "
                'give the schedule as "module:function", importable in a new process'
            ) from error


class LocalWorkers:
    """One worker that has this machine's cores to itself."""

    def __init__(self, target: Target, schedule: str) -> None:
        self._worker = KernelWorker(target, schedule)

    def answers(self, requests: Sequence[Request], limit_secs: float, tries: int = 1) -> Generator[tuple[int, Answer]]:
        """As in `Workers`, in the order of `requests`."""
        for number, request in enumerate(requests):
            attempts = Attempts(tries)
            while True:
                end, answer = self._worker.attempt(request, limit_secs)
                if attempts.final(end):
                    break
            yield number, answer

    def close(self) -> None:
        """As in `Workers`."""
        self._worker.process.kill()
