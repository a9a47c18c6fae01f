"""Deciding what a group of equal terms is: a rule that can be proved, under which conditions, or a coincidence."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute
from rlflow_tvm.passes.proof.sampling import CannotDecide, Sample
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.synthesis.expressions import conditions
from rlflow_tvm.passes.synthesis.generalise import Equation, Point, generalised
from rlflow_tvm.passes.synthesis.ground import parts_of, tensors_of
from rlflow_tvm.passes.synthesis.values import differ
from rlflow_tvm.passes.verify import INSTANCES, Differing, Proof, compared, examined

_QUICK = 16
_QUICK_ATTEMPTS = 800
_FEW = 4  # samples without a difference, with which a rule goes to its proof
_ATTEMPTS = 3000  # rules that match less often than one draw in some hundreds are not worth a search
_MOST_CONDITIONS = 5
_MOST_EQUATIONS = 3
_MOST_PARTS = 6
_CLASSES = {"relu": ("Unary",), "add": ("Binary", "Commutative", "Linear"), "multiply": ("Binary", "Commutative")}
"""Classes that an operator of a rule may be generalised to, the widest first."""
_INVENTED = re.compile(r"axes=\[")


@dataclass(frozen=True)
class Found:
    """A proved rule, and the names of those of the catalogue that do the same (told at the end of a search)."""

    rule: RewriteRule
    proof: Proof
    catalogue: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule.to_json(), "proof": self.proof.to_json()}


def decide(points: Sequence[Point], seed: int = 0) -> list[Found]:
    """The proved rules that rewrite the left terms of `points` (of one skeleton) into the right ones.

    A rule that adds operators with an order of axes out of nothing undoes a composition: there are as many of these
    as orders, and none is told.
    """
    if any(differ(point.left, point.right) for point in points[:2]):
        return []
    found = _all_decided(points, seed)
    if not found:  # several rules' points: those alike in their tensors' ranks, then in their axes too
        for alike in (_ranks, _axes):
            parts = _parted(points, alike)
            if 1 < len(parts) <= _MOST_PARTS:
                found = [one for part in parts for one in _all_decided(part, seed)]
            if found:
                break
    return found


def _all_decided(points: Sequence[Point], seed: int) -> list[Found]:
    found = []
    grows = sum(node.size for node in points[0].right) > sum(node.size for node in points[0].left)
    for number, equation in enumerate(generalised(points)):
        if number == _MOST_EQUATIONS:
            break
        if grows and _INVENTED.search(equation.text.partition("=>")[2]):
            continue
        one = _decided(equation, seed)
        if one is not None:
            found.append(one)
    return found


def _parted(points: Sequence[Point], alike: Callable[[Point], Any]) -> list[list[Point]]:
    parts: dict[Any, list[Point]] = {}
    for point in points:
        parts.setdefault(alike(point), []).append(point)
    return list(parts.values())


def _ranks(point: Point) -> Any:
    return tuple(len(tensor.shape) for root in point.left for tensor in tensors_of(root))


def _axes(point: Point) -> Any:
    held = (pair for root in point.left for part in parts_of(root) for pair in part.attributes)
    return _ranks(point), tuple(pair for pair in held if pair[0] in ("axes", "axis"))


def _decided(equation: Equation, seed: int) -> Found | None:
    left, _, right = equation.text.partition(" => ")
    if left == right:
        return None  # equal but for attributes of which nothing is told
    try:
        rule = RewriteRule("found", "found", equation.text)
    except RewriteError:
        return None  # something stands on the right only
    true = _true(equation)
    refused: set[str] = set()
    while len(rule.when) <= _MOST_CONDITIONS:
        sample: Sample | str | None = difference(rule, seed)
        if sample == _EQUAL:
            for fewer in dict.fromkeys((_without_idle(rule, seed).when, rule.when)):
                outcome = _proved(replace(rule, when=fewer), seed)
                if isinstance(outcome, Found):
                    return outcome
                sample = outcome  # rarer than the few that were looked at before
        if isinstance(sample, Sample):
            separating = next((c for c in true if c not in rule.when and c not in refused and _false(c, sample)), None)
            if separating is None:
                return None
            rule = replace(rule, when=(*rule.when, separating))
        elif sample == _UNDECIDABLE and rule.when:  # the last condition cannot be asked everywhere
            last, when = rule.when[-1], rule.when[:-1]
            first = next((c for c in true if c not in when and _is_rank_of(last, c)), None)
            if first is None:
                refused.add(last)
            rule = replace(rule, when=when if first is None else (*when, first, last))
        else:
            return None
    return None


def _is_rank_of(condition: str, first: str) -> bool:
    """Whether `first` says how many axes a tensor has of which `condition` asks the extent of one."""
    rank = re.fullmatch(r"rank\((\w+)\) == \d", first)
    return rank is not None and f"dim({rank[1]}, " in condition


def _without_idle(rule: RewriteRule, seed: int) -> RewriteRule:
    """The rule without the conditions that later ones made idle."""
    for condition in rule.when[:-1]:
        fewer = replace(rule, when=tuple(c for c in rule.when if c != condition))
        if difference(fewer, seed) == _EQUAL:
            rule = fewer
    return rule


_EQUAL, _UNDECIDABLE, _TOO_FEW = "equal", "undecidable", "too few"


def difference(rule: RewriteRule, seed: int) -> Sample | str:
    """A sample for which the rule is wrong; or that there is none, or that a condition cannot be asked, or that there
    are too few samples."""
    count = 0
    try:
        for sample, equal in compared(rule, _QUICK, seed, _QUICK_ATTEMPTS):
            if not equal:
                return sample
            count += 1
    except CannotDecide:
        return _UNDECIDABLE
    return _EQUAL if count >= _FEW else _TOO_FEW


def _true(equation: Equation) -> list[str]:
    """The conditions that hold at every point."""
    texts = conditions(equation.tensors, equation.variables, equation.rests, equation.envs[0])
    return [text for text in dict.fromkeys(texts) if all(_holds(text, env) for env in equation.envs)]


def _holds(text: str, env: Any) -> bool:
    try:
        return bool(Attribute(text).value(env))
    except RewriteError:
        return False


def _false(text: str, sample: Sample) -> bool:
    """Whether the condition can be asked of the sample, and does not hold."""
    try:
        return not Attribute(text).value(sample.env)
    except RewriteError:
        return False


def _proved(rule: RewriteRule, seed: int) -> Found | Sample | None:
    """The rule, of the widest classes of operators that it is proved for; a sample for which it is wrong itself."""
    rules = [rule]
    for operator, classes in _CLASSES.items():
        for name in classes:
            if (wider := _of_class(rules[-1], operator, name)) is not None and difference(wider, seed) == _EQUAL:
                rules.append(wider)
                break
    for one in reversed(rules):
        outcome = examined(one, INSTANCES, seed, _ATTEMPTS)
        if isinstance(outcome, Proof):
            return Found(one, outcome)
    return outcome.sample if isinstance(outcome, Differing) else None


def _of_class(rule: RewriteRule, operator: str, name: str) -> RewriteRule | None:
    """The rule with a class of operators in place of one; None if it does not have it on the left side."""
    pattern = re.compile(rf"\b{operator}\(")
    if not pattern.search(rule.text.partition("=>")[0]):
        return None
    member = next(name for name in "fgh" if f"[{name}]" not in rule.text)  # one for each class at most
    try:
        return replace(rule, text=pattern.sub(f"{name}[{member}](", rule.text))
    except RewriteError:
        return None
