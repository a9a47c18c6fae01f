"""What is known of places: exact means, the policy's use of it, and an agent that goes on learning it in a search."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from training_checks import make_ppo

from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes, compact
from rlflow_tvm.agents.places import SPREAD, Places, expected_saving
from rlflow_tvm.agents.policy import TwoStepPolicy, UniformPolicy
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
    assert places.known(asked)[:, :-1] == pytest.approx(np.array(expected), abs=1e-6)
    means, weights = np.split(np.array(expected), 2, axis=1)
    assert places.known(asked)[:, -1] == pytest.approx(expected_saving(means[:, 1:], weights[:, 1:]), abs=1e-6)
    by_rule = places.known(asked, by_rule=True)
    assert by_rule[:, -1] == pytest.approx(expected_saving(means, weights), abs=1e-6)
    assert not np.allclose(by_rule[:, -1], places.known(asked)[:, -1])
    np.testing.assert_array_equal(by_rule[:, :-1], places.known(asked)[:, :-1])
    assert places.known(asked).dtype == np.float32
    assert (places.known(asked)[-1] == 0).all()


def test_nothing_is_known_at_first_and_stop_is_no_place():
    places = Places()
    assert (places.known(np.array([[1, 2]])) == 0).all()
    assert places.known(np.zeros((0, 2), np.int64)).shape == (0, 5)
    places.add(np.zeros((3, 2), np.int64), np.ones(3))
    assert len(places.keys) == 0


def test_what_is_imagined_has_the_deviation_that_is_left_and_is_the_same_all_through_an_episode():
    rng = np.random.default_rng(3)
    keys = rng.integers(-(2**63), 2**63 - 1, (4000, 3))
    places = Places()
    for rows, times in ((slice(1000, 2000), 1), (slice(2000, 3000), 9)):
        for _ in range(times):
            places.add(keys[rows], np.full(1000, 2.0))
    # of the last quarter the coarsest keys, which are the rules', alone were tried
    places.add(keys[3000:] * np.array([1, 0, 0]), np.full(1000, 2.0))
    imagined = places.imagined(keys, 5)
    assert np.array_equal(imagined[:, :-1], places.known(keys)[:, :-1])
    saves = imagined[:, -1] - places.known(keys)[:, -1]
    left = SPREAD * np.array([1.0, 0.5**2, 0.1**2, 1.0])
    assert saves.reshape(4, -1).std(axis=1) == pytest.approx(left, rel=0.1)
    assert saves.reshape(4, -1).mean(axis=1) == pytest.approx(0.0, abs=4 * SPREAD / 1000**0.5)
    some = rng.permutation(4000)[:50]
    assert np.array_equal(places.imagined(keys[some], 5), imagined[some])
    other = places.imagined(keys, 6)
    assert abs(np.corrcoef(other[:1000, -1], imagined[:1000, -1])[0, 1]) < 0.15


def test_of_stop_nothing_is_imagined():
    assert (Places().imagined(np.zeros((2, 3), np.int64), 7) == 0).all()


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
    means = np.array([[8.0, 4.0, 2.0], [8.0, 0.0, 0.0], [8.0, 4.0, 2.0]])
    weights = np.array([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.5, 0.5, 0.5]])
    assert expected_saving(means, weights).tolist() == [0.0, 4.0, 3.0]
    weights[2, 2] = 0.99
    assert expected_saving(means, weights)[2] == pytest.approx(2.0, abs=0.03)


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


@pytest.fixture(scope="module")
def stored(toy, tmp_path_factory):
    config = PPOConfig(hidden=16, rounds=1, steps_per_update=20, n_epochs=1)
    return train(toy.ToyRewriteEnv(length=5), config, 1, seed=0, out_dir=tmp_path_factory.mktemp("out")).checkpoint


def test_a_checkpoint_knows_the_places_of_its_training(toy, stored):
    env = toy.ToyRewriteEnv(length=5)
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(ObservationSizes.from_space(env.observation_space), PPOConfig(hidden=16, rounds=1), 0)
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
    kept = compact(observation, agent.sizes, agent.fresh().policy.places.known)
    assert kept.site_known.shape == (len(kept.site_rules), agent.sizes.num_known)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 5, 35), (1.0, 40, 40)])
def test_so_many_episodes_look_at_what_is_known(share, least, most, toy):
    env = toy.ToyRewriteEnv(length=5)
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        policy = TwoStepPolicy(sizes, 16, 1, share)
    policy.places.learn([collect_episode(env, UniformPolicy(sizes), episode_rng(1, number)) for number in range(9)])
    episodes = [collect_episode(env, policy, episode_rng(0, number)) for number in range(40)]
    first = [episode.observations[0] for episode in episodes]
    looked = [kept.site_known.any() for kept in first]
    assert least <= sum(looked) <= most
    imagined = set()
    for kept, told in zip(first, looked, strict=True):
        known = policy.places.known(kept.site_places)
        assert known.any()
        if told:
            assert np.array_equal(kept.site_known[:, :-1], known[:, :-1])
            if not np.array_equal(kept.site_known[:, -1], known[:, -1]):
                imagined.add(float(kept.site_known[0, -1]))  # something else in each
    # in about half of them: what is known is looked at as it is in the others
    assert 0.25 * sum(looked) <= len(imagined) <= 0.75 * sum(looked)
    again = [collect_episode(env, policy, episode_rng(0, number)) for number in (7, 3)]
    assert [episode.sites for episode in again] == [episodes[7].sites, episodes[3].sites]


def test_an_episode_knows_what_its_own_steps_have_saved(toy):
    env = toy.ToyRewriteEnv(length=6)
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        policy = TwoStepPolicy(sizes, 16, 1, informed_share=1.0)
    episode = next(e for n in range(20) if len(e := collect_episode(env, policy, episode_rng(0, n))) > 4)
    saved, told = squeezed(torch.from_numpy(savings(episode))).numpy(), dict[int, list[float]]()
    for kept, site, saving in zip(episode.observations, episode.sites, saved, strict=True):
        for place, known in zip(kept.site_places, kept.site_known, strict=True):
            means = [np.mean(told.get(key, [0.0])) for key in place.tolist()]
            assert known[: len(place)] == pytest.approx(np.array(means), abs=1e-5)
        for key in kept.site_places[site].tolist():
            told.setdefault(key, []).append(float(saving))
    assert len(policy.places.keys) == 0


def test_without_a_share_episodes_are_told_what_is_known_and_no_more(toy):
    env = toy.ToyRewriteEnv(length=6)
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        policy = TwoStepPolicy(sizes, 16, 1)
    policy.places.learn([collect_episode(env, UniformPolicy(sizes), episode_rng(1, number)) for number in range(9)])
    for kept in collect_episode(env, policy, episode_rng(0, 0)).observations:
        assert np.array_equal(kept.site_known, policy.places.known(kept.site_places))


def test_what_is_added_a_few_at_a_time_is_what_a_plain_memory_holds():
    """Some of the keys new, some known, some twice in one call."""
    rng, places = np.random.default_rng(0), Places()
    plain: dict[int, list[float]] = {}
    for _ in range(60):
        keys, saved = rng.integers(0, 40, (int(rng.integers(0, 5)), 2)), rng.normal(size=5)
        before = places.copy()
        held = {name: array.copy() for name, array in vars(before).items()}
        places.add(keys, saved[: len(keys)])
        assert all(np.array_equal(array, held[name]) for name, array in vars(before).items())
        for row, value in zip(keys, saved, strict=False):
            for key in row if row.any() else []:
                plain.setdefault(int(key), []).append(float(value))
    assert places.keys.tolist() == sorted(plain)
    assert places.tries.tolist() == [len(plain[key]) for key in sorted(plain)]
    np.testing.assert_allclose(places.means, [np.mean(plain[key]) for key in sorted(plain)], atol=1e-12)
