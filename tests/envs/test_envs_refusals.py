"""Moves and modules that cannot be priced, rewritten or used."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from env_tools import make_env, random_legal, rule_action
from fake_cost import FakeCostModel
from small_models import LANES, conv_chain, module
from tvm.relax import op as rx

from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.errors import EnvError, KernelError
from rlflow_tvm.passes import RewriteAction, RewriteRule, RuleSet, default_rules
from rlflow_tvm.passes.ops import OPERATORS
from rlflow_tvm.search import Budget, FamilySearch, Greedy, beginnings
from rlflow_tvm.search.result import Incumbent


def test_fork_keeps_its_own_refusals():
    env = make_env(conv_chain(), fails=lambda node: node.op == "relax.layout_transform")
    env.reset(seed=0)
    fork = env.fork()
    fork.step(rule_action(fork, "block_conv"))
    assert env.action_of(*rule_action(env, "block_conv")) is not None
    assert fork.action_of(*rule_action(fork, "block_conv")) is None


def is_packed_input(node) -> bool:
    return node.op == "relax.layout_transform" and node.inputs[0].name == "x"


def test_refused_move_is_masked_until_the_graph_changes(caplog):
    env = make_env(conv_chain(), fails=is_packed_input)
    observation, _ = env.reset(seed=0)
    action = rule_action(env, "block_conv")
    assert observation["location_mask"][tuple(action)] == 1
    state = env.state
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert env.state is state
    assert info["refused"] == "block_conv@0#0"
    assert "invalid" not in info
    assert observation["location_mask"][tuple(action)] == 0
    assert observation["location_mask"][action[0], 1] == 1  # the second convolution's site keeps its place
    assert "block_conv@0#0 refused: kernel relax.layout_transform" in caplog.text
    assert env.step(action)[1] == -100.0
    observation, *_ = env.step(rule_action(env, "block_conv", 1))
    assert observation["location_mask"][tuple(action)] == 1


def test_refused_move_is_not_priced_again():
    env = make_env(conv_chain(), fails=is_packed_input)
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    asked = env.problem.cost_model.asked
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    assert env.problem.cost_model.asked == asked
    assert env.problem.moves == 2


def test_a_refused_move_is_made_once_another_process_has_measured_what_failed(caplog):
    problem = RewriteProblem(conv_chain(), FakeCostModel(fails=is_packed_input), default_rules(LANES))
    action = RewriteAction("block_conv", problem.start.sites["block_conv"][0])
    for revision in (0, 0, 1):
        problem.cost_model.revision = revision
        assert problem.successor(problem.start, action) is None
    assert len(problem.refusals) == caplog.text.count("refused") == 1
    problem.cost_model._fails, problem.cost_model.revision = lambda node: False, 2
    problem.cost_model._known.clear()
    assert problem.successor(problem.start, action) is not None
    assert not problem.refusals


def test_rewrite_that_is_ill_typed_is_refused():
    wrong = RewriteRule("wrong", "none", "relu(x) => matmul(x, x)")
    mod = module({"x": (2, 3)}, {}, lambda emit, x: rx.tanh(emit(rx.nn.relu(x))))
    env = make_env(mod, rules=RuleSet((wrong,), LANES))
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(np.array([0, 0]))
    assert (reward, terminated) == (0.0, True)  # nothing else is left to do
    assert "refused" in info
    assert observation["rule_mask"].tolist() == [0, 1]


def unpacked(emit, x):
    return OPERATORS["unpack"].make([emit(OPERATORS["pack"].make([x], {"block": 4}))], {"block": 4})


def test_rewrite_that_leaves_nothing_to_compute_is_refused():
    env = make_env(module({"x": (1, 8, 3, 3)}, {}, unpacked))
    env.reset(seed=0)
    state = env.state
    _, reward, *_, info = env.step(rule_action(env, "cancel_unpack_of_pack"))
    assert reward == 0.0
    assert "refused" in info
    assert env.state is state


def test_plan_whose_graph_cannot_be_priced_is_refused():
    env = make_env(conv_chain(), fails=lambda node: node.op == "relax.layout_transform")
    env.reset(seed=0)
    state = env.state
    plan = state.apply(env.action_of(*rule_action(env, "block_conv"))).plan
    with pytest.raises(EnvError, match=r"plan's graph cannot be priced: kernel relax\.layout_transform fails"):
        env.replay(plan)
    assert env.state is state
    assert math.isfinite(env.run_secs)


def test_plan_that_leaves_nothing_to_compute_is_refused():
    env = make_env(module({"x": (1, 8, 3, 3)}, {}, unpacked))
    env.reset(seed=0)
    with pytest.raises(EnvError, match="nothing to compute"):
        env.replay(env.state.apply(env.action_of(*rule_action(env, "cancel_unpack_of_pack"))).plan)


def test_module_that_fails_as_it_is():
    with pytest.raises(EnvError, match=r"cannot be priced as it is: kernel relax\.nn\.conv2d fails"):
        make_env(fails=lambda node: node.op == "relax.nn.conv2d")


class FailsAgain(FakeCostModel):
    """Kernels of graphs with such operators fail when they are measured again."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.confirming = op, 0

    def cost(self, mod, *, reach=None, confirmed=False):
        cost = super().cost(mod, reach=reach, confirmed=confirmed)
        if not any(node.op == self.op for node in mod.nodes):
            return cost
        cost = dataclasses.replace(cost, single=1)
        if confirmed:
            self.confirming += 1
            return dataclasses.replace(cost, run_secs=math.inf, failed=(f"{self.op}: it failed again",))
        return cost


def test_what_is_begun_with_may_be_of_one_measurement(caplog):
    """That a kernel fails the second time may be chance."""
    model = FailsAgain("relax.nn.conv2d")
    problem = RewriteProblem(conv_chain(), model, default_rules(LANES))
    assert problem.start_secs == FakeCostModel().cost(problem.start.graph).run_secs
    assert "priced by first measurements, as kernel relax.nn.conv2d: it failed again" in caplog.text
    assert math.isfinite(GraphRewriteEnv(problem=problem).run_secs)


@pytest.mark.parametrize("search", [Greedy(), FamilySearch()])
def test_a_search_ends_where_its_start_is_of_one_measurement(search):
    """Nothing that still runs the kernel that failed is taken, nor a beginning with it."""
    problem = RewriteProblem(conv_chain(), FailsAgain("relax.nn.conv2d"), default_rules(LANES))
    assert len(problem.start.sites["block_conv"]) > 0
    result = search.run(problem)
    assert (result.plan, result.run_secs_after) == (problem.start.plan, problem.start_secs)
    assert result.env_steps > 0


class CannotLower(FakeCostModel):
    def cost(self, mod, *, reach=None, confirmed=False):
        if any(node.op == "relax.layout_transform" for node in mod.nodes):
            raise KernelError("relax.layout_transform cannot be lowered")
        return super().cost(mod, reach=reach, confirmed=confirmed)


def test_a_move_to_what_cannot_be_lowered_is_refused(caplog):
    """As a user's rule may make: neither a search nor where it begins ends with it."""
    problem = RewriteProblem(conv_chain(), CannotLower(), default_rules(LANES))
    action = RewriteAction("block_conv", problem.start.sites["block_conv"][0])
    assert problem.successor(problem.start, action) is None
    assert list(problem.refusals.values()) == ["relax.layout_transform cannot be lowered"]
    assert [each.state for each in beginnings(problem)] == [problem.start]
    assert "a family's graph is passed over: relax.layout_transform cannot be lowered" in caplog.text


def test_a_move_is_not_refused_for_good_where_a_kernel_failed_the_second_time():
    problem = RewriteProblem(conv_chain(), FailsAgain("relax.layout_transform"), default_rules(LANES))
    action = RewriteAction("block_conv", problem.start.sites["block_conv"][0])
    assert problem.successor(problem.start, action, confirmed=True) is None
    assert not problem.refusals
    following = problem.successor(problem.start, action)
    assert following is not None
    best = Incumbent(problem, Budget(9), None)
    best.run_secs = math.inf
    asked = problem.cost_model.confirming
    for _ in range(3):
        assert not best.offer(following[0], 0.0)
    assert problem.cost_model.confirming == asked + 1, "once is enough"


def test_module_that_costs_nothing():
    with pytest.raises(EnvError, match="costs nothing"):
        make_env(module({"x": (2, 3)}, {}, lambda emit, x: rx.reshape(x, (6,))))


def test_module_that_computes_nothing():
    with pytest.raises(EnvError, match="computes nothing"):
        make_env(module({"x": (2,)}, {"w": (2,)}, lambda emit, x, w: rx.nn.relu(w)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 0}, "at least one step"),
        ({"reward": "speed"}, "no reward is called 'speed': there are incremental, relative, mixed"),
        ({"problem": None}, "needs a module and a target, or a problem"),
    ],
)
def test_unusable_arguments(arguments, message):
    problem = RewriteProblem(conv_chain(), FakeCostModel(), default_rules(LANES))
    with pytest.raises(EnvError, match=message):
        GraphRewriteEnv(**{"problem": problem, **arguments})


def test_infinite_costs_never_reach_the_agent():
    env = make_env(fails=lambda node: node.op == "relax.layout_transform")
    rng = np.random.default_rng(1)
    observation, _ = env.reset(seed=0)
    refused = 0
    for _ in range(15):
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        assert math.isfinite(reward)
        assert math.isfinite(info["run_secs"])
        refused += "refused" in info
    assert refused >= 2
