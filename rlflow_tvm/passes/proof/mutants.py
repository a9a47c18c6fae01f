"""Wrong rules made of right ones, for proofs to reject: one change each, to the right side or the conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute, NotEvaluable
from rlflow_tvm.passes.ops import COMMUTATIVE
from rlflow_tvm.passes.proof.sampling import Sampler
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Equation, Item, Number, Scalar, Term

KINDS = ("swap", "drop", "constant", "axis", "condition")
_SAMPLES = 60
_ATTEMPTS = 20000


@dataclass(frozen=True)
class Mutant:
    """A rule with one change. `kind`: what was done to it. `changed`: what exactly, in words."""

    rule: RewriteRule
    kind: str
    changed: str


def mutants(rule: RewriteRule) -> Iterator[Mutant]:
    """Every mutant of `rule` that can be written down: operands swapped, an operator left out, a number or an axis
    changed on the right side; a condition left out."""
    seen = {str(rule.equation)}
    for kind, changed, equation in _equations(rule.equation):
        text = str(equation)
        if text not in seen:
            seen.add(text)
            with suppress(RewriteError):  # it reads what the left side does not bind
                yield Mutant(_renamed(replace(rule, text=text), kind, len(seen)), kind, changed)
    for number, condition in enumerate(rule.when):
        others = (*rule.when[:number], *rule.when[number + 1 :])
        yield Mutant(_renamed(replace(rule, when=others), "condition", number), "condition", f"without {condition}")


def why_right(mutant: Mutant, original: RewriteRule) -> str:
    """The reason for which a mutant that was proved is right."""
    if mutant.kind != "condition":
        return f"{mutant.changed}: the equation is a true one too"
    (missing,) = (c for c in original.conditions if c.text not in mutant.rule.when)
    samples = []
    for sample in Sampler(mutant.rule).samples(_ATTEMPTS):
        samples.append(sample)
        if len(samples) == _SAMPLES:
            break
    outside = sum(not _holds(missing, sample.env) for sample in samples)
    if not outside:
        return f"{missing} holds in all of {len(samples)} instances of what is left: it says no more than that does"
    return f"true on the {outside} of {len(samples)} instances outside {missing} too, which says when the rewrite pays"


def _holds(condition: Attribute, env: dict[str, object]) -> bool:
    try:
        return bool(condition.value(env))
    except NotEvaluable:
        return False


def _renamed(rule: RewriteRule, kind: str, number: int) -> RewriteRule:
    return replace(rule, name=f"{rule.name}_{kind}_{number}")


def _equations(equation: Equation) -> Iterator[tuple[str, str, Equation]]:
    for place, term in enumerate(equation.right):
        for kind, changed, other in _terms(term):
            right = (*equation.right[:place], other, *equation.right[place + 1 :])
            yield kind, changed, replace(equation, right=right)
    for place, (name, attribute) in enumerate(equation.lets):
        for changed, other_text in _expressions(attribute.text):
            lets = (*equation.lets[:place], (name, Attribute(other_text)), *equation.lets[place + 1 :])
            yield "axis", f"{name} = {changed}", replace(equation, lets=lets)


def _terms(term: Term) -> Iterator[tuple[str, str, Term]]:
    """Each change of one place in `term`."""
    if isinstance(term, Number):
        for other in (term.value + 1.0, -term.value):
            yield "constant", f"{other} for {term.value}", Number(other)
    elif isinstance(term, Scalar):
        yield "constant", f"twice {term.attribute}", Scalar(Attribute(f"2 * ({term.attribute})"))
    elif isinstance(term, Item):
        yield "axis", f"item {1 - term.index} for {term.index}", Item(term.term, 1 if term.index == 0 else 0)
        for kind, changed, other_term in _terms(term.term):
            yield kind, changed, Item(other_term, term.index)
    elif isinstance(term, Apply):
        yield from _calls(term)


def _calls(term: Apply) -> Iterator[tuple[str, str, Term]]:
    if len(term.args) > 1 and term.head not in COMMUTATIVE:
        yield "swap", f"the operands of {term.head} swapped", replace(term, args=term.args[::-1])
    for place, arg in enumerate(term.args):
        yield "drop", f"{arg} for {term}", arg
        for kind, changed, other in _terms(arg):
            args = (*term.args[:place], other, *term.args[place + 1 :])
            yield kind, changed, replace(term, args=args)
    for place, (name, attribute) in enumerate(term.attributes):
        for changed, text in _expressions(attribute.text):
            attributes = (*term.attributes[:place], (name, Attribute(text)), *term.attributes[place + 1 :])
            yield "axis", f"{name} = {changed}", replace(term, attributes=attributes)


def _expressions(text: str) -> Iterator[tuple[str, str]]:
    """The expression with one whole number changed, or the arguments of a call swapped."""
    tree = ast.parse(text, mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            before, node.value = node.value, node.value + 1
            yield f"{ast.unparse(tree)} for {text}", ast.unparse(tree)
            node.value = before
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            node.value = not node.value
            yield f"{ast.unparse(tree)} for {text}", ast.unparse(tree)
            node.value = not node.value
        elif isinstance(node, ast.Call) and len(node.args) == 2:
            node.args.reverse()
            yield f"{ast.unparse(tree)} for {text}", ast.unparse(tree)
            node.args.reverse()
