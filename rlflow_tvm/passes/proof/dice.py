"""Random choices of one sample of a rule: extents, axes, small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflow_tvm.passes.proof.domains import Shape

_LARGEST = 4


class Dice:
    """Random choices of one sample. It prefers few different extents, so that what must agree often does."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._extents = tuple(int(e) for e in rng.integers(1, _LARGEST + 1, 2))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def extent(self) -> int:
        if self.chance(0.7):
            return int(self.pick(self._extents))
        return int(self.rng.integers(1, _LARGEST + 1))

    def shape(self, rank: int | None = None, least: int = 0) -> Shape:
        """Extents of a tensor of `rank`, by default of at least `least`."""
        if rank is None:
            ranks = [0, 1, 2, 2, 3, 3, 4]
            rank = int(self.pick([r for r in ranks if r >= least]))
        return tuple(self.extent() for _ in range(rank))

    def permutation(self, count: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self.rng.permutation(count))

    def small(self, least: int, most: int, seldom: int) -> int:
        """A number up to `most`, now and then up to `seldom`."""
        return int(self.rng.integers(least, (seldom if self.chance(0.3) else most) + 1))

    def signed(self, axis: int, rank: int) -> int:
        """The axis, now and then counted from the end."""
        return axis - rank if self.chance(0.25) else axis
