"""All sites of all rules in a graph, kept up to date after a rewrite by looking only at its neighbourhood."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import NotComputable, NotEvaluable
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import (
    Form,
    Match,
    Mismatch,
    bind,
    forms_of,
    match_root,
    operators_below,
    root_operators,
    unified,
    variants,
    warn_of,
)
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import depth

_REMEMBERED = 50_000
_PARTNERS = 9  # a match itself, with which it is not joined, is mostly the first of them

Candidate = tuple[RewriteRule, int, tuple[Form, ...]]
"""A rule, the number of one of its left terms, and the forms of that term."""


@dataclass(frozen=True)
class RuleSet:
    """The rules of a search and the parameters that their attribute expressions see.

    `lanes` is the target's float32 vector width: the block of blocked layouts.
    """

    rules: tuple[RewriteRule, ...]
    lanes: int = 16

    def __post_init__(self) -> None:
        double = [name for name, times in Counter(rule.name for rule in self.rules).items() if times > 1]
        if double:
            raise RewriteError(f"two rules are called {double[0]}: every rule needs a name of its own")

    @cached_property
    def _by_operator(self) -> Mapping[str, tuple[Candidate, ...]]:
        """Relax name of an operator -> the left terms that can be rooted at it."""
        found: dict[str, list[Candidate]] = {}
        for rule in self.rules:
            for number, term in enumerate(rule.equation.left):
                for operator in root_operators(term):
                    found.setdefault(operator, []).append((rule, number, forms_of(term, rule.fixes_operands)))
        return {operator: tuple(entries) for operator, entries in found.items()}

    @cached_property
    def _candidates(self) -> dict[tuple[str, tuple[str, ...], frozenset[str]], tuple[Candidate, ...]]:
        return {}

    def candidates(self, operator: str, below: tuple[str, ...], present: frozenset[str]) -> tuple[Candidate, ...]:
        """The left terms that can match an operator's call on results of the operators `below` it ("" for inputs), in a
        graph that holds the operators `present`."""
        key = operator, below, present
        if key not in self._candidates:
            if len(self._candidates) > _REMEMBERED:
                self._candidates.clear()
            entries = self._by_operator.get(operator, ())
            fitting = ((rule, n, tuple(f for f in forms if f.fits(below, present))) for rule, n, forms in entries)
            self._candidates[key] = tuple(entry for entry in fitting if entry[2])
        return self._candidates[key]

    @cached_property
    def depths(self) -> dict[tuple[str, int], int]:
        """(rule, number of a left term) -> how far a match of it reaches from its root, in operators."""
        return {(rule.name, n): depth(term) for rule in self.rules for n, term in enumerate(rule.equation.left)}

    @cached_property
    def reach(self) -> int:
        """How far a match of any rule reaches from its root, in operators."""
        return max(self.depths.values(), default=0)

    def __getitem__(self, name: str) -> RewriteRule:
        for rule in self.rules:
            if rule.name == name:
                return rule
        raise RewriteError(f"no rule is called {name!r}: see rlflow_tvm.passes.CATALOGUE for the names")

    def parameters(self, graph: Graph) -> dict[str, Any]:
        """What every attribute expression may use besides a match's own variables."""
        return {"lanes": self.lanes, "block": self.block, "is_weight": graph.is_weight, "same": _same_expression}

    def block(self, channels: int) -> int:
        """The channel block for `channels`: all lanes, or half of them; 1 if neither divides."""
        for block in (self.lanes, self.lanes // 2):
            if block > 1 and channels % block == 0:
                return block
        return 1


def _same_expression(a: relax.Expr, b: relax.Expr) -> bool:
    return a.same_as(b)


Pairs = dict[tuple[Match, Match], Match | None]
"""Match of a rule's first left terms and one of the next term -> what they are together, None if they disagree."""

Roots = Mapping[tuple[str, int], Mapping[relax.Var, Sequence[Match]]]
"""(rule, number of the left term) -> root variable -> the matches of that term there."""


class Matches:
    """Every match in one graph, by rule and in execution order. Immutable; `after` gives the next graph's."""

    def __init__(self, graph: Graph, ruleset: RuleSet, roots: Roots, before: Matches | None = None) -> None:
        self.graph, self.ruleset, self._roots = graph, ruleset, roots
        self.parameters = ruleset.parameters(graph)
        self.by_rule: dict[str, tuple[Match, ...]] = {}
        self._pairs: dict[str, Pairs] = {}
        steady = before if before is not None and _same_order(before.graph, graph) else None
        for rule in ruleset.rules:
            name, terms = rule.name, range(len(rule.equation.left))
            if steady is not None and all(roots.get((name, n)) is steady._roots.get((name, n)) for n in terms):
                self.by_rule[name], self._pairs[name] = steady.by_rule[name], steady._pairs[name]
                continue
            self._pairs[name] = {}
            self.by_rule[name] = tuple(self._join(rule, before._pairs[name] if before is not None else {}))

    @staticmethod
    def of(graph: Graph, ruleset: RuleSet) -> Matches:
        """Match every rule everywhere."""
        return Matches(graph, ruleset, _match_nodes(graph, ruleset, ((node, 0) for node in graph.nodes)))

    def after(self, graph: Graph) -> Matches:
        """The matches of `graph`, a rewrite of this one: only nodes near a changed binding are looked at again."""
        distances = self._distances(graph)
        nodes = ((node, distances[node.var]) for node in graph.nodes if node.var in distances)
        fresh = _match_nodes(graph, self.ruleset, nodes)
        removed = self.graph.position.keys() - graph.position.keys()
        gone = [
            {*removed, *(var for var, distance in distances.items() if distance < reach)}
            for reach in range(self.ruleset.reach + 1)
        ]  # by the depth of the term that matched
        roots = {}
        for key in {**self._roots, **fresh}:
            matches, lost = self._roots.get(key, {}), gone[self.ruleset.depths[key]]
            if not matches.keys().isdisjoint(lost):
                matches = {var: found for var, found in matches.items() if var not in lost}
            roots[key] = {**matches, **fresh[key]} if key in fresh else matches
        return Matches(graph, self.ruleset, roots, self)

    def _distances(self, graph: Graph) -> dict[relax.Var, int]:
        """How far above a change each variable of `graph` is, in operators, no further than a term reaches.

        0: bound anew. -1: begins or ceases to be a weight; conditions ask that of a term's variables, which lie
        one operator further down than the term's last operator.
        """
        old = frozenset(self.graph.nodes)
        turned = graph.weight_only ^ self.graph.weight_only
        front = [var for var in turned if var in graph.position]
        anew = [node.var for node in graph.nodes if node not in old]
        distances: dict[relax.Var, int] = {}
        for distance in range(-1, self.ruleset.reach):
            front = [var for var in front if var not in distances]
            distances.update(dict.fromkeys(front, distance))
            users = [user.var for var in front for user in graph.users.get(var, ())]
            front = [*users, *anew] if distance == -1 else users
        return distances

    def _join(self, rule: RewriteRule, known: Pairs) -> list[Match]:
        """Matches of all roots together: single-root matches that agree on the variables they share.

        `known`: pairs of matches in the graph before.
        """
        partial, last = self._ordered(rule, 0), len(rule.equation.left) - 1
        if last == 0:  # checked when it was matched
            return partial
        for number in range(1, last + 1):
            by_key: dict[tuple[object, ...], list[Match]] = {}
            for one in self._ordered(rule, number) if partial else ():
                by_key.setdefault(_key(one, rule.shared[number]), []).append(one)
            partial = [
                joined
                for first in partial
                for second in self._partners(first, by_key.get(_key(first, rule.shared[number]), []), last)
                if (joined := self._joined(first, second, known, number == last)) is not None
            ]
        return partial

    def _partners(self, first: Match, others: list[Match], last: int) -> list[Match]:
        """Those of the `others`, in execution order, that are tried with `first`. All of them, but of a symmetric rule
        with three left terms or more the next few: of a hundred products of one tensor there would be as many triples
        as their number's cube, and those that are worth joining, as queries, keys and values, stand together."""
        if not first.rule.symmetric or last < 2:
            return others
        position = self.graph.position
        start = bisect_left(others, position[first.roots[-1]], key=lambda each: position[each.roots[0]])
        return others[start : start + _PARTNERS]

    def _ordered(self, rule: RewriteRule, number: int) -> list[Match]:
        """The matches of one left term, in execution order."""
        found = self._roots.get((rule.name, number), {})
        return [match for var in sorted(found, key=self.graph.position.__getitem__) for match in found[var]]

    def _joined(self, first: Match, second: Match, known: Pairs, last: bool) -> Match | None:
        """The two as one match, with its conditions checked if that was the `last` root.

        Remembered from graph to graph: both are the same objects only where nothing near them has changed.
        """
        position = self.graph.position
        if first.rule.symmetric and position[first.roots[-1]] > position[second.roots[0]]:
            return None
        pair = first, second
        if pair in known:
            joined = known[pair]
        else:
            joined = _agreed(first, second)
            if last and joined is not None:
                joined = _checked(joined, self.graph, self.parameters)
        self._pairs[first.rule.name][pair] = joined
        return joined

    def explain(self, rule: RewriteRule, node: Node, root: int = 0) -> str:
        """Why `rule` does not match with its left term number `root` at `node` ("" if it does)."""
        reasons: list[tuple[int, str]] = []
        for term in variants(rule.equation.left[root], rule.fixes_operands):
            env = dict(self.parameters)
            matched: list[relax.Var] = []
            try:
                unified(term, node.var, self.graph, env, matched)
                if any(node.var in match.roots for match in self.by_rule[rule.name]):
                    return ""
                reasons.append((len(matched) + 1, self._failed_condition(rule, env)))
            except Mismatch as mismatch:
                reasons.append((len(matched), f"{mismatch.reason} (at {mismatch.culprit})"))
            except NotEvaluable as error:
                reasons.append((len(matched), str(error)))
        return max(reasons, key=lambda r: r[0])[1]

    def _failed_condition(self, rule: RewriteRule, env: dict[str, Any]) -> str:
        if len(rule.equation.left) > 1:
            return f"no other match that goes with this one ({' and '.join(rule.when) or 'shared variables differ'})"
        env = dict(env)
        for name, value in rule.equation.lets:
            env[name] = value.value(env)
        # no further than the first: a condition may rely on those before it
        failed = next((str(c) for c in rule.conditions if not c.value(env)), None)
        return "it computes on weights alone" if failed is None else f"the condition {failed} does not hold"


def _same_order(before: Graph, graph: Graph) -> bool:
    """Whether the nodes that are in both graphs stand in the same order in both."""
    old, new = frozenset(before.nodes), frozenset(graph.nodes)
    return [node for node in before.nodes if node in new] == [node for node in graph.nodes if node in old]


def _agreed(first: Match, second: Match) -> Match | None:
    (root,) = second.roots
    if root in first.roots:
        return None
    env = dict(first.env)
    try:
        for name, value in second.env.items():
            bind(name, value, env, root)
    except Mismatch:
        return None
    roots, variant = (*first.roots, root), (*first.variant, *second.variant)
    return Match(first.rule, roots, variant, env, (*first.matched, *second.matched))


def _key(match: Match, names: tuple[str, ...]) -> tuple[object, ...]:
    """What `names` stand for, to join by; constants are compared by value later, so here they are all alike."""
    return tuple([v if isinstance(v := match.env[name], relax.Var) else None for name in names])


def _checked(match: Match, graph: Graph, parameters: Mapping[str, Any]) -> Match | None:
    """The match with its `where` attributes bound, if the rule's conditions hold."""
    if all(root in graph.weight_only for root in match.roots):
        return None  # work on weights alone is done once, before the first run: rewriting it gains nothing
    env, lets = {**parameters, **match.env}, {}
    try:
        for name, value in match.rule.equation.lets:
            env[name] = lets[name] = value.value(env)
        if not all(condition.value(env) for condition in match.rule.conditions):
            return None
    except NotComputable:
        return None
    except NotEvaluable as error:
        warn_of(match.rule.name, str(error))
        return None
    return Match(match.rule, match.roots, match.variant, {**match.env, **lets}, match.matched)


def _match_nodes(
    graph: Graph, ruleset: RuleSet, nodes: Iterable[tuple[Node, int]]
) -> dict[tuple[str, int], dict[relax.Var, list[Match]]]:
    """The matches at each node, by terms that reach further down than the number beside it."""
    parameters = ruleset.parameters(graph)
    result: dict[tuple[str, int], dict[relax.Var, list[Match]]] = {}
    for node, distance in nodes:
        for rule, number, forms in ruleset.candidates(node.op, operators_below(node, graph), graph.operators):
            if ruleset.depths[rule.name, number] <= distance:
                continue
            matches = match_root(rule, forms, node, graph, parameters)
            if len(rule.equation.left) == 1:
                matches = [c for m in matches if (c := _checked(m, graph, parameters)) is not None]
            if matches:
                result.setdefault((rule.name, number), {})[node.var] = matches
    return result
