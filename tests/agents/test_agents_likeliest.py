"""Episodes of likeliest actions: what they do, who learns from them, and how often they are played."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from training_checks import assert_same_training, known_of, make_ppo

from rlflow_tvm.agents.collect import Quota, collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError

CONFIG = PPOConfig(hidden=8, rounds=1, steps_per_update=40, minibatch_size=32, n_epochs=1)
GATHERING = Opening(likeliest=True, gathers=True)


@pytest.fixture
def env(toy):
    return toy.ToyRewriteEnv(length=6, horizon=20)


@pytest.fixture
def learner(env):
    """One that knows of places what a random agent found out."""
    sizes = ObservationSizes.from_space(env.observation_space)
    made = make_ppo(sizes, CONFIG, 0)
    random = UniformPolicy(sizes)
    made.policy.places = known_of([collect_episode(env, random, episode_rng(1, number)) for number in range(9)])
    return made


def test_its_actions_are_the_likeliest_by_what_is_known_and_found_out_on_the_way(env, learner):
    policy, before = learner.policy, learner.policy.places.copy()
    first, again = (collect_episode(env, policy, episode_rng(seed, 0), opening=GATHERING) for seed in (0, 5))
    assert first.likeliest
    assert first.sites == again.sites, "nothing is drawn"
    known = before.copy()
    for kept, site, secs, after in zip(
        first.observations, first.sites, first.run_secs, first.run_secs[1:], strict=False
    ):
        np.testing.assert_array_equal(kept.site_known, known.known(kept.site_places, by_rule=True))
        assert policy.choose(kept, None)[0] == site
        known.tried([kept.site_places[site]], [100.0 * (secs - after) / first.run_secs[0]])
    assert len(first) > 2
    assert not np.array_equal(known.means, before.means)
    np.testing.assert_array_equal(policy.places.means, before.means)


def test_it_ends_where_ten_steps_found_nothing_cheaper(toy, learner):
    class Idle(toy.ToyRewriteEnv):
        """Nothing is ever cheaper."""

        def reset(self, *, seed=None, options=None):
            told = super().reset(seed=seed, options=options)
            self.state = ((toy.HOT,) * 40, (0,) * 39)
            self.cheapest = ((toy.GOLD,), ())
            return self.observed(), told[1]

    env = Idle(horizon=30)
    openings = GATHERING, Opening(likeliest=True)
    lengths = [len(collect_episode(env, learner.policy, episode_rng(0, 0), opening=each)) for each in openings]
    assert lengths[0] == 10 < lengths[1]


def test_parameters_are_learnt_from_drawn_episodes_alone_and_places_from_all(env):
    sizes = ObservationSizes.from_space(env.observation_space)
    plain, mixed = make_ppo(sizes, CONFIG, 0), make_ppo(sizes, CONFIG, 0)
    drawn = [collect_episode(env, plain.policy, episode_rng(0, number)) for number in range(3)]
    likeliest = collect_episode(env, plain.policy, episode_rng(0, 3), opening=GATHERING)
    plain.update(drawn)
    mixed.update([drawn[0], likeliest, *drawn[1:]])
    ours, theirs = mixed.policy.state_dict(), plain.policy.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    expected = known_of([drawn[0], likeliest, *drawn[1:]])
    np.testing.assert_array_equal(mixed.policy.places.tries, expected.tries)
    np.testing.assert_array_equal(mixed.policy.places.means, expected.means)
    assert mixed.policy.places.tries.sum() > plain.policy.places.tries.sum()


def test_their_steps_are_none_that_an_update_waits_for():
    quota = Quota(10, 5)
    lengths = [Episode(rewards=[0.0] * 5, likeliest=likeliest).drawn for likeliest in (False, True, False)]
    assert lengths == [5, 0, 5]
    for length in lengths[:2]:
        quota.add(length)
    assert quota.open
    quota.add(lengths[2])
    assert not quota.open


@pytest.mark.parametrize("remembered_share", [0.0, 0.75])
def test_they_are_played_in_turn_and_more_seldom_while_they_find_nothing(env, tmp_path, remembered_share):
    """The toy's greedy optimum is soon found, and they find no better one."""
    seen: list[Episode] = []
    config = dataclasses.replace(CONFIG, likeliest_every=3, remembered_share=remembered_share)
    train(env, config, 1500, 0, tmp_path / "some", on_episode=seen.append)
    numbers = [number for number, each in enumerate(seen) if each.likeliest]
    assert numbers[0] == 2
    assert all(number % 3 == 2 for number in numbers)
    gaps = np.diff(numbers)
    assert gaps.min() < 24 <= gaps.max() <= 48
    seen.clear()
    train(env, dataclasses.replace(CONFIG, likeliest_every=0), 200, 0, tmp_path / "never", on_episode=seen.append)
    assert not any(each.likeliest for each in seen)


@pytest.mark.parametrize("every", [-1, 1])
def test_impossible_shares_are_refused(every):
    with pytest.raises(AgentError, match="likeliest_every"):
        dataclasses.replace(CONFIG, likeliest_every=every)


def test_without_gathering_it_acts_as_the_agent_will(env, learner):
    policy, known = learner.policy, learner.policy.places.copy()
    episode = collect_episode(env, policy, episode_rng(0, 0), opening=Opening(likeliest=True))
    gathered = collect_episode(env, policy, episode_rng(0, 0), opening=GATHERING)
    first, theirs = episode.observations[0], gathered.observations[0]
    np.testing.assert_array_equal(first.site_known, known.known(first.site_places))
    assert not np.array_equal(first.site_known, theirs.site_known)


def test_a_resumed_training_plays_the_same_ones(env, tmp_path):
    """More seldom after a while."""
    config, seen = dataclasses.replace(CONFIG, likeliest_every=2), list[Episode]()
    train(env, config, 900, 3, tmp_path / "straight", on_episode=seen.append)
    likeliest = [episode for episode in seen if episode.likeliest]
    assert 2 * len(likeliest) < len(seen) - 2
    for steps in (200, 500, 900):
        train(env, config, steps, 3, tmp_path / "cut", resume=steps > 200)
    assert_same_training(tmp_path / "straight", tmp_path / "cut")


def test_a_reward_that_is_not_finite_is_refused_in_them_too(env, learner):
    episodes = [collect_episode(env, learner.policy, episode_rng(0, number)) for number in range(2)]
    episodes.append(dataclasses.replace(episodes[0], likeliest=True, rewards=[float("nan")] * len(episodes[0])))
    with pytest.raises(AgentError, match="not finite"):
        learner.update(episodes)
