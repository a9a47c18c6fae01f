"""A family of the catalogue's rules as one pass: what makes the graph smaller is done until nothing does."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.operations import elements
from rlflow_tvm.passes.rules import FAMILIES
from rlflow_tvm.passes.state import GraphState, RewriteAction


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.Family")
class Family:
    """Apply a family's rules wherever that leaves fewer operations at run time, or as many that write less.

    Each step lowers (operations, elements written), so it ends; the same module gives the same result. Families whose
    rules are of the target (`layout`) have no place here.

    RewriteError for a name that is no family's.
    """

    def __init__(self, family: str) -> None:
        if family not in FAMILIES:
            raise RewriteError(f"no family of rules is called {family!r}: there are {', '.join(FAMILIES)}")
        self.family = family
        self._ruleset = RuleSet(FAMILIES[family], 1)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        state = GraphState.from_module(mod, self._ruleset)
        known: dict[object, Difference | None] = {}
        following = _smaller(state, known)
        while following is not None:
            state, following = following, _smaller(following, known)
        return state.bound() if state.actions else mod


def _smaller(state: GraphState, known: dict[object, Difference | None]) -> GraphState | None:
    """The state after the first move that makes it smaller; None where none does."""
    for action, difference in _differences(state, known):
        if _gain(state.graph, difference) > (0, 0):
            try:
                following = state.apply(action)
            except RewriteError:  # it would depend on itself
                continue
            if not following.graph.is_empty:
                return following
    return None


def _differences(
    state: GraphState, known: dict[object, Difference | None]
) -> Iterator[tuple[RewriteAction, Difference]]:
    """What each move changes; those of the last state are remembered while they hold."""
    for rule in state.sites:
        for site, match in state.located(rule):
            difference = known.get(match)
            if match not in known or (difference is not None and not difference.holds(state.graph)):
                try:
                    difference = Difference.of(state.graph, match, state.matches.parameters)
                except RewriteError:
                    difference = None
                known[match] = difference
            if difference is not None:
                yield RewriteAction(rule, site), difference


def _gain(graph: Graph, difference: Difference) -> tuple[int, int]:
    """Fewer operations at run time, and fewer elements written by them."""
    free = set(graph.weight_only)
    before = [graph.node(var) for var in difference.removed if var not in free]
    gone = [node.var for node in before if node is not None and isinstance(node.value, relax.Call)]
    added = []
    for node in difference.added:
        if free.issuperset(expr for expr in difference.read_by(node) if isinstance(expr, relax.Var)):
            free.add(node.var)
        elif isinstance(node.value, relax.Call):
            added.append(node.var)
    return len(gone) - len(added), sum(elements(v.ty) for v in gone) - sum(elements(v.ty) for v in added)
