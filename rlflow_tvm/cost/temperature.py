"""Where a launch finds its operands: in the private caches, or as far away as what was touched since has pushed them.

A kernel takes up to twice as long with cold operands as with those that the launch before has just written, and up to a
third longer when its weights were last read a quarter of a gigabyte ago rather than a few megabytes: last-level caches
are shared and far, and page tables leave the caches too. Counted is how many bytes the launches between two uses of
the same memory touch (LRU's stack distance, each launch's operands once), over the storage that TVM's memory plan
gives to tensors.

A temperature is a digit: 0 in the private caches; 1 out of them, but touched in this run; d > 1 touched in the run
before: as far away as a sweep that reads `megabytes(d)` leaves it. Such a sweep evicts less than a model that touches
as much, as caches tell a stream that is read once from data that are used: with sweeps of `_SWEEP` times the size the
sums of kernels' times of SqueezeNet, ResNet-18, ResNet-50 and BERT-Base came nearest to their models' times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tvm.target import Target

from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.memory import MemoryPlan, plan_memory
from rlflow_tvm.cost.metrics import kernel_buffers, tensor_bytes
from rlflow_tvm.cost.rehearsal import Rehearsal, Step
from rlflow_tvm.kernels import Kernel, Launch, Launches

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_BYTES = 1 << 20  # of a core's second level, where the system does not tell
_NEAREST, _FARTHEST = 2, 8
_SWEEP = 3


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
    """What is read between two uses of a tensor of temperature `digit`: 16 (digit 2), 32, ... 1024 MiB (digit 8)."""
    return 4 << digit


class Temperatures:
    """Gives the kernels of a graph, with their operands' temperatures; remembers sizes: let one serve a search."""

    def __init__(self, target: Target) -> None:
        # on a GPU nothing is evicted when kernels are timed: its cache holds what the last kernels wrote
        self._capacity = private_bytes(target) if target.kind.name == "llvm" else None
        self._known: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}  # by the kernel, see `_buffers`
        self._planned: tuple[Launches, MemoryPlan] | None = None  # the last one

    def kernels(self, launches: Launches, reach: int | None = None, *, part: bool = False) -> list[Kernel]:
        """Equal kernels with equally warm operands are merged, in the order of their first launch.

        `reach`: the temperature of weights; by default this graph's own. `part`: the graph is a part of another one,
        which has just used the memory of its inputs and results.
        """
        merged: dict[tuple[str, str], list[Launch]] = {}
        for launch, cold in zip(launches.launches, self._cold(launches, reach, part), strict=True):
            merged.setdefault((launch.key, cold), []).append(launch)
        return [Kernel(same[0].func, key, same[0].name, len(same), cold) for (key, cold), same in merged.items()]

    def rehearsal(self, launches: Launches, reach: int | None = None) -> Rehearsal:
        """The launches of which `kernels` are, in order, with the storage that the memory plan gives their operands."""
        colds, places = self._cold(launches, reach, False), self._plan(launches).places
        return tuple(Step(e.func, e.key, c, p) for e, c, p in zip(launches.launches, colds, places, strict=True))

    def _cold(self, launches: Launches, reach: int | None, part: bool) -> list[str]:
        sizes = self._sizes(launches)
        if self._capacity is None:
            return ["0" * len(size) for size in sizes]
        far = self.reach(launches) if reach is None else reach
        return operand_temperatures(launches, self._plan(launches), sizes, self._capacity, far, part)

    def reach(self, launches: Launches) -> int:
        """The temperature of what a run of the graph touches once: the weights."""
        total = sum(map(sum, self._sizes(launches)))
        if self._capacity is None or total <= self._capacity:
            return 0
        return min(max(round(math.log2(_SWEEP * total / (4 << 20))), _NEAREST), _FARTHEST)

    def peak_bytes(self, launches: Launches) -> int:
        """Bytes that a run of the graph needs beside its weights, by TVM's memory plan."""
        return self._plan(launches).peak_bytes

    def _plan(self, launches: Launches) -> MemoryPlan:
        if self._planned is None or self._planned[0] is not launches:
            dtypes = [self._buffers(launch)[1] for launch in launches.launches]
            self._planned = launches, plan_memory(launches, self._sizes(launches), dtypes)
        return self._planned[1]

    def _sizes(self, launches: Launches) -> list[tuple[int, ...]]:
        return [self._buffers(launch)[0] for launch in launches.launches]

    def _buffers(self, launch: Launch) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Bytes and element types of the operands."""
        if launch.key not in self._known:
            buffers = kernel_buffers(launch.func)
            sizes = tuple(tensor_bytes(*buffer) for buffer in buffers)
            self._known[launch.key] = sizes, tuple(str(dtype) for _, dtype in buffers)
        return self._known[launch.key]


def operand_temperatures(
    launches: Launches,
    plan: MemoryPlan,
    sizes: Sequence[tuple[int, ...]],
    capacity: int,
    reach: int,
    part: bool = False,
) -> list[str]:
    """For each launch a digit an operand; `sizes` of the operands and `capacity` of the private caches in bytes."""
    touched: dict[int, int] = {}
    untouched = str(reach)
    clock, found = 0, []
    for launch, size, places in zip(launches.launches, sizes, plan.places, strict=True):
        digits = []
        for number, place, own in zip(launch.operands, places, size, strict=True):
            before = touched.get(place, 0 if part and number not in launches.weights else None)
            if before is None:
                digits.append(untouched)
            else:
                digits.append("1" if reach and clock - before + own > capacity else "0")
        found.append("".join(digits))
        clock += sum(size)
        for place in places:
            touched[place] = clock
    return found
