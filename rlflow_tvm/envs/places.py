"""What the places of a graph where a rule matches look like, as numbers that outlive the graph.

Two sites have the same key at radius r where the same rule matches nodes whose surroundings, r edges far, are alike:
operators, attributes, shapes. What a rewrite saves is largely a matter of that, in this graph, in the next one and in
the twin block further down: so what was tried in one of them is known of the others. The first key is the rule's alone.
"""

from __future__ import annotations

import hashlib
from itertools import count

import numpy as np

from rlflow_tvm.hashing import mixed, refined

RADII = (0, 1, 3)
"""Edges that a key's surroundings reach; one key of a site for each."""
KEYS = 1 + len(RADII)
"""Of a site, the rule's among them."""
_RULE = 63  # in place of a radius


def place_keys(
    kinds: np.ndarray, links: np.ndarray, rules: np.ndarray, nodes: np.ndarray, radii: tuple[int, ...] = RADII
) -> np.ndarray:
    """Keys of sites, int64 (S, 1 + radii), the same in every process: the rule's, then those by surroundings.

    Args:
        kinds: what each node is for itself, uint64 (N,).
        links: edges, (E, 2), (source, destination).
        rules: of each site, (S,).
        nodes: of each site, (S, K), -1 = none; their order counts.
        radii: ascending.
    """
    numbers = np.asarray(rules).astype(np.uint64) * np.uint64(64)
    around, keys = mixed(np.asarray(kinds, np.uint64)), [mixed(numbers + np.uint64(_RULE))]
    for radius in count():
        if radius in radii:
            key = mixed(numbers + np.uint64(radius))
            for column in np.asarray(nodes).T:
                key = mixed(key ^ np.where(column >= 0, around[column], np.uint64(1)))
            keys.append(key)
        if radius == radii[-1]:
            break
        around = refined(around, links)
    return np.stack(keys, axis=1).view(np.int64)


def kind(*told: object) -> int:
    """A number below 2^64 for what is told (printed: the same in every process)."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=8).digest(), "little")
