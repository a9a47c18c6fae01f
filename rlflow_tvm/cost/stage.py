"""Kernels that are built once and stay, to be played in the order of one graph after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx

from rlflow_tvm.cost.bench import ENTRY, Bench
from rlflow_tvm.cost.metrics import kernel_buffers
from rlflow_tvm.cost.operands import divisors
from rlflow_tvm.cost.rehearsal import Part, call_secs, rehearse, summary

_MOST_KERNELS = 1024  # or those of two graphs like the last
_TRIES_SECS = 2.0  # for all tries of a graph: the timer has others made, of other moments


class Stage:
    """Keeps the last kernels that were built, and times the launches of graphs of them. What goes wrong is raised."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._built: OrderedDict[str, tuple[tvm.runtime.Module, tirx.PrimFunc, frozenset[int]]] = OrderedDict()
        self._most = _MOST_KERNELS
        self._call_secs: float | None = None

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those that would have to be built; the others are kept for longest, and there will be room for all."""
        self._most = max(_MOST_KERNELS, 2 * len(set(keys)))
        for key in keys:
            if key in self._built:
                self._built.move_to_end(key)
        return [key for key in keys if key not in self._built]

    def build(self, key: str, func: tirx.PrimFunc) -> tuple[tvm.runtime.Module, tirx.PrimFunc]:
        """`func`, scheduled and loaded, known as `key` here: now, or before. And the function that was: of one key
        there are those with more unit axes or fewer, which take other arguments."""
        if key not in self._built:
            self._built[key] = self._bench.build(func), func, divisors(func)
            while len(self._built) > self._most:
                self._built.popitem(last=False)
        return self._built[key][:2]

    def forget(self, key: str) -> None:
        """Keep `key` no longer: it does not run, and would stop each graph that it is in."""
        self._built.pop(key, None)

    def rehearse(
        self,
        launches: Sequence[tuple[str, Sequence[int]]],
        wanted: Mapping[str, Sequence[int]],
        usual_secs: float | None = None,
    ) -> dict[str, dict[str, Any]]:
        """A `Measurement`'s fields for each of `wanted`, which are numbers of launches that count as one kernel.

        `launches`: the key and the operands' storages of each. `usual_secs`: as in `Pace`.
        """
        if self._call_secs is None:
            self._call_secs = call_secs(self._bench.target, self._bench.device)
        called = self._call_secs
        built = [self._built[key] for key, _ in launches]
        parts = [
            Part(module[ENTRY], kernel_buffers(func), places, ones)
            for (module, func, ones), (_, places) in zip(built, launches, strict=True)
        ]

        pace = self._bench.pace(usual_secs)

        def series() -> tuple[dict[str, Any], float]:
            samples, waited = rehearse(parts, self._bench.device, called, pace)
            return {name: summary([samples[i] for i in own]) for name, own in wanted.items()}, waited

        times, slowdown = self._bench.undisturbed(series, usual_secs, _TRIES_SECS)
        return {name: {**fields, "slowdown": slowdown} for name, fields in times.items()}
