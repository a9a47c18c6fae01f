"""Fixtures of the cost room: targets, and one worker shared by the tests that only measure."""

from __future__ import annotations

import pytest
import tvm
from cost_kernels import SCHEDULE

from rlflow_tvm.cost import KernelTimer


@pytest.fixture(scope="session")
def target():
    return tvm.target.Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture(scope="module")
def timer(target):
    with KernelTimer(target, timeout_secs=60.0, schedule=SCHEDULE) as shared:
        yield shared
