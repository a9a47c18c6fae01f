"""What a rewrite would change, told without making the graph that comes of it.

A graph of hundreds of nodes has hundreds of rewrites, each of which touches a handful of them.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import Node, canonical
from rlflow_tvm.passes.apply import Roots, replacement
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import Match

_BITS = 2**64 - 1
_ODD = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, eq=False)
class Difference:
    """The graph after a rewrite, as far as it is not the graph before.

    Attributes:
        roots: of each root its new expression; itself where it is bound anew.
        added: nodes that the new graph is to have besides.
        removed: variables that are bound anew or no more.
        balance: what is computed more often than before, and less often, by whichever operands, as a hash: two
            differences to one graph that make the same graph of it have the same.
    """

    roots: Roots
    added: tuple[Node, ...]
    removed: tuple[relax.Var, ...]
    balance: int
    _rests_on: Mapping[relax.Var, tuple[Node, ...]]
    _removed: Mapping[relax.Var, tuple[Node | None, bool]]  # what binds it, and whether it is work on weights
    _outputs: tuple[relax.Var, ...]

    @staticmethod
    def of(graph: Graph, match: Match, parameters: Mapping[str, Any]) -> Difference:
        """What `apply_match` would change; RewriteError as there, but that a graph which would depend on itself is
        found out only there."""
        reader = _Reader(graph)
        roots, new = replacement(graph, match, parameters, reader.users)
        removed = _removed(reader, roots, new)
        for var in (*roots, *(var for node in new for var in node.inputs)):
            reader.users(var)
        gone = {var: (graph.node(var), var in graph.weight_only) for var in removed}
        balance = _balance(graph, roots, new, removed)
        return Difference(roots, tuple(new), removed, balance, reader.seen, gone, graph.outputs)

    def holds(self, graph: Graph) -> bool:
        """Whether it is the difference to `graph` too, in which the same match was found: nothing of what it was told
        by has changed."""
        users, weights = graph.users, graph.weight_only
        return (
            self._outputs == graph.outputs
            and all(users.get(var, ()) == nodes for var, nodes in self._rests_on.items())
            # a node below the match may be bound anew, read as before by others: what it reads goes with it then
            and all(graph.node(var) is node and (var in weights) == free for var, (node, free) in self._removed.items())
        )


def kind(node: Node) -> int:
    """What a node computes of its variables, whichever these are, one read twice included: a hash of operator,
    attributes, constants and type, of this process."""
    if "kind" not in node.notes:
        node.notes["kind"] = hash((tvm_ffi.structural_hash(node.var.ty), _written(node.value)))
    return node.notes["kind"]


def _written(value: relax.Expr) -> Hashable:
    """A value in normal form without its variables."""
    if isinstance(value, relax.Var):
        return None
    if isinstance(value, relax.Call):
        attrs = 0 if value.attrs is None else tvm_ffi.structural_hash(value.attrs)
        op = value.op.name if isinstance(value.op, tvm.ir.Op) else tvm_ffi.structural_hash(value.op)
        return op, attrs, tuple(map(_written, value.args)), tuple(map(tvm_ffi.structural_hash, value.ty_args))
    if isinstance(value, relax.Tuple):
        return tuple(map(_written, value.fields))
    if isinstance(value, relax.TupleGetItem):
        return value.index, _written(value.tuple_value)
    return tvm_ffi.structural_hash(value)


def _balance(graph: Graph, roots: Roots, new: list[Node], removed: tuple[relax.Var, ...]) -> int:
    bound = {node.var for node in new} | graph.position.keys()
    gone = [graph.nodes[graph.position[var]] for var in removed]
    before, after = [_local(node, bound, {}) for node in gone], [_local(node, bound, {}) for node in new]
    ends = {root: expr for root, expr in roots.items() if not isinstance(expr, relax.Var) or expr not in bound}
    for root in ends:  # where a parameter takes a root's place, its readers read a parameter
        for reader in graph.users.get(root, ()):
            if reader not in gone:
                before.append(_local(reader, bound, {}))
                after.append(_local(reader, bound, ends))
    return sum(after) - sum(before)


def _local(node: Node, bound: Container[relax.Expr], roots: Roots) -> int:
    """A hash of what a node computes and of which parameters it reads where."""
    read = [roots.get(var, var) for var in node.inputs]
    told = hash((kind(node), *(0 if var in bound else _name(var) for var in read))) & _BITS
    for odd in _ODD:  # Python's hashes of tuples with the same end differ by too few numbers to be added up
        told = ((told ^ (told >> 31)) * odd) & _BITS
    return told ^ (told >> 31)


def _name(expr: relax.Expr) -> int:
    return hash(canonical(expr)) if isinstance(expr, relax.Var) else tvm_ffi.structural_hash(expr)


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
