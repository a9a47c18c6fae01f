"""Times of one rehearsal, reckoned to the moment of those before it.

Launches of a rehearsal are slow or fast together: of 24 kernels of BERT-Base on one core, timed in six rehearsals, the
graph's time varied by 3.8 % from one to the next (one standard deviation), a kernel's share in it by 0.6 % (in another
hour by 1.8). What a rewrite adds is timed in another rehearsal than what it replaces, and so would be cheaper or dearer
by the moment. But most launches of its graph are known, measured twice: what they take now against what they took tells
what the moment is like. Where they are not, as in the first graph in blocked layouts, the launches of a graph that is
known, the anchor, are timed right after, and tell it, three times over, as all graphs like it are reckoned to this one
then. (Without, such a graph was reckoned by the reference kernel alone: InceptionV3's was priced at 0.82 of its
unsearched one's time where its module takes 0.91, in an hour in which that kernel was slowed down by a third and others
by a twentieth.)

Where other machines share the last-level cache and the memory, as on a virtual machine, the moment is not the same for
all: over half an hour a convolution of SqueezeNet varied by 1 %, Winograd's by 5 to 10 %, a max pool by 30 %. So the
logarithms of the ratios are fitted by a line in the square root of the bytes that a kernel has from beyond the private
caches in a second. SqueezeNet's kernels, timed in sixteen pairs of processes, each reckoned by all others (deviation,
weighted by time): 6.9 % in a loud half hour, 8.5 by one factor for all, 9.7 as they were; 2.6 %, 3.4 and 3.9 in a calm
one.

How far known kernels then are from what they took is how far to trust a new one's time. Searches keep whatever was
timed in a kind moment: in an hour in which one and the same module took 18 to 23 ms, five of them gained 12 to 15 % of
ResNet-18 by prices of which a hundredth was left when the plans were priced anew. So a rehearsal of an uneasy moment
(`unrest_of`) is repeated after a while, and the calmest one counts. 200 kernels of rewritten graphs of ResNet-18, timed
while the other core moved memory on and off, were 2.3 % off a calm hour's times so, and 3.6 % without (root mean
square, weighted by time; two calm runs 1.1 % off their mean), in 246 s in place of 155 (each with 2 s between tries,
and whatever is usual). Where most moments are uneasy, others are no better: of 26 that were tried again on a loud
virtual machine, two were calm 2 s later. So one is tried again where it is worse than usual there.

Where others compute on all processors, what waits for one takes ten times as long as it does without: that is no speed
of the machine, and what did not have to wait would be reckoned to a tenth. So no factor is beyond `MOST`.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.reference import MOST
from rlflow_tvm.errors import UsageError

log = logging.getLogger("rlflow_tvm")

CALM = 0.025
"""The unrest up to which a rehearsal is taken as it is: in calm hours it is a hundredth, seldom two."""
PATIENCE = "RLFLOW_TVM_PATIENCE"
"""The environment's variable that says how often what was measured in an uneasy moment is tried again; 2 by default."""
_LATELY, _FEW = 9, 3  # rehearsals whose median unrest is the usual one, and how many of them tell one
_BEYOND = 1.5  # times the usual unrest: what is no more is taken as it is
_LEAST_SHARE = 0.25  # of a rehearsal's time: the fewer launches tell the moment, the more of their own noise is in it
_USUAL = 0.04  # deviation of a logarithm from the line: kernels that are further off count as if they were so far off
_ROUNDS = 10
_MAD = 1.4826  # deviations of a normal distribution to a median of absolute ones
_DOUBT = 0.1  # that memory makes a difference, in the weight of a known kernel with as much traffic as the mean one


@dataclass(frozen=True)
class Told:
    """What a rehearsal tells of its kernels, by name: the seconds of a launch, how many launches there are, and the
    bytes of its operands that are not in the private caches."""

    secs: Mapping[str, float]
    counts: Mapping[str, int]
    traffic: Mapping[str, int]

    def rate(self, name: str) -> float:
        """The root of a kernel's traffic, bytes a second."""
        return (self.traffic[name] / self.secs[name]) ** 0.5


@dataclass(frozen=True)
class Moment:
    """What seconds are to be multiplied by, as a logarithm: a line in `Told.rate`, not drawn on beyond `most`."""

    level: float = 0.0
    slope: float = 0.0
    most: float = 0.0

    def factors(self, told: Told) -> dict[str, float]:
        """Of each kernel."""
        logs = {name: self.level + self.slope * min(told.rate(name), self.most) for name in told.secs}
        return {name: float(np.clip(np.exp(each), 1.0 / MOST, MOST)) for name, each in logs.items()}


def moment_of(known: Mapping[str, Measurement], told: Told) -> Moment | None:
    """The moment of a rehearsal, by which its known kernels take what they took before; None where too little is known.

    `known`: what was measured before, seconds all.
    """
    total = sum(told.counts[name] * each for name, each in told.secs.items())
    names = sorted(known.keys() & told.secs.keys())
    weights = np.array([told.counts[name] * told.secs[name] for name in names])
    if not weights.sum() >= _LEAST_SHARE * total > 0.0:
        return None
    ratios = np.log([(known[name].run_secs or 0.0) / told.secs[name] for name in names])
    rates = np.array([told.rate(name) for name in names])
    level, slope = _line(rates, ratios, weights)
    return Moment(level, slope, float(rates.max()))


def unrest_of(known: Mapping[str, Measurement], told: Told) -> float:
    """How far kernels that are known are off what they took before, the moment taken out: a deviation of logarithms, by
    the median, weighted by time, as a kernel whose known time is wrong is no unrest. Nought where too little is known.
    """
    moment = moment_of(known, told)
    if moment is None:
        return 0.0
    factors = moment.factors(told)
    names = sorted(known.keys() & told.secs.keys())
    off = np.abs(np.log([(known[name].run_secs or 0.0) / (factors[name] * told.secs[name]) for name in names]))
    weights = np.array([told.counts[name] * told.secs[name] for name in names])
    order = np.argsort(off)
    middle = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return float(_MAD * off[order][middle])


def most_tries() -> int:
    """How often something is measured until the moment is calm, at most. UsageError where `PATIENCE` is no number."""
    said = os.environ.get(PATIENCE, "2")
    if not said.isdecimal():
        raise UsageError(f"{PATIENCE}={said}: a whole number is expected, of tries after an uneasy one (0: none)")
    return 1 + int(said)


class Patience:
    """How calm a moment has to be for a rehearsal to be taken as it is: calm, or not much less so than usual here. On a
    machine that is never calm other moments are no better, and tries would be in vain."""

    def __init__(self) -> None:
        self.tries = most_tries()
        """Of a rehearsal, at most."""
        self._seen: deque[float] = deque(maxlen=_LATELY)
        self._told = False

    @property
    def enough(self) -> float:
        """The unrest up to which a rehearsal is taken as it is."""
        return max(CALM, _BEYOND * self._usual)

    @property
    def _usual(self) -> float:
        return median(self._seen) if len(self._seen) >= _FEW else 0.0

    def note(self, unrest: float) -> None:
        """What a rehearsal's calmest try was like; nought, where too little was known to tell, does not count."""
        if unrest > 0.0:
            self._seen.append(unrest)
        if self._usual > CALM and not self._told:
            self._told = True
            log.warning(
                "kernels take times that differ by %.0f %% from one moment to the next, as something else uses this "
                "machine: gains of no more than that may be none; search again when it is quiet",
                100 * self._usual,
            )


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
