"""Fixtures of the cost room: targets, and one worker shared by the tests that only measure."""

from __future__ import annotations

import pytest
import tvm
from cost_kernels import SCHEDULE

from rlflow_tvm.cost import KernelTimer, Measurement
from rlflow_tvm.cost.kernel_worker import LocalWorkers
from rlflow_tvm.cost.schema import ONCE_VERSION, REFERENCE_KEY


@pytest.fixture(scope="session", autouse=True)
def usual_speed():
    """The reference kernel is timed, for a second, by the first timer of a target alone that is not told of it."""
    known: dict[str, float] = {}
    measured = KernelTimer._measure_once

    def once(self, key, op, what):
        if key != REFERENCE_KEY or not isinstance(self._workers, LocalWorkers):
            return measured(self, key, op, what)
        if self.target_key not in known:
            known[self.target_key] = measured(self, key, op, what)
        else:
            self._times.store(key, ONCE_VERSION, Measurement(run_secs=known[self.target_key], repeats=7))
        return known[self.target_key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelTimer, "_measure_once", once)
        yield


@pytest.fixture(scope="session")
def target():
    return tvm.target.Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture(scope="module")
def timer(target):
    with KernelTimer(target, timeout_secs=60.0, schedule=SCHEDULE) as shared:
        yield shared
