"""Rewards, worked out by hand, and the cost above which an episode is lost."""

from __future__ import annotations

import numpy as np
import pytest
from env_tools import make_env, random_legal, rule_action
from small_models import MODELS, conv_chain

from rlflow_tvm.errors import EnvError


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


def test_improvement_is_mostly_what_beats_the_best():
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
    assert rewards == pytest.approx([0.1 * 100 * change / 202 for change in (-4, 0, 0, -4, 6)])
    better = make_env(conv_chain(), reward="improvement")
    better.reset(seed=0)
    first, second = (better.step(rule_action(better, "block_conv"))[1] for _ in range(2))
    assert (first, second) == (pytest.approx(100 * 34 / 202), pytest.approx(100 * 34 / 202))


def test_improvement_adds_up_to_the_gains_of_the_best_and_the_last_graph():
    env = make_env(reward="improvement")
    rng = np.random.default_rng(8)
    observation, info = env.reset(seed=0)
    start = best = info["run_secs"]
    total = 0.0
    for _ in range(15):
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        total, best = total + reward, min(best, info["run_secs"])
    assert env.best_cost.run_secs == best < start
    assert total == pytest.approx(100 * (0.9 * (start - best) + 0.1 * (start - info["run_secs"])) / start)
