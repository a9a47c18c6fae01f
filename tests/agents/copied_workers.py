"""Rollout workers that are copies of a process that has imported what they import: seconds less for each of many.

How they are started for a user is the business of the tests that do without.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from types import SimpleNamespace
from typing import IO, Any

from rlflow_tvm.agents import worker
from tests.command_process import SLOW_TO_IMPORT


class Copy:
    """What `ProcessWorker` needs of `subprocess.Popen`."""

    def __init__(
        self,
        _command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stderr: IO[bytes],
        env: Mapping[str, str],
        **_options: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(SLOW_TO_IMPORT)
        (connection,) = map(_Descriptor, pass_fds)
        arguments = (connection, _Descriptor(stderr.fileno()), dict(env))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


SUBPROCESS = SimpleNamespace(Popen=Copy, DEVNULL=subprocess.DEVNULL)
"""In place of the module of that name, for `rlflow_tvm.agents.processes`."""


class _Descriptor:
    """A file's, on the way to another process, where it is a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self._number),)


def _arrived(duplicate: Any) -> int:
    return duplicate.detach()


def _serve(connection: int, stderr: int, environment: dict[str, str]) -> None:
    os.setsid()
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.update(environment)
    worker.serve(connection)
