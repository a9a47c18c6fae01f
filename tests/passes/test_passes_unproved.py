"""Uses of operators that no rule is for: rules are proved for less than TVM's operators can be told."""

from __future__ import annotations

import pytest
from small_models import LANES, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.passes import GraphState, RewriteRule, RuleSet, default_rules
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.ops import OPERATORS


def padded_pool(pool, **options):
    def body(emit, x):
        return pool(emit(rx.nn.relu(x)), **options)

    return body


@pytest.mark.parametrize(
    ("options", "extent", "matched"),
    [
        ({"pool_size": (3, 3), "padding": (1, 1, 1, 1)}, 4, True),
        ({"pool_size": (1, 1), "padding": (1, 1, 1, 1)}, 1, False),  # as wide as the window
        ({"pool_size": (2, 2), "dilation": (3, 3), "padding": (1, 1, 1, 1)}, 2, False),  # both taps beside the image
        ({"pool_size": (2, 2), "dilation": (3, 3), "padding": (1, 1, 1, 1)}, 4, True),
    ],
)
@pytest.mark.parametrize("pool", [rx.nn.max_pool2d, rx.nn.avg_pool2d])
def test_no_rule_is_for_windows_in_the_padding(pool, options, extent, matched):
    mod = module({"x": (1, 2, extent, extent)}, {}, padded_pool(pool, **options))
    graph = Graph.from_module(mod)
    name = pool.__name__
    (call,) = (node.value for node in graph.nodes if node.op == f"relax.nn.{name}")
    assert (OPERATORS[name].attributes_of(call) is not None) == matched
    sites = GraphState.from_module(mod, default_rules(LANES)).sites
    if pool is rx.nn.max_pool2d:
        assert bool(sites["relu_after_max_pool"]) == matched


@pytest.mark.parametrize(("mode", "matched"), [("clip", True), ("wrap", True), ("nan", False)])
def test_no_rule_is_for_positions_that_give_nan(mode, matched):
    def body(emit, x):
        return rx.take(emit(rx.power(x, relax.const(2.0))), relax.const([1], "int64"), axis=1, mode=mode)

    sites = GraphState.from_module(module({"x": (3, 4)}, {}, body), default_rules(LANES)).sites
    assert bool(sites["take_before_scalar"]) == matched


@pytest.mark.parametrize(("mode", "matched"), [("constant", True), ("reflect", False)])
def test_no_rule_is_for_pads_that_repeat(mode, matched):
    def body(emit, x):
        return rx.nn.pad(emit(rx.nn.pad(x, (1, 1, 1, 1), mode)), (1, 1, 1, 1), mode)

    graph = Graph.from_module(module({"x": (3, 4)}, {}, body))
    assert all((OPERATORS["pad"].attributes_of(node.value) is not None) == matched for node in graph.nodes)


@pytest.mark.parametrize(("layout", "kernel", "matched"), [("NCHW", "OIHW", True), ("NHWC", "HWIO", False)])
def test_no_rule_is_for_channels_last(layout, kernel, matched):
    """Nor is a rule that names no layout: axis 1 is H there."""
    texts = ("max_pool2d(relu(x), **k) => relu(max_pool2d(x, **k))",
             "adaptive_avg_pool2d(relu(x), **k) => relu(adaptive_avg_pool2d(x, **k))",
             "conv2d(relu(x), w, **k) => conv2d(relu(relu(x)), w, **k)")  # fmt: skip
    rules = tuple(RewriteRule(text.split("(")[0], "none", text) for text in texts)

    def body(emit, x, w):
        y = emit(rx.nn.relu(x))
        pooled = rx.nn.max_pool2d(y, (2, 2), layout=layout), rx.nn.adaptive_avg_pool2d(y, (2, 2), layout=layout)
        return *pooled, rx.nn.conv2d(y, w, data_layout=layout, kernel_layout=kernel)

    mod = module({"x": (1, 4, 4, 4)}, {"w": (4, 4, 4, 4)}, body)
    sites = GraphState.from_module(mod, RuleSet(rules, LANES)).sites
    assert {name: len(found) for name, found in sites.items()} == {rule.name: int(matched) for rule in rules}
