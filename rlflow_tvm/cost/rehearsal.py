"""A graph's launches run one after the other, as in the model, each of them timed.

What a launch takes depends on what those before it have left in the caches, and where: by which core, how long ago,
written or read. A sequence of launches over storage that is shared as in TVM's memory plan leaves all of it as the
model does; no preparation of the caches for a kernel alone does (see `caches`, which serves where there is no graph).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.target import Target

from rlflow_tvm.cost.metrics import tensor_bytes
from rlflow_tvm.cost.operands import plain_array, plain_ones

Buffer = tuple[tuple[int, ...], str]
Call = tuple[tvm_ffi.Function, list[tvm.runtime.Tensor]]
# Each placement is storage of its own: a kernel's time varies by some per cent with where its operands happen to lie.
_BUDGET_SECS = 0.6
_SECOND_SECS = 1.0  # a second placement is begun until then: one alone says nothing of what its place does
_MOST_PLACEMENTS = 8
_RUNS_SECS = 0.3  # of a placement, its untimed runs apart
_LEAST_RUNS, _MOST_RUNS = 3, 4
_SLOW_SECS = 0.2  # one untimed run of a graph that takes so long does, else two
_SHORT_SECS = 5e-3  # a graph that takes less may live in private caches, which the reference kernel sweeps
_CALLS = 2000
_WAITED = 1.03  # times what this thread had of a processor a run may take, and so many seconds more, for reading clocks
_CLOCKS_SECS = 1e-4
_EQUAL = 1.0 + 1e-6  # times what one run waited: as much
_LEAST_SHARE = 0.2  # of its time, which a launch keeps when what calling it takes is subtracted
_ABOUT_ONE = 0x3F803F80  # as bits of float32; each half is 1 in bfloat16 and 1.9 in float16, two of it 0.008 in float64


class Step(NamedTuple):
    """One launch: its kernel, how warm its operands are (as in `Kernel`), and the storage of each."""

    func: tirx.PrimFunc
    key: str
    cold: str
    places: tuple[int, ...]


Rehearsal = tuple[Step, ...]
"""The launches of a graph, in order."""


class Part(NamedTuple):
    """A launch as it is played: a built kernel, the buffers it takes, and the storage of each.

    `ones`: numbers of those that hold ones, on storage of their own (as in `divisors`).
    """

    function: tvm_ffi.Function
    buffers: Sequence[Buffer]
    places: Sequence[int]
    ones: Collection[int] = ()


def call_secs(target: Target, device: tvm.runtime.Device) -> float:
    """Seconds that a call from here takes, whatever the kernel does."""
    x = te.placeholder((1,), "float32", name="x")
    y = te.compute((1,), lambda i: x[i] + tirx.const(1, "float32"), name="y")
    function = tvm.compile(te.create_prim_func([x, y]), target=target).jit()["main"]
    arguments = [tvm.runtime.tensor(np.zeros(1, "float32"), device) for _ in range(2)]
    return median(_timed([(function, arguments)])[0] for _ in range(_CALLS))


def rehearse(
    parts: Sequence[Part], device: tvm.runtime.Device, called_secs: float, pace: Callable[[], float] = lambda: 1.0
) -> tuple[list[list[float]], float]:
    """Seconds of each launch in each timed run, (launches, runs), and how much longer than it had a processor this
    thread took for a run, as a median.

    Runs in which it had to wait for one, as others compute on all of them, are left out, but for the better half: a
    reference kernel, which takes less than such a pause, does not see them. `called_secs`: as `call_secs` found;
    `pace`: a `reference.Pace`.
    """
    runs: list[_Run] = []
    started = time.perf_counter()
    for placement in range(_MOST_PLACEMENTS):
        if placement and time.perf_counter() - started > (_SECOND_SECS if placement == 1 else _BUDGET_SECS):
            break
        runs += _runs(_placed(parts, device), pace)
    waited = median(run.waited for run in runs)
    samples: list[list[float]] = [[] for _ in parts]
    for run in runs:
        if run.waited <= max(_EQUAL * waited, _WAITED):
            for own, each in zip(samples, run.secs, strict=True):
                own.append(run.pace * max(each - called_secs, _LEAST_SHARE * each))
    return samples, waited


class _Run(NamedTuple):
    secs: list[float]  # of each launch
    pace: float
    waited: float  # its time over what this thread had of a processor


def _runs(calls: Sequence[Call], pace: Callable[[], float]) -> list[_Run]:
    """Some, the first ones left out; what the calls take hold of is free afterwards.

    Of a short graph each comes right after another, as in a model that runs again and again: it finds what that has
    left, not what `pace` has.
    """
    secs = sum(_timed(calls))
    if secs < _SLOW_SECS:
        secs = sum(_timed(calls))
    runs = []
    pace()
    for _ in range(min(max(round(_RUNS_SECS / secs), _LEAST_RUNS), _MOST_RUNS)):
        if secs < _SHORT_SECS:
            _timed(calls)
        before, had_before = time.perf_counter(), time.thread_time()
        each = _timed(calls)
        had, wall = time.thread_time() - had_before, time.perf_counter() - before
        runs.append(_Run(each, pace(), stretched(wall, had)))
    return runs


def stretched(wall_secs: float, had_secs: float) -> float:
    """How many times as long something took as this thread had a processor; 1 if reading clocks took the rest, or its
    clock is too coarse to tell."""
    if had_secs <= 0.0:
        return 1.0
    return max((wall_secs - _CLOCKS_SECS) / had_secs, 1.0)


def summary(samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What equal launches take, as a `Measurement` has it; `samples`: (launches, runs)."""
    low, _, high = np.percentile(np.mean(samples, axis=0), [25, 50, 75])
    secs = float(np.mean(np.median(samples, axis=1)))
    if secs <= 0:
        raise ValueError(f"the clock gave {secs} s for a run")
    return {"run_secs": secs, "repeats": int(np.size(samples)), "spread": float((high - low) / secs)}


def _placed(parts: Sequence[Part], device: tvm.runtime.Device) -> list[Call]:
    """The calls, over storage that is allocated now.

    Integers do not share it: whatever a launch reads there is zero, so that no index can leave its table, or one where
    it divides by it. Weights are small enough for what is computed with them to stay about as large from layer to
    layer, as in a trained model (a square matrix of n elements has n^(1/2) rows, and is drawn with the deviation
    n^(-1/4)).
    """
    tensor = tvm.runtime.tensor
    sizes: dict[int, int] = {}  # bytes
    dtypes: dict[int, set[str]] = {}
    for part in parts:
        for number, (place, buffer) in enumerate(zip(part.places, part.buffers, strict=True)):
            if _is_float(buffer) and number not in part.ones:
                sizes[place] = max(sizes.get(place, 1), tensor_bytes(*buffer))
                dtypes.setdefault(place, set()).add(buffer[1])
    storages = {place: tensor(_floats(size, dtypes[place]), device) for place, size in sizes.items()}

    def operand(part: Part, number: int) -> tvm.runtime.Tensor:
        place, buffer = part.places[number], part.buffers[number]
        if number in part.ones:
            return tensor(plain_ones(*buffer), device)
        return storages[place]._create_view(*buffer) if _is_float(buffer) else tensor(plain_array(*buffer), device)

    return [(part.function, [operand(part, number) for number in range(len(part.buffers))]) for part in parts]


def _floats(size: int, dtypes: Collection[str]) -> np.ndarray:
    """At least `size` bytes, which are numbers of usual sizes in each of `dtypes`: NaN and denormal ones take longer.

    Storage of several types is that of intermediates: what is there at first is written over before it is read.
    """
    if len(dtypes) > 1:
        return np.full(-(-size // 4), _ABOUT_ONE, "uint32")
    (dtype,) = dtypes
    elements = -(-size // tensor_bytes((1,), dtype))
    return plain_array((elements,), dtype, elements**-0.25)


def _is_float(buffer: Buffer) -> bool:
    return buffer[1].startswith(("float", "bfloat"))


def _timed(calls: Sequence[Call]) -> list[float]:
    clock = time.perf_counter
    found = []
    gc.disable()
    try:
        for function, arguments in calls:
            before = clock()
            function(*arguments)
            found.append(clock() - before)
    finally:
        gc.enable()
    return found
