"""Commands as a user calls them: in a process of their own, with a home folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from rlflow_tvm.frontend.net import Net

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel database for all commands, so that a kernel is measured once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network of few kernels: a residual and a fire block, a pool and a head."""
    net = Net(0)
    x = net.conv_relu("image", 3, 16, 3, stride=2)
    x = net.fire(net.max_pool(net.residual(x, 16)), 16, 8, 16)
    net.dense(net.global_average(x), 32, 10, "logits")
    path = tmp_path_factory.mktemp("network") / "network.onnx"
    onnx.save(net.model("small", {"image": (onnx.TensorProto.FLOAT, (1, 3, 32, 32))}, {"logits": (1, 10)}), path)
    return path


@pytest.fixture(scope="session")
def run(home: Path) -> Command:
    def call(command: str, *arguments: object, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"rlflow_tvm.{command}", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "RLFLOW_TVM_HOME": str(home), "COLUMNS": "200"},
            check=False,
        )

    return call
