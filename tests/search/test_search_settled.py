"""Where searches begin: at the model, or at a graph in which a family of rules is settled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import tvm
from small_models import LANES, MODELS, TARGET, conv_chain, conv_net, module
from test_search_searches import LAYOUT, PLATEAU, Scripted, problem_of
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.comparison import converted_layout
from rlflow_tvm.errors import PlanError
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.frontend.zoo_light import light_files
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search import Budget, FamilySearch, make_search, random_states
from rlflow_tvm.search.agent_search import AgentSearch
from rlflow_tvm.search.settled import beginnings, exhausted
from rlflow_tvm.verify import Comparison


@pytest.fixture(scope="module")
def settled() -> Iterator[Callable[[str], GraphState]]:
    """A model by name, in which the family of layouts is settled."""

    @cache
    def of(model: str) -> GraphState:
        mod = MODELS[model]() if model in MODELS else from_onnx(light_files()[model])
        return exhausted(GraphState.from_module(mod, default_rules(LANES)), TERMINATING_FAMILIES["layout"])

    yield of
    of.cache_clear()


@pytest.mark.parametrize("model", ["conv_chain", "conv_net", "light_squeezenet", "light_inception_v2"])
def test_exhausted_family_has_no_sites_left(model, settled):
    family = TERMINATING_FAMILIES["layout"]
    state = settled(model)
    assert len(state.actions) > 0
    assert not any(state.sites[rule] for rule in family.rules)
    assert exhausted(state, family).structural_hash == state.structural_hash


@pytest.mark.parametrize(("width", "groups"), [(16, 4), (32, 2), (32, 32), (24, 3)])
def test_convolutions_by_groups_are_blocked_among_others(width, groups):
    """As in a ResNeXt's block, of which no transform is left inside: then it gains, plain ones between it cost."""

    def body(emit, x, enter, inside, leave):
        y = emit(rx.nn.relu(emit(rx.nn.conv2d(x, enter))))
        y = emit(rx.nn.relu(emit(rx.nn.conv2d(y, inside, padding=1, groups=groups))))
        return rx.nn.relu(emit(rx.add(x, emit(rx.nn.conv2d(y, leave)))))

    weights = {"enter": (width, 16, 1, 1), "inside": (width, width // groups, 3, 3), "leave": (16, width, 1, 1)}
    start = GraphState.from_module(module({"x": (1, 16, 6, 5)}, weights, body), default_rules(LANES))
    state = exhausted(start, TERMINATING_FAMILIES["layout"])
    convolutions = [node.value for node in state.graph.nodes if node.op == "relax.nn.conv2d"]
    assert len(convolutions) == 3
    assert all(conv.attrs.data_layout != "NCHW" != conv.attrs.out_layout for conv in convolutions)
    transforms = [node for node in state.graph.nodes if node.op == "relax.layout_transform"]
    of_weights = {conv.args[1] for conv in convolutions}
    inside = [node for node in transforms if node.var not in of_weights]
    assert len(inside) == 2, "the input's and the output's"
    assert Comparison(start, TARGET).check(state) < 1e-5


@pytest.mark.parametrize("model", ["light_bvlc_alexnet", "light_densenet121", "light_shufflenet"])
def test_no_convolution_stays_plain_that_tvms_own_pass_blocks(model, settled):
    """Whatever that can do to layouts is a beginning of ours."""
    mod = from_onnx(light_files()[model])

    def blocked(state):
        attrs = [node.value.attrs for node in state.graph.nodes if node.op == "relax.nn.conv2d"]
        return sum(each.data_layout != "NCHW" != each.out_layout for each in attrs)

    converted = GraphState.from_module(converted_layout(mod, LANES), default_rules(LANES))
    assert blocked(settled(model)) >= blocked(converted) > 0


def classifier(tokens: int = 7, width: int = 8, heads: int = 2, blocks: int = 2) -> tvm.IRModule:
    """Transformer blocks and a classifier that reads the first token alone."""

    def body(emit, x, head, **w):
        def dense(y, name):
            return emit(rx.add(emit(rx.matmul(y, w[f"w{name}"])), w[f"b{name}"]))

        def norm(y, name):
            return emit(rx.nn.layer_norm(y, w[f"s{name}"], w[f"t{name}"], axes=[-1]))

        def split_heads(y, axes):
            return emit(rx.permute_dims(emit(rx.reshape(y, (1, tokens, heads, width // heads))), axes))

        for i in range(blocks):
            y = norm(x, f"1{i}")
            q, k, v = (dense(y, f"{n}{i}") for n in "qkv")
            scores = emit(rx.matmul(split_heads(q, (0, 2, 1, 3)), split_heads(k, (0, 2, 3, 1))))
            scores = emit(rx.nn.softmax(emit(rx.multiply(scores, relax.const(0.5)))))
            mixed = emit(rx.permute_dims(emit(rx.matmul(scores, split_heads(v, (0, 2, 1, 3)))), (0, 2, 1, 3)))
            x = emit(rx.add(x, dense(emit(rx.reshape(mixed, (1, tokens, width))), f"o{i}")))
            y = emit(rx.nn.gelu(dense(norm(x, f"2{i}"), f"1{i}")))
            x = emit(rx.add(x, dense(y, f"2{i}")))
        last = emit(rx.take(norm(x, f"3{blocks - 1}"), relax.const(0, "int64"), axis=1))
        return rx.matmul(last, head)

    weights = {"head": (width, 5)}
    for i in range(blocks):
        weights |= {f"w{n}{i}": (width, width) for n in "qkvo12"} | {f"b{n}{i}": (width,) for n in "qkvo12"}
        weights |= {f"{n}{norm}{i}": (width,) for n in "st" for norm in (1, 2, 3)}
    return module({"x": (1, tokens, width)}, weights, body)


def test_a_token_that_alone_is_read_is_led_back_to_where_others_are():
    """Through the last block: of what only the token needs one row is computed, all of what others need, once."""
    start = GraphState.from_module(classifier(), default_rules(LANES))
    family = TERMINATING_FAMILIES["take"]
    state = exhausted(start, family)
    rows = {}
    for node in state.graph.nodes:
        if node.op == "relax.matmul" and node.value.args[1] in state.graph.params:
            rows.setdefault(node.value.args[1].name, []).append(node.value.args[0].ty.shape.values[-2])
    all_rows = {f"w{n}0": [7] for n in "qkvo12"} | {"wk1": [7], "wv1": [7]}
    assert rows == all_rows | {f"w{n}1": [1] for n in "qo12"} | {"head": [1]}
    assert (
        len([node for node in state.graph.nodes if node.op == "relax.take"]) == 2
    )  # of the block's input and its norm
    assert exhausted(state, family).structural_hash == state.structural_hash
    assert Comparison(start, TARGET).check(state) < 1e-5


def taken_of_a_result(emit, x, w, index):
    y = emit(rx.matmul(x, w))
    return y, rx.take(y, index, axis=0)


def taken_of_an_input(emit, x, w, index):
    return rx.matmul(x, w), rx.take(x, index, axis=0)


def taken_of_a_table(emit, x, w, index):
    rows = emit(rx.add(emit(rx.astype(x, "int64")), index))
    return rx.take(emit(rx.nn.relu(w)), rows, axis=0)


@pytest.mark.parametrize(
    ("body", "index", "rule"),
    [
        (taken_of_a_result, [0], "take_before_matmul"),
        (taken_of_a_result, 0, "take_one_as_row"),
        (taken_of_an_input, 0, "take_one_as_row"),
        (taken_of_a_table, 0, "take_before_unary"),
    ],
)
def test_where_nothing_would_be_spared_a_take_stays(body, index, rule):
    """What the function gives, or is given, is there as a whole; what is made of weights costs nothing."""
    shapes = {"x": (4, 8)}, {"w": (8, 8)}
    start = GraphState.from_module(
        module(*shapes, lambda emit, x, w: body(emit, x, w, relax.const(index, "int64"))), default_rules(LANES)
    )
    assert start.sites[rule]
    assert exhausted(start, TERMINATING_FAMILIES["take"]).actions == ()


@pytest.mark.parametrize("model", ["light_squeezenet", "light_resnet50", "light_inception_v2", "light_densenet121"])
def test_no_image_of_a_settled_network_is_unpacked(model, settled):
    """Neither before the mean over the plane, in whatever way its axes are written, nor before a scale by channel."""
    moved = [node for node in settled(model).graph.nodes if node.op == "relax.layout_transform"]
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


def first_pixel(emit, x, w, v, head):
    """Convolutions, and a classifier that reads one pixel of them."""
    y = emit(rx.nn.relu(emit(rx.nn.conv2d(emit(rx.nn.relu(emit(rx.nn.conv2d(x, w)))), v))))
    tokens = emit(rx.permute_dims(emit(rx.reshape(y, (1, 32, 16))), (0, 2, 1)))
    tokens = emit(rx.nn.relu(emit(rx.matmul(tokens, head))))
    return rx.take(tokens, relax.const(0, "int64"), axis=1)


@pytest.mark.parametrize("blocked_conv", [60.0, 150.0])
def test_a_family_is_settled_where_an_earlier_one_pays(blocked_conv):
    weights = {"w": (32, 16, 1, 1), "v": (32, 32, 1, 1), "head": (32, 8)}
    problem = problem_of(module({"x": (1, 16, 4, 4)}, weights, first_pixel), blocked_conv=blocked_conv)
    layout, take = (TERMINATING_FAMILIES[name] for name in ("layout", "take"))
    blocked, taken = exhausted(problem.start, layout), exhausted(problem.start, take)
    wanted = [problem.start, blocked, taken]
    if blocked_conv < 100.0:
        wanted.append(exhausted(blocked, take))
    assert len({state.structural_hash for state in wanted}) == len(wanted)
    assert {each.state.structural_hash for each in beginnings(problem)} == {state.structural_hash for state in wanted}


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


def test_what_a_beginning_saves_is_left_where_an_error_ends_the_search_there(monkeypatch):
    problem = problem_of(conv_chain())
    begin = beginnings(problem)[0]
    assert begin.state.actions
    again = problem_of(conv_chain())
    monkeypatch.setattr(again, "keep", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beginnings(again)
    assert again.best.structural_hash == begin.state.structural_hash
