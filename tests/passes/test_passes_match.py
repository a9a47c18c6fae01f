"""What attribute expressions of left terms read, and what becomes of those that a graph does not fit."""

from __future__ import annotations

import re
from itertools import islice

import pytest
import tvm
from small_models import LANES, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.passes.instance import instance_function
from rlflow_tvm.passes.proof.sampling import FLOAT, Sampler


def start(mod: tvm.IRModule, *rules: RewriteRule) -> GraphState:
    return GraphState.from_module(mod, RuleSet(rules, LANES))


@pytest.mark.parametrize(
    "rule",
    [
        RewriteRule("asks_of_axes", "none", "mean(x, axis=a, keepdims=True) => x", ("len(a) == 1",)),
        RewriteRule("computes_of_axes", "none", "mean(x, axis=a, keepdims=True) => x where n = len(a)"),
        RewriteRule("reads_of_axes", "none", "softmax(mean(x, axis=a, keepdims=True), axis=a[0]) => x"),
    ],
    ids=lambda rule: rule.name,
)
def test_a_rule_that_cannot_be_asked_does_not_match_and_is_named_once(rule, caplog):
    def body(emit, x):
        return tuple(rx.nn.softmax(emit(rx.mean(x, None, keepdims=True)), axis=axis) for axis in (0, 1))

    state = start(module({"x": (3, 4)}, {}, body), rule)
    assert state.sites[rule.name] == ()
    (warning,) = caplog.messages
    assert warning.startswith(f"rule {rule.name}: ")
    assert any("cannot be evaluated" in state.matches.explain(rule, node) for node in state.graph.nodes)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_attributes_of_left_terms_read_what_stands_after_them(swapped, factor):
    """However the operands of what commutes are written down, and in the rule's own order."""
    inverse = RewriteRule("inverse", "none", "multiply(multiply(x, number(c)), number(1 / c)) => x", ("c != 0",))
    spread = RewriteRule("spread", "none", "add(broadcast_to(x, shape=shape(y)), y) => add(x, y)")

    def body(emit, x, y):
        twice, other = emit(rx.multiply(x, relax.const(2.0))), relax.const(factor)
        wide = emit(rx.broadcast_to(x, (2, 3)))
        return rx.multiply(other, twice) if swapped else rx.multiply(twice, other), rx.add(wide, y)

    state = start(module({"x": (3,), "y": (2, 3)}, {}, body), inverse, spread)
    assert len(state.sites["inverse"]) == (factor == 0.5)
    assert len(state.sites["spread"]) == 1
    reasons = [state.matches.explain(inverse, node) for node in state.graph.nodes]
    assert ("" in reasons) == (factor == 0.5)
    assert any(re.search(r"the constant \S+ is needed, not \S+ ", reason) for reason in reasons) == (factor == 0.25)


def test_attributes_of_left_terms_read_the_parameters():
    rule = RewriteRule("half", "none", "unpack(pack(x, block=lanes // 2), block=block(2 * 1)) => x")
    for sample in islice((s for s in Sampler(rule).samples(2000) if s.dtype == FLOAT), 3):
        state = start(tvm.IRModule({"main": instance_function(rule, sample.instance)}), rule)
        (site,) = state.sites["half"]
        assert state.matches.explain(rule, state.graph.nodes[site.roots[0]]) == ""
        assert state.apply(RewriteAction("half", site)).graph.is_empty
