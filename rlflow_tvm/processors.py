"""How many of this machine's processors a process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def usable_processors() -> int:
    """Logical processors that this process may keep busy, at least one: of those it may run on (taskset, a container's
    set), as many as its container has time for, if that is bounded (docker's --cpus). A thread more, and all of them
    would be stopped for a part of each moment."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(float(allowed), _quota())))


def _quota() -> float:
    """Seconds of processor time that all of a container's processes together have in a second, by control groups of
    version 2 or else 1; infinite where there is no bound, or none that can be read."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = map(float, " ".join((_CONTROL_GROUP / name).read_text() for name in names).split())
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
        if quota > 0.0 and period > 0.0:
            return quota / period
    return math.inf
