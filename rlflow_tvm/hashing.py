"""A hash of 64-bit numbers, of many at once or of one: the finaliser of splitmix64 (Steele et al. 2014)."""

from __future__ import annotations

import numpy as np

BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LAST = 31


def mixed(values: np.ndarray) -> np.ndarray:
    """Of uint64 numbers, each for itself."""
    values = values + np.uint64(_STEP)
    for shift, odd in _ROUNDS:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(odd)
    return values ^ (values >> np.uint64(_LAST))


def mixed_one(value: int) -> int:
    """The same of one number, of which the last 64 bits count."""
    value = (value + _STEP) & BITS
    for shift, odd in _ROUNDS:
        value = ((value ^ (value >> shift)) * odd) & BITS
    return value ^ (value >> _LAST)
