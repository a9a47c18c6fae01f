"""Times of one rehearsal, reckoned to the speed of those before it.

All launches of a rehearsal are slow or fast together: of 24 kernels of BERT-Base on one core, timed in six rehearsals,
the graph's time varied by 3.8 % from one to the next (one standard deviation), a kernel's share in it by 0.6 %. What a
rewrite adds is timed in another rehearsal than what it replaces, and so would be cheaper or dearer by the moment. But
most launches of its graph are known: what they take now against what they took tells the moment's speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from rlflow_tvm.cost.measurement import Measurement

_LEAST_SHARE = 0.25  # of a rehearsal's time: the fewer launches tell the speed, the more of their own noise is in it


def speed(known: Mapping[str, Measurement], secs: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """What the seconds of a rehearsal are to be multiplied by, for those of known kernels to be as they were.

    `secs` and `counts`: by name, a launch's seconds here and the number of launches. `known`: what was measured before,
    seconds all. The median over the known ones' time, of those that are confirmed where they are enough; 1 where too
    little is known.
    """
    total = sum(counts[name] * each for name, each in secs.items())
    confirmed = {name for name, each in known.items() if each.confirmed}
    for names in (confirmed, set(known)):
        weights = {name: counts[name] * secs[name] for name in names & secs.keys()}
        if sum(weights.values()) >= _LEAST_SHARE * total > 0.0:
            return _median({name: (known[name].run_secs or 0.0) / secs[name] for name in weights}, weights)
    return 1.0


def _median(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Of `values` the one on whose both sides lies at most half of the weight."""
    names = sorted(values, key=lambda name: values[name])
    passed = list(accumulate(weights[name] for name in names))
    return values[names[bisect_left(passed, passed[-1] / 2.0)]]
