"""What rules are to each other: whether one does what another does, at once or by several steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.ops import CLASSES
from rlflow_tvm.passes.proof.sampling import FLOAT, CannotDecide, Sampler
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.synthesis.generalise import Point
from rlflow_tvm.passes.synthesis.ground import Node, apply, built, expression_env, leaf, rewritten
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, subterms

_ATTEMPTS = 3000
_INSTANCES = 6  # of a rule, that others must do alike
_MOST_TERMS = 400  # that are looked at between two terms


class RuleIndex:
    """Rules by the operator of their first left term."""

    def __init__(self, rules: Iterable[RewriteRule] = ()) -> None:
        self._by_root: dict[tuple[str, int], list[RewriteRule]] = {}
        for rule in rules:
            self.add(rule)

    def add(self, rule: RewriteRule) -> None:
        for root in _roots(rule):
            self._by_root.setdefault(root, []).append(rule)

    def remove(self, rule: RewriteRule) -> None:
        """Take out what was added."""
        for root in _roots(rule):
            self._by_root[root].remove(rule)

    def rewritten(self, nodes: tuple[Node, ...]) -> Iterator[tuple[RewriteRule, tuple[Node, ...]]]:
        """What each rule makes of `nodes`, at their roots."""
        for rule in self._by_root.get((nodes[0].operator, len(nodes)), ()):
            for result in rewritten(rule, nodes):
                yield rule, result

    def everywhere(self, node: Node) -> Iterator[Node]:
        """What each rule of one left term makes of `node`, at it or below."""
        yield from (result for _, (result,) in self.rewritten((node,)))
        for i, arg in enumerate(node.args):
            for changed in self.everywhere(arg):
                try:
                    yield apply(node.operator, (*node.args[:i], changed, *node.args[i + 1 :]), dict(node.attributes),
                                node.item)  # fmt: skip
                except RewriteError:
                    continue


def _roots(rule: RewriteRule) -> list[tuple[str, int]]:
    """The operators that the first left term may begin with, each with the number of left terms."""
    first = rule.equation.left[0]
    head = first.term if isinstance(first, Item) else first
    assert isinstance(head, Apply)
    return [(operator, len(rule.equation.left)) for operator in CLASSES.get(head.head, (head.head,))]


def instances(rule: RewriteRule, count: int, seed: int = 0) -> list[Point]:
    """Ground instances of `rule`, at most `count`; none of a rule with numbers."""
    terms = (*rule.equation.left, *rule.equation.right)
    if any(isinstance(t, Number | Scalar) for term in terms for t in subterms(term)):
        return []
    found: list[Point] = []
    try:
        for sample in Sampler(rule, seed).samples(_ATTEMPTS):
            if sample.dtype != FLOAT:
                continue
            tensors = {name: leaf(name, shape) for name, shape in sample.instance.shapes.items()}
            others = {name: value for name, value in sample.env.items() if name not in tensors}
            env = {**others, **tensors}
            values = expression_env(env)
            try:
                found.append(Point(tuple(built(t, env, values) for t in rule.equation.left),
                                   tuple(built(t, env, values) for t in rule.equation.right)))  # fmt: skip
            except RewriteError:
                continue
            if len(found) == count:
                break
    except CannotDecide:
        pass
    return found


@dataclass(frozen=True)
class Covered:
    """How many of a rule's instances others do alike at once (`by`: which others), in several steps, or not at all."""

    at_once: int
    in_steps: int
    not_at_all: int
    by: tuple[str, ...]


def covered(points: Sequence[Point], rules: RuleIndex, steps: int = 2, but: str = "") -> Covered:
    """How the rules, all but the one named `but`, do what `points` are instances of."""
    names: dict[str, None] = {}
    once = several = 0
    for point in points:
        name = next(
            (r.name for r, result in rules.rewritten(point.left) if r.name != but and result == point.right), None
        )
        if name is not None:
            names[name] = None
            once += 1
        elif len(point.left) == 1 and steps > 1 and _reaches(point.left[0], point.right[0], rules, steps):
            several += 1
    return Covered(once, several, len(points) - once - several, tuple(names))


def few_instances(rule: RewriteRule) -> list[Point]:
    """As many instances as tell whether others do what `rule` does."""
    return instances(rule, _INSTANCES)


def done_by(points: Sequence[Point], rules: RuleIndex) -> tuple[str, ...]:
    """Names of those that do at once what a rule does, told by `few_instances` of it; none where they do not do all of
    it."""
    outcome = covered(points, rules, steps=1)
    return outcome.by if outcome.at_once == len(points) else ()


def _reaches(start: Node, goal: Node, rules: RuleIndex, steps: int) -> bool:
    """Whether rules lead from one term to the other, from either side."""
    seen, border = {start}, [start]
    for _ in range(steps):
        new = []
        for node in border:
            for result in rules.everywhere(node):
                if result is goal:
                    return True
                if result not in seen and len(seen) < _MOST_TERMS:
                    seen.add(result)
                    new.append(result)
        border = new
    return any(result in seen for result in rules.everywhere(goal))
