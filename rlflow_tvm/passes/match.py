"""Matching one rule at one place, with the reason where it does not match."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from math import isfinite
from typing import Any

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.dataflow import Node, canonical
from rlflow_tvm.passes.attribute import Attribute, NotBound, NotComputable, NotEvaluable, shape
from rlflow_tvm.passes.graph import VARIABLES, Graph
from rlflow_tvm.passes.ops import BY_RELAX_NAME, CLASSES, COMMUTATIVE, OPERATORS, Operator
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, Term, Var, subterms

log = logging.getLogger("rlflow_tvm")


class Mismatch(Exception):
    """Why a term does not match, and where; put into words only when somebody asks."""

    def __init__(self, expr: relax.Expr, reason: str, *details: Any) -> None:
        super().__init__(reason)
        self._expr, self._reason, self._details = expr, reason, details

    @property
    def reason(self) -> str:
        return self._reason.format(*self._details)

    @property
    def culprit(self) -> str:
        return self._expr.name if isinstance(self._expr, relax.Var) else type(self._expr).__name__


@dataclass(eq=False)  # made by the thousand for each graph: a frozen one takes three times as long
class Match:
    """A rule's left side found in a graph: its roots, and what its variables stand for. Not to be changed."""

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


def root_operators(term: Term) -> tuple[str, ...]:
    """Relax names of the operators at which `term` can be rooted."""
    if isinstance(term, Item):
        return ("getitem",)
    assert isinstance(term, Apply)
    return tuple({OPERATORS[name].relax_name: None for name in CLASSES.get(term.head, (term.head,))})


CONSTANT = "constant"
"""Among operators: what is no operator's result but a constant."""

Below = tuple[frozenset[str] | None, ...]
"""For each operand of a term, the operators that it may be (Relax names); None: anything."""


@dataclass(frozen=True, eq=False)
class Form:
    """A left term with the operands of its commutative operators in one order. `number`: which order.

    `needed`: for each operator in the term, which it may be.
    """

    number: int
    term: Term
    below: Below
    needed: tuple[frozenset[str], ...]

    def fits(self, operators: tuple[str, ...], present: frozenset[str]) -> bool:
        """Whether operands that are these operators' results can be the term's, in a graph of the operators `present`:
        a quick look before `unify`."""
        return (
            len(operators) == len(self.below)
            and all(a is None or operator in a for a, operator in zip(self.below, operators, strict=True))
            and not any(present.isdisjoint(allowed) for allowed in self.needed)
        )


@lru_cache(maxsize=4096)
def forms_of(term: Term, symmetric: bool) -> tuple[Form, ...]:
    needed = tuple({frozenset(root_operators(t)) for t in subterms(term) if isinstance(t, Apply | Item)})
    return tuple(
        Form(number, variant, tuple(_allowed(operand) for operand in _below(variant)), needed)
        for number, variant in enumerate(variants(term, symmetric))
    )


def _below(term: Term) -> tuple[Term, ...]:
    if isinstance(term, Item):
        return (term.term,)
    return term.args if isinstance(term, Apply) else ()


def _allowed(term: Term) -> frozenset[str] | None:
    if isinstance(term, Number | Scalar):
        return frozenset({CONSTANT})
    return frozenset(root_operators(term)) if isinstance(term, Apply | Item) else None


def operands_of(node: Node) -> tuple[relax.Expr, ...] | None:
    """The tensors that a node computes with (variables canonical); None where they are not written out, or where an
    operand is no tensor."""
    if "operands" not in node.notes:
        node.notes["operands"] = _operands(node)
    return node.notes["operands"]


def _operands(node: Node) -> tuple[relax.Expr, ...] | None:
    if node.op == "getitem":
        found: Sequence[relax.Expr] | None = (node.value.tuple_value,)
    else:
        operators = BY_RELAX_NAME.get(node.op)
        found = operators[0].operands(node.value) if operators else None
        if found is not None and not all(isinstance(e.ty, relax.TensorType) for e in found):
            return None  # a bare number, which some of TVM's passes leave, is no term
    return None if found is None else tuple(canonical(e) if isinstance(e, relax.Var) else e for e in found)


def operators_below(node: Node, graph: Graph) -> tuple[str, ...]:
    """The operators whose results a node computes with, "" or `CONSTANT` for what is no result."""
    return tuple([_operator(operand, graph.node(operand)) for operand in operands_of(node) or ()])


def _operator(operand: relax.Expr, node: Node | None) -> str:
    if node is not None:
        return node.op
    return CONSTANT if isinstance(operand, tvm.ir.GenericConst) else ""


@lru_cache(maxsize=256)  # told once
def warn_of(rule: str, error: str) -> None:
    """That a rule asks what does not fit all that it matches: its samples, of which it was proved, had none of it."""
    log.warning("rule %s: no match where it cannot be asked: %s", rule, error)


def match_root(
    rule: RewriteRule, forms: Sequence[Form], node: Node, graph: Graph, parameters: Mapping[str, Any]
) -> list[Match]:
    """Every way in which a left term of `rule`, given by its `forms`, matches at `node` (conditions not yet asked).

    `parameters` are the rule set's, for the attribute expressions of the term.
    """
    found: list[Match] = []
    for form in forms:
        env: dict[str, Any] = dict(parameters)
        matched: list[relax.Var] = []
        try:
            unified(form.term, node.var, graph, env, matched)
        except (Mismatch, NotComputable):
            continue
        except NotEvaluable as error:
            warn_of(rule.name, str(error))
            continue
        env = {name: value for name, value in env.items() if name not in parameters}
        if not any(_same_env(env, other.env) for other in found):
            found.append(Match(rule, (node.var,), (form.number,), env, tuple(dict.fromkeys(matched))))
    return found


def _same_env(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(_same(value, b[name]) for name, value in a.items())


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, relax.Expr):
        if isinstance(a, tvm.ir.GenericConst) and isinstance(b, tvm.ir.GenericConst):
            return a.same_as(b) or (shape(a) == shape(b) and bool((a.value.numpy() == b.value.numpy()).all()))
        return isinstance(b, relax.Expr) and a.same_as(b)
    return a == b


_LATE = " "
"""In an environment: checks of attribute expressions that read what is bound after them."""


def unified(term: Term, expr: relax.Expr, graph: Graph, env: dict[str, Any], matched: list[relax.Var]) -> None:
    """`unify` a whole left term, expressions that read what stands after them included."""
    unify(term, expr, graph, env, matched)
    for attribute, check in env.pop(_LATE, ()):
        check(attribute.value(env))


def _expect(attribute: Attribute, env: dict[str, Any], check: Callable[[Any], None]) -> None:
    """`check` an expression's value, in the end where it reads what is not bound yet."""
    try:
        value = attribute.value(env)
    except NotBound:
        env.setdefault(_LATE, []).append((attribute, check))
    else:
        check(value)


def unify(term: Term, expr: relax.Expr, graph: Graph, env: dict[str, Any], matched: list[relax.Var]) -> None:
    """Match `term` at `expr` (canonical, if a variable), binding variables in `env`, which holds the parameters that
    attribute expressions read; Mismatch says why it cannot. What `unified` is for is left to it."""
    match term:
        case Var(name):
            bind(name, expr, env, expr)
        case Apply():
            _unify_call(term, _result(term.head, expr, graph, matched), expr, graph, env, matched)
        case Item(inner, index):
            node = _result("an item", expr, graph, matched)
            if node.op != "getitem" or node.item[0] != index:
                raise Mismatch(expr, "item {} of a tuple is needed, not {}", index, node.op)
            unify(inner, canonical(node.value.tuple_value), graph, env, matched)
        case Number(value):
            if _scalar(expr) is None or not _is_number(expr, value):
                raise Mismatch(expr, "the constant {} is needed", value)
        case Scalar():
            _unify_scalar(term, expr, env)


def _result(needed: str, expr: relax.Expr, graph: Graph, matched: list[relax.Var]) -> Node:
    node = graph.node(expr)
    if node is None:
        raise Mismatch(expr, "{} is needed, this is an input", needed)
    matched.append(node.var)
    return node


def _unify_call(
    term: Apply, node: Node, expr: relax.Expr, graph: Graph, env: dict[str, Any], matched: list[relax.Var]
) -> None:
    operator, attributes = _read(term, node)
    operands = operands_of(node)
    if operands is None or len(operands) != len(term.args):
        count = "no" if operands is None else len(operands)
        raise Mismatch(expr, "{} has {} operands, {} are needed", operator.name, count, len(term.args))
    for arg, operand in zip(term.args, operands, strict=True):
        if type(arg) is Var:
            bind(arg.name, operand, env, operand)
        else:
            unify(arg, operand, graph, env, matched)
    if attributes or term.member is not None or term.rest is not None:
        _unify_attributes(term, operator, attributes, env, expr)


def _scalar(expr: relax.Expr) -> float | None:
    """The value of a constant without axes, None for anything else."""
    return None if type(expr) in VARIABLES else _scalar_of_constant(expr)


@lru_cache(maxsize=256)  # few, and no more: it keeps them
def _scalar_of_constant(expr: relax.Expr) -> float | None:
    if not isinstance(expr, tvm.ir.GenericConst) or shape(expr) != ():
        return None
    found = expr.value.numpy()
    return int(found) if found.dtype.kind in "iub" else float(found)  # a float does not hold all of 64 bits


@lru_cache(maxsize=256)
def _is_number(constant: relax.Expr, value: float) -> bool:
    """Whether a constant without axes is the number, rounded to the constant's element type: to floats that are neither
    infinite nor, of another number than zero, zero; integers are not rounded to."""
    found = constant.value.numpy()
    if found.dtype.kind in "iub":
        return int(found) == value
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(found.dtype.type(float(value)))
    return float(found) == rounded and isfinite(rounded) and (rounded != 0) == (value != 0)


def _unify_scalar(term: Scalar, expr: relax.Expr, env: dict[str, Any]) -> None:
    value, variable = _scalar(expr), term.attribute.variable
    if value is None:
        raise Mismatch(expr, "a scalar constant is needed")
    if variable is not None and variable not in env:
        env[variable] = value
    else:
        _expect(term.attribute, env, partial(_check_number, expr))


def _check_number(expr: relax.Expr, expected: float) -> None:
    if not _is_number(expr, expected):
        raise Mismatch(expr, "the constant {} is needed, not {}", expected, _scalar(expr))


@cache
def _operators_as(head: str, relax_name: str) -> tuple[Operator, ...]:
    """The operators that `head`, an operator or a class, can be, of those with a name in Relax."""
    named = BY_RELAX_NAME.get(relax_name, ())
    return tuple(operator for operator in named if operator.name == head or operator.name in CLASSES.get(head, ()))


def _read(term: Apply, node: Node) -> tuple[Operator, dict[str, Any]]:
    """The operator of the term that `node` applies, and the call's attributes."""
    for operator in _operators_as(term.head, node.op):
        if operator.name not in node.notes:
            node.notes[operator.name] = operator.attributes_of(node.value)
        attributes = node.notes[operator.name]
        if attributes is not None:
            return operator, attributes
    name = node.op.removeprefix("relax.")
    if any(operator.name in name for operator in _operators_as(term.head, node.op)):
        raise Mismatch(node.var, "{} is needed as rules know it, not with such attributes or operands", term.head)
    raise Mismatch(node.var, "{} is needed, not {}", term.head, name)


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
        else:
            _expect(attribute, env, partial(_check_attribute, expr, f"{operator.name}: {name}", value, attribute))
    others = {name: value for name, value in attributes.items() if name not in named}
    if term.rest is not None:
        bind(term.rest, others, env, expr)
        return
    for name, value in others.items():
        if operator.attributes[name] != value:
            raise Mismatch(expr, "{}: {} = {}, not {}", operator.name, name, value, operator.attributes[name])


def _check_attribute(expr: relax.Expr, which: str, value: Any, attribute: Attribute, expected: Any) -> None:
    if value != expected:
        raise Mismatch(expr, "{} = {}, not {} = {}", which, value, attribute, expected)


def bind(name: str, value: Any, env: dict[str, Any], expr: relax.Expr) -> None:
    """Bind `name`, or check that it stands for the same thing as before."""
    if name not in env:
        env[name] = value
    elif not _same(env[name], value):
        raise Mismatch(expr, "{} would stand for two different things", name)
