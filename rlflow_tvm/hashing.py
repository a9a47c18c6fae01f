"""A hash of 64-bit numbers, of many at once or of one: the finaliser of splitmix64 (Steele et al. 2014); and of what
stands around a graph's nodes, made of it."""

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


def refined(names: np.ndarray, links: np.ndarray, edges: np.ndarray | int = 0) -> np.ndarray:
    """What nodes look like, uint64 (N,), one edge further than `names` have it.

    Args:
        names: what they look like, (N,).
        links: edges, (E, 2), (source, destination).
        edges: what each edge looks like, uint64 (E,); 0 where all look the same.
    """
    # sums, for a node's producers and consumers have no order; one direction told from the other
    produced, consumed = np.zeros_like(names), np.zeros_like(names)
    sources, destinations = np.asarray(links).T
    told = np.asarray(edges, np.uint64)
    np.add.at(produced, destinations, mixed(names[sources] ^ told))
    np.add.at(consumed, sources, mixed(~names[destinations] ^ told))
    return mixed(names ^ mixed(produced) ^ mixed(~consumed))
