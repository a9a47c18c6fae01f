"""The measuring worker's side: builds one kernel at a time and has it timed, here or on a server of TVM's RPC.

Runs in its own process (see `worker_process`). Requests are JSON objects with an "op":
- "start": `target` (TVM JSON), `schedule` ("module:function"), `remote` (null, or the fields of `RpcDevices`): first
- "open": `wait_secs`: have a server's session, for a worker with `remote`; before each of the following
- "measure": `func` (TVM JSON of an unscheduled PrimFunc), `cold` (as in `Kernel`); with `key` it stays built
- "missing": `keys`: which of them are not built here?
- "build": `func`, `key`: keep it, and see that it runs
- "rehearse": `launches` ([key, storages of the operands] each), `wanted` (numbers of launches by name): all built here
- "difference": `func`, `other` (as in "measure", the same parameters): do both write the same?
- "launch": seconds of one kernel launch in the Relax VM
- "reference": seconds of the reference kernel, which are the `usual_secs` of "measure" and "rehearse" (see `Pace`)
All but the first two have `limit_secs`.
Answers: {"run_secs", "repeats", "spread", "slowdown"}, {"missing"}, {"times"} (such by name), {"difference"},
{"error", "error_kind"} with "passing" where the machine was short of something, {"lost"} (why the session, if any, is
gone), to "open" also {"error"} (why none can ever be used), or nothing.
"""

from __future__ import annotations

import gc
import json
import re
import signal
from multiprocessing.connection import Connection
from typing import Any

import tvm

from rlflow_tvm.cost.bench import ENTRY, Bench, schedule_named
from rlflow_tvm.cost.caches import LocalCaches, SentCaches
from rlflow_tvm.cost.place import Here, LinkError
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.session import IDLE_SECS, Session, SessionLostError
from rlflow_tvm.cost.stage import Stage
from rlflow_tvm.errors import CostError

_SHORT = re.compile("out.of.memory|bad_alloc|cannot allocate memory|no space left on device", re.IGNORECASE)
"""In messages of errors that are neither MemoryError nor OSError: of TVM's allocations, a GPU's among them."""


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes the connection."""
    connection.send_bytes(b"{}")
    worker: _Worker | None = None
    while True:
        try:
            if not connection.poll(IDLE_SECS) and worker is not None:
                worker.release()
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if request["op"] == "start":
            worker = _Worker(request)
            gc.collect()
            gc.freeze()  # what is here now stays: not to be walked through after each answer
            answer: dict[str, Any] = {}
        else:
            assert worker is not None, "the first request must be start"
            answer = worker.open(request["wait_secs"]) if request["op"] == "open" else worker.answer(request)
        connection.send_bytes(json.dumps(answer).encode())


class _Worker:
    def __init__(self, request: dict[str, Any]) -> None:
        self.target = tvm.ir.load_json(request["target"])
        self.schedule = schedule_named(request["schedule"])
        self.remote = None if request["remote"] is None else RpcDevices(**request["remote"])
        self.session: Session | None = None
        self.bench: Bench | None = None
        self.stage: Stage | None = None
        if self.remote is None:
            self.bench = Bench(self.target, self.schedule, Here(self.target), LocalCaches(self.target))
            self.stage = Stage(self.bench)

    def open(self, wait_secs: float) -> dict[str, Any]:
        """See to it that there is a living session; the tracker may take `wait_secs` to hand out a server."""
        assert self.remote is not None, "only a worker with devices has sessions"
        if self.session is not None:
            return self._lost()
        try:
            self.session = Session(self.remote, self.target, wait_secs)
            caches = SentCaches(self.target, self.session.helpers)
            self.bench = Bench(self.target, self.schedule, self.session, caches)
            return {}
        except LinkError as error:
            self.release()
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001  whatever TVM raises where a session ends or the target is not its
            self.release()
            return {"lost": str(error) if isinstance(error, CostError) else _one_line(error)}

    def release(self) -> None:
        """Give the server back, if there is one."""
        if self.remote is not None:
            self.session = self.bench = None
            gc.collect()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds, or the error."""
        # The parent's time limit does not hold if the parent itself is killed while a kernel hangs: then SIGALRM,
        # whose default action ends the process, sees to it. A parent that was merely stopped takes
        # that for a timeout. A server has an alarm of its own, sooner, as the next kernel waits for it.
        signal.setitimer(signal.ITIMER_REAL, 1.5 * request["limit_secs"] + 2.0)
        try:
            answer = self._lost(request["limit_secs"] + 1.0) or self._answer(request)
            lost = self._lost()
            return lost if "error" in answer and lost else answer
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            gc.collect()  # cycles (tracebacks) may hold the arguments, hundreds of megabytes of them

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.bench is not None, "a worker with devices must be told to open"
        kind = "build"
        try:
            if request["op"] == "launch":
                return self.bench.launch()
            if request["op"] == "reference":
                return self.bench.usual()
            if request["op"] in ("missing", "rehearse"):
                assert self.stage is not None, "graphs are timed here only"
                if request["op"] == "missing":
                    return {"missing": self.stage.missing(request["keys"])}
                kind = "run"
                return {"times": self.stage.rehearse(request["launches"], request["wanted"], request["usual_secs"])}
            func = tvm.ir.load_json(request["func"])
            if request["op"] == "difference":
                return {"difference": self.bench.difference(func, tvm.ir.load_json(request["other"]))}
            if (key := request.get("key")) is None or self.stage is None:
                built = self.bench.build(func)
            else:
                built, func = self.stage.build(key, func)
            kind = "run"
            if request["op"] == "build":
                built[ENTRY](*self.bench.arguments(func))
                return {}
            return self.bench.time(func, built, request["cold"], request["usual_secs"])
        except Exception as error:  # noqa: BLE001  process boundary: whatever a kernel does wrong becomes a value
            if kind == "run" and self.stage is not None and request["op"] in ("build", "measure"):
                self.stage.forget(request.get("key", ""))
            failed: dict[str, Any] = {"error": _one_line(error), "error_kind": kind}
            return {**failed, "passing": True} if _is_passing(error) else failed

    def _lost(self, limit_secs: float = 3 * IDLE_SECS) -> dict[str, Any]:
        """Whether there should be a session and is none; one that lives ends after so long without a request."""
        if self.remote is None:
            return {}
        if self.session is None:
            return {"lost": f"it was given back, as there was nothing to do for {IDLE_SECS:g} s"}
        try:
            self.session.check(limit_secs)
            return {}
        except SessionLostError as error:
            self.release()
            return {"lost": str(error)}


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]


def _is_passing(error: Exception) -> bool:
    """Whether it tells nothing of the kernel, but that this machine was short of something, which it need not be the
    next time."""
    return isinstance(error, MemoryError | OSError | LinkError) or _SHORT.search(str(error)) is not None
