"""What rewrites would change, against the graphs that they make."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from small_models import LANES, MODELS, module
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import GraphState, RewriteRule, RuleSet, default_rules
from rlflow_tvm.passes.apply import apply_match
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.search import random_states

STEPS = 8


def differences(state: GraphState) -> dict:
    """Match -> its difference, and what `apply_match` makes of it; where both refuse, nothing."""
    graph, parameters, found = state.graph, state.matches.parameters, {}
    for matches in state.matches.by_rule.values():
        for match in matches:
            try:
                difference = Difference.of(graph, match, parameters)
            except RewriteError as error:
                with pytest.raises(RewriteError, match=str(error).split("`", maxsplit=1)[0][:20]):
                    apply_match(graph, match, parameters)
                continue
            found[match] = difference, apply_match(graph, match, parameters)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_differences_are_those_of_the_graphs(name):
    start = GraphState.from_module(MODELS[name](), default_rules(LANES))
    for state in [start, *random_states(start, STEPS, np.random.default_rng(0))]:
        graphs, identities = defaultdict(set), defaultdict(set)
        for difference, graph in differences(state).values():
            before = len(state.graph.nodes)
            assert len(graph.nodes) == before - len(difference.removed) + len(difference.added)
            graphs[difference.identity].add(graph.structural_hash)
            identities[graph.structural_hash].add(difference.identity)
        assert all(len(hashes) == 1 for hashes in graphs.values()), "two graphs taken for one"
        assert all(len(found) == 1 for found in identities.values()), "one graph taken for two"


@pytest.mark.parametrize("name", MODELS)
def test_differences_that_hold_need_not_be_made_anew(name):
    start = GraphState.from_module(MODELS[name](), default_rules(LANES))
    known, held, stale = {}, 0, 0
    for state in [start, *random_states(start, 8 * STEPS, np.random.default_rng(1))]:
        fresh = {match: difference for match, (difference, _) in differences(state).items()}
        for match, difference in fresh.items():
            if match in known and known[match].holds(state.graph):
                held += 1
                assert known[match].identity == difference.identity
                assert set(known[match].removed) == set(difference.removed)
                assert len(known[match].added) == len(difference.added)
            else:
                stale += match in known
        known |= fresh
    assert held > 10
    assert stale or name == "conv_chain", "every match was left alone, or made anew: the walks show nothing"


def _twice(first: str, second: str, body) -> list[Difference]:
    rules = RuleSet((RewriteRule("first", "none", first), RewriteRule("second", "none", second)), LANES)
    state = GraphState.from_module(module({"x": (2, 3)}, {}, body), rules)
    graph, parameters = state.graph, state.matches.parameters
    return [Difference.of(graph, match, parameters) for rule in ("first", "second")
            for match in state.matches.by_rule[rule]]  # fmt: skip


def test_a_rule_further_up_can_make_the_same_graph():
    def body(emit, x):
        return rx.tanh(emit(rx.nn.relu(emit(rx.nn.relu(x)))))

    one, other = _twice("relu(relu(x)) => relu(x)", "tanh(relu(relu(x))) => tanh(relu(x))", body)
    assert one.roots.keys() != other.roots.keys()
    assert one.identity == other.identity


def test_what_somebody_else_reads_too_is_not_the_same_change():
    def body(emit, x):
        y = emit(rx.nn.relu(emit(rx.nn.relu(x))))
        return rx.tanh(y), rx.exp(y)

    one, other = _twice("relu(relu(x)) => relu(x)", "tanh(relu(relu(x))) => tanh(relu(x))", body)
    assert one.identity != other.identity, "the second leaves what the exponential reads"
    assert len(one.removed) > len(other.removed) - len(other.added)
