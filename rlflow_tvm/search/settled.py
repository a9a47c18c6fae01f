"""Graphs to begin a search at, besides the model's own: those in which a whole family of rules is settled."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterator
from itertools import takewhile
from operator import attrgetter

from rlflow_tvm.envs import Beginning, RewriteProblem
from rlflow_tvm.errors import KernelError, RewriteError
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.passes.match import Match
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES, TerminatingFamily

log = logging.getLogger("rlflow_tvm")


def beginnings(problem: RewriteProblem) -> list[Beginning]:
    """The model's graph and those in which terminating families of rules are exhausted, the cheapest first.

    A blocked layout pays once most of a network is in it, and costs until then; convolutions of one tensor that are
    added up are one, once the biases between them are moved; what is convolved after it was enlarged is convolved
    before, of a concatenation part by part; sums stand where products write, once permutations are led past them; a few
    rows taken of a tensor are led back past what they are read of, which gains nothing in an addition and much in the
    product before it. No search by single rewrites gets there soon. Applying all of the family's rules wherever they
    apply does, without pricing the graphs on the way; so they count as no environment steps. A family is exhausted from
    the model's graph, and from the cheapest of those before, where that is another. Of a problem that is stopped
    meanwhile, those found by then.
    """
    found = {problem.start.structural_hash: Beginning(problem.start_secs, problem.start)}
    for family in TERMINATING_FAMILIES.values():
        cheapest = min(found.values(), key=attrgetter("run_secs")).state
        for source in [problem.start] + [cheapest] * (cheapest is not problem.start):
            way = takewhile(lambda _: not problem.stopped, _settling(source, family))
            last = deque(way, maxlen=1)
            if problem.stopped:
                break
            begin = _priced(problem, last.pop(), found)
            if begin is not None:
                if begin.run_secs < min(each.run_secs for each in found.values()):
                    problem.best = begin.state  # what is left where an error ends the search before its first step
                found[begin.state.structural_hash] = begin
                problem.keep(begin.state)
    ordered = sorted(found.values(), key=attrgetter("run_secs"))
    problem.settled = next((each for each in ordered if each.state.actions), None)
    return ordered


def _priced(problem: RewriteProblem, state: GraphState, found: Collection[int]) -> Beginning | None:
    """A family's graph with its price; None where nothing is left of it, it has been found, or it cannot be run."""
    if state.graph.is_empty or state.structural_hash in found:
        return None
    try:
        cost = problem.cost(state, confirmed=True)
    except KernelError as error:
        log.warning("a family's graph is passed over: %s", error)
        return None
    if not math.isfinite(cost.run_secs):
        log.warning("a family's graph is passed over: %s fails", ", ".join(cost.failed))
        return None
    return Beginning(cost.run_secs, state)


def exhausted(state: GraphState, family: TerminatingFamily) -> GraphState:
    """`state` after applying the family's rules until none applies, earlier ones first, each at its first site."""
    return deque(_settling(state, family), maxlen=1).pop()


def _settling(state: GraphState, family: TerminatingFamily) -> Iterator[GraphState]:
    """`state`, and what it becomes by one after the other of the rewrites to that in which the family is exhausted."""
    refused: set[RewriteAction] = set()  # of this state
    yield state
    while True:
        action = next((a for a in _actions(state, family) if a not in refused), None)
        if action is None:
            return
        try:
            state = state.apply(action)
        except RewriteError:  # a site that cannot be rewritten is passed over, as it is in `RewriteProblem`
            refused.add(action)
        else:
            refused.clear()
            yield state


def _actions(state: GraphState, family: TerminatingFamily) -> Iterator[RewriteAction]:
    for rule in family.rules:
        for site, match in state.located(rule):
            if not family.sole or _read_by_nothing_else(state, match):
                yield RewriteAction(rule, site)


def _read_by_nothing_else(state: GraphState, match: Match) -> bool:
    """Whether what a match reads below its roots is computed at run time, for itself alone; where its roots are all of
    it, what they read. There must be some."""
    matched, graph = set(match.reads), state.graph
    inner = matched.difference(match.roots)
    if not inner:
        read = {var for root in match.roots for var in graph.nodes[graph.position[root]].reads}
        inner = {var for var in read if var in graph.position and var not in graph.weight_only}
    elsewhere = {*graph.outputs, *graph.weight_only}
    return bool(inner) and all(
        var not in elsewhere and all(user.var in matched for user in graph.users[var]) for var in inner
    )
