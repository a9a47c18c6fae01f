"""Schedules found by tuning, as the kernel database keeps them."""

from __future__ import annotations

import json

from tvm import tirx

from rlflow_tvm.cost.database import TunedRow
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.kernels import kernel_key
from rlflow_tvm.kernels.tuned import apply_trace

_LEAST_GAIN = 1.02
"""Below it the two times are the same one: medians of two series of one kernel differ by so much."""


class TunedSchedules:
    """For `rlflow_tvm.kernels.Choices`: a kernel by its tuned schedule where that measured faster than the rules'.

    `timer`: for the target, with the database that they are in; it measures nothing here.
    """

    def __init__(self, timer: KernelTimer) -> None:
        self._timer = timer

    def row(self, key: str) -> TunedRow | None:
        """What tuning came to for the kernel with this key, if its schedule is to be used."""
        database = self._timer.database
        row = None if database is None else database.get_tuned(key, self._timer.target_key, self._timer.version)
        return row if row is not None and pays(row) else None

    def __call__(self, func: tirx.PrimFunc) -> tirx.PrimFunc | None:
        """`func` (fused, not scheduled) by its tuned schedule, or None."""
        row = self.row(kernel_key(func))
        if row is None or row.trace is None:
            return None
        return apply_trace(func, self._timer.target, json.loads(row.trace))


def pays(row: TunedRow) -> bool:
    """Whether the tuned schedule measured faster than the schedule rules' own."""
    return row.run_secs is not None and row.rule_secs is not None and row.rule_secs > _LEAST_GAIN * row.run_secs
