"""How much faster one whole model is than another, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from rlflow_tvm.cost.end_to_end import EndToEnd

LEAST_ROUNDS = 6
"""Of fewer not even the extremes hold the median with 95 % confidence."""


@dataclass(frozen=True)
class Ratio:
    """Seconds of one candidate over those of another, round by round, as a round's two sides saw the same machine.

    `median` over the rounds; `interval`: its 95 % interval (see `median_interval`).
    """

    median: float
    interval: tuple[float, float] | None

    @staticmethod
    def of(old: EndToEnd, new: EndToEnd) -> Ratio:
        """`old` over `new`: above 1, `new` is faster."""
        ratios = [a / b for a, b in zip(old.round_secs, new.round_secs, strict=True)]
        return Ratio(float(np.median(ratios)), median_interval(ratios))


def ratio_json(name: str, ratio: Ratio | None) -> dict[str, Any]:
    """`name`: the median, `name`_interval: the interval; null where there is none."""
    interval = None if ratio is None or ratio.interval is None else list(ratio.interval)
    return {name: None if ratio is None else ratio.median, f"{name}_interval": interval}


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics, equally far from both ends, that holds the median of what `values` are
    drawn from with at least 95 % confidence, whatever its distribution; None for fewer than `LEAST_ROUNDS` values."""
    number = len(values)
    outside, tail = 0, 0.0
    while 2 * (tail := tail + comb(number, outside) / 2**number) <= 0.05:
        outside += 1
    if not outside:
        return None
    ordered = sorted(values)
    return ordered[outside - 1], ordered[number - outside]
