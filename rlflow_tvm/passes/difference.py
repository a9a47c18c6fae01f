"""What a rewrite would change, told without making the graph that comes of it.

A graph of hundreds of nodes has hundreds of rewrites, each of which touches a handful of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import Node, canonical
from rlflow_tvm.hashing import BITS, mixed_one
from rlflow_tvm.passes.apply import replacement
from rlflow_tvm.passes.graph import Graph, end_of
from rlflow_tvm.passes.match import Match

Ends = Mapping[relax.Expr, relax.Expr]
"""Root of a match -> what is read in its place afterwards: itself where it is bound anew."""


@dataclass(frozen=True, eq=False)
class Difference:
    """The graph after a rewrite, as far as it is not the graph before.

    Attributes:
        ends: what is read in the place of each root.
        added: nodes that only the new graph has, each after those that it reads.
        removed: variables that are bound anew or no more.
        balance: what is computed more often than before, and less often, by whichever operands, as a hash: two
            differences to one graph that make the same graph of it have the same.
    """

    ends: Ends
    added: tuple[Node, ...]
    removed: tuple[relax.Var, ...]
    balance: int
    _rests_on: Mapping[relax.Var, tuple[Node, ...]]
    _removed: Mapping[relax.Var, tuple[Node | None, bool]]  # what binds it, and whether it is work on weights
    _outputs: tuple[relax.Var, ...]

    @staticmethod
    def of(graph: Graph, match: Match, parameters: Mapping[str, Any]) -> Difference:
        """What `apply_match` would change; RewriteError as there, but that a graph which would depend on itself may be
        found out only there."""
        reader = _Reader(graph)
        roots, new = replacement(graph, match, parameters, reader.users)
        replaced = {root: expr for root, expr in roots.items() if not expr.same_as(root)}
        ends: Ends = {root: _canonical(end_of(root, replaced)) for root in roots}
        added, removed = _parted(reader, ends, new)
        for var in (var for node in new for var in node.inputs):
            reader.users(var)
        gone = {var: (graph.node(var), var in graph.weight_only) for var in removed}
        balance = _balance(graph, ends, added, removed)
        return Difference(ends, tuple(added), tuple(removed), balance, reader.seen, gone, graph.outputs)

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

    def read_by(self, node: Node) -> tuple[relax.Expr, ...]:
        """The operands of a node afterwards."""
        return _read_by(node, self.ends)


def operands(node: Node) -> tuple[relax.Expr, ...]:
    """The variables (canonical) and constants that a node computes with, in order."""
    if "leaves" not in node.notes:
        node.notes["leaves"] = tuple(_operands(node.value))
    return node.notes["leaves"]


def kind(node: Node) -> int:
    """What a node computes of its operands, whichever these are, one read twice included: a hash of operator,
    attributes and type, of this process."""
    if "kind" not in node.notes:
        node.notes["kind"] = hash((tvm_ffi.structural_hash(node.var.ty), _written(node.value))) & BITS
    return node.notes["kind"]


def _operands(value: relax.Expr) -> Iterator[relax.Expr]:
    if isinstance(value, relax.Var):
        yield canonical(value)
    elif isinstance(value, tvm.ir.GenericConst):
        yield value
    else:
        for part in _parts(value):
            yield from _operands(part)


def _parts(value: relax.Expr) -> Iterable[relax.Expr]:
    """What a value in normal form is put together of."""
    if isinstance(value, relax.Call):
        return value.args
    if isinstance(value, relax.Tuple):
        return value.fields
    return (value.tuple_value,) if isinstance(value, relax.TupleGetItem) else ()


def _written(value: relax.Expr) -> Hashable:
    """A value in normal form without its operands."""
    if isinstance(value, relax.Var | tvm.ir.GenericConst):
        return None
    own: Hashable
    if isinstance(value, relax.Call):
        op = value.op.name if isinstance(value.op, tvm.ir.Op) else tvm_ffi.structural_hash(value.op)
        attrs = 0 if value.attrs is None else tvm_ffi.structural_hash(value.attrs)
        own = op, attrs, tuple(map(tvm_ffi.structural_hash, value.ty_args))
    elif isinstance(value, relax.TupleGetItem):
        own = value.index
    else:
        own = "tuple" if isinstance(value, relax.Tuple) else tvm_ffi.structural_hash(value)
    return own, tuple(map(_written, _parts(value)))


class _Reader:
    """Asks a graph for users, and keeps what it was told."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.seen: dict[relax.Var, tuple[Node, ...]] = {}

    def users(self, var: relax.Var) -> tuple[Node, ...]:
        if var not in self.seen:
            self.seen[var] = self.graph.users.get(var, ())
        return self.seen[var]


def _read_by(node: Node, ends: Ends) -> tuple[relax.Expr, ...]:
    return tuple(ends.get(operand, operand) for operand in operands(node))


def _parted(reader: _Reader, ends: Ends, new: list[Node]) -> tuple[list[Node], dict[relax.Var, None]]:
    """Which of the new nodes are read afterwards, each after those that it reads; and which variables no more.

    One depends on the other: a root that only another root read may be read by nothing then.
    """
    outputs, bound = reader.graph.outputs, {node.var: node for node in new}
    removed: dict[relax.Var, None] = dict.fromkeys(ends)
    for root in ends:
        reader.users(root)  # of outputs too: what reads one reads its end afterwards
    while True:
        read = [
            end
            for root, end in ends.items()
            if root in outputs or any(user.var not in removed for user in reader.users(root))
        ]
        added: dict[relax.Var, Node] = {}
        for end in read:
            _take(end, bound, ends, added)
        kept = {operand for node in added.values() for operand in _read_by(node, ends)} | {*read, *outputs}
        before, removed = removed, _removed(reader, ends, kept)
        if removed.keys() == before.keys():
            return list(added.values()), removed


def _take(expr: relax.Expr, bound: Mapping[relax.Var, Node], ends: Ends, added: dict[relax.Var, Node]) -> None:
    """Add the new node that binds an expression, if one does, after those that it reads."""
    node = bound.get(expr) if isinstance(expr, relax.Var) else None
    if node is None or node.var in added:
        return
    added[node.var] = node
    for operand in _read_by(node, ends):
        _take(operand, bound, ends, added)
    added[node.var] = added.pop(node.var)


def _removed(reader: _Reader, ends: Ends, kept: set[relax.Expr]) -> dict[relax.Var, None]:
    """The roots, and what nobody reads any more without them."""
    graph = reader.graph
    removed = dict.fromkeys(ends)
    pending = list(ends)
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
    return removed


def _balance(graph: Graph, ends: Ends, added: list[Node], removed: Mapping[relax.Var, None]) -> int:
    own = {node.var for node in added}

    def local(node: Node, read: tuple[relax.Expr, ...]) -> int:
        """A hash of what a node computes and of which parameters and constants it reads where."""
        names = (0 if expr in own or expr in graph.position else name_of(expr) for expr in read)
        return reduce(lambda told, name: mixed_one(told ^ name), names, mixed_one(kind(node)))

    gone = [graph.nodes[graph.position[var]] for var in removed]
    before = [local(node, operands(node)) for node in gone]
    after = [local(node, _read_by(node, ends)) for node in added]
    unbound = [root for root, end in ends.items() if end not in own and end not in graph.position]
    for reader in dict.fromkeys(reader for root in unbound for reader in graph.users.get(root, ())):
        if reader.var not in removed:  # it reads a parameter or constant from now on
            before.append(local(reader, operands(reader)))
            after.append(local(reader, _read_by(reader, ends)))
    return sum(after) - sum(before)


def name_of(expr: relax.Expr) -> int:
    """A parameter or constant as a number, of this process."""
    return (hash(expr) if isinstance(expr, relax.Var) else tvm_ffi.structural_hash(expr)) & BITS


def _canonical(expr: relax.Expr) -> relax.Expr:
    return canonical(expr) if isinstance(expr, relax.Var) else expr
