"""Where searches begin: at the model, or at a graph in which a family of rules is settled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from small_models import LANES, MODELS, TARGET, conv_chain, conv_net, module
from test_search_searches import LAYOUT, PLATEAU, Scripted, problem_of
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.errors import PlanError
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.frontend.zoo_light import light_files
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search import Budget, FamilySearch, make_search, random_states
from rlflow_tvm.search.agent_search import AgentSearch
from rlflow_tvm.search.settled import beginnings, exhausted
from rlflow_tvm.verify import Comparison


@pytest.mark.parametrize("model", ["conv_chain", "conv_net", "light_squeezenet", "light_inception_v2"])
def test_exhausted_family_has_no_sites_left(model):
    mod = MODELS[model]() if model in MODELS else from_onnx(light_files()[model])
    start = GraphState.from_module(mod, default_rules(LANES))
    for rules in TERMINATING_FAMILIES.values():
        state = exhausted(start, rules)
        assert len(state.actions) > 0
        assert not any(state.sites[rule] for rule in rules)
        again = exhausted(state, rules)
        assert again.structural_hash == state.structural_hash


@pytest.mark.parametrize("model", ["light_squeezenet", "light_resnet50", "light_inception_v2", "light_densenet121"])
def test_no_image_of_a_settled_network_is_unpacked(model):
    """Neither before the mean over the plane, in whatever way its axes are written, nor before a scale by channel."""
    start = GraphState.from_module(from_onnx(light_files()[model]), default_rules(LANES))
    state = exhausted(start, TERMINATING_FAMILIES["layout"])
    moved = [node for node in state.graph.nodes if node.op == "relax.layout_transform"]
    assert moved
    assert not [node.value for node in moved if len(node.var.ty.shape.values) == 4]


def test_nor_of_one_with_bounds_pads_gates_and_a_dense_head():
    """What mobile networks and classifiers are made of: each of these once stopped the way of an unpacked image."""

    def body(emit, image, stem, depth, squeeze, excite, joined, head):
        def hard(x):
            return emit(rx.minimum(emit(rx.nn.relu(x)), relax.const(6.0)))

        x = hard(emit(rx.nn.conv2d(image, stem, padding=1)))
        x = hard(emit(rx.nn.conv2d(emit(rx.nn.pad(x, [0, 0, 0, 0, 0, 1, 0, 1])), depth, groups=8)))
        peak = emit(rx.max(x, [-1, -2], keepdims=True))
        gate = emit(rx.nn.conv2d(hard(emit(rx.nn.conv2d(peak, squeeze))), excite))
        x = emit(rx.multiply(emit(rx.multiply(relax.const([[[[0.5]]]]), emit(rx.sigmoid(gate)))), x))
        parts = [emit(rx.nn.conv2d(x, joined)) for _ in range(2)]
        x = emit(rx.concat([*parts, *parts, x], 1))
        return rx.matmul(emit(rx.reshape(x, (1, 40 * 25))), head)

    weights = {"stem": (8, 3, 3, 3), "depth": (8, 1, 3, 3), "squeeze": (4, 8, 1, 1), "excite": (8, 4, 1, 1),
               "joined": (8, 8, 1, 1), "head": (1000, 10)}  # fmt: skip
    start = GraphState.from_module(module({"image": (1, 3, 6, 6)}, weights, body), default_rules(LANES))
    state = exhausted(start, TERMINATING_FAMILIES["layout"])
    runtime = [node for node in state.graph.nodes if node.var not in state.graph.weight_only]
    assert not [node.value for node in runtime if node.op == "relax.layout_transform"]
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_family_search_on_the_smallest_budget_has_priced_every_start():
    costs = {**PLATEAU, "relax.layout_transform": 4.0}
    problem = problem_of(conv_chain(), LAYOUT, costs=costs, blocked_conv=95.0)
    exhausted_secs = problem.cost(exhausted(problem.start, TERMINATING_FAMILIES["layout"])).run_secs
    assert exhausted_secs < problem.start_secs
    assert FamilySearch(budget=Budget(1)).run(problem).run_secs_after <= exhausted_secs


@pytest.mark.parametrize("blocked_conv", [60.0, 150.0])
def test_agents_and_walks_begin_where_family_search_does(blocked_conv, monkeypatch):
    """At the cheapest graph of those in which a family is settled, the model's own among them."""
    problem = problem_of(conv_net(), blocked_conv=blocked_conv)
    settled = exhausted(problem.start, TERMINATING_FAMILIES["layout"])
    found = beginnings(problem)
    order = [settled, problem.start] if blocked_conv < 100.0 else [problem.start, settled]
    assert [each.state.plan for each in found] == [state.plan for state in order]
    assert [each.run_secs for each in found] == sorted(problem.cost(state).run_secs for state in order)
    left_from: list[GraphState] = []
    successor = problem.successor

    def asked(state, action, **options):
        left_from.append(state)
        return successor(state, action, **options)

    monkeypatch.setattr(problem, "successor", asked)
    begin, names = found[0].state, tuple(rule.name for rule in problem.ruleset.rules)
    firsts = {rule: begin.apply(RewriteAction(rule, sites[0])) for rule, sites in begin.sites.items() if sites}
    saves = {rule: found[0].run_secs - problem.cost(state).run_secs for rule, state in firsts.items()}
    rule = max(saves, key=lambda each: abs(saves[each]))
    assert saves[rule]
    policy = Scripted((rule,), names)
    AgentSearch(policy, samples=0).run(problem)
    assert [state.plan for state in left_from] == [begin.plan]
    assert policy.told[0][1] == pytest.approx(100.0 * saves[rule] / found[0].run_secs)  # as in a training
    make_search("random-restarts", budget=Budget(1)).run(problem)
    assert [state.plan for state in left_from] == [begin.plan] * 2
    applies = next(rule for rule, sites in problem.start.sites.items() if sites)
    AgentSearch(Scripted((applies,), names), samples=0, settled=False).run(problem)
    assert left_from[2].plan == problem.start.plan


def test_settling_ends_where_somebody_stops_it(monkeypatch):
    problem = problem_of(conv_net(), blocked_conv=60.0)
    applied, apply = 0, GraphState.apply

    def stopping(state, action):
        nonlocal applied
        applied += 1
        problem.stopped = applied == 3
        return apply(state, action)

    monkeypatch.setattr(GraphState, "apply", stopping)
    assert [each.state.plan for each in beginnings(problem)] == [problem.start.plan]
    assert applied == 3


def test_replays_go_on_from_the_graphs_that_are_kept(monkeypatch):
    problem = problem_of(conv_net())
    begin = next(each.state for each in beginnings(problem) if each.state.actions)
    rng = np.random.default_rng(0)
    *_, last = random_states(begin, 4, rng)
    applied: list[int] = []
    apply = GraphState.apply

    def counted(state, action):
        applied.append(len(state.actions))
        return apply(state, action)

    monkeypatch.setattr(GraphState, "apply", counted)
    found = problem.replay(last.plan)
    assert found.plan == last.plan
    assert applied == list(range(len(begin.actions), len(last.actions)))
    other = problem_of(conv_chain()).start.plan
    with pytest.raises(PlanError, match="another module"):
        problem.replay(other)
    wrong = dataclasses.replace(last.plan, actions=(*last.plan.actions, "no_rule@0#0"))
    with pytest.raises(PlanError, match=f"action {len(wrong)} of the plan cannot be repeated"):
        problem.replay(wrong)
