"""Which of many graphs one rewrite away are the same, found out without making any of them.

A value's fingerprint is a hash of what is computed and of the fingerprints of its operands (Merkle 1987), a graph's is
made of those of all that it computes: two graphs have the same if they are the same up to names and order. A rewrite
changes the fingerprints of all that follows, so all rewrites of a graph are followed through it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.hashing import BITS, mixed, mixed_one
from rlflow_tvm.passes.difference import Difference, kind, name_of, operands
from rlflow_tvm.passes.graph import Graph

_COUNTED = 0xD6E8FEB86659FD93
"""Tells what a node adds to its graph's fingerprint from what it is for its readers."""

_AT_ONCE = 256
"""Differences that are followed together, with a number for each of a graph's variables."""


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
    # those of all sites of a large graph at once would fill gigabytes
    parts = (differences[i : i + _AT_ONCE] for i in range(0, len(differences), _AT_ONCE))
    return [found for part in parts for found in _Follower(graph, part).found()]


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
                    value[number] = lookups[number].of(self._differences[number].ends[node.var])
                except RewriteError:
                    self._circular.add(number)
            self._values[node.var] = value  # not before: what asks for a root's value meanwhile goes in a circle
        result = self._total
        for number, each in enumerate(self._differences):
            if number not in self._circular:
                gone = [before.get((number, var), int(self._values[var][number])) for var in each.removed]
                came = [lookups[number].of(node.var) for node in each.added]
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

    def of(self, expr: relax.Expr) -> int:
        """RewriteError where an expression depends on itself."""
        pending, above = [expr], set[relax.Expr]()  # the latter: those that wait for their operands
        while pending:
            asked = pending[-1]
            if self._known(asked) is not None:
                pending.pop()
                continue
            node = self._node(asked)
            values = [(operand, self._known(operand)) for operand in self._difference.read_by(node)]
            missing = [operand for operand, value in values if value is None]
            if missing:
                above.add(asked)
                if not above.isdisjoint(missing):
                    raise RewriteError(f"{node.var.name} depends on itself")
                pending += missing
                continue
            value = mixed_one(kind(node))
            for _, own in values:
                assert own is not None
                value = mixed_one(value ^ own)
            self._found[asked] = value
            above.discard(asked)
            pending.pop()
        found = self._known(expr)
        assert found is not None
        return found

    def _known(self, expr: relax.Expr) -> int | None:
        """Its value; None where it is made of others' that have to be asked for."""
        if not isinstance(expr, relax.Var):
            return name_of(expr)
        if expr in self._found:
            return self._found[expr]
        if expr in self._added or expr not in self._values:
            return None
        return int(self._values[expr][self._number])

    def _node(self, expr: relax.Expr) -> Node:
        node = self._added.get(expr)
        if node is None:
            node = self._graph.node(expr)  # one further down, which the rewrite brings forward
            assert node is not None
        return node
