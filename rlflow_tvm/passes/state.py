"""The state of a search: a module, the sites in it, and the actions that led to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import tvm

from rlflow_tvm.errors import PlanError, RewriteError
from rlflow_tvm.ir import Detached, check_pure, check_static, detach
from rlflow_tvm.passes.apply import apply_match
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import Match
from rlflow_tvm.passes.matcher import Matches, RuleSet
from rlflow_tvm.passes.plan import Plan

_INTEGERS = r"([0-9]{1,18}(?:,[0-9]{1,18})*)"
_SITE = re.compile(f"{_INTEGERS}#{_INTEGERS}")
_SHOWN = 80  # characters of what is no action


@dataclass(frozen=True, order=True)
class Site:
    """Where a rule matches: the positions of its roots among the bindings, and which operand orders matched."""

    roots: tuple[int, ...]
    variant: tuple[int, ...]

    def __str__(self) -> str:
        return f"{','.join(map(str, self.roots))}#{','.join(map(str, self.variant))}"

    @staticmethod
    def parse(text: str) -> Site:
        found = _SITE.fullmatch(text)
        if not found:
            raise RewriteError(f"{text[:_SHOWN]!r} is no site: POSITION[,POSITION]#VARIANT is expected, as 12#0")
        roots, variant = (tuple(map(int, group.split(","))) for group in found.groups())
        return Site(roots, variant)


@dataclass(frozen=True)
class RewriteAction:
    """Apply `rule` at `site`. Its text form is `rule@site`."""

    rule: str
    site: Site

    def __str__(self) -> str:
        return f"{self.rule}@{self.site}"

    @staticmethod
    def parse(text: str) -> RewriteAction:
        rule, at, site = text.rpartition("@")  # a rule's name may hold one
        if not at:
            raise RewriteError(f"{text[:_SHOWN]!r} is no action: RULE@SITE is expected")
        return RewriteAction(rule, Site.parse(site))


class GraphState:
    """Immutable: `apply` returns the next state and leaves this one as it is."""

    def __init__(self, start: Detached, matches: Matches, actions: tuple[RewriteAction, ...], start_hash: int) -> None:
        self.start, self._matches, self.actions, self.start_hash = start, matches, actions, start_hash

    @staticmethod
    def from_module(mod: tvm.IRModule, ruleset: RuleSet) -> GraphState:
        """The state of `mod` (bound or detached) with no action taken; UsageError if it cannot be rewritten."""
        start = detach(mod)
        check_static(start.mod["main"])
        check_pure(start.mod["main"])
        return GraphState._beginning(start, ruleset)

    @staticmethod
    def _beginning(start: Detached, ruleset: RuleSet) -> GraphState:
        graph = Graph.from_module(start.mod).live()
        return GraphState(start, Matches.of(graph, ruleset), (), graph.structural_hash)

    def origin(self) -> GraphState:
        """The state that this one was reached from, with no action taken: the same module and weights."""
        return GraphState._beginning(self.start, self.ruleset)

    def under(self, ruleset: RuleSet) -> GraphState:
        """This graph under other rules, as a state with no action taken yet; RewriteError where one was."""
        if self.actions:
            raise RewriteError("only a state with no action taken can be put under other rules")
        return GraphState(self.start, Matches.of(self.graph, ruleset), (), self.start_hash)

    @property
    def graph(self) -> Graph:
        return self._matches.graph

    @property
    def ruleset(self) -> RuleSet:
        return self._matches.ruleset

    @property
    def matches(self) -> Matches:
        return self._matches

    def located(self, rule: str) -> list[tuple[Site, Match]]:
        """The sites of `rule` in canonical order, each with what matches there; none where the set lacks the rule."""
        return list(self._by_site.get(rule, {}).items())

    @cached_property
    def sites(self) -> Mapping[str, tuple[Site, ...]]:
        """Rule name -> its sites in canonical order (the same on every machine)."""
        return {rule: tuple(by_site) for rule, by_site in self._by_site.items()}

    @cached_property
    def _by_site(self) -> dict[str, dict[Site, Match]]:
        position = self.graph.position
        result = {}
        for rule, matches in self._matches.by_rule.items():
            places = {(tuple([position[root] for root in match.roots]), match.variant): match for match in matches}
            result[rule] = {Site(*place): places[place] for place in sorted(places)}
        return result

    def match(self, action: RewriteAction) -> Match:
        """The match that `action` means; RewriteError if the rule does not match there."""
        sites = self._by_site.get(action.rule)
        if sites is None:
            raise RewriteError(f"action {action}: no rule of that name here (one of your own? give their file)")
        if action.site not in sites:
            raise RewriteError(f"action {action}: the rule does not match there (it has {len(sites)} sites)")
        return sites[action.site]

    def apply(self, action: RewriteAction) -> GraphState:
        """The state after `action`; RewriteError if it is not legal here."""
        graph = apply_match(self.graph, self.match(action), self._matches.parameters)
        return GraphState(self.start, self._matches.after(graph), (*self.actions, action), self.start_hash)

    @cached_property
    def mod(self) -> tvm.IRModule:
        """The module now, in the working form (weights as parameters)."""
        # `main` keeps its name's variable, as other functions may call it
        mod = tvm.IRModule(dict(self.start.mod.functions_items()), attrs=self.start.mod.attrs)
        mod["main"] = self.graph.function
        return mod

    def bound(self) -> tvm.IRModule:
        """The module now, with its weights as constants."""
        return self.start.bind(self.mod)

    @property
    def structural_hash(self) -> int:
        return self.graph.structural_hash

    @property
    def plan(self) -> Plan:
        """The actions so far, with the hashes of both ends."""
        return Plan(tuple(map(str, self.actions)), self.start_hash, self.structural_hash, self.ruleset.lanes)

    def replay(self, plan: Plan) -> GraphState:
        """The state after all of `plan`'s actions; PlanError if it is for another module or other rules."""
        state = self
        for following in self.along(plan):
            state = following
        return state

    def along(self, plan: Plan) -> Iterator[GraphState]:
        """The state after each of `plan`'s actions in turn; PlanError as in `replay`."""
        plan.check_start(self.structural_hash)
        plan.check_lanes(self.ruleset.lanes)
        state = self
        for number, text in enumerate(plan.actions, len(self.actions) + 1):
            try:
                state = state.apply(RewriteAction.parse(text))
            except RewriteError as error:
                raise PlanError(
                    f"action {number} of the plan cannot be repeated ({error}): the rules have changed; search again"
                ) from error
            yield state
        plan.check_end(state.structural_hash)
