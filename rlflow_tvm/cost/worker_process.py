"""A child process that answers requests: started when needed, with a time limit, replaced when it dies.

TVM's own `PopenWorker` does nearly this, but takes over the parent's environment and imports torch with TVM; the
thread counts must be in the environment before TVM loads, and a foreign OpenMP pool spoils kernel times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from rlflow_tvm.cost.scratch import scratch_written
from rlflow_tvm.errors import CostError

_START_SECS = 180.0  # importing TVM takes one second on an idle machine
_FROM_OUTSIDE: dict[int, str] = {
    signal.SIGKILL: "SIGKILL; short of memory?",
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT",
    signal.SIGHUP: "SIGHUP",
    signal.SIGXCPU: "SIGXCPU; a limit of processor time",
}
"""Signals that no kernel gives itself."""
# A None in sys.modules makes `import torch` an ImportError, which TVM takes for "not installed": 0.7 s instead of
# 2.4 s to start, and no second thread pool.
_BOOTSTRAP = """
import sys
sys.modules["torch"] = None
from importlib import import_module
from multiprocessing.connection import Connection
import_module(sys.argv[1]).serve(Connection(int(sys.argv[2])))
"""


class WorkerTimeoutError(Exception):
    """The worker did not answer within the limit; it has been killed."""


class WorkerCrashError(Exception):
    """The worker died while it worked; the message says of what."""


class WorkerKilledError(WorkerCrashError):
    """The worker was killed by somebody else: the system, when memory or time allowed is short, or an administrator."""


class WorkerProcess:
    """A process that runs `serve(connection)` of the module named `entry` and answers JSON objects with JSON objects.

    It starts with the first `call`, with TVM_NUM_THREADS = `threads` and one OpenMP thread, in a session of its own (so
    that Ctrl-C at a terminal reaches the parent alone), without torch. `serve` sends an empty object once it is
    ready, and returns when the connection is closed: a parent that is gone leaves no worker behind.
    """

    def __init__(self, entry: str, threads: int, environment: Mapping[str, str] | None = None) -> None:
        self.entry = entry
        self.threads = threads
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stderr: IO[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def call(self, request: Mapping[str, Any], timeout_secs: float) -> dict[str, Any]:
        """Send `request`, return the answer.

        WorkerTimeoutError after `timeout_secs` (starting the process does not count), WorkerCrashError when the process
        dies; the next call starts another. CostError when it cannot be started at all.
        """
        if not self.running:
            self.kill()
            self._start()
        try:
            return self._exchange(request, timeout_secs)
        except BaseException:
            # Also on KeyboardInterrupt: an answer still under way would be taken for the next request's.
            self.kill()
            raise

    def kill(self) -> None:
        """End the process at once, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            with suppress(ProcessLookupError):  # its compiler and linker too; it leads a session of its own
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def interrupt(self) -> None:
        """End the process while another thread is in `call`, which then raises `WorkerKilledError`."""
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        environment = {
            **os.environ,
            "TVM_NUM_THREADS": str(self.threads),
            "OMP_NUM_THREADS": "1",
            # The parent may have found the package by its current folder or through pytest.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **self._environment,
        }
        try:
            with scratch_written():
                self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process, closed by kill
            self._connection, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, self.entry, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    env=environment,
                    start_new_session=True,
                )
            self._receive(_START_SECS)
        except (WorkerCrashError, WorkerTimeoutError, OSError) as error:
            self.kill()
            remedy = (
                "check free memory and the limits (ulimit -a)"
                if isinstance(error, OSError)
                else "check that `python -c 'import tvm'` works with this interpreter"
            )
            raise CostError(f"the measuring worker {self.entry} did not start ({error}): {remedy}") from error
        except BaseException:
            self.kill()
            raise

    def _exchange(self, request: Mapping[str, Any], timeout_secs: float) -> dict[str, Any]:
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError as error:
            raise self._death() from error
        return self._receive(timeout_secs)

    def _receive(self, timeout_secs: float) -> dict[str, Any]:
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout_secs):
                raise WorkerTimeoutError(f"no answer within {timeout_secs:g} s")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> WorkerCrashError | WorkerTimeoutError:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            return WorkerCrashError("the worker closed its connection")
        if code == -signal.SIGALRM:  # its own limit, where this process was stopped and missed the time
            return WorkerTimeoutError("the worker stopped itself at its time limit")
        if -code in _FROM_OUTSIDE:
            return WorkerKilledError(f"the worker was killed ({_FROM_OUTSIDE[-code]})")
        if code < 0:
            return WorkerCrashError(f"the worker died of {signal.Signals(-code).name}")
        return WorkerCrashError(f"the worker ended with exit code {code}: {self._last_line()}")

    def _last_line(self) -> str:
        if self._stderr is None:
            return "no message"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"
