"""MetaSchedule's candidates measured as all kernels are: in the timer's worker, operands as warm as in a graph."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderInput, BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerInput, RunnerResult

from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.kernels.tuned import marked

LIMIT_SECS = 10.0
"""For one candidate, built and run: many a random schedule is a thousand times slower than a good one."""


class Candidates:
    """The builder and the runner of one tuning run: candidates wait here, not built, until the worker takes them.

    `cold` as in `Kernel`.
    """

    def __init__(self, timer: KernelTimer, cold: str, on_trial: Callable[[Measurement], None]) -> None:
        waiting: dict[str, tvm.tirx.PrimFunc] = {}

        @derived_object
        class Builder(PyBuilder):
            def build(self, build_inputs: list[BuilderInput]) -> list[BuilderResult]:
                names = []
                for each in build_inputs:
                    names.append(f"candidate {len(waiting)}")
                    waiting[names[-1]] = marked(each.mod["main"])
                return [BuilderResult(name, None) for name in names]

        @derived_object
        class Future(PyRunnerFuture):
            def __init__(self, measurement: Measurement) -> None:
                self.measurement = measurement

            def done(self) -> bool:
                return True

            def result(self) -> RunnerResult:
                measured = self.measurement
                secs = None if measured.run_secs is None else [measured.run_secs]
                return RunnerResult(secs, None if measured.ok else f"{measured.error_kind}: {measured.error}")

        @derived_object
        class Runner(PyRunner):
            def run(self, runner_inputs: list[RunnerInput]) -> list[PyRunnerFuture]:
                futures = []
                for each in runner_inputs:
                    measurement = timer.time(waiting[str(each.artifact_path)], LIMIT_SECS, cold)
                    on_trial(measurement)
                    futures.append(Future(measurement))
                waiting.clear()
                return futures

        self.builder = Builder()
        self.runner = Runner()
