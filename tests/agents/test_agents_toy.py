"""The toy environment keeps gymnasium's rules, and cannot be solved greedily."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env


@pytest.mark.parametrize("random_start", [False, True])
def test_gymnasium_checks_pass(toy, random_start):
    check_env(toy.ToyRewriteEnv(random_start=random_start), skip_render_check=True)


def test_greedy_stays_below_the_optimum(toy):
    env = toy.ToyRewriteEnv(length=6)
    env.reset(seed=0)
    assert (toy.greedy(env.state), toy.optimum(env.state)) == (6, 30)


def test_rewards_add_up_to_the_drop_in_cost_and_masks_are_honest(toy):
    env = toy.ToyRewriteEnv(length=6)
    rng = np.random.default_rng(0)
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        start, total, done = toy.cost(env.state), 0.0, False
        while not done:
            assert env.observation_space.contains(observation)
            rule, location = rng.choice(np.argwhere(observation["location_mask"]))
            observation, reward, terminated, truncated, info = env.step((rule, location))
            total += reward
            done = terminated or truncated
        assert total == start - toy.cost(env.state) <= toy.optimum(((toy.RED,) * 6, (1, 0, 1, 0, 1)))
        assert info["run_secs"] == pytest.approx(toy.cost(env.state) * 1e-3)


def test_invalid_actions_cost_a_hundred_and_change_nothing(toy):
    env = toy.ToyRewriteEnv(length=4)
    env.reset(seed=0)
    before = env.state
    for action in ((2, 0), (0, 4), (3, 1)):
        _, reward, terminated, truncated, _ = env.step(action)
        assert (reward, terminated, truncated, env.state) == (-100.0, False, False, before)


def test_the_horizon_truncates(toy):
    env = toy.ToyRewriteEnv(length=6, horizon=2)
    env.reset(seed=0)
    assert env.step((0, 0))[2:4] == (False, False)
    assert env.step((0, 0))[2:4] == (False, True)
