"""Substitution rules: an equation and the conditions under which it may be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import FUNCTIONS, Attribute
from rlflow_tvm.passes.ops import CLASSES, COMMUTATIVE, SEVERAL
from rlflow_tvm.passes.term import Apply, Equation, Item, Scalar, Term, Var, parse_equation, subterms

PARAMETERS = ("lanes", "block", "is_weight", "same")
"""What attribute expressions may use besides a rule's own variables (see `matcher.RuleSet.parameters`)."""

_MOST_COMMUTATIVE = 10
"""Commutative operators of a left term, at most: each is matched in both orders, all together in 2 to that power."""


def _calls(terms: tuple[Term, ...]) -> list[Apply]:
    return [t for term in terms for t in subterms(term) if isinstance(t, Apply)]


def _values(terms: tuple[Term, ...]) -> list[Attribute]:
    """The attribute expressions in `terms`."""
    scalars = [t.attribute for term in terms for t in subterms(term) if isinstance(t, Scalar)]
    return scalars + [value for call in _calls(terms) for _, value in call.attributes]


def _kinds(terms: tuple[Term, ...]) -> tuple[set[str], set[str], set[str], set[str]]:
    """Names in `terms` by what they stand for: tensors, attributes, all attributes that are not named, members of
    classes."""
    calls = _calls(terms)
    return (
        RewriteRule.tensors(terms),
        {value.variable for value in _values(terms) if value.variable is not None},
        {call.rest for call in calls if call.rest is not None},
        {call.member for call in calls if call.member is not None},
    )


@dataclass(frozen=True)
class RewriteRule:
    """`equation` may replace its left terms by its right terms wherever every condition of `when` holds.

    With `symmetric`, several roots are matched in execution order only, and of one the operands of commutative
    operators as written: for rules whose two orders are the same rewrite.
    """

    name: str
    family: str
    text: str
    when: tuple[str, ...] = ()
    symmetric: bool = False

    @property
    def fixes_operands(self) -> bool:
        """Whether operands of commutative operators are matched as written only."""
        return self.symmetric and len(self.equation.left) == 1

    def __post_init__(self) -> None:
        unbound = self.tensors(self.equation.right) - self.tensors(self.equation.left)
        if unbound:
            raise RewriteError(f"rule {self.name}: {', '.join(sorted(unbound))} stands on the right side only")
        for root in self.equation.left:
            if not isinstance(root, Apply | Item):
                raise RewriteError(f"rule {self.name}: the left term {root} is no operator")
            commutative = sum(call.head in COMMUTATIVE for call in _calls((root,)))
            if commutative > _MOST_COMMUTATIVE and not self.fixes_operands:
                raise RewriteError(
                    f"rule {self.name}: {commutative} commutative operators in one left term, each matched in both "
                    f"orders: {_MOST_COMMUTATIVE} are the most"
                )
        for term in (*self.equation.left, *self.equation.right):
            self._check_results(term)
        self._check_names()

    def _check_results(self, term: Term) -> None:
        """RewriteError where a part is taken of what has no parts, or what has parts stands for a tensor."""
        if isinstance(term, Item):
            if not isinstance(term.term, Apply) or term.term.head not in SEVERAL:
                raise RewriteError(f"rule {self.name}: {term} is no part of anything: {term.term} gives one tensor")
            term = term.term
        elif isinstance(term, Apply) and term.head in SEVERAL:
            raise RewriteError(f"rule {self.name}: {term} gives several tensors: take one of them, as {term}[0]")
        for operand in term.args if isinstance(term, Apply) else ():
            self._check_results(operand)

    def _check_members(self) -> None:
        """RewriteError where the right side uses an operator as one of a class that it need not be of."""
        members: dict[str, set[str]] = {}
        for apply in _calls(self.equation.left):
            if apply.member is not None:
                names = set(CLASSES[apply.head])
                members[apply.member] = members.get(apply.member, names) & names
        for apply in _calls(self.equation.right):
            if apply.member is not None and not members[apply.member] <= set(CLASSES[apply.head]):
                raise RewriteError(f"rule {self.name}: {apply.member} need not be one of {apply.head}")

    def _check_names(self) -> None:
        """RewriteError if an attribute expression is malformed or reads what nothing binds, or if a variable stands for
        two things or has the name of a parameter or function, which it would hide."""
        equation, lets = self.equation, {name for name, _ in self.equation.lets}
        tensors, attributes, rests, members = _kinds((*equation.left, *equation.right))
        kinds, bound = (tensors, attributes | lets, rests, members), set[str]().union(*_kinds(equation.left))
        names = [name for kind in kinds for name in kind]
        twice = (bound & lets) | {name for name in names if names.count(name) > 1}
        if twice:
            raise RewriteError(
                f"rule {self.name}: {', '.join(sorted(twice))} stands for two things: name one otherwise"
            )
        hidden = (bound | lets) & {*PARAMETERS, *FUNCTIONS}
        if hidden:
            raise RewriteError(
                f"rule {self.name}: {', '.join(sorted(hidden))} is a parameter or function: name the variable otherwise"
            )
        for root in equation.left:
            foreign = (bound | lets) - set[str]().union(*_kinds((root,)))
            for value in _values((root,)):
                value.check({*bound, *lets, *PARAMETERS})
                if value.names & foreign:
                    raise RewriteError(
                        f"rule {self.name}: {value} in {root}, which is matched by itself, does not know "
                        f"{', '.join(sorted(value.names & foreign))}"
                    )
        bound.update(PARAMETERS)
        for name, value in equation.lets:
            value.check(bound)
            bound.add(name)
        for value in _values(equation.right):
            value.check(bound)
        unbound = (rests | members) - bound
        if unbound:
            raise RewriteError(f"rule {self.name}: {', '.join(sorted(unbound))} stands on the right side only")
        self._check_members()
        for condition in self.conditions:
            condition.check(bound)

    def __str__(self) -> str:
        conditions = [f"({text})" if " or " in text else text for text in self.when]
        return f"{self.equation}" + (f"   if {' and '.join(conditions)}" if conditions else "")

    @cached_property
    def equation(self) -> Equation:
        return parse_equation(self.text)

    @cached_property
    def conditions(self) -> tuple[Attribute, ...]:
        return tuple(Attribute(text) for text in self.when)

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """For each left term, the tensor variables that it has in common with the ones before it."""
        left = self.equation.left
        return tuple(
            tuple(sorted(self.tensors(left[:number]) & self.tensors((term,)))) for number, term in enumerate(left)
        )

    @staticmethod
    def tensors(terms: tuple[Term, ...]) -> set[str]:
        """Names of the tensor variables in `terms`."""
        return {t.name for term in terms for t in subterms(term) if isinstance(t, Var)}

    @cached_property
    def digest(self) -> str:
        """What of the rule a proof is a proof of: its equation and conditions, not its name."""
        text = json.dumps([str(self.equation), list(self.when)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """What a rule file holds of this rule."""
        return {"name": self.name, "family": self.family, "equation": str(self.equation), "when": list(self.when),
                "symmetric": self.symmetric}  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RewriteRule:
        """Read `to_json`'s form; RewriteError names what is missing, or is not what it should be."""
        try:
            name, family, text, when = data["name"], data["family"], data["equation"], data["when"]
        except KeyError as error:
            raise RewriteError(f"rule {data.get('name', '?')}: no field {error.args[0]!r}") from None
        symmetric = data.get("symmetric", False)
        if not all(isinstance(value, str) for value in (name, family, text)):
            raise RewriteError(f"rule {name}: name, family and equation are texts")
        if not isinstance(when, list) or not all(isinstance(condition, str) for condition in when):
            raise RewriteError(f"rule {name}: when is a list of texts, one a condition")
        if not isinstance(symmetric, bool):
            raise RewriteError(f"rule {name}: symmetric is true or false")
        try:
            return RewriteRule(name, family, text, tuple(when), symmetric)
        except (MemoryError, RecursionError, ValueError) as error:  # Python's parser, of what is nested too deeply
            raise RewriteError(f"rule {name}: cannot be read ({str(error) or type(error).__name__})") from None
