"""Quiet for measuring: processes of one machine that compute side by side stop while one of them measures."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlflow_tvm.errors import CostError

_SILENT_SECS = 60.0  # of waiting: a graph's kernels are seldom longer in being measured
_logger = logging.getLogger(__name__)


class QuietMachine:
    """A lock that many hold while they compute, or one while it measures; the system frees what a dead process held.

    Two files beside `path`, which stay: ".busy" is locked shared by those that compute, and alone by the one that
    measures; ".turn" is passed by everybody on the way in. Who wants to measure holds it while waiting, so that it
    need not wait for ever for a moment at which nobody computes. A long wait is told of in the log. Locks belong to
    the open files: two objects in one process exclude each other like two processes. Not for use from several threads.
    CostError where the files cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.computing = False
        """Whether this object holds the lock as one that computes."""
        self._path = Path(path).resolve()  # one and the same for all, however they come to it
        self._busy = _open(Path(f"{self._path}.busy"))
        try:
            self._turn = _open(Path(f"{self._path}.turn"))
        except BaseException:
            os.close(self._busy)
            raise

    def compute(self) -> None:
        """Go on computing, after those that wait to measure; to be called again and again in long work."""
        self.rest()
        self._lock(self._turn, fcntl.LOCK_EX)
        try:
            self._lock(self._busy, fcntl.LOCK_SH)
            self.computing = True
        finally:
            self._lock(self._turn, fcntl.LOCK_UN)

    def rest(self) -> None:
        """Compute no longer: what follows disturbs nobody."""
        self._lock(self._busy, fcntl.LOCK_UN)
        self.computing = False

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Nobody else computes or measures inside; one that computes goes on with it afterwards."""
        computing = self.computing
        self.rest()  # two that compute and wait for each other's end would never measure
        self._lock(self._turn, fcntl.LOCK_EX)
        try:
            self._lock(self._busy, fcntl.LOCK_EX)
        finally:
            self._lock(self._turn, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self.rest()
            if computing:
                self.compute()

    def _lock(self, file: int, how: int) -> None:
        try:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._told():
                    fcntl.flock(file, how)
        except OSError as error:
            raise CostError(
                f"{self._path}.busy cannot be locked ({error.strerror}): set RLFLOW_TVM_HOME to a folder on a disk of "
                "this machine"
            ) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """The log is told if what is inside takes long."""
        what = "waiting for another process that measures kernels (which locks %s.busy): if it was stopped, end it"
        timer = threading.Timer(_SILENT_SECS, _logger.warning, (what, self._path))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Give everything back."""
        os.close(self._busy)
        os.close(self._turn)

    def __enter__(self) -> QuietMachine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        with suppress(OSError):  # what may be read alone can be locked all the same
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise CostError(
            f"{path} cannot be opened ({error.strerror}): set RLFLOW_TVM_HOME to a folder that can be written"
        ) from error
