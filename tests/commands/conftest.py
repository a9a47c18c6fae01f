"""Commands as a user calls them: in a process of their own, with a home folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel database for all commands, so that a kernel is measured once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def run(home: Path) -> Command:
    def call(
        command: str, *arguments: object, timeout: float = 300.0, columns: int = 200
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"rlflow_tvm.{command}", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "RLFLOW_TVM_HOME": str(home), "COLUMNS": str(columns)},
            check=False,
        )

    return call
