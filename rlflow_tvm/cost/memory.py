"""Where TVM's memory plan puts a graph's tensors, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow_tvm.kernels import Launches

_MATCH = 16  # TVM's plan reuses storage of up to this many times the size, or of down to its inverse


@dataclass(frozen=True)
class MemoryPlan:
    """`places`: for each launch the storage of each operand, by number. `held_bytes`: of inputs and outputs.

    `storage_bytes`: of the pieces of storage that intermediates share, all of which are there as long as the graph is.
    """

    places: tuple[tuple[int, ...], ...]
    held_bytes: int
    storage_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of inputs, outputs and intermediates; of weights, which are there in any case, none."""
        return self.held_bytes + self.storage_bytes


def plan_memory(
    launches: Launches, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[tuple[str, ...]] | None = None
) -> MemoryPlan:
    """What `relax.transform.StaticPlanBlockMemory` plans for a graph; `sizes` of the launches' operands, in bytes, and
    their element types, if they are not all of one.

    A result takes the storage of a tensor of its type that is no longer read, the one that fits best; never that of an
    operand of its own launch.
    """
    kinds = [("",) * len(size) for size in sizes] if dtypes is None else dtypes
    last = {number: i for i, launch in enumerate(launches.launches) for number in launch.operands}
    held = launches.inputs | launches.outputs
    storages = _Storages(held | launches.weights)
    places, held_sizes = [], dict.fromkeys(held, 0)
    for i, (launch, size, kind) in enumerate(zip(launches.launches, sizes, kinds, strict=True)):
        places.append(tuple(map(storages.of, launch.operands, size, kind)))
        for number, own in zip(launch.operands, size, strict=True):
            if number in held:
                held_sizes[number] = own
            if last[number] == i:
                last[number] = -1  # once, however often the launch reads it
                storages.release(number)
    return MemoryPlan(tuple(places), sum(held_sizes.values()), storages.total)


class _Storages:
    """The storage of each tensor; those in `kept` have one of their own."""

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self._place: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._kind: dict[int, str] = {}
        self._free: list[int] = []

    @property
    def total(self) -> int:
        """Bytes of all storage that is shared."""
        return sum(self._size.values())

    def of(self, number: int, size: int, kind: str) -> int:
        """The storage of a tensor, which gets one when it is first asked for."""
        place = self._place.get(number)
        if place is None:
            place = self._place[number] = number if number in self._kept else self._take(number, size, kind)
        return place

    def release(self, number: int) -> None:
        """The tensor is read no more."""
        if number not in self._kept:
            self._free.append(self._place[number])

    def _take(self, number: int, size: int, kind: str) -> int:
        fitting: int | None = None
        smaller: int | None = None
        least, most = _MATCH * size + 1, -(-size // _MATCH) - 1
        for place in self._free:
            if self._kind[place] != kind:
                continue
            own = self._size[place]
            if size <= own < least:
                fitting, least = place, own
            elif most < own < size:
                smaller, most = place, own
        taken = fitting if fitting is not None else smaller
        if taken is None:
            self._size[number], self._kind[number] = size, kind
            return number
        self._free.remove(taken)
        self._size[taken] = max(size, self._size[taken])
        return taken
