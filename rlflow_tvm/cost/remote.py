"""Requests answered by all servers that a tracker lists, each by the next that is free.

A worker process for each server builds kernels here and talks to a session there: TVM's client may wait for ever for a
server that is gone, and a process can be killed. The parent hands requests out and alone knows what was answered.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

from tvm.target import Target

from rlflow_tvm.cost.kernel_worker import Answer, Attempts, End, KernelWorker, Request
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.session import IDLE_SECS
from rlflow_tvm.cost.worker_process import WorkerCrashError, WorkerTimeoutError
from rlflow_tvm.errors import CostError

_TICK_SECS = 0.2
_PAUSE_SECS = 0.5  # between two questions for a server
_HAND_OUT_SECS = 1.0  # for the tracker to find one that is free
_OPEN_LIMIT_SECS = 60.0
_END_SECS = 30.0
_logger = logging.getLogger(__name__)


class RemoteWorkers:
    """As many workers as there are servers; those that another user has are waited for.

    When no server is left, a line in the log says so, and `RpcDevices.wait_secs` later it is a CostError.
    """

    def __init__(self, devices: RpcDevices, target: Target, schedule: str) -> None:
        self._devices = devices
        self._target = target
        self._schedule = schedule
        self._slots: list[_Slot] = []

    def answers(self, requests: Sequence[Request], limit_secs: float, tries: int = 1) -> Generator[tuple[int, Answer]]:
        """As in `Workers`, in the order in which they come. CostError without a tracker or a server."""
        if not requests:
            return
        wanted = max(1, min(len(requests), self._devices.servers()))
        while len(self._slots) < wanted:
            self._slots.append(_Slot(KernelWorker(self._target, self._schedule, self._devices), str(self._devices)))
        # first those that still hold a session: no other could have their servers
        slots = sorted(self._slots, key=lambda slot: not slot.has_server)[:wanted]
        jobs = _Jobs(requests, limit_secs, tries)
        for slot in slots:
            slot.begin(jobs)
        try:
            patience = _Patience(self._devices, slots)
            for _ in requests:
                yield jobs.next_answer(patience.check)
        finally:
            whole = jobs.stop()
            for slot in slots:
                slot.end(whole)

    def close(self) -> None:
        """As in `Workers`; the servers are free for others."""
        for slot in self._slots:
            slot.worker.process.kill()
        self._slots.clear()


class _Jobs:
    """The requests of one run, and the answers so far; for use from several threads."""

    def __init__(self, requests: Sequence[Request], limit_secs: float, tries: int) -> None:
        self.requests = requests
        self.limit_secs = limit_secs
        self._attempts = [Attempts(tries) for _ in requests]
        self._waiting = deque(range(len(requests)))
        self._left = len(requests)
        self._answers: queue.SimpleQueue[tuple[int, Answer] | Exception] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stopped = False

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return self._stopped or not self._left

    def take(self, wait_secs: float) -> int | None:
        """A request to work on, which nobody else then does; None if there is none within `wait_secs`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.over, wait_secs)
            return self._waiting.popleft() if self._waiting and not self.over else None

    def settle(self, number: int, end: End, answer: Answer) -> None:
        """How a request that was taken ended: it is answered, or waits again."""
        with self._changed:
            if self._stopped:
                return
            if self._attempts[number].final(end):
                self._left -= 1
                self._answers.put((number, answer))
            else:
                self._waiting.append(number)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing can be measured any more."""
        self._answers.put(error)

    def pause(self, secs: float) -> None:
        """Sleep, unless it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.over, secs)

    def next_answer(self, check: Callable[[], None]) -> tuple[int, Answer]:
        """The next answer; `check` is called while there is none."""
        while True:
            try:
                answer = self._answers.get(timeout=_TICK_SECS)
            except queue.Empty:
                check()
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def stop(self) -> bool:
        """Hand nothing out any more. Whether everything was answered."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            return not self._left


class _Slot:
    """A worker, and the thread that hands it requests whenever it has a server."""

    def __init__(self, worker: KernelWorker, devices: str) -> None:
        self.worker = worker
        self.has_server = False
        self.waits_for_server = False
        self.reason = ""
        self._devices = devices
        self._thread: threading.Thread | None = None

    def begin(self, jobs: _Jobs) -> None:
        self.waits_for_server = False
        self._thread = threading.Thread(target=self._run, args=(jobs,), daemon=True)
        self._thread.start()

    def end(self, whole: bool) -> None:
        """Wait for the thread, whose jobs were stopped. `whole`: what it does yet is short, and not broken off."""
        assert self._thread is not None
        self._thread.join(_END_SECS if whole else 0.0)
        while self._thread.is_alive():
            self.worker.process.interrupt()
            self._thread.join(_TICK_SECS)

    def _run(self, jobs: _Jobs) -> None:
        try:
            while not jobs.over:
                if not self._open():
                    jobs.pause(_PAUSE_SECS)
                    continue
                number = jobs.take(IDLE_SECS / 2)  # with nothing to do for longer, the worker gives the server back
                if number is None:
                    continue
                end, answer = self.worker.attempt(jobs.requests[number], jobs.limit_secs)
                if end == "lost":
                    _logger.warning("RPC %s: a server was lost; its kernel is tried again", self._devices)
                jobs.settle(number, end, answer)
        except Exception as error:  # noqa: BLE001  the parent raises it
            jobs.fail(error)

    def _open(self) -> bool:
        try:
            answer = self.worker.call({"op": "open", "wait_secs": _HAND_OUT_SECS}, _OPEN_LIMIT_SECS)
            if "error" in answer:  # it lies here, whatever servers there are
                raise CostError(answer["error"])
            self.reason = answer.get("lost", "")
        except (WorkerTimeoutError, WorkerCrashError) as error:
            self.reason = str(error)
        self.has_server = not self.reason
        self.waits_for_server = not self.has_server
        return self.has_server


class _Patience:
    """How long there has been no server at all."""

    def __init__(self, devices: RpcDevices, slots: Sequence[_Slot]) -> None:
        self._devices = devices
        self._slots = slots
        self._since: float | None = None

    def check(self) -> None:
        """CostError after too long without a server."""
        if not all(slot.waits_for_server for slot in self._slots):
            self._since = None
            return
        devices, reason = self._devices, self._slots[0].reason
        if self._since is None:
            self._since = time.monotonic()
            _logger.warning("RPC %s: no server (%s); waiting up to %g s for one", devices, reason, devices.wait_secs)
        elif time.monotonic() - self._since > devices.wait_secs:
            raise CostError(
                f"no server to measure on at RPC tracker {devices.host}:{devices.port} under key {devices.key!r} for "
                f"{devices.wait_secs:g} s ({reason}): start `python -m tvm.exec.rpc_server --tracker "
                f"{devices.host}:{devices.port} --key {devices.key}` on the machines that --target describes"
            )
