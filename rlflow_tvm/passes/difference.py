"""What a rewrite would change, told without making the graph that comes of it.

A graph of hundreds of nodes has hundreds of rewrites, each of which touches a handful of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import Node, canonical
from rlflow_tvm.passes.apply import Roots, replacement
from rlflow_tvm.passes.graph import VARIABLES, Graph
from rlflow_tvm.passes.match import Match


@dataclass(frozen=True, eq=False)
class Difference:
    """The graph after a rewrite, as far as it is not the graph before.

    Attributes:
        roots: of each root its new expression; itself where it is bound anew.
        added: nodes that only the new graph has, each after those that it reads.
        removed: variables that are bound anew or no more.
        identity: equal for two differences to the same graph if and only if they make the same graph of it, but for
            graphs that are the same by a symmetry of the whole.
    """

    roots: Roots
    added: tuple[Node, ...]
    removed: tuple[relax.Var, ...]
    identity: Hashable
    _rests_on: Mapping[relax.Var, tuple[Node, ...]]
    _outputs: tuple[relax.Var, ...]

    @staticmethod
    def of(graph: Graph, match: Match, parameters: Mapping[str, Any]) -> Difference:
        """What `apply_match` would change; RewriteError as there, but that a graph which would depend on itself is
        found out only there."""
        reader = _Reader(graph)
        roots, new = replacement(graph, match, parameters, reader.users)
        removed = _removed(reader, roots, new)
        identity = _identity(reader, roots, new)
        for var in (*roots, *(var for node in new for var in node.inputs)):
            reader.users(var)
        return Difference(roots, tuple(new), removed, identity, reader.seen, graph.outputs)

    def holds(self, graph: Graph) -> bool:
        """Whether it is the difference to `graph` too, in which the same match was found: nothing of what it was told
        by has changed."""
        users = graph.users
        return self._outputs == graph.outputs and all(
            users.get(var, ()) == nodes for var, nodes in self._rests_on.items()
        )


class _Reader:
    """Asks a graph for users, and keeps what it was told."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.seen: dict[relax.Var, tuple[Node, ...]] = {}

    def users(self, var: relax.Var) -> tuple[Node, ...]:
        if var not in self.seen:
            self.seen[var] = self.graph.users.get(var, ())
        return self.seen[var]


def _removed(reader: _Reader, roots: Roots, new: list[Node]) -> tuple[relax.Var, ...]:
    """The roots, and what nobody reads any more without them."""
    graph = reader.graph
    kept = {var for node in new for var in node.inputs}
    kept.update(canonical(expr) for expr in roots.values() if isinstance(expr, relax.Var))
    kept.update(graph.outputs)
    removed = dict.fromkeys(roots)
    pending = list(roots)
    while pending:
        node = graph.node(pending.pop())
        if node is None:
            continue
        for var in node.reads:
            if var in removed or var in kept or graph.node(var) is None:
                continue
            if all(user.var in removed for user in reader.users(var)):
                removed[var] = None
                pending.append(var)
    return tuple(removed)


def _identity(reader: _Reader, roots: Roots, new: list[Node]) -> Hashable:
    """The places that compute something else afterwards, as near to the inputs as can be, and what they compute.

    A root whose new node differs from its old one in an operand that nothing else reads is the operand's change.
    """
    graph = reader.graph
    added = {node.var: node for node in new}
    names: dict[relax.Expr, Hashable] = {}
    for node in new:
        names[node.var] = (_kind(node), tuple(names.get(var, _name(graph, var)) for var in node.inputs))
    pending = [(root, root if root in added else expr) for root, expr in roots.items()]
    changed: set[Hashable] = set()
    seen = set()
    while pending:
        old, expr = pending.pop()
        if (old, expr) in seen:
            continue
        seen.add((old, expr))
        before, after = graph.node(old), added.get(expr) if type(expr) in VARIABLES else None
        if before is not None and after is not None and _kind(before) == _kind(after):
            pairs = [pair for pair in zip(before.inputs, after.inputs, strict=True) if pair[0] is not pair[1]]
            if all(_read_by(reader, var, before) for var, _ in pairs):
                pending += pairs
                continue
        changed.add((_name(graph, old), names.get(expr, _name(graph, expr))))
    return frozenset(changed)


def _read_by(reader: _Reader, var: relax.Var, node: Node) -> bool:
    """Whether `node` alone reads the variable, which some node binds."""
    graph = reader.graph
    return graph.node(var) is not None and var not in graph.outputs and reader.users(var) == (node,)


def _name(graph: Graph, expr: relax.Expr) -> Hashable:
    """An expression of the graph as it is."""
    if type(expr) in VARIABLES:
        return expr
    return tvm_ffi.structural_hash(expr)


def _kind(node: Node) -> int:
    """What a node computes of its variables, whichever these are: operator, attributes, constants, their types."""
    if "kind" not in node.notes:
        node.notes["kind"] = tvm_ffi.structural_hash(node.value, map_free_vars=True)
    return node.notes["kind"]
