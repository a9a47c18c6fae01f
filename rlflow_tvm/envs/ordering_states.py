"""Modules that orders of passes lead to, remembered: a pass makes the same of the same module each time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import tvm
import tvm_ffi

from rlflow_tvm.errors import RewriteError, RlflowError
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.operations import Operations
from rlflow_tvm.passes.ordering import apply_pass

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MODULES, _FACTS = 512, 50_000


class Recent(Generic[Key, Value]):
    """What was looked at last, at most `capacity` of it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Value | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Key, value: Value) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)


@dataclass(frozen=True)
class Facts:
    """Of a module: what it does at run time, and what it is to have little of."""

    operations: Operations
    objective: float


@dataclass(frozen=True)
class Step:
    """What a pass made of a module: the key of another, the same one where it changed nothing or was `refused` (why).
    `secs`: how long it took, when it was done."""

    key: int
    secs: float
    refused: str = ""


class OrderingStates:
    """Modules by structural hash, each reached from one that somebody holds by a list of passes.

    Memory is bounded: of modules the last few hundred are kept, of what is known of them the last ten thousands.
    """

    def __init__(self, objective: Callable[[tvm.IRModule, Operations], float]) -> None:
        self._objective = objective
        self._modules: Recent[int, tvm.IRModule] = Recent(_MODULES)
        self._facts: Recent[int, Facts] = Recent(_FACTS)
        self._steps: Recent[tuple[int, str], Step] = Recent(_FACTS)

    def add(self, mod: tvm.IRModule) -> int:
        """The key of a module (in the working form)."""
        key = tvm_ffi.structural_hash(mod) & (2**64 - 1)
        self._modules.put(key, mod)
        return key

    def module(self, key: int, start: tvm.IRModule, order: tuple[str, ...]) -> tvm.IRModule:
        """The module of this key, which `order` makes of `start` (passes that are refused are left out)."""
        known = self._modules.get(key)
        if known is not None:
            return known
        mod = start
        for name in order:
            try:
                mod = apply_pass(mod, name)
            except RewriteError:
                continue
        self._modules.put(key, mod)
        return mod

    def facts(self, key: int, start: tvm.IRModule, order: tuple[str, ...]) -> Facts:
        """What is known of the module; arguments as in `module`."""
        facts = self._facts.get(key)
        if facts is None:
            mod = self.module(key, start, order)
            operations = Operations.of(Graph.from_module(mod))
            facts = Facts(operations, self._objective(mod, operations))
            self._facts.put(key, facts)
        return facts

    def step(self, key: int, name: str, start: tvm.IRModule, order: tuple[str, ...]) -> Step:
        """What the pass makes of the module; arguments as in `module`."""
        step = self._steps.get((key, name))
        if step is None:
            mod, began = self.module(key, start, order), time.perf_counter()
            try:
                made = apply_pass(mod, name)
            except RewriteError as error:
                step = Step(key, time.perf_counter() - began, str(error))
            else:
                secs, following = time.perf_counter() - began, self.add(made)
                untold = self._untold(following, made)
                step = Step(key, secs, f"pass {name}: {untold}") if untold else Step(following, secs)
            self._steps.put((key, name), step)
        return step

    def _untold(self, key: int, mod: tvm.IRModule) -> str:
        """Why the objective of a module cannot be told; nothing where it can."""
        try:
            objective = self.facts(key, mod, ()).objective
        except RlflowError as error:
            return str(error)
        return "" if math.isfinite(objective) else "a kernel of the graph that it makes fails"
