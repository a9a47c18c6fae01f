"""Roots of a rewrite that stay, become one, come back as they were, or change places; pairs of roots that are found."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
import tvm
from small_models import LANES, TARGET, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.verify import Comparison


def start(mod: tvm.IRModule, *rules: RewriteRule) -> GraphState:
    return GraphState.from_module(mod, RuleSet(rules, LANES))


def first(state: GraphState, rule: str) -> GraphState:
    """`state` after `rule` at its first site."""
    return state.apply(RewriteAction(rule, state.sites[rule][0]))


def operators(state: GraphState) -> list[str]:
    return [node.op.removeprefix("relax.") for node in state.graph.nodes]


def test_rewrite_that_changes_nothing_is_refused():
    swap = RewriteRule("swap", "none", "add(x, y) => add(y, x)", symmetric=True)

    def body(emit, x, y):
        return rx.multiply(emit(rx.add(x, x)), emit(rx.add(x, y)))

    state = start(module({"x": (3,), "y": (3,)}, {}, body), swap)
    same, swapped = (RewriteAction("swap", site) for site in state.sites["swap"])
    with pytest.raises(RewriteError, match=r"rule swap: at .* it changes nothing"):
        state.apply(same)
    assert Comparison(state, TARGET).error(state.apply(swapped)) == 0.0


def test_right_side_that_reads_the_left_builds_it_anew():
    double = RewriteRule("double", "none", "relu(x) => relu(relu(x))")
    after = first(start(module({"x": (3,)}, {}, lambda emit, x: rx.tanh(emit(rx.nn.relu(x)))), double), "double")
    assert operators(after) == ["nn.relu", "nn.relu", "tanh"]
    relax.analysis.well_formed(after.mod)


def test_root_that_stays_beside_one_that_changes():
    rule = RewriteRule("half", "none", "relu(x), tanh(y) => y, tanh(negative(negative(y)))")
    state = start(module({"x": (3,)}, {}, lambda emit, x: rx.tanh(emit(rx.nn.relu(x)))), rule)
    after = first(state, "half")  # y is the first root itself
    assert operators(after) == ["nn.relu", "negative", "negative", "tanh"]
    assert Comparison(state, TARGET).error(after) == 0.0


@pytest.mark.parametrize("inner_first", [True, False])
def test_two_roots_that_become_one(inner_first):
    """One is an output, whose name the new node takes; the other's users must follow."""
    text = "relu(x), tanh(x) => sigmoid(x), sigmoid(x)" if inner_first else "tanh(x), relu(x) => sigmoid(x), sigmoid(x)"
    rule = RewriteRule("two", "none", text)
    state = start(module({"x": (3,)}, {}, lambda emit, x: (rx.abs(emit(rx.nn.relu(x))), rx.tanh(x))), rule)
    after = first(state, "two")
    assert sorted(operators(after)) == ["abs", "sigmoid"]
    assert [v.name for v in after.graph.outputs] == [v.name for v in state.graph.outputs]
    relax.analysis.well_formed(after.mod)


def test_a_pair_is_found_when_one_of_its_roots_changes():
    pair = RewriteRule("pair", "none", "relu(x), tanh(x) => relu(x), tanh(negative(negative(x)))")
    undo = RewriteRule("undo", "none", "negative(negative(x)) => x")

    def body(emit, x):
        left = emit(rx.nn.relu(x))
        return rx.add(left, emit(rx.tanh(emit(rx.negative(emit(rx.negative(x)))))))

    state = start(module({"x": (3,)}, {}, body), pair, undo)
    assert not state.sites["pair"]
    after = first(state, "undo")
    assert len(after.sites["pair"]) == 1
    assert after.sites == start(after.mod, pair, undo).sites


def test_a_symmetric_pair_follows_roots_that_change_places():
    pair = RewriteRule("pair", "none", "abs(x), abs(y) => abs(x), abs(abs(y))", symmetric=True)
    move = RewriteRule("move", "none", "relu(x), tanh(y) => relu(add(x, subtract(y, y))), tanh(y)")

    def body(emit, x, y):
        left = emit(rx.nn.relu(x))
        one = emit(rx.abs(x))
        other = emit(rx.abs(y))
        return rx.add(emit(rx.add(left, one)), emit(rx.tanh(other)))

    state = start(module({"x": (3,), "y": (3,)}, {}, body), pair, move)
    after = first(state, "move")
    (before,), (found,) = state.matches.by_rule["pair"], after.matches.by_rule["pair"]
    assert [root.name for root in found.roots] == [root.name for root in before.roots][::-1]
    assert after.sites == start(after.mod, pair, move).sites


@pytest.mark.parametrize("readers", [3, 9, 30])
def test_triples_of_a_tensor_with_many_readers_are_those_that_stand_together(readers):
    """Of a hundred there would be 161700."""
    rule = RewriteRule("three", "none", "multiply(x, a), multiply(x, b), multiply(x, c) => "
                       "multiply(a, x), multiply(b, x), multiply(c, x)", symmetric=True)  # fmt: skip
    names = [f"y{i}" for i in range(readers)]

    def body(emit, x, **others):
        return tuple(rx.multiply(x, others[name]) for name in names)

    state = start(module({"x": (3,), **dict.fromkeys(names, (3,))}, {}, body), rule)
    found = [[state.graph.position[root] for root in match.roots] for match in state.matches.by_rule["three"]]
    wanted = [each for each in combinations(range(readers), 3) if each[1] - each[0] < 9 and each[2] - each[1] < 9]
    assert sorted(found) == sorted(map(list, wanted))
    if readers < 10:
        assert len(found) == comb(readers, 3)
    after = first(state, "three")
    assert after.sites == start(after.mod, rule).sites
