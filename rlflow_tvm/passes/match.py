"""Matching one rule at one place, with the reason where it does not match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import dpl

from rlflow_tvm.dataflow import Node, canonical
from rlflow_tvm.passes.attribute import shape
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.ops import CLASSES, COMMUTATIVE, OPERATORS, Operator
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, Term, Var


class Mismatch(Exception):
    """Why a term does not match, and where."""

    def __init__(self, reason: str, expr: relax.Expr) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = expr.name if isinstance(expr, relax.Var) else type(expr).__name__


@dataclass(frozen=True, eq=False)
class Match:
    """A rule's left side found in a graph: its roots, and what its variables stand for."""

    rule: RewriteRule
    roots: tuple[relax.Var, ...]
    variant: tuple[int, ...]
    env: Mapping[str, Any]
    matched: tuple[relax.Var, ...] = field(default=())

    @cached_property
    def reads(self) -> tuple[relax.Var, ...]:
        """What it matches, roots first, each once."""
        return tuple(dict.fromkeys((*self.roots, *self.matched)))


@lru_cache(maxsize=4096)
def variants(term: Term, symmetric: bool) -> tuple[Term, ...]:
    """`term` with the operands of its commutative operators in each order that can matter."""
    if isinstance(term, Item):
        return tuple(Item(t, term.index) for t in variants(term.term, symmetric))
    if not isinstance(term, Apply):
        return (term,)
    forms = [
        Apply(term.head, args, term.attributes, term.rest, term.member)
        for args in product(*(variants(a, symmetric) for a in term.args))
    ]
    if term.head in COMMUTATIVE and not symmetric:
        forms += [Apply(f.head, f.args[::-1], f.attributes, f.rest, f.member) for f in forms]
    return tuple(forms)


@lru_cache(maxsize=4096)
def pattern_of(term: Term) -> dpl.DFPattern:
    """The term's shape as a Relax pattern: the quick filter in front of `unify`, which decides."""
    return _pattern(term)


def _pattern(term: Term) -> dpl.DFPattern:
    # Equal subterms get patterns of their own: one pattern object would only match one and the same expression,
    # while two calls that compute the same thing match here too.
    if isinstance(term, Var | Number | Scalar):
        return dpl.wildcard()
    if isinstance(term, Item):
        return dpl.is_tuple_get_item(_pattern(term.term), term.index)
    args = [_pattern(arg) for arg in term.args]
    names = CLASSES.get(term.head, (term.head,))
    heads = [dpl.ExprPattern(tvm.ir.Op.get(OPERATORS[name].relax_name)) for name in names]
    head = heads[0]
    for other in heads[1:]:
        head = head | other
    operator = OPERATORS[names[0]]
    if operator.arity is None:
        return head(dpl.is_tuple(args))
    return head(*args, *(dpl.wildcard() for _ in range(operator.extra)))


def root_operators(term: Term) -> tuple[str, ...]:
    """Relax names of the operators at which `term` can be rooted."""
    if isinstance(term, Item):
        return ("getitem",)
    assert isinstance(term, Apply)
    return tuple({OPERATORS[name].relax_name: None for name in CLASSES.get(term.head, (term.head,))})


Forms = tuple[tuple[Term, dpl.DFPattern], ...]
"""The variants of a term, each with its pattern."""


def match_root(rule: RewriteRule, forms: Forms, node: Node, graph: Graph) -> list[Match]:
    """Every way in which a left term of `rule`, given by its `forms`, matches at `node` (conditions not yet asked)."""
    found: list[Match] = []
    for number, (term, pattern) in enumerate(forms):
        if pattern.extract_matched_expr(node.value, graph.bindings_map) is None:
            continue
        env: dict[str, Any] = {}
        matched: list[relax.Var] = []
        try:
            unify(term, node.var, graph, env, matched)
        except Mismatch:
            continue
        if not any(_same_env(env, other.env) for other in found):
            found.append(Match(rule, (node.var,), (number,), env, tuple(dict.fromkeys(matched))))
    return found


def _same_env(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(_same(value, b[name]) for name, value in a.items())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, relax.Expr):
        if isinstance(a, tvm.ir.GenericConst) and isinstance(b, tvm.ir.GenericConst):
            return a.same_as(b) or (shape(a) == shape(b) and bool((a.value.numpy() == b.value.numpy()).all()))
        return isinstance(b, relax.Expr) and a.same_as(b)
    return a == b


def unify(term: Term, expr: relax.Expr, graph: Graph, env: dict[str, Any], matched: list[relax.Var]) -> None:
    """Match `term` at `expr`, binding variables in `env`; Mismatch says why it cannot."""
    if isinstance(expr, relax.Var):
        expr = canonical(expr)
    if isinstance(term, Var):
        bind(term.name, expr, env, expr)
        return
    if isinstance(term, Number):
        if _scalar(expr) != np.float32(term.value):
            raise Mismatch(f"the constant {term.value} is needed", expr)
        return
    if isinstance(term, Scalar):
        _unify_scalar(term, expr, env)
        return
    node = graph.node(expr)
    if node is None:
        raise Mismatch(f"{term.head if isinstance(term, Apply) else 'an item'} is needed, this is an input", expr)
    matched.append(node.var)
    if isinstance(term, Item):
        if node.op != "getitem" or node.value.index != term.index:
            raise Mismatch(f"item {term.index} of a tuple is needed, not {node.op}", expr)
        unify(term.term, node.value.tuple_value, graph, env, matched)
        return
    operator, attributes = _read(term, node)
    operands = operator.operands(node.value)
    if operands is None or len(operands) != len(term.args):
        count = "no" if operands is None else str(len(operands))
        raise Mismatch(f"{operator.name} has {count} operands, {len(term.args)} are needed", expr)
    for arg, operand in zip(term.args, operands, strict=True):
        unify(arg, operand, graph, env, matched)
    _unify_attributes(term, operator, attributes, env, expr)


def _scalar(expr: relax.Expr) -> float | None:
    """The value of a constant without axes, None for anything else."""
    if not isinstance(expr, tvm.ir.GenericConst) or shape(expr) != ():
        return None
    return float(expr.value.numpy())


def _unify_scalar(term: Scalar, expr: relax.Expr, env: dict[str, Any]) -> None:
    value, variable = _scalar(expr), term.attribute.variable
    if value is None:
        raise Mismatch("a scalar constant is needed", expr)
    if variable is not None and variable not in env:
        env[variable] = value
    elif (expected := term.attribute.value(env)) != value:
        raise Mismatch(f"the constant {expected} is needed, not {value}", expr)


def _read(term: Apply, node: Node) -> tuple[Operator, dict[str, Any]]:
    names = CLASSES.get(term.head, (term.head,))
    for name in names:
        operator = OPERATORS[name]
        if operator.relax_name == node.op:
            attributes = operator.attributes_of(node.value)
            if attributes is not None:
                return operator, attributes
    raise Mismatch(f"{term.head} is needed, not {node.op.removeprefix('relax.')}", node.var)


def _unify_attributes(
    term: Apply, operator: Operator, attributes: dict[str, Any], env: dict[str, Any], expr: relax.Expr
) -> None:
    if term.member is not None:
        bind(term.member, (operator.name, attributes), env, expr)
        return
    named = dict(term.attributes)
    for name, attribute in named.items():
        value = attributes[name]
        if attribute.variable is not None and attribute.variable not in env:
            env[attribute.variable] = value
        elif (expected := attribute.value(env)) != value:
            raise Mismatch(f"{operator.name}: {name} = {value}, not {attribute} = {expected}", expr)
    others = {name: value for name, value in attributes.items() if name not in named}
    if term.rest is not None:
        bind(term.rest, others, env, expr)
        return
    for name, value in others.items():
        if operator.attributes[name] != value:
            raise Mismatch(f"{operator.name}: {name} = {value}, not {operator.attributes[name]}", expr)


def bind(name: str, value: Any, env: dict[str, Any], expr: relax.Expr) -> None:
    """Bind `name`, or check that it stands for the same thing as before."""
    if name not in env:
        env[name] = value
    elif not _same(env[name], value):
        raise Mismatch(f"{name} would stand for two different things", expr)
