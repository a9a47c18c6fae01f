"""Random rewrites in a row, run: the outputs stay what they were, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import LANES, MODELS, TARGET, module
from tvm.relax import op as rx

from rlflow_tvm.differences import TOLERANCE
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RewriteRule, RuleSet, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search import random_states
from rlflow_tvm.search.settled import exhausted
from rlflow_tvm.verify import Comparison

SEEDS = range(5)
STEPS = 15


@pytest.fixture(scope="module")
def comparisons() -> dict[str, tuple[GraphState, Comparison]]:
    starts = {name: GraphState.from_module(build(), default_rules(LANES)) for name, build in MODELS.items()}
    return {name: (start, Comparison(start, TARGET, seed=1)) for name, start in starts.items()}


def walked(start: GraphState, rng: np.random.Generator, steps: int = STEPS) -> GraphState:
    """The state after up to `steps` random moves; moves that the rewriter refuses are passed over."""
    state = start
    for reached in random_states(start, steps, rng):
        state = reached
    return state


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MODELS)
def test_random_trajectory_keeps_the_outputs(name, seed, comparisons):
    start, comparison = comparisons[name]
    state = walked(start, np.random.default_rng(seed))
    assert len(state.actions) >= 3
    assert comparison.check(state) <= TOLERANCE


def test_exhausted_family_keeps_the_outputs(comparisons):
    start, comparison = comparisons["conv_net"]
    state = exhausted(start, TERMINATING_FAMILIES["layout"])
    assert len(state.actions) >= 10
    assert comparison.check(state) <= TOLERANCE


def test_wrong_rule_is_found_and_named():
    wrong = RewriteRule("wrong", "none", "matmul(matmul(x, a), b) => matmul(matmul(x, b), a)")
    start = GraphState.from_module(MODELS["algebra"](), RuleSet((*CATALOGUE, wrong), LANES))
    state = start
    for rule in ("matmul_factor_left", "concat_after_unary", "wrong", "compose_reshapes", "permute_after_unary"):
        state = state.apply(RewriteAction(rule, state.sites[rule][0]))
    comparison = Comparison(start, TARGET, seed=1)
    assert comparison.error(state) > TOLERANCE
    with pytest.raises(RewriteError, match=r"first after wrong@.* \(action 3\)"):
        comparison.check(state)


def test_saturated_output_does_not_hide_a_wrong_rule():
    """A softmax over activations that double from layer to layer is a one among zeros, whatever comes before it."""

    def body(emit, x, head, **layers):
        for layer in layers.values():
            x = emit(rx.add(x, emit(rx.matmul(x, layer))))
        return rx.nn.softmax(emit(rx.matmul(x, head)))

    weights = {"head": (32, 64), **{f"w{i}": (32, 32) for i in range(14)}}
    wrong = RewriteRule("wrong", "none", "softmax(x) => softmax(multiply(x, 0.9))")
    start = GraphState.from_module(module({"x": (1, 32)}, weights, body), RuleSet((wrong,), LANES))
    state = start.apply(RewriteAction("wrong", start.sites["wrong"][0]))
    assert Comparison(start, TARGET).error(state) > TOLERANCE
