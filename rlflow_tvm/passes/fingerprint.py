"""Which of many graphs one rewrite away are the same, found out without making any of them.

A value's fingerprint is a hash of what is computed and of the fingerprints of its operands (Merkle 1987), a graph's is
made of those of all that it computes: two graphs have the same if they are the same up to names and order. A rewrite
changes the fingerprints of all that follows, so all rewrites of a graph are followed through it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.difference import Difference, kind, name_of, operands
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.hashing import BITS, mixed, mixed_one

_COUNTED = 0xD6E8FEB86659FD93
"""Tells what a node adds to its graph's fingerprint from what it is for its readers."""


def distinct(graph: Graph, differences: Sequence[Difference], barred: Collection[int] = ()) -> list[int]:
    """The numbers of those that make graphs of their own, ascending: the first of each, none that makes the graph of
    one that is `barred`, and none that would make a graph which depends on itself, as far as that is found out."""
    alike: dict[int, list[int]] = {}
    for number, each in enumerate(differences):
        alike.setdefault(each.balance, []).append(number)
    unsure = sorted(number for numbers in alike.values() if len(numbers) > 1 for number in numbers)
    told = dict(zip(unsure, fingerprints(graph, [differences[i] for i in unsure]), strict=True))
    seen: set[int | None] = {None, *(told[number] for number in barred if number in told)}
    dropped = set(barred)
    for number, fingerprint in told.items():
        if fingerprint in seen:
            dropped.add(number)
        seen.add(fingerprint)
    return [number for number in range(len(differences)) if number not in dropped]


def fingerprints(graph: Graph, differences: Sequence[Difference]) -> list[int | None]:
    """Of the graph after each difference; None where it would depend on itself."""
    return _Follower(graph, differences).found() if differences else []


class _Follower:
    """Follows C differences through a graph: the values of its variables, a number of uint64 (C,) each."""

    def __init__(self, graph: Graph, differences: Sequence[Difference]) -> None:
        self._graph, self._differences = graph, differences
        self._values: dict[relax.Var, np.ndarray] = {
            param: np.full(len(differences), name_of(param), np.uint64) for param in graph.params
        }
        self._total = np.zeros(len(differences), np.uint64)
        self._circular: set[int] = set()

    def found(self) -> list[int | None]:
        lookups = [_Lookup(self._graph, each, self._values, i) for i, each in enumerate(self._differences)]
        rooted: dict[relax.Expr, list[int]] = {}
        for number, each in enumerate(self._differences):
            for root in each.ends:
                rooted.setdefault(root, []).append(number)
        before: dict[tuple[int, relax.Var], int] = {}
        for node in self._graph.nodes:
            value = np.full(len(self._differences), mixed_one(kind(node)), np.uint64)
            for operand in operands(node):
                own = self._values[operand] if isinstance(operand, relax.Var) else np.uint64(name_of(operand))
                value = mixed(value ^ own)
            self._total += mixed(value ^ np.uint64(_COUNTED))
            for number in rooted.get(node.var, ()):
                before[number, node.var] = int(value[number])
                try:
                    value[number] = lookups[number].of(self._differences[number].ends[node.var], ())
                except RewriteError:
                    self._circular.add(number)
            self._values[node.var] = value  # not before: what asks for a root's value meanwhile goes in a circle
        result = self._total
        for number, each in enumerate(self._differences):
            if number not in self._circular:
                gone = [before.get((number, var), int(self._values[var][number])) for var in each.removed]
                came = [lookups[number].of(node.var, ()) for node in each.added]
                change = sum(mixed_one(value ^ _COUNTED) for value in came)
                change -= sum(mixed_one(value ^ _COUNTED) for value in gone)
                result[number] = (int(result[number]) + change) & BITS
        for var in self._graph.outputs:
            result = mixed(result ^ self._values[var])
        return [None if number in self._circular else int(value) for number, value in enumerate(result)]


class _Lookup:
    """Values of expressions under one difference, while the graph is being followed."""

    def __init__(self, graph: Graph, difference: Difference, values: dict[relax.Var, np.ndarray], number: int) -> None:
        self._graph, self._difference, self._values, self._number = graph, difference, values, number
        self._added = {node.var: node for node in difference.added}
        self._found: dict[relax.Expr, int] = {}

    def of(self, expr: relax.Expr, above: tuple[relax.Expr, ...]) -> int:
        """RewriteError where an expression depends on itself; `above`: those that are being asked for."""
        if not isinstance(expr, relax.Var):
            return name_of(expr)
        if expr in self._found:
            return self._found[expr]
        if expr in above:
            raise RewriteError(f"{expr.name} depends on itself")
        node = self._added.get(expr)
        if node is None and expr in self._values:
            return int(self._values[expr][self._number])
        if node is None:
            node = self._graph.node(expr)  # one further down, which the rewrite brings forward
            assert node is not None
        value = mixed_one(kind(node))
        for operand in self._difference.read_by(node):
            value = mixed_one(value ^ self.of(operand, (*above, expr)))
        self._found[expr] = value
        return value
