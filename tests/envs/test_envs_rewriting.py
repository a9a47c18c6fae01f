"""The rewriting environment: gymnasium's contract, masks, rewards, ends of episodes, forks and replays."""

from __future__ import annotations

import math
import warnings

import gymnasium
import numpy as np
import pytest
from fake_cost import FakeCostModel
from gymnasium.utils.env_checker import check_env
from small_models import LANES, MODELS, bound, conv_chain, conv_net, module
from tvm.relax import op as rx

from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.errors import EnvError, PlanError
from rlflow_tvm.passes import GraphState, RewriteRule, RuleSet, default_rules
from rlflow_tvm.passes.ops import OPERATORS


def make_env(
    mod=None,
    horizon: int = 200,
    rules: RuleSet | None = None,
    limit: float = math.inf,
    reward: str = "runtime",
    **cost,
) -> GraphRewriteEnv:
    mod = conv_net() if mod is None else mod
    problem = RewriteProblem(mod, FakeCostModel(**cost), rules or default_rules(LANES))
    return GraphRewriteEnv(problem=problem, horizon=horizon, limit=limit, reward=reward)


def legal_actions(observation) -> list[tuple[int, int]]:
    """Everything that the masks allow except stop, in order."""
    pairs = np.argwhere(observation["location_mask"][:-1])
    return [(int(rule), int(location)) for rule, location in pairs]


def random_legal(observation, rng: np.random.Generator) -> np.ndarray:
    actions = legal_actions(observation)
    return np.array(actions[int(rng.integers(len(actions)))])


def rule_action(env: GraphRewriteEnv, rule: str, location: int = 0) -> np.ndarray:
    return np.array([env.rule_names.index(rule), location])


def stop_action(env: GraphRewriteEnv) -> np.ndarray:
    return np.array([env.stop, 0])


@pytest.mark.parametrize("name", MODELS)
def test_gymnasium_finds_nothing_wrong(name):
    env = make_env(MODELS[name](), horizon=20)
    with warnings.catch_warnings():
        # It was not made by `gymnasium.make`, and draws no pictures that could be looked at.
        warnings.filterwarnings("ignore", message=".*Not able to test alternative render modes")
        check_env(env)


def test_environment_can_be_made_by_its_name():
    problem = RewriteProblem(conv_chain(), FakeCostModel(), default_rules(LANES))
    env = gymnasium.make("rlflow_tvm/GraphRewrite-v0", problem=problem, horizon=3)
    assert isinstance(env.unwrapped, GraphRewriteEnv)
    assert env.unwrapped.problem is problem
    observation, _ = env.reset(seed=0)
    env.step(np.array(legal_actions(observation)[0]))


@pytest.mark.parametrize("name", MODELS)
def test_masks_are_the_sites(name):
    env = make_env(MODELS[name]())
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    for _ in range(6):
        for number, rule in enumerate(env.rule_names):
            mask = observation["location_mask"][number]
            count = len(env.state.sites[rule])
            assert list(mask[:count]) == [1] * count
            assert not mask[count:].any()
        assert observation["rule_mask"].tolist() == observation["location_mask"].any(axis=1).astype(int).tolist()
        assert observation["location_mask"][env.stop].tolist() == [1] + [0] * 199
        observation, _, terminated, *_ = env.step(random_legal(observation, rng))
        if terminated:
            break


def test_legal_action_is_the_rewrite_it_stands_for():
    env = make_env()
    observation, _ = env.reset(seed=0)
    for rule, location in legal_actions(observation):
        action = env.action_of(rule, location)
        assert action.rule == env.rule_names[rule]
        assert action.site == env.state.sites[action.rule][location]
    expected = env.state.apply(env.action_of(*legal_actions(observation)[0]))
    env.step(np.array(legal_actions(observation)[0]))
    assert env.state.structural_hash == expected.structural_hash
    assert env.plan == expected.plan


@pytest.mark.parametrize("action", [(0, 199), (-1, 0), (10_000, 0), (0, 200), (0, -1)])
def test_invalid_action_costs_a_hundred_and_changes_nothing(action):
    env = make_env(conv_chain())
    before, _ = env.reset(seed=0)
    state = env.state
    observation, reward, terminated, truncated, info = env.step(np.array(action))
    assert (reward, terminated, truncated) == (-100.0, False, False)
    assert info["invalid"]
    assert env.state is state
    assert np.array_equal(observation["location_mask"], before["location_mask"])


def test_stop_is_legal_at_its_first_location_only():
    env = make_env(conv_chain())
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(np.array([env.stop, 1]))
    assert (reward, terminated, info["rule"]) == (-100.0, False, "stop")
    _, reward, terminated, truncated, info = env.step(stop_action(env))
    assert (reward, terminated, truncated, info["rule"]) == (0.0, True, False, "stop")
    assert len(env.plan) == 0


def test_episode_ends_when_no_rule_applies():
    rules = RuleSet((default_rules(LANES)["relu_idempotent"],), LANES)
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.nn.relu(emit(rx.nn.relu(x))))
    env = make_env(mod, rules=rules, horizon=1)
    env.reset(seed=0)
    observation, _, terminated, truncated, _ = env.step(np.array([0, 0]))
    assert (terminated, truncated) == (True, False)
    assert observation["rule_mask"].tolist() == [0, 1]


def test_horizon_truncates():
    env = make_env(horizon=3)
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    ends = []
    for _ in range(3):
        observation, _, terminated, truncated, _ = env.step(random_legal(observation, rng))
        ends.append((terminated, truncated))
    assert ends == [(False, False), (False, False), (False, True)]


def test_horizon_counts_invalid_actions_too():
    env = make_env(conv_chain(), horizon=2)
    env.reset(seed=0)
    assert env.step(np.array([0, 199]))[3] is False
    assert env.step(np.array([0, 199]))[3] is True
    with pytest.raises(EnvError, match="call reset"):
        env.step(stop_action(env))


def test_stop_at_the_horizon_is_termination():
    env = make_env(conv_chain(), horizon=1)
    env.reset(seed=0)
    assert env.step(stop_action(env))[2:4] == (True, False)


def test_step_after_the_end_is_an_error():
    env = make_env(conv_chain())
    env.reset(seed=0)
    env.step(stop_action(env))
    with pytest.raises(EnvError, match="call reset"):
        env.step(stop_action(env))
    env.reset()
    env.step(stop_action(env))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["conv_net", "transformer_block"])
def test_rewards_add_up_to_the_relative_gain(name, seed):
    env = make_env(MODELS[name]())
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    start, total = info["run_secs"], 0.0
    for _ in range(10):
        before = env.run_secs
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        assert reward == pytest.approx(100 * (before - info["run_secs"]) / start)
        total += reward
    assert total == pytest.approx(100 * (start - env.run_secs) / start)
    assert env.run_secs == info["run_secs"] == env.problem.cost(env.state).run_secs


def test_reward_of_one_known_step():
    env = make_env(conv_chain(), blocked_conv=60.0)
    _, info = env.reset(seed=0)
    assert info["run_secs"] == pytest.approx(202e-6)  # two convolutions at 100, bias and relu at 1
    _, reward, _, _, info = env.step(rule_action(env, "block_conv"))
    assert info["run_secs"] == pytest.approx(168e-6)  # one at 60 with two transforms at 3
    assert reward == pytest.approx(100 * 34 / 202)
    assert info["rule"] == "block_conv"


def test_graph_that_costs_too_much_ends_the_episode():
    env = make_env(conv_chain(), blocked_conv=200.0, limit=1.3)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(rule_action(env, "block_conv"))
    assert info["run_secs"] == pytest.approx(308e-6)  # of 202
    assert (terminated, truncated) == (True, False)
    assert reward == pytest.approx(-30.0)  # counted as the limit
    within = make_env(conv_chain(), blocked_conv=200.0, limit=1.6)
    within.reset(seed=0)
    _, reward, terminated, *_ = within.step(rule_action(within, "block_conv"))
    assert not terminated
    assert reward == pytest.approx(-100 * 106 / 202)


@pytest.mark.parametrize("limit", [1.0, 0.5, -1.0])
def test_limit_below_the_first_graph_is_refused(limit):
    with pytest.raises(EnvError, match="must lie above 1"):
        make_env(conv_chain(), limit=limit)


def test_improvement_rewards_only_what_beats_the_best():
    env = make_env(conv_chain(), reward="improvement", blocked_conv=98.0)
    env.reset(seed=0)
    rewards = [
        env.step(rule_action(env, rule))[1]
        for rule in (
            "block_conv",  # 2 less and two transforms at 3: 206 instead of 202
            "unpack_after_binary", "unpack_after_unary",
            "block_conv",  # 210
            "cancel_pack_of_unpack",  # 204
        )
    ]  # fmt: skip
    assert rewards == [0.0] * 5
    better = make_env(conv_chain(), reward="improvement")
    better.reset(seed=0)
    first, second = (better.step(rule_action(better, "block_conv"))[1] for _ in range(2))
    assert (first, second) == (pytest.approx(100 * 34 / 202), pytest.approx(100 * 34 / 202))


def test_improvement_adds_up_to_the_best_graphs_gain():
    env = make_env(reward="improvement")
    rng = np.random.default_rng(8)
    observation, info = env.reset(seed=0)
    start = best = info["run_secs"]
    total = 0.0
    for _ in range(15):
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        total, best = total + reward, min(best, info["run_secs"])
    assert env.best_cost.run_secs == best < start
    assert total == pytest.approx(100 * (start - best) / start)


def test_reset_goes_back_to_the_start():
    env = make_env()
    first, _ = env.reset(seed=0)
    observation, *_ = env.step(np.array(legal_actions(first)[0]))
    again, info = env.reset(seed=0)
    assert info["rule"] == "reset"
    assert len(env.plan) == 0
    assert np.array_equal(first["graph"].nodes, again["graph"].nodes)
    assert not np.array_equal(first["location_nodes"], observation["location_nodes"])


def test_same_actions_give_the_same_episode():
    def episode() -> list:
        env, rng, seen = make_env(), np.random.default_rng(5), []
        observation, _ = env.reset(seed=0)
        for _ in range(8):
            observation, reward, *_, info = env.step(random_legal(observation, rng))
            seen.append((reward, info, observation["graph"].nodes.tobytes(), observation["location_nodes"].tobytes()))
        return [*seen, env.plan]

    assert episode() == episode()


def test_fork_is_independent():
    env = make_env()
    observation, _ = env.reset(seed=0)
    observation, *_ = env.step(np.array(legal_actions(observation)[0]))
    fork = env.fork()
    assert (fork.plan, fork.run_secs) == (env.plan, env.run_secs)
    plan, state = env.plan, env.state
    for _ in range(3):
        observation, *_ = fork.step(np.array(legal_actions(observation)[0]))
    assert len(fork.plan) == 4
    assert (env.plan, env.state) == (plan, state)
    fork.step(stop_action(fork))
    env.step(stop_action(env))
    fork.reset(seed=0)
    with pytest.raises(EnvError):
        env.step(stop_action(env))


def test_fork_keeps_its_own_refusals():
    env = make_env(conv_chain(), fails=lambda node: node.op == "relax.layout_transform")
    env.reset(seed=0)
    fork = env.fork()
    fork.step(rule_action(fork, "block_conv"))
    assert env.action_of(*rule_action(env, "block_conv")) is not None
    assert fork.action_of(*rule_action(fork, "block_conv")) is None


def test_replay_brings_back_the_state():
    env, other = make_env(horizon=6), make_env(horizon=6)
    rng = np.random.default_rng(2)
    observation, _ = env.reset(seed=0)
    for _ in range(4):
        observation, *_ = env.step(random_legal(observation, rng))
    other.replay(env.plan)
    assert other.best_cost.run_secs == min(other.run_secs, other.problem.start_secs)
    assert other.state.structural_hash == env.state.structural_hash
    assert other.run_secs == env.run_secs
    action = random_legal(observation, rng)
    found, expected = other.step(action), env.step(action)
    assert found[1:4] == expected[1:4]
    assert other.step(random_legal(found[0], rng))[3] is True  # the replayed steps count towards the horizon


def test_replay_of_another_models_plan_is_refused():
    env = make_env(conv_chain())
    with pytest.raises(PlanError, match="another module"):
        env.replay(make_env().plan)


def test_module_is_bound():
    env = make_env(bound(conv_chain()))
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    assert [p.name for p in env.module["main"].params] == ["x"]
    assert "layout_transform" in env.module.script()


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
    priced = env.problem.cost_model.measured
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    assert env.problem.cost_model.measured == priced
    assert env.problem.moves == 2


def test_rewrite_that_is_ill_typed_is_refused():
    wrong = RewriteRule("wrong", "none", "relu(x) => matmul(x, x)")
    mod = module({"x": (2, 3)}, {}, lambda emit, x: rx.tanh(emit(rx.nn.relu(x))))
    env = make_env(mod, rules=RuleSet((wrong,), LANES))
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(np.array([0, 0]))
    assert (reward, terminated) == (0.0, True)  # nothing else is left to do
    assert "refused" in info
    assert observation["rule_mask"].tolist() == [0, 1]


def test_rewrite_that_leaves_nothing_to_compute_is_refused():
    def body(emit, x):
        return OPERATORS["unpack"].make([emit(OPERATORS["pack"].make([x], {"block": 4}))], {"block": 4})

    env = make_env(module({"x": (1, 8, 3, 3)}, {}, body))
    env.reset(seed=0)
    state = env.state
    _, reward, *_, info = env.step(rule_action(env, "cancel_unpack_of_pack"))
    assert reward == 0.0
    assert "refused" in info
    assert env.state is state


def test_module_that_fails_as_it_is():
    with pytest.raises(EnvError, match=r"cannot be priced as it is: kernel relax\.nn\.conv2d fails"):
        make_env(fails=lambda node: node.op == "relax.nn.conv2d")


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
        ({"reward": "speed"}, "no reward is called 'speed': there are runtime, improvement"),
        ({"problem": None}, "needs a module and a target, or a problem"),
    ],
)
def test_unusable_arguments(arguments, message):
    problem = RewriteProblem(conv_chain(), FakeCostModel(), default_rules(LANES))
    with pytest.raises(EnvError, match=message):
        GraphRewriteEnv(**{"problem": problem, **arguments})


def test_cost_model_of_others_stays_open():
    env = make_env(conv_chain())
    env.fork().close()
    env.close()
    assert not env.problem.cost_model.closed


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


def test_state_is_the_start_and_the_actions():
    env = make_env()
    rng = np.random.default_rng(3)
    observation, _ = env.reset(seed=0)
    for _ in range(5):
        observation, *_ = env.step(random_legal(observation, rng))
    again = GraphState.from_module(env.problem.start.mod, env.problem.ruleset).replay(env.plan)
    assert again.structural_hash == env.state.structural_hash
