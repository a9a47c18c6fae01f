"""Ground terms, with every attribute a value and every shape known: matching rules against them, rewriting them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import Any

from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.ops import CLASSES, COMMUTATIVE, OPERATORS
from rlflow_tvm.passes.proof.domains import Shape, Shapes, shape_of
from rlflow_tvm.passes.proof.meaning import meaning
from rlflow_tvm.passes.proof.sampling import LANES
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Item, Term, Var

Env = dict[str, Any]
Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Node:
    """An operator on nodes, one result of it where `item` says which, or (without `operator`) a tensor called `name`.

    Equal nodes are one object: `leaf` and `apply` make them.
    """

    operator: str
    args: tuple[Node, ...]
    attributes: Values
    item: int | None
    shape: Shape
    name: str = ""
    number: int = field(default_factory=count().__next__)

    @cached_property
    def work(self) -> frozenset[int]:
        """The operators at and below it; an operator with several results is one."""
        if not self.operator:
            return frozenset()
        own = self.number if self.item is None else -_call_number(self.operator, self.args, self.attributes)
        return frozenset({own}.union(*(arg.work for arg in self.args)))

    @property
    def size(self) -> int:
        return len(self.work)

    @cached_property
    def variable(self) -> relax.Var:
        """Stands for the node in attribute expressions."""
        return relax.Var("v", relax.TensorType(self.shape, "float32"))

    @cached_property
    def text(self) -> str:
        if not self.operator:
            return self.name
        values = "".join(f", {key}={value}" for key, value in self.attributes
                         if OPERATORS[self.operator].attributes.get(key) != value)  # fmt: skip
        told = f"{self.operator}({', '.join(arg.text for arg in self.args)}{values})"
        return told if self.item is None else f"{told}[{self.item}]"

    def __reduce__(self) -> Any:
        if not self.operator:
            return leaf, (self.name, self.shape)
        return _apply, (self.operator, self.args, self.attributes, self.item)

    def __lt__(self, other: Node) -> bool:
        """Fewer operators first, then shorter and alphabetically earlier text: what rules rewrite towards."""
        return (self.size, len(self.text), self.text) < (other.size, len(other.text), other.text)

    def __str__(self) -> str:
        return self.text


@cache
def leaf(name: str, shape: Shape) -> Node:
    return Node("", (), (), None, shape, name)


@cache
def _call_number(operator: str, args: tuple[Node, ...], attributes: Values) -> int:
    return next(_calls)


_calls = count(1)


def ordered(operator: str, args: tuple[Node, ...]) -> tuple[Node, ...]:
    """The operands of a commutative operator in one order."""
    return tuple(sorted(args)) if operator in COMMUTATIVE else args


def apply(operator: str, args: tuple[Node, ...], attributes: Mapping[str, Any], item: int | None = None) -> Node:
    """RewriteError where the operator does not take these."""
    values = {**OPERATORS[operator].attributes, **attributes}
    return _apply(operator, ordered(operator, args), tuple(sorted(values.items())), item)


@cache
def _apply(operator: str, args: tuple[Node, ...], attributes: Values, item: int | None) -> Node:
    shapes = _result_shapes(operator, tuple(arg.shape for arg in args), attributes)
    if (operator == "split") != (item is not None) or (item is not None and item >= len(shapes)):
        raise RewriteError(f"{operator} has no result {item}")
    return Node(operator, args, attributes, item, shapes if item is None else shapes[item])


_DOMAIN = Shapes("float32")


@lru_cache(maxsize=1 << 18)
def _result_shapes(operator: str, shapes: tuple[Shape, ...], attributes: Values) -> Any:
    """The shape of the result, or of each of several."""
    result = meaning(operator, _DOMAIN, [_DOMAIN.draw(shape) for shape in shapes], dict(attributes))
    return tuple(shape_of(x) for x in result) if operator == "split" else shape_of(result)


def _same(a: Any, b: Any) -> bool:
    return a is b


_PARAMETERS: Env = {"lanes": LANES, "block": RuleSet((), LANES).block, "same": _same, "is_weight": lambda expr: True}


def expression_env(env: Mapping[str, Any]) -> Env:
    """What attribute expressions read, where `env` gives tensors as nodes."""
    return _PARAMETERS | {name: value.variable if isinstance(value, Node) else value for name, value in env.items()}


def matches(terms: tuple[Term, ...], nodes: tuple[Node, ...], rule: RewriteRule) -> Iterator[Env]:
    """What the variables of a rule's left `terms` stand for where they are `nodes`, its conditions holding."""
    for env in _all(terms, nodes, {}):
        values = expression_env(env)
        try:
            if not all(value == attribute.value(values) for attribute, value in env.get(_LATE, ())):
                continue
            for name, let in rule.equation.lets:
                values[name] = env[name] = let.value(values)
            if all(condition.value(values) for condition in rule.conditions):
                yield env
        except RewriteError:
            continue


_LATE = " "  # in an environment: attribute expressions of the left side with the values that they must have


def _all(terms: tuple[Term, ...], nodes: tuple[Node, ...], env: Env) -> Iterator[Env]:
    if not terms:
        yield env
        return
    for first in _one(terms[0], nodes[0], env):
        yield from _all(terms[1:], nodes[1:], first)


def _one(term: Term, node: Node, env: Env) -> Iterator[Env]:
    if isinstance(term, Var):
        if term.name not in env:
            yield {**env, term.name: node}
        elif env[term.name] is node:
            yield env
        return
    if isinstance(term, Item):
        if node.item == term.index and isinstance(term.term, Apply):
            yield from _call(term.term, node, env)
        return
    if isinstance(term, Apply) and node.operator and node.item is None:
        yield from _call(term, node, env)


def _call(term: Apply, node: Node, env: Env) -> Iterator[Env]:
    if len(term.args) != len(node.args):
        return
    bound = _attributes(term, node, env)
    if bound is None:
        return
    yield from _all(term.args, node.args, bound)
    if node.operator in COMMUTATIVE and node.args[0] is not node.args[1]:
        yield from _all(term.args, node.args[::-1], bound)


def _attributes(term: Apply, node: Node, env: Env) -> Env | None:
    """`env` with what the attributes of `term` stand for; None if they do not fit."""
    values = dict(node.attributes)
    if term.member is not None:
        found = (node.operator, values)
        fits = node.operator in CLASSES[term.head] and env.get(term.member, found) == found
        return {**env, term.member: found} if fits else None
    if term.head != node.operator:
        return None
    env = dict(env)
    named = dict(term.attributes)
    for name, attribute in named.items():
        value, variable = values[name], attribute.variable
        if variable is None:
            env[_LATE] = (*env.get(_LATE, ()), (attribute, value))
        elif env.setdefault(variable, value) != value:
            return None
    others = {name: value for name, value in values.items() if name not in named}
    if term.rest is not None:
        return env if env.setdefault(term.rest, others) == others else None
    defaults = OPERATORS[node.operator].attributes
    return env if all(defaults[name] == value for name, value in others.items()) else None


def built(term: Term, env: Mapping[str, Any], values: Env | None = None) -> Node:
    """The node of a rule's right term. RewriteError where it is ill-typed or holds a number."""
    values = expression_env(env) if values is None else values
    if isinstance(term, Var):
        return env[term.name]
    if isinstance(term, Item) and isinstance(term.term, Apply):
        return _built(term.term, env, values, term.index)
    if isinstance(term, Apply):
        return _built(term, env, values, None)
    raise RewriteError(f"{term} is no ground term")


def _built(term: Apply, env: Mapping[str, Any], values: Env, item: int | None) -> Node:
    args = tuple(built(arg, env, values) for arg in term.args)
    if term.member is not None:
        name, attributes = env[term.member]
        return apply(name, args, attributes, item)
    attributes = dict(env[term.rest]) if term.rest is not None else {}
    attributes.update({name: value.value(values) for name, value in term.attributes})
    return apply(term.head, args, attributes, item)


def rewritten(rule: RewriteRule, nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """What `rule` makes of `nodes` where they are its left terms."""
    for env in matches(rule.equation.left, nodes, rule):
        try:
            values = expression_env(env)
            yield tuple(built(term, env, values) for term in rule.equation.right)
        except RewriteError:
            continue


def parts_of(node: Node) -> Iterator[Node]:
    """The node and what it is made of, again and again."""
    yield node
    for arg in node.args:
        yield from parts_of(arg)


def tensors_of(node: Node) -> Iterator[Node]:
    """The tensors that it is made of, in order, again and again."""
    return (part for part in parts_of(node) if not part.operator)
