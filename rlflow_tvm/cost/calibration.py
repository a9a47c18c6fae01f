"""Times of one rehearsal, reckoned to the moment of those before it.

Launches of a rehearsal are slow or fast together: of 24 kernels of BERT-Base on one core, timed in six rehearsals, the
graph's time varied by 3.8 % from one to the next (one standard deviation), a kernel's share in it by 0.6 %. What a
rewrite adds is timed in another rehearsal than what it replaces, and so would be cheaper or dearer by the moment. But
most launches of its graph are known, measured twice: what they take now against what they took tells what the moment is
like.

Where other machines share the last-level cache and the memory, as on a virtual machine, the moment is not the same for
all: over half an hour a convolution of SqueezeNet varied by 1 %, Winograd's by 5 to 10 %, a max pool by 30 %. So the
logarithms of the ratios are fitted by a line in the square root of the bytes that a kernel has from beyond the private
caches in a second. SqueezeNet's kernels, timed in sixteen pairs of processes, each reckoned by all others (deviation,
weighted by time): 6.9 % in a loud half hour, 8.5 by one factor for all, 9.7 as they were; 2.6 %, 3.4 and 3.9 in a calm
one.

Where others compute on all processors, what waits for one takes ten times as long as it does without: that is no speed
of the machine, and what did not have to wait would be reckoned to a tenth. So no factor is beyond `MOST`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.reference import MOST

_LEAST_SHARE = 0.25  # of a rehearsal's time: the fewer launches tell the moment, the more of their own noise is in it
_USUAL = 0.04  # deviation of a logarithm from the line: kernels that are further off count as if they were so far off
_ROUNDS = 10
_DOUBT = 0.1  # that memory makes a difference, in the weight of a known kernel with as much traffic as the mean one


def factors(
    known: Mapping[str, Measurement],
    secs: Mapping[str, float],
    counts: Mapping[str, int],
    traffic: Mapping[str, int],
) -> dict[str, float]:
    """What each kernel's seconds in a rehearsal are to be multiplied by, for those of known kernels to be as they were.

    `secs`, `counts`, `traffic`: by name, a launch's seconds here, the number of launches, and the bytes of its operands
    that are not in the private caches. `known`: what was measured before, seconds all. 1 where too little is known.
    """
    total = sum(counts[name] * each for name, each in secs.items())
    told = sorted(known.keys() & secs.keys())
    weights = np.array([counts[name] * secs[name] for name in told])
    if not weights.sum() >= _LEAST_SHARE * total > 0.0:
        return dict.fromkeys(secs, 1.0)
    ratios = np.log([(known[name].run_secs or 0.0) / secs[name] for name in told])
    rate = {name: (traffic[name] / each) ** 0.5 for name, each in secs.items()}
    rates = np.array([rate[name] for name in told])
    level, slope = _line(rates, ratios, weights)
    most = rates.max()  # beyond what is known the line is not drawn on
    logs = {name: level + slope * min(each, most) for name, each in rate.items()}
    return {name: float(np.clip(np.exp(each), 1.0 / MOST, MOST)) for name, each in logs.items()}


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Level and slope, by Huber's estimate: least squares in which far points count less, round after round."""
    weights = weights / weights.sum()
    scale = float(weights @ x) or 1.0
    points = np.stack([np.ones_like(x), x / scale], axis=1)
    used = weights
    for _ in range(_ROUNDS):
        root = np.sqrt(used)
        left = np.vstack([points * root[:, None], [0.0, _DOUBT**0.5]])
        solved = np.linalg.lstsq(left, np.append(y * root, 0.0), rcond=None)[0]
        used = weights * np.minimum(1.0, _USUAL / np.maximum(np.abs(y - points @ solved), 1e-12))
    return float(solved[0]), float(solved[1]) / scale
