"""Commands as a user calls them: in a process of their own, with a home folder of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command_process import run_command
from tests.one_processor import one_processor

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", autouse=True)
def on_one_processor() -> Iterator[None]:
    """Commands measure kernels."""
    with one_processor():
        yield


@pytest.fixture(scope="session")
def home(package_home: Path) -> Path:
    """One kernel database for all commands and for what calls the package here, so that a kernel is measured once."""
    return package_home


@pytest.fixture(scope="session")
def run(home: Path) -> Command:
    def call(
        command: str, *arguments: object, timeout: float = 300.0, columns: int = 200
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "RLFLOW_TVM_HOME": str(home), "COLUMNS": str(columns)}
        return run_command(f"rlflow_tvm.{command}", list(map(str, arguments)), environment, timeout)

    return call
