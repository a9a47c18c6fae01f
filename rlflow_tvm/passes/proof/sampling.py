"""Samples: shapes, element types, attributes and weights with which a rule's left side is legal, and matched.

The left side is drawn from its leaves: an operator whose operands are partly known has the others drawn beside them,
then its attributes. What a condition says of them is heeded as soon as all that it reads is drawn; what turns out
illegal, or outside the rule's conditions all the same, is drawn again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute, NotComputable, shape
from rlflow_tvm.passes.instance import Instance
from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.ops import CLASSES, NOT_FOR_INTEGERS, OPERATORS, REQUIRED
from rlflow_tvm.passes.proof.dice import Dice
from rlflow_tvm.passes.proof.domains import Domain, Shape, Shapes, Tensor, Unfit, shape_of
from rlflow_tvm.passes.proof.draw import draw_attributes, draw_operands
from rlflow_tvm.passes.proof.meaning import meaning, number
from rlflow_tvm.passes.proof.steering import UNSTEERED, Steering
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, Term, Var, subterms

LANES = 4
"""Vector lanes of the samples' target: blocks of 2 and 4 fit into small shapes."""

FLOAT, INTEGERS = "float32", ("int8", "uint8", "int32", "int64")
_OF_INTEGERS = 0.25  # of the samples, where the left side can be of integers
_REPEATED = 0.3  # of the variables have the shape of an earlier one
_NUMBERS = {
    FLOAT: (0.0, 0.5, 2.0, -1.0, 0.25, 3.0, 2.0**-17),
    **dict.fromkeys(INTEGERS, (2, 3, -1, 7)),
    "uint8": (2, 3, 7),
}
_FAR = 1 << 30  # beyond all positions
_REDRAWS = 8  # of a call's operands or attributes, until no condition speaks against them

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """An instance of a rule, the element type of its variables, and what all its names stand for.

    `env` holds the variables' stand-ins (Relax variables of the right type), attributes, `where` attributes and the
    rule set's parameters: what attribute expressions read.
    """

    rule: RewriteRule
    instance: Instance
    dtype: str
    env: dict[str, Any]

    @property
    def size(self) -> int:
        """Elements of all variables: what makes a counterexample small enough to read."""
        return sum(int(np.prod(shape)) for shape in self.instance.shapes.values())

    def __str__(self) -> str:
        told = [f"{name}: {list(shape)}" for name, shape in self.instance.shapes.items()]
        told += [f"{name} = {value}" for name, value in self.instance.attributes.items()]
        weights = f"; weights: {', '.join(self.instance.weights)}" if self.instance.weights else ""
        return f"{'; '.join(told)}; {self.dtype}{weights}"


class CannotDecide(RewriteError):
    """A condition or attribute of a rule that cannot be evaluated where its left side matches."""


def operators_of(terms: tuple[Term, ...], env: dict[str, Any]) -> set[str]:
    """Names of the operators in `terms`; members of classes as `env` has bound them."""
    heads = [t for term in terms for t in subterms(term) if isinstance(t, Apply)]
    return {env[t.member][0] if t.member is not None else t.head for t in heads}


def evaluate(term: Term, domain: Domain, tensors: dict[str, Tensor], env: dict[str, Any], like: Tensor) -> Any:
    """The value of `term`: a tensor, or a tuple of them for a term of several results. `like` gives the element type
    of numbers. Errors of `meaning`; RewriteError for attributes that `env` does not give."""
    if isinstance(term, Var):
        return tensors[term.name]
    if isinstance(term, Number):
        return number(domain, term.value, like)
    if isinstance(term, Scalar):
        value = term.attribute.value(env)
        try:
            return number(domain, Fraction(value), like)
        except (TypeError, ValueError, OverflowError):
            raise Unfit(f"{value!r} is no number") from None
    if isinstance(term, Item):
        items = evaluate(term.term, domain, tensors, env, like)
        if term.index >= len(items):
            raise Unfit(f"{term} of {len(items)} parts")
        return items[term.index]
    operands = [evaluate(arg, domain, tensors, env, like) for arg in term.args]
    if term.member is not None:
        name, attributes = env[term.member]
        return meaning(name, domain, operands, attributes)
    operator = OPERATORS[term.head]
    attributes = dict(env[term.rest]) if term.rest is not None else {}
    attributes.update({name: value.value(env) for name, value in term.attributes})
    values = {**operator.attributes, **attributes}
    if any(value is REQUIRED for value in values.values()):
        raise Unfit(f"{term.head} lacks an attribute")
    return meaning(term.head, domain, operands, values)


class Sampler:
    """Draws samples of one rule; the same ones for the same seed."""

    def __init__(self, rule: RewriteRule, seed: int = 0) -> None:
        self.rule = rule
        self._rng = np.random.default_rng(seed)
        self._turn = 0
        needed = (_needed_weight(part) for condition in rule.conditions for part in condition.conjuncts)
        self._weights = {name for name in needed if name is not None}
        self._variables = rule.tensors(rule.equation.left)
        self._indices = frozenset(
            t.args[1].name for term in rule.equation.left for t in subterms(term)
            if isinstance(t, Apply) and t.head == "take" and isinstance(t.args[1], Var)
        )  # fmt: skip
        self._steering = Steering(rule)
        heads = [t for term in rule.equation.left for t in subterms(term) if isinstance(t, Apply)]
        self._integers = not any(t.head in NOT_FOR_INTEGERS for t in heads)

    def samples(self, attempts: int) -> Iterator[Sample]:
        """Different ones, found in `attempts` draws. CannotDecide where a condition fails to be true or false."""
        seen = set()
        for _ in range(attempts):
            sample = self.attempt()
            if sample is not None and (told := str(sample)) not in seen:
                seen.add(told)
                yield sample

    def near_misses(self, attempts: int) -> Iterator[tuple[Sample, str]]:
        """Legal graphs of the left side outside the rule's conditions, each with the first condition that fails."""
        for _ in range(attempts):
            chances = ((name, 0.7 if name in self._weights else 0.2) for name in sorted(self._variables))
            draw = self._draw({name for name, chance in chances if self._rng.random() < chance}, UNSTEERED)
            if draw is not None and draw.sample() is None and draw.failed:
                yield draw.near_miss(), draw.failed

    def attempt(self) -> Sample | None:
        """One draw; None where it is no legal graph, or none that the rule's conditions hold for."""
        draw = self._draw(self._weights, self._steering)
        return None if draw is None else draw.sample()

    def _draw(self, weights: set[str], steering: Steering) -> _Draw | None:
        integers = self._integers and self._rng.random() < _OF_INTEGERS
        dtype = INTEGERS[int(self._rng.integers(len(INTEGERS)))] if integers else FLOAT
        draw = _Draw(Dice(self._rng), dtype, self.rule, frozenset(weights), self._indices, steering, self._turn)
        self._turn += 1
        try:
            draw.left()
        except RewriteError:
            return None
        return draw


def _needed_weight(condition: Attribute) -> str | None:
    """The name in a condition `is_weight(name)`, which is all of it."""
    match ast.parse(condition.text, mode="eval").body:
        case ast.Call(func=ast.Name(id="is_weight"), args=[ast.Name(id=name)]):
            return name
    return None


def _bound(term: Apply, attributes: dict[str, Any]) -> dict[str, Any]:
    """What the attribute variables of a call stand for."""
    named = {
        attribute.variable: attributes[key] for key, attribute in term.attributes if attribute.variable is not None
    }
    if term.rest is None:
        return named
    keys = dict(term.attributes)
    return {**named, term.rest: {key: value for key, value in attributes.items() if key not in keys}}


@lru_cache(maxsize=1 << 14)
def _stand_in(name: str, extents: Shape, dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(extents, dtype))


class _Draw:
    """One attempt. `failed`: the condition that did not hold."""

    def __init__(
        self, dice: Dice, dtype: str, rule: RewriteRule, weights: frozenset[str], indices: frozenset[str],
        steering: Steering, turn: int,
    ) -> None:  # fmt: skip
        self._dice, self._dtype, self._rule, self._weights, self._indices = dice, dtype, rule, weights, indices
        self._steering, self._turn = steering, turn
        self._bounds: dict[str, tuple[int, int]] = {}  # of positions: the least, and where they end
        self._domain = Shapes(dtype)
        self.failed = ""
        self._tensors: dict[str, Tensor] = {}
        self._attributes: dict[str, Any] = {}
        self._parameters: dict[str, Any] = {"lanes": LANES, "block": RuleSet((), LANES).block,
                                            "same": relax.Var.same_as,
                                            "is_weight": lambda expr: expr.name in self._weights}  # fmt: skip
        self._env = dict(self._parameters)
        self._late: list[tuple[Attribute, Any]] = []  # expressions of the left side, and what they must be, if anything

    def left(self) -> None:
        for term in self._rule.equation.left:
            self._drawn(term)
        for attribute, wanted in self._late:
            try:
                found = attribute.value(self._env)
            except NotComputable as error:  # the matcher has no site there either
                raise Unfit(str(error)) from error
            if wanted is not None and found != wanted:
                raise Unfit(f"{wanted} is not {attribute}")

    def sample(self) -> Sample | None:
        """What was drawn, if the rule's conditions hold."""
        env = dict(self._env)
        if not self._tensors.keys() - self._weights:
            return None  # work on weights alone is no match
        try:
            for name, value in self._rule.equation.lets:
                env[name] = value.value(env)
            for condition in self._rule.conditions:
                if not condition.value(env):
                    self.failed = condition.text
                    return None
        except RewriteError as error:
            raise CannotDecide(f"{error} for {self._told()}") from error
        return Sample(self._rule, self._instance(), self._dtype, env)

    def near_miss(self) -> Sample:
        """What was drawn, whether or not the conditions hold; without `where` attributes."""
        return Sample(self._rule, self._instance(), self._dtype, dict(self._env))

    def _instance(self) -> Instance:
        weights = tuple(name for name in self._tensors if name in self._weights)
        shapes = {name: shape_of(x) for name, x in self._tensors.items()}
        return Instance(shapes, self._attributes, weights, self._bounds, self._parameters)

    def _told(self) -> str:
        return "; ".join(f"{name}: {list(shape_of(x))}" for name, x in self._tensors.items())

    def _drawn(self, term: Term) -> Any:
        if isinstance(term, Number):
            return number(self._domain, term.value, self._domain.draw(()))
        if isinstance(term, Scalar):
            variable = term.attribute.variable
            if variable is not None and variable not in self._env:
                self._note(variable, Fraction(self._dice.pick(_NUMBERS[self._dtype])))
            elif variable is None:
                self._late.append((term.attribute, None))
            return number(self._domain, 1, self._domain.draw(()))
        if isinstance(term, Var):
            return self._tensors[term.name]
        if isinstance(term, Item):
            items = self._drawn(term.term)
            if term.index >= len(items):
                raise Unfit(f"{term} of {len(items)} parts")
            return items[term.index]
        name, attributes = self._member(term) if term.member is not None else (term.head, self._known(term))
        operands = self._operands(name, term, attributes)
        shapes = [shape_of(x) for x in operands]
        if term.member is None:
            attributes = self._known(term)  # now of the operands too
        attributes = self._steered(
            lambda: draw_attributes(name, self._dice, shapes, attributes, self._dtype),
            lambda drawn: _bound(term, drawn),
        )
        self._bind(term, name, attributes)
        if name == "take" and isinstance(term.args[1], Var) and -len(shapes[0]) <= attributes["axis"] < len(shapes[0]):
            extent, (least, end) = shapes[0][attributes["axis"]], self._bounds.get(term.args[1].name, (-_FAR, _FAR))
            beyond = extent if attributes["mode"] in ("wrap", "clip") else 0  # others do not say what is there
            self._bounds[term.args[1].name] = max(least, -beyond), min(end, extent + beyond)
        return meaning(name, self._domain, operands, attributes)

    def _steered(self, draw: Callable[[], T], names: Callable[[T], dict[str, Any]]) -> T:
        """What `draw` gives, drawn again while a condition speaks against it. `names`: what it binds."""
        for _ in range(_REDRAWS):
            drawn = draw()
            if self._steering.permit(self._env, names(drawn)):
                return drawn
        raise Unfit("no draw that the conditions permit")

    def _member(self, term: Apply) -> tuple[str, dict[str, Any]]:
        assert term.member is not None
        if term.member in self._env:
            name, attributes = self._env[term.member]
            return name, dict(attributes)
        names = CLASSES[term.head]
        if self._dtype != FLOAT:
            names = tuple(name for name in names if name not in NOT_FOR_INTEGERS)
        # in turns, all members of one class with each of another: by chance one would be left out of a proof
        self._turn, chosen = divmod(self._turn, len(names))
        return names[chosen], {}

    def _known(self, term: Apply) -> dict[str, Any]:
        """The attributes of `term` that what is bound so far determines."""
        operator, named = OPERATORS[term.head], dict(term.attributes)
        known: dict[str, Any] = {}
        if term.rest is None:
            known = {name: value for name, value in operator.attributes.items() if name not in named}
        elif term.rest in self._env:
            known = dict(self._env[term.rest])
        for name, attribute in named.items():
            try:
                variable = attribute.variable
                if variable is None or variable in self._env:
                    known[name] = attribute.value(self._env)
                else:
                    known[name] = self._steering.value(variable, self._env)
            except RewriteError:
                continue
        return known

    def _operands(self, name: str, term: Apply, attributes: dict[str, Any]) -> list[Tensor]:
        terms = [None if isinstance(arg, Var) else self._drawn(arg) for arg in term.args]  # they may draw a variable
        found: list[Any] = [self._tensors.get(arg.name) if isinstance(arg, Var) else x
                            for arg, x in zip(term.args, terms, strict=True)]  # fmt: skip
        if any(x is None for x in found):
            new = self._steered(lambda: self._variables(name, term, found, attributes), lambda drawn: drawn)
            for variable, stands_in in new.items():
                self._tensors[variable] = Shapes(str(stands_in.ty.dtype)).draw(shape(stands_in))
            self._env.update(new)
        return [self._tensors[arg.name] if isinstance(arg, Var) else x for arg, x in zip(term.args, found, strict=True)]

    def _variables(self, name: str, term: Apply, found: list[Any], attributes: dict[str, Any]) -> dict[str, relax.Var]:
        """The operands that are not `found`."""
        known: list[Shape | None] = [None if x is None else shape_of(x) for x in found]
        for place, x in enumerate(found):  # what must agree with an earlier variable's shape often does so
            if x is None and self._tensors and self._dice.chance(_REPEATED):
                known[place] = shape_of(self._dice.pick(list(self._tensors.values())))
        new: dict[str, relax.Var] = {}
        for arg, x, drawn in zip(term.args, found, draw_operands(name, self._dice, known, attributes), strict=True):
            if x is None and isinstance(arg, Var) and arg.name not in new:
                dtype = "int64" if arg.name in self._indices else self._dtype
                new[arg.name] = _stand_in(arg.name, drawn, dtype)
        return new

    def _bind(self, term: Apply, name: str, attributes: dict[str, Any]) -> None:
        if term.member is not None:
            self._note(term.member, (name, attributes))
            return
        for variable, value in _bound(term, attributes).items():
            self._note(variable, value)
        for key, attribute in term.attributes:
            if not attribute.names <= self._env.keys():
                self._late.append((attribute, attributes[key]))
            elif attribute.value(self._env) != attributes[key]:
                raise Unfit(f"{key} is not {attribute}")

    def _note(self, variable: str, value: Any) -> None:
        if self._env.setdefault(variable, value) != value:
            raise Unfit(f"{variable} stands for two things")
        self._attributes[variable] = value


def drawn_tensors(sample: Sample, domain: Domain, rng: np.random.Generator) -> dict[str, Tensor]:
    """Random values of the sample's variables."""
    tensors = {}
    for name, extents in sample.instance.shapes.items():
        tensors[name] = domain.draw(extents, rng)
        if name in sample.instance.indices:  # the same in each plane
            positions = np.asarray(rng.integers(*sample.instance.indices[name], extents))
            tensors[name] = tuple(positions for _ in tensors[name])
    return tensors
