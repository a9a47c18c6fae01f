"""Rollout workers as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait

from rlflow_tvm.agents.pool import WorkerDiedError

_BOOTSTRAP = "import sys; from rlflow_tvm.agents.worker import serve; serve(int(sys.argv[1]))"


class ProcessWorker:
    """A new Python process, never a fork: TVM's and torch's threads would not survive one.

    It has a session of its own, so that Ctrl-C at a terminal reaches the training alone, which ends it; and it ends by
    itself when the training's side of the connection is closed, as it is by the training's death.
    """

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop
        # the package and the factory may have been found by the current folder or through pytest
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def send(self, request: bytes, answered: bool) -> None:
        """Send a request; that the process is gone is for `answer` to say."""
        del answered  # the connection has whatever comes
        with suppress(OSError):
            self.connection.send_bytes(request)

    def answer(self) -> bytes:
        """Receive an answer; WorkerDiedError."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDiedError(self._death()) from None

    def stop(self) -> None:
        """Kill it."""
        self.connection.close()
        self._process.kill()
        self._process.wait()
        self._stderr.close()

    def _death(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}, {lines[-1] if lines else 'without a message'}"


class ProcessCrew:
    """`count` processes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def shared(self, request: bytes) -> bytes:
        """The request itself."""
        return request

    def hire(self) -> ProcessWorker:
        """A process, just begun."""
        return ProcessWorker()

    def wait(self, workers: Sequence[ProcessWorker]) -> ProcessWorker:
        """The first of those that have answered or died."""
        (ready, *_) = wait([worker.connection for worker in workers])
        return next(worker for worker in workers if worker.connection is ready)

    def close(self) -> None:
        """Nothing is left."""
