"""What an agent sees: consistent arrays within their space, and the meaning of their columns."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from small_models import LANES, MODELS, conv_net, module
from tvm.relax import op as rx

from rlflow_tvm.envs.observation import (
    EDGE_FEATURES,
    LOCATIONS,
    NODE_FEATURES,
    NODES_PER_LOCATION,
    OPERATOR_INDEX,
    observation_space,
    observe,
)
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.frontend.zoo_demo import demo_model
from rlflow_tvm.frontend.zoo_light import light_files
from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet, default_rules
from rlflow_tvm.search import random_action

SHARE, USERS, RANK, READS_WEIGHT, IS_OUTPUT = range(9, 14)
"""Columns of a node's features behind the operator, the shape, the size and the FLOPs."""


@pytest.fixture(scope="module")
def modules() -> dict[str, tvm.IRModule]:
    built = {name: build() for name, build in MODELS.items()}
    imported = {"demo": demo_model(0), "inception": light_files()["light_inception_v2"]}
    return {**built, **{name: from_onnx(model) for name, model in imported.items()}}


def states(mod: tvm.IRModule, steps: int = 5) -> list[GraphState]:
    rng = np.random.default_rng(0)
    found = [GraphState.from_module(mod, default_rules(LANES))]
    for _ in range(steps):
        action = random_action(found[-1], rng)
        if action is not None:
            found.append(found[-1].apply(action))
    return found


@pytest.mark.parametrize("name", [*MODELS, "demo", "inception"])
def test_observations_are_in_their_space(name, modules):
    for state in states(modules[name]):
        observation = observe(state)
        space = observation_space(len(state.ruleset.rules))
        assert space.contains(observation)
        graph = observation["graph"]
        assert graph.nodes.shape[1:] == (NODE_FEATURES,)
        assert graph.edges.shape == (len(graph.edge_links), EDGE_FEATURES)
        assert graph.edge_links.dtype == np.int64
        assert np.isfinite(graph.nodes).all()
        assert np.isfinite(graph.edges).all()


@pytest.mark.parametrize("name", [*MODELS, "demo", "inception"])
def test_edges_and_locations_point_at_nodes(name, modules):
    for state in states(modules[name]):
        observation = observe(state)
        graph, count = observation["graph"], len(observation["graph"].nodes)
        assert graph.edge_links.min() >= 0
        assert graph.edge_links.max() < count
        assert (graph.edge_links[:, 0] < graph.edge_links[:, 1]).all()  # nodes stand in execution order
        nodes, mask = observation["location_nodes"], observation["location_mask"].astype(bool)
        assert nodes.min() >= -1
        assert nodes.max() < count
        assert (nodes[~mask] == -1).all()
        stop = len(state.ruleset.rules)
        assert (nodes[:stop][mask[:stop]][:, 0] >= 0).all()  # every site has at least its root
        assert (nodes[stop] == -1).all()


@pytest.mark.parametrize("name", [*MODELS, "demo"])
def test_nodes_are_what_is_computed_at_run_time(name, modules):
    state = states(modules[name], 0)[0]
    graph = state.graph
    runtime = [node for node in graph.nodes if node.var not in graph.weight_only]
    nodes = observe(state)["graph"].nodes
    operators = [1] * graph.inputs + [OPERATOR_INDEX.get(node.op, 0) for node in runtime]
    assert nodes[:, 0].astype(int).tolist() == operators
    assert nodes[:, SHARE].sum() == pytest.approx(1.0, abs=1e-5)
    assert nodes[:, IS_OUTPUT].sum() == len(graph.outputs)
    assert not nodes[: graph.inputs, READS_WEIGHT].any()


def test_columns_of_a_small_graph():
    def body(emit, x, w):
        y = emit(rx.nn.relu(x))
        return rx.matmul(emit(rx.add(y, y)), emit(rx.permute_dims(w, (1, 0))))

    state = GraphState.from_module(module({"x": (3, 4)}, {"w": (5, 4)}, body), default_rules(LANES))
    graph = observe(state)["graph"]
    operator = [1, *(OPERATOR_INDEX[f"relax.{name}"] for name in ("nn.relu", "add", "matmul"))]
    assert graph.nodes[:, 0].astype(int).tolist() == operator
    assert graph.edge_links.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3]]
    assert graph.nodes[:, USERS].tolist() == [1 / 8, 1 / 8, 1 / 8, 0]
    assert graph.nodes[:, READS_WEIGHT].tolist() == [0, 0, 0, 1]
    assert graph.nodes[:, IS_OUTPUT].tolist() == [0, 0, 0, 1]
    assert graph.nodes[:, RANK] == pytest.approx([2 / 6] * 4)
    assert graph.nodes[:, 1:5].tolist() == [[0] * 4] * 4  # extents stand at the right
    assert graph.nodes[0, 5] == pytest.approx(np.log2(4) / 12)
    assert graph.nodes[0, 6] == pytest.approx(np.log2(5) / 12)
    assert graph.edges[0].tolist() == graph.nodes[0, 1:8].tolist()


def test_work_of_a_convolution_counts_its_multiplications():
    def share(kernel: int) -> float:
        def body(emit, x, w):
            return rx.nn.relu(emit(rx.nn.conv2d(x, w, padding=kernel // 2)))

        mod = module({"x": (1, 16, 8, 8)}, {"w": (16, 16, kernel, kernel)}, body)
        return float(observe(GraphState.from_module(mod, default_rules(LANES)))["graph"].nodes[1, SHARE])

    moved = 16 * 4 * 2 * 16 * 64
    for kernel in (3, 5):
        flops = 2 * 16 * 64 * 16 * kernel**2
        assert share(kernel) == pytest.approx(flops / (flops + moved), rel=1e-5)


def test_location_nodes_are_the_matched_operators():
    state = states(conv_net(), 0)[0]
    observation = observe(state)
    index = {node.var: i + state.graph.inputs for i, node in enumerate(state.graph.nodes)}  # no weight work in it
    for number, rule in enumerate(state.ruleset.rules):
        for location, site in enumerate(state.sites[rule.name]):
            match = state.match(RewriteAction(rule.name, site))
            expected = {index[var] for var in (*match.roots, *match.matched)}
            found = [n for n in observation["location_nodes"][number, location] if n >= 0]
            assert found[: len(match.roots)] == [index[root] for root in match.roots]
            assert set(found) <= expected
            assert len(found) == min(len(expected), NODES_PER_LOCATION)


def test_refused_actions_are_masked_in_place():
    state = states(conv_net(), 0)[0]
    rule = next(i for i, r in enumerate(state.ruleset.rules) if len(state.sites[r.name]) >= 2)
    name = state.ruleset.rules[rule].name
    action = RewriteAction(name, state.sites[name][0])
    before, after = observe(state), observe(state, {action})
    assert after["location_mask"][rule, 0] == 0
    assert (after["location_nodes"][rule, 0] == -1).all()
    assert after["location_mask"][rule, 1:].tolist() == before["location_mask"][rule, 1:].tolist()
    everything = {RewriteAction(name, site) for site in state.sites[name]}
    assert observe(state, everything)["rule_mask"][rule] == 0


def test_sites_beyond_the_last_location_are_left_out():
    def body(emit, x):
        for _ in range(LOCATIONS + 5):
            x = emit(rx.tanh(x))
        return rx.nn.relu(x)

    rule = RewriteRule("flip", "none", "tanh(x) => negative(tanh(negative(x)))")
    state = GraphState.from_module(module({"x": (2,)}, {}, body), RuleSet((rule,), LANES))
    assert len(state.sites["flip"]) == LOCATIONS + 5
    assert observe(state)["location_mask"].sum() == LOCATIONS + 1
