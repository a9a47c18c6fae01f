"""The rewriting environment: gymnasium's contract, masks, ends of episodes, forks and replays."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_tools import legal_actions, make_env, random_legal, rule_action, stop_action
from fake_cost import FakeCostModel
from gymnasium.utils.env_checker import check_env
from small_models import LANES, MODELS, TARGET, bound, conv_chain, module
from tvm.relax import op as rx

from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem, episode
from rlflow_tvm.errors import EnvError, PlanError
from rlflow_tvm.passes import GraphState, RuleSet, default_rules


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


@pytest.mark.parametrize("action", [(0, 199), (-1, 0), (-100, 0), (-(10**4), 0), (10_000, 0), (0, 200), (0, -1)])
def test_invalid_action_costs_a_hundred_and_changes_nothing(action):
    env = make_env(conv_chain())
    before, _ = env.reset(seed=0)
    state = env.state
    observation, reward, terminated, truncated, info = env.step(np.array(action))
    assert (reward, terminated, truncated) == (-100.0, False, False)
    assert info["invalid"]
    assert info["rule"] == (env.rule_names[0] if action[0] == 0 else "none")
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


def test_fork_draws_its_own_random_numbers():
    """The same ones, whatever the other draws meanwhile."""
    env = make_env(conv_chain())
    env.reset(seed=0)
    env.action_space.seed(1)
    fork = env.fork()
    drawn = [[e.action_space.sample().tolist() for _ in range(3)] + [e.np_random.random()] for e in (env, fork)]
    assert drawn[0] == drawn[1]
    assert env.action_space == fork.action_space


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


def test_cost_model_of_others_stays_open():
    env = make_env(conv_chain())
    env.fork().close()
    env.close()
    assert not env.problem.cost_model.closed


def test_state_is_the_start_and_the_actions():
    env = make_env()
    rng = np.random.default_rng(3)
    observation, _ = env.reset(seed=0)
    for _ in range(5):
        observation, *_ = env.step(random_legal(observation, rng))
    again = GraphState.from_module(env.problem.start.mod, env.problem.ruleset).replay(env.plan)
    assert again.structural_hash == env.state.structural_hash


def test_with_patience_an_episode_is_cut_off_where_nothing_cheaper_comes():
    env = make_env(horizon=50)
    rng, lengths = np.random.default_rng(0), []
    for seed in range(6):
        observation, info = env.reset(seed=seed, options={"patience": 3})
        secs, over = [info["run_secs"]], False
        while not over:
            observation, _, terminated, truncated, info = env.step(random_legal(observation, rng))
            secs.append(info["run_secs"])
            over = terminated or truncated
            steps = len(secs) - 1
            waited = steps - int(np.argmin(secs))  # of equal ones the first
            assert truncated == (waited >= 3 and not terminated)
        lengths.append(steps)
    assert max(lengths) > 3
    observation, over, steps = env.reset(seed=0)[0], False, 0
    while not over:
        observation, _, terminated, truncated, _ = env.step(random_legal(observation, rng))
        steps, over = steps + 1, terminated or truncated
    assert terminated or steps == 50, "without it the horizon counts"


def test_what_an_environment_opened_it_closes(monkeypatch):
    """Also where nothing comes of it; a fork has opened nothing."""
    closed: list[str] = []

    class Database(ExitStack):
        def __init__(self, _path: Any) -> None:
            super().__init__()
            self.callback(closed.append, "database")

    class Prices(FakeCostModel, AbstractContextManager):
        def __init__(self, _target: Any, _database: Any) -> None:
            super().__init__()

        def __exit__(self, *_error: object) -> None:
            closed.append("prices")

    monkeypatch.setattr(episode, "KernelDatabase", Database)
    monkeypatch.setattr(episode, "CostModel", Prices)
    env = GraphRewriteEnv(conv_chain(), TARGET)
    env.fork().close()
    assert closed == []
    env.close()
    env.close()
    assert closed == ["prices", "database"]
    with pytest.raises(EnvError, match="costs nothing"):
        GraphRewriteEnv(module({"x": (2, 3)}, {}, lambda emit, x: rx.reshape(x, (6,))), TARGET)
    assert closed == ["prices", "database"] * 2
