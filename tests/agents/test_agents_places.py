"""What is known of places: exact means, the policy's use of it, and an agent that goes on learning it in a search."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes, compact
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import TwoStepPolicy, UniformPolicy
from rlflow_tvm.agents.ppo import PPO
from rlflow_tvm.agents.prior import expected_saving
from rlflow_tvm.agents.savings import savings, squeezed
from rlflow_tvm.agents.training import train


def random_places(rng: np.random.Generator, number: int) -> np.ndarray:
    """Keys of which many come again, some of them negative."""
    return rng.integers(-20, 20, (number, 3)) * 10 + np.array([1, 2, 3])


def test_means_and_tries_are_those_of_a_plain_dictionary():
    rng = np.random.default_rng(0)
    places, told = Places(), dict[int, list[float]]()
    for _ in range(6):
        keys, saved = random_places(rng, 17), rng.normal(size=17)
        places.add(keys, saved)
        for row, saving in zip(keys.tolist(), saved, strict=True):
            for key in row:
                told.setdefault(key, []).append(saving)
    asked = np.concatenate([random_places(rng, 30), [[7, 8, 9]]])
    expected = [
        [
            *(float(np.mean(told.get(key, [0.0]))) for key in row),
            *(len(told.get(key, [])) / (1 + len(told.get(key, []))) for key in row),
        ]
        for row in asked.tolist()
    ]
    assert places.known(asked) == pytest.approx(np.array(expected), abs=1e-6)
    assert places.known(asked).dtype == np.float32
    assert (places.known(asked)[-1] == 0).all()


def test_nothing_is_known_at_first_and_stop_is_no_place():
    places = Places()
    assert (places.known(np.array([[1, 2]])) == 0).all()
    assert places.known(np.zeros((0, 2), np.int64)).shape == (0, 4)
    places.add(np.zeros((3, 2), np.int64), np.ones(3))
    assert len(places.keys) == 0


def test_a_copy_learns_for_itself_and_tensors_are_everything():
    rng = np.random.default_rng(1)
    places, keys = Places(), random_places(rng, 20)
    places.add(keys, rng.normal(size=20))
    before, copy = places.known(keys), places.copy()
    copy.add(keys, np.full(20, 9.0))
    assert np.array_equal(places.known(keys), before)
    assert not np.array_equal(copy.known(keys), before)
    assert np.array_equal(Places.of(copy.tensors()).known(keys), copy.known(keys))


def test_episodes_tell_what_their_steps_saved(toy):
    env = toy.ToyRewriteEnv()
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    episodes = [collect_episode(env, policy, episode_rng(0, number)) for number in range(4)]
    silent = dataclasses.replace(episodes[0], run_secs=[])
    places, expected = Places(), Places()
    places.learn([*episodes, silent])
    for episode in episodes:
        for seen, site, saved in zip(episode.observations, episode.sites, savings(episode), strict=True):
            expected.add(seen.site_places[[site]], squeezed(torch.tensor([saved])).numpy())
    assert len(places.keys) > 5
    assert np.array_equal(places.keys, expected.keys)
    assert places.tries.sum() == expected.tries.sum() > 0
    assert places.means == pytest.approx(expected.means)
    places.learn([silent])
    assert places.tries.sum() == expected.tries.sum()


def test_the_finest_key_that_was_tried_counts_most():
    # means of three keys, then n / (n + 1)
    known = torch.tensor(
        [[8.0, 4.0, 2.0, 0.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.5, 0.0, 0.0], [8.0, 4.0, 2.0, 0.5, 0.5, 0.5]]
    )
    assert expected_saving(known).tolist() == [0.0, 4.0, 3.0]
    known[2, 5] = 0.99
    assert float(expected_saving(known)[2]) == pytest.approx(2.0, abs=0.03)


def test_what_saved_before_is_likelier_and_what_cost_less_likely(toy):
    env = toy.ToyRewriteEnv()
    observation, _ = env.reset(seed=0)
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        policy = TwoStepPolicy(sizes, 16, 1)

    def probability() -> float:
        return float(policy.probabilities(policy.compact(observation))[1, 0])

    before = probability()
    place = observation["location_places"][1, [0]]
    policy.places.add(place, np.array([3.0]))
    saved = probability()
    policy.places.add(place, np.array([-9.0]))
    assert probability() < before < saved


@pytest.fixture
def stored(toy, tmp_path):
    config = PPOConfig(hidden=16, rounds=1, steps_per_update=20, n_epochs=1)
    return train(toy.ToyRewriteEnv(length=5), config, 1, seed=0, out_dir=tmp_path / "out").checkpoint


def test_a_checkpoint_knows_the_places_of_its_training(toy, stored):
    env = toy.ToyRewriteEnv(length=5)
    with torch.random.fork_rng(devices=[]):
        learner = PPO(ObservationSizes.from_space(env.observation_space), PPOConfig(hidden=16, rounds=1), 0)
    agent = Agent.load(stored)
    assert len(learner.policy.places.keys) == 0
    assert len(agent.policy.places.keys) > 3


def test_an_agent_knows_what_it_tried_until_it_begins_afresh(toy, stored):
    observation, _ = toy.ToyRewriteEnv(length=5).reset(seed=0)
    agent, other = Agent.load(stored), Agent.load(stored)
    before = agent.probabilities(observation)
    agent.tried([observation, observation], np.array([[1, 2], [3, 0]]), [-50.0, 0.0])
    assert agent.probabilities(observation)[1, 2] < before[1, 2]
    assert np.array_equal(agent.fresh().probabilities(observation), before)
    assert np.array_equal(other.probabilities(observation), before)
    # and the other sites of red nodes without neighbours of their own kind know nothing of it at the finest key
    kept = compact(observation, agent.sizes, agent.fresh().policy.places)
    assert kept.site_known.shape == (len(kept.site_rules), 2 * agent.sizes.keys_per_location)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 5, 35), (1.0, 40, 40)])
def test_so_many_episodes_look_at_what_is_known(share, least, most, toy):
    env = toy.ToyRewriteEnv(length=5)
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        policy = TwoStepPolicy(sizes, 16, 1, share)
    policy.places.learn([collect_episode(env, UniformPolicy(sizes), episode_rng(1, 0))])
    episodes = [collect_episode(env, policy, episode_rng(0, number)) for number in range(40)]
    looked = [any(kept.site_known.any() for kept in episode.observations) for episode in episodes]
    assert least <= sum(looked) <= most
    again = [collect_episode(env, policy, episode_rng(0, number)) for number in (7, 3)]
    assert [episode.sites for episode in again] == [episodes[7].sites, episodes[3].sites]
