"""Where a launch finds its operands: in the private caches, or as far away as what was touched since has pushed them.

A kernel takes up to twice as long with cold operands as with those that the launch before has just written, and up to a
third longer when its weights were last read a quarter of a gigabyte ago rather than a few megabytes: last-level caches
are shared and far, and page tables leave the caches too. Counted is how many bytes the launches between two uses of
the same memory touch (LRU's stack distance, each launch's operands once), over the storage that TVM's memory plan
gives to tensors.

A temperature is a digit: 0 in the private caches; 1 out of them, but touched in this run; d > 1 touched in the run
before, `megabytes(d)` ago.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.metrics import kernel_buffers, tensor_bytes
from rlflow_tvm.kernels import Kernel, Launch, Launches

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_BYTES = 1 << 20  # of a core's second level, where the system does not tell
_NEAREST, _FARTHEST = 2, 5
_MATCH = 16  # TVM's plan reuses storage of up to this many times the size, or of down to its inverse


def private_bytes(target: Target) -> int:
    """Bytes of the second-level caches of the cores that `target` uses on this machine."""
    return cores(target) * _second_level()


@cache
def _second_level() -> int:
    for entry in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((entry / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if level == "2" and kind != "Instruction" and size.endswith("K"):
            return int(size[:-1]) << 10
    return _USUAL_BYTES


def megabytes(digit: int) -> int:
    """What is touched between two runs' uses of a tensor of temperature `digit`: 16, 64, 256 or 1024 MiB."""
    return 4**digit


class Temperatures:
    """Gives the kernels of a graph, with their operands' temperatures; remembers sizes: let one serve a search."""

    def __init__(self, target: Target) -> None:
        # on a GPU nothing is evicted when kernels are timed: its cache holds what the last kernels wrote
        self._capacity = private_bytes(target) if target.kind.name == "llvm" else None
        self._bytes: dict[str, tuple[int, ...]] = {}

    def kernels(self, launches: Launches, reach: int | None = None, *, part: bool = False) -> list[Kernel]:
        """Equal kernels with equally warm operands are merged, in the order of their first launch.

        `reach`: the temperature of weights; by default this graph's own. `part`: the graph is a part of another one,
        which has just used the memory of its inputs and results.
        """
        merged: dict[tuple[str, str], list[Launch]] = {}
        sizes = self._sizes(launches)
        if self._capacity is None:
            temperatures = ["0" * len(size) for size in sizes]
        else:
            far = self.reach(launches) if reach is None else reach
            temperatures = operand_temperatures(launches, sizes, self._capacity, far, part)
        for launch, cold in zip(launches.launches, temperatures, strict=True):
            merged.setdefault((launch.key, cold), []).append(launch)
        return [Kernel(same[0].func, key, same[0].name, len(same), cold) for (key, cold), same in merged.items()]

    def reach(self, launches: Launches) -> int:
        """The temperature of what a run of the graph touches once: the weights."""
        total = sum(map(sum, self._sizes(launches)))
        if self._capacity is None or total <= self._capacity:
            return 0
        return min(max(round(math.log(total / (1 << 20), 4)), _NEAREST), _FARTHEST)

    def _sizes(self, launches: Launches) -> list[tuple[int, ...]]:
        return [self._operand_bytes(launch) for launch in launches.launches]

    def _operand_bytes(self, launch: Launch) -> tuple[int, ...]:
        if launch.key not in self._bytes:
            self._bytes[launch.key] = tuple(tensor_bytes(*buffer) for buffer in kernel_buffers(launch.func))
        return self._bytes[launch.key]


def operand_temperatures(
    launches: Launches, sizes: Sequence[tuple[int, ...]], capacity: int, reach: int, part: bool = False
) -> list[str]:
    """For each launch a digit an operand; `sizes` of the operands and `capacity` of the private caches in bytes."""
    last = {number: i for i, launch in enumerate(launches.launches) for number in launch.operands}
    storages = _Storages(launches)
    touched: dict[int, int] = {}
    untouched = str(reach)
    clock, found = 0, []
    for i, (launch, size) in enumerate(zip(launches.launches, sizes, strict=True)):
        operands = launch.operands
        places = [storages.of(number, own) for number, own in zip(operands, size, strict=True)]
        digits = []
        for number, place, own in zip(operands, places, size, strict=True):
            before = touched.get(place, 0 if part and number not in launches.weights else None)
            if before is None:
                digits.append(untouched)
            else:
                digits.append("1" if reach and clock - before + own > capacity else "0")
        found.append("".join(digits))
        clock += sum(size)
        for place in places:
            touched[place] = clock
        for number in operands:
            if last[number] == i:
                last[number] = -1  # once, however often the launch reads it
                storages.release(number)
    return found


class _Storages:
    """TVM's static plan: a result takes the storage of a tensor that is no longer read, the one that fits best."""

    def __init__(self, launches: Launches) -> None:
        self._kept = launches.inputs | launches.weights | launches.outputs
        self._place: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, number: int, size: int) -> int:
        """The storage of a tensor, which gets one when it is first asked for."""
        place = self._place.get(number)
        if place is None:
            place = self._place[number] = number if number in self._kept else self._take(number, size)
        return place

    def release(self, number: int) -> None:
        """The tensor is read no more."""
        if number not in self._kept:
            self._free.append(self._place[number])

    def _take(self, number: int, size: int) -> int:
        fitting: int | None = None
        smaller: int | None = None
        least, most = _MATCH * size + 1, -(-size // _MATCH) - 1
        for place in self._free:
            own = self._size[place]
            if size <= own < least:
                fitting, least = place, own
            elif most < own < size:
                smaller, most = place, own
        taken = fitting if fitting is not None else smaller
        if taken is None:
            self._size[number] = size
            return number
        self._free.remove(taken)
        self._size[taken] = max(size, self._size[taken])
        return taken
