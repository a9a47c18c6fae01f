"""Advantages against closed forms and brute force; the buffer; the reward scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow_tvm.agents.rollout import Episode, RewardScale, RolloutBuffer, gae


def gae_by_definition(rewards, values, last_value, gamma, gae_lambda):
    """Equation 16's double sum, term by term."""
    steps = len(rewards)
    following = [*values[1:], last_value]
    return [
        sum((gamma * gae_lambda) ** (k - t) * (rewards[k] + gamma * following[k] - values[k]) for k in range(t, steps))
        for t in range(steps)
    ]


numbers = st.floats(-10, 10)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), numbers, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_definition(steps, last_value, gamma, gae_lambda):
    rewards, values = np.array(steps).T
    result = gae(rewards, values, last_value, gamma, gae_lambda)
    np.testing.assert_allclose(
        result, gae_by_definition(rewards, values, last_value, gamma, gae_lambda), rtol=1e-9, atol=1e-9
    )


def test_gae_closed_forms():
    rewards, zeros = np.full(50, 2.0), np.zeros(50)
    left = np.arange(50, 0, -1)
    # constant reward, no values: a geometric series
    ratio = 0.9 * 0.8
    np.testing.assert_allclose(gae(rewards, zeros, 0.0, 0.9, 0.8), 2 * (1 - ratio**left) / (1 - ratio))
    # lambda = 1: discounted return minus value
    values = np.linspace(-1, 1, 50)
    discounted = 2 * (1 - 0.9**left) / (1 - 0.9) + 0.9**left * 7.0
    np.testing.assert_allclose(gae(rewards, values, 7.0, 0.9, 1.0), discounted - values)
    # lambda = 0: the one-step error
    np.testing.assert_allclose(gae(rewards, values, 7.0, 0.9, 0.0), 2 + 0.9 * np.append(values[1:], 7.0) - values)
    # values that are right already, r / (1 - gamma) with the same ahead: no advantage anywhere
    right = np.full(50, 2.0 / (1 - 0.9))
    np.testing.assert_allclose(gae(rewards, right, right[0], 0.9, 0.95), zeros, atol=1e-9)


def episode(observation, rewards, values, terminated, last_value=5.0):
    steps = len(rewards)
    return Episode(
        observations=[observation] * steps,
        sites=[0] * steps,
        rewards=list(rewards),
        values=list(values),
        log_probs=[-1.0] * steps,
        terminated=terminated,
        truncated=not terminated,
        last_value=last_value,
    )


def test_a_terminated_episode_does_not_bootstrap_and_a_truncated_one_does(random_observation):
    observation = random_observation(np.random.default_rng(0))
    ended = episode(observation, [1.0, 1.0], [0.0, 0.0], terminated=True)
    cut = episode(observation, [1.0, 1.0], [0.0, 0.0], terminated=False)
    buffer = RolloutBuffer([ended, cut], gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(buffer.returns, [1.5, 1.0, 1.5 + 0.25 * 5, 1.0 + 0.5 * 5])


def test_advantages_do_not_leak_from_one_episode_into_another(random_observation):
    observation = random_observation(np.random.default_rng(0))
    first = episode(observation, [1.0, -2.0, 3.0], [0.5, 0.1, 0.2], terminated=True)
    second = episode(observation, [100.0], [-7.0], terminated=True)
    alone = RolloutBuffer([first], 0.9, 0.8).advantages
    np.testing.assert_array_equal(RolloutBuffer([first, second], 0.9, 0.8).advantages[:3], alone)


def test_advantages_are_normalised_over_the_whole_buffer(random_observation):
    rng = np.random.default_rng(1)
    observation = random_observation(rng)
    episodes = [episode(observation, rng.normal(3, 5, 7), rng.normal(size=7), terminated=True) for _ in range(4)]
    buffer = RolloutBuffer(episodes, 0.99, 0.95)
    assert buffer.normalised.mean() == pytest.approx(0, abs=1e-9)
    assert buffer.normalised.std() == pytest.approx(1, abs=1e-6)
    single = RolloutBuffer([episode(observation, [1.0], [0.0], terminated=True)], 0.99, 0.95)
    assert single.normalised.tolist() == [0.0]
    assert single.explained_variance() is None


def test_minibatches_hold_each_step_once_with_its_own_numbers(random_observation):
    rng = np.random.default_rng(2)
    observations = [random_observation(rng) for _ in range(11)]
    made = Episode(
        observations=observations,
        sites=list(range(11)),
        rewards=[0.0] * 11,
        values=[float(i) for i in range(11)],
        log_probs=[-float(i) for i in range(11)],
        terminated=True,
    )
    buffer = RolloutBuffer([made], gamma=0.0, gae_lambda=0.0)
    parts = list(buffer.minibatches(4, np.random.default_rng(3)))
    assert [len(part.sites) for part in parts] == [4, 4, 3]
    seen = np.concatenate([part.sites for part in parts])
    assert sorted(seen) == list(range(11))
    assert seen.tolist() != list(range(11))
    for part in parts:
        assert [observations.index(one) for one in part.observations] == part.sites.tolist()
        np.testing.assert_array_equal(part.log_probs, -part.sites)
        # gamma = 0 and no reward: A = -V, so the target is 0
        np.testing.assert_array_equal(part.advantages, buffer.normalised[part.sites])
        np.testing.assert_array_equal(part.returns, np.zeros(len(part.sites)))


def test_the_reward_scale_is_the_deviation_of_all_discounted_returns():
    rng = np.random.default_rng(4)
    scale, seen = RewardScale(), []
    assert scale.deviation == 1.0
    for length in (1, 5, 20, 7):
        rewards = rng.normal(4.0, 3.0, length)
        seen += [sum(0.9 ** (t - k) * rewards[k] for k in range(t + 1)) for t in range(length)]
        scale.add(rewards, gamma=0.9)
    assert scale.deviation == pytest.approx(np.std(seen))
    scale.add(np.ones(3), 0.9)
    again = RewardScale(**scale.as_dict())
    assert again.deviation == scale.deviation


def test_rewards_are_divided_and_not_centred(random_observation):
    observation = random_observation(np.random.default_rng(5))
    made = episode(observation, [2.0, 4.0], [0.0, 0.0], terminated=True)
    np.testing.assert_allclose(RolloutBuffer([made], 0.5, 1.0, reward_divisor=2.0).returns, [2.0, 2.0])


def test_an_episode_knows_its_return_and_best_time():
    assert Episode(rewards=[1.0, 2.5], run_secs=[3.0, 1.0, 2.0]).total_reward == 3.5
    assert Episode(run_secs=[3.0, 1.0, 2.0]).best_run_secs == 1.0
    assert Episode().best_run_secs is None
