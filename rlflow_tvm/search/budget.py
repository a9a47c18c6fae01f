"""What a search may spend."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rlflow_tvm.errors import UsageError

_UNITS = {"": None, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """Environment steps (moves tried) and seconds of wall time; a search ends when either is spent.

    With steps alone a search is deterministic for given costs; with seconds it is not.
    """

    steps: float = math.inf
    secs: float = math.inf

    @staticmethod
    def parse(text: str | int) -> Budget:
        """`20000` (steps), `90s`, `5m` or `2h`; UsageError for anything else."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(text).strip())
        if found is None or float(found[1]) == 0 or (not found[2] and "." in found[1]):
            raise UsageError(f"--budget {text}: steps are expected, as 20000, or a time, as 90s, 5m or 2h")
        unit = _UNITS[found[2]]
        return Budget(int(found[1])) if unit is None else Budget(secs=unit * float(found[1]))


DEFAULT_BUDGET = Budget(20_000)
"""A limit for searches that end by themselves."""
