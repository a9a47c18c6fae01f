"""Roots of a rewrite that stay, become one, or come back as they were."""

from __future__ import annotations

import pytest
import tvm
from small_models import LANES, TARGET, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.verify import Comparison


def start(mod: tvm.IRModule, rule: RewriteRule) -> GraphState:
    return GraphState.from_module(mod, RuleSet((rule,), LANES))


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
