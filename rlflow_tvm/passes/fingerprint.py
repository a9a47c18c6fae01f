"""Which of many graphs one rewrite away are the same, found out without making any of them.

A value's fingerprint is a hash of what is computed and of the fingerprints of its operands (Merkle 1987), a graph's is
made of those of all that it computes: two graphs have the same if they are the same up to names and order. A rewrite
changes the fingerprints of all that follows, so all rewrites of a graph are followed through it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import canonical
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.difference import Difference, kind
from rlflow_tvm.passes.graph import VARIABLES, Graph

_BITS = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
_SHIFT = 29
_COUNTED = 0x94D049BB133111EB


def distinct(graph: Graph, differences: Sequence[Difference]) -> list[int]:
    """The numbers of those that make graphs of their own, ascending: the first of each, and none that would make a
    graph which depends on itself, as far as that is found out."""
    alike: dict[int, list[int]] = {}
    for number, each in enumerate(differences):
        alike.setdefault(each.balance, []).append(number)
    unsure = sorted(number for numbers in alike.values() if len(numbers) > 1 for number in numbers)
    seen: set[int | None] = {None}
    dropped: set[int] = set()
    for number, fingerprint in zip(unsure, fingerprints(graph, [differences[i] for i in unsure]), strict=True):
        if fingerprint in seen:
            dropped.add(number)
        seen.add(fingerprint)
    return [number for number in range(len(differences)) if number not in dropped]


def fingerprints(graph: Graph, differences: Sequence[Difference]) -> list[int | None]:
    """Of the graph after each difference; None where it would depend on itself."""
    return _Follower(graph, differences).found() if differences else []


def _joined(a: np.ndarray, b: np.ndarray | np.uint64) -> np.ndarray:
    """A hash of two numbers whose order counts, elementwise."""
    c: np.ndarray = (a ^ b) * np.uint64(_ODD[0]) + a * np.uint64(_ODD[1])
    return c ^ (c >> np.uint64(_SHIFT))


def _joined_one(a: int, b: int) -> int:
    """The same of one pair."""
    c = ((a ^ b) * _ODD[0] + a * _ODD[1]) & _BITS
    return c ^ (c >> _SHIFT)


class _Follower:
    """Values of all variables of a graph under each of C differences, uint64 (C,)."""

    def __init__(self, graph: Graph, differences: Sequence[Difference]) -> None:
        self._graph, self._differences = graph, differences
        number = len(differences)
        self._values: dict[relax.Var, np.ndarray] = {
            param: np.full(number, _joined_one(_COUNTED, i), np.uint64) for i, param in enumerate(graph.params)
        }
        self._total = np.zeros(number, np.uint64)
        self._circular: set[int] = set()

    def found(self) -> list[int | None]:
        replaced: dict[relax.Var, list[int]] = {}
        for number, each in enumerate(self._differences):
            for root in each.roots:
                replaced.setdefault(root, []).append(number)
        before: dict[tuple[int, relax.Var], int] = {}
        for node in self._graph.nodes:
            value = np.full(len(self._differences), kind(node) & _BITS, np.uint64)
            for var in node.inputs:
                value = _joined(value, self._values[var])
            self._total += _joined(value, np.uint64(_COUNTED))
            for number in replaced.get(node.var, ()):
                before[number, node.var] = int(value[number])
                value[number] = self._after(number, node.var)
            self._values[node.var] = value  # not before: what asks for a root's value meanwhile goes in a circle
        for number, each in enumerate(self._differences):
            if number not in self._circular:
                self._count(number, each, before)
        result = self._total
        for var in self._graph.outputs:
            result = _joined(result, self._values[var])
        return [None if number in self._circular else int(value) for number, value in enumerate(result)]

    def _after(self, number: int, root: relax.Var) -> int:
        """What a root's value becomes."""
        each = self._differences[number]
        try:
            return _Lookup(self._graph, each, self._values, number).of(each.roots[root], ())
        except RewriteError:
            self._circular.add(number)
            return 0

    def _count(self, number: int, each: Difference, before: dict[tuple[int, relax.Var], int]) -> None:
        """Of what is computed: without what is removed, with what is added."""
        lookup, change = _Lookup(self._graph, each, self._values, number), 0
        for var in each.removed:
            value = before.get((number, var), int(self._values[var][number]))
            change -= _joined_one(value, _COUNTED)
        for node in each.added:
            change += _joined_one(lookup.of(node.var, ()), _COUNTED)
        self._total[number] = (int(self._total[number]) + change) & _BITS


class _Lookup:
    """Values of expressions under one difference, while the graph is being followed."""

    def __init__(self, graph: Graph, difference: Difference, values: dict[relax.Var, np.ndarray], number: int) -> None:
        self._graph, self._values, self._number, self._difference = graph, values, number, difference
        self._added = {node.var: node for node in difference.added}

    def of(self, expr: relax.Expr, above: tuple[relax.Expr, ...]) -> int:
        """RewriteError where an expression depends on itself; `above`: those that are being asked for."""
        if type(expr) not in VARIABLES:
            return tvm_ffi.structural_hash(expr) & _BITS
        var = canonical(expr)
        if var in above:
            raise RewriteError(f"{var.name} depends on itself")
        node = self._added.get(var)
        if node is None:
            new = self._difference.roots.get(var)
            if var in self._values:
                return int(self._values[var][self._number])
            if new is not None:
                return self.of(new, (*above, var))
            node = self._graph.node(var)  # a node further down, which the rewrite brings forward
            assert node is not None
        value = kind(node) & _BITS
        for source in node.inputs:
            value = _joined_one(value, self.of(source, (*above, var)))
        return value
