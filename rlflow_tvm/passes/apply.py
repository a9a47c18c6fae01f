"""Applying a rule at one match: build the right side, splice it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import relax
from tvm.error import InternalError

from rlflow_tvm.dataflow import Node
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import Match
from rlflow_tvm.passes.ops import CLASSES, OPERATORS
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, Term, Var

Roots = Mapping[relax.Var, relax.Expr]
"""Root of a match -> its new expression: itself where it is bound anew."""


def apply_match(graph: Graph, match: Match, parameters: Mapping[str, Any]) -> Graph:
    """The graph after rewriting `match`; `parameters` are the rule set's, for its attribute expressions.

    RewriteError if the right side is ill-typed, holds a number that cannot be computed, depends on itself or is what
    stands there already.
    """
    return graph.rewritten(*replacement(graph, match, parameters, lambda var: graph.users.get(var, ())))


def replacement(
    graph: Graph, match: Match, parameters: Mapping[str, Any], users: Callable[[relax.Var], tuple[Node, ...]]
) -> tuple[Roots, list[Node]]:
    """What `Graph.rewritten` takes: each root's new expression, and the nodes that these need.

    `users`: a variable's in the graph, asked where an equal node may be there already. RewriteError if the right side
    is ill-typed, holds a number that cannot be computed or is what stands there already.
    """
    builder = _Builder(users, {**parameters, **match.env}, match.roots)
    built: dict[relax.Var, relax.Expr] = {}
    for root, term in zip(match.roots, match.rule.equation.right, strict=True):
        try:
            expr = builder.build(term)
        except ArithmeticError as error:
            raise RewriteError(f"rule {match.rule.name}: {term} cannot be computed: {error}") from error
        except (IndexError, InternalError, TypeError, ValueError) as error:  # Relax's type inference refuses the call
            raise RewriteError(f"rule {match.rule.name}: {term} is ill-typed: {str(error).splitlines()[-1]}") from error
        if not tvm_ffi.structural_equal(expr.ty, root.ty):
            raise RewriteError(f"rule {match.rule.name}: {root.name} would change its type from {root.ty} to {expr.ty}")
        built[root] = expr
    roots, new = builder.bound_to(built)
    bound = {node.var: node for node in new}
    if all(expr.same_as(root) and _unchanged(graph.node(root), bound.get(root)) for root, expr in roots.items()):
        raise RewriteError(f"rule {match.rule.name}: at {match.roots[0].name} it changes nothing")
    return roots, new


def _unchanged(old: Node | None, new: Node | None) -> bool:
    return old is not None and (new is None or _equal(old, new))


def _equal(a: Node, b: Node) -> bool:
    return a.op == b.op and a.inputs == b.inputs and tvm_ffi.structural_equal(a.value, b.value)


def _constant(value: float, dtype: str) -> relax.Expr:
    """OverflowError for a number that the element type does not hold: another would be infinite, zero or cut off, or as
    halves are below 6e-5 off by more than rounding elsewhere."""
    whole = "int" in dtype or dtype == "bool"
    with np.errstate(over="ignore", under="ignore"):
        constant = relax.const(int(value) if whole else float(value), dtype)
    held = constant.value.numpy()
    if whole and int(held) != value:
        raise OverflowError(f"{value} is no {dtype}")
    if not whole and not abs(float(held) - value) <= float(ml_dtypes.finfo(held.dtype).eps) * abs(value):
        raise OverflowError(f"{value} is no {dtype}")
    return constant


class _Builder:
    """Builds terms over a match as new nodes, sharing equal ones with each other and with the graph.

    The roots are not shared: they are about to be bound to something else.
    """

    def __init__(
        self, users: Callable[[relax.Var], tuple[Node, ...]], env: Mapping[str, Any], roots: tuple[relax.Var, ...]
    ) -> None:
        self._users, self._env, self._roots = users, env, frozenset(roots)
        self._dtype = str(getattr(roots[0].ty, "dtype", None) or "float32")
        self._normalizer = relax.BlockBuilder()
        self.new: dict[relax.Var, Node] = {}
        self._built: dict[int, relax.Expr] = {}

    def build(self, term: Term) -> relax.Expr:
        """The variable (or constant) that holds `term`'s value."""
        # what is named behind `where` is one object wherever the name stands
        if id(term) not in self._built:
            self._built[id(term)] = self._made(term)
        return self._built[id(term)]

    def _made(self, term: Term) -> relax.Expr:
        if isinstance(term, Var):
            return self._env[term.name]
        if isinstance(term, Number):
            return _constant(term.value, self._dtype)
        if isinstance(term, Scalar):
            return _constant(term.attribute.value(self._env), self._dtype)
        if isinstance(term, Item):
            return self._emit(relax.TupleGetItem(self.build(term.term), term.index))
        return self._emit(self._call(term, [self.build(arg) for arg in term.args]))

    def _call(self, term: Apply, args: list[relax.Expr]) -> relax.Expr:
        if term.member is not None:
            name, attributes = self._env[term.member]
            assert name in CLASSES[term.head]
            return OPERATORS[name].make(args, attributes)
        attributes = dict(self._env[term.rest]) if term.rest is not None else {}
        attributes.update({name: value.value(self._env) for name, value in term.attributes})
        return OPERATORS[term.head].make(args, attributes)

    def _emit(self, value: relax.Expr) -> relax.Var:
        value = self._normalizer.normalize(value)
        candidate = Node.of(relax.DataflowVar("t", value.ty), value)
        if candidate.inputs:
            first = candidate.inputs[0]
            for node in (*self._users(first), *self.new.values()):
                if node.var not in self._roots and _equal(node, candidate):
                    return node.var
        self.new[candidate.var] = candidate
        return candidate.var

    def bound_to(self, roots: dict[relax.Var, relax.Expr]) -> tuple[dict[relax.Var, relax.Expr], list[Node]]:
        """Let new nodes that are a root's value bind the root's own variable, so that no user changes."""
        result = dict(roots)
        for root, expr in roots.items():
            last = self.new.get(expr) if isinstance(expr, relax.Var) else None
            read = any(expr in node.inputs for node in self.new.values())
            if last is not None and not read and sum(e is expr or e.same_as(expr) for e in result.values()) == 1:
                del self.new[expr]
                self.new[root] = Node.of(root, last.value)
                result[root] = root
        return result, list(self.new.values())
