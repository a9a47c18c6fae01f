"""A family of the catalogue's rules as one pass: what makes the graph smaller is done until nothing does."""

from __future__ import annotations

from functools import lru_cache

import tvm
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.ir import check_no_devices
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.match import Match
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
        check_no_devices(mod)  # before what is remembered, which is functions alone
        state = _beginning(tuple(mod.functions_items()), mod.attrs).under(self._ruleset)
        if state.start.weights:
            _beginning.cache_clear()  # it would keep them
        known: Known = {}
        following = _smaller(state, known)
        while following is not None:
            state, following = following, _smaller(following, known)
        return state.bound() if state.actions else mod


@lru_cache(maxsize=4)  # functions are equal where they are the same object; a module may be given others
def _beginning(functions: tuple[tuple[tvm.ir.GlobalVar, tvm.ir.BaseFunc], ...], attrs: tvm.ir.DictAttrs) -> GraphState:
    """The graph of a module's functions, remembered: one family is mostly tried after another on the same module, and
    reading the graph takes longer than most families do on it."""
    return GraphState.from_module(tvm.IRModule(dict(functions), attrs=attrs), RuleSet((), 1))


Gain = tuple[int, int]
Known = dict[Match, tuple[Difference, Gain] | None]
"""What a move changes and what that saves, None where it cannot be made; it stands while the difference holds."""


def _smaller(state: GraphState, known: Known) -> GraphState | None:
    """The state after the first move that makes it smaller; None where none does."""
    for rule in state.sites:
        for site, match in state.located(rule):
            told = known.get(match)
            if match not in known or (told is not None and not told[0].holds(state.graph)):
                told = known[match] = _told(state, match)
            if told is None or told[1] <= (0, 0):
                continue
            try:
                following = state.apply(RewriteAction(rule, site))
            except RewriteError:  # it would depend on itself
                continue
            if not following.graph.is_empty:
                return following
    return None


def _told(state: GraphState, match: Match) -> tuple[Difference, Gain] | None:
    try:
        difference = Difference.of(state.graph, match, state.matches.parameters)
    except RewriteError:
        return None
    return difference, _gain(state.graph, difference)


def _gain(graph: Graph, difference: Difference) -> Gain:
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
