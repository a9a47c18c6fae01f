"""PPO: the loss against brute force, one update's direction, and a task that greed cannot solve."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from training_checks import make_ppo, most_of

from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes, collate
from rlflow_tvm.agents.policy import TwoStepPolicy
from rlflow_tvm.agents.ppo import approximate_kl, clipped_loss
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError


def test_clipped_loss_is_the_papers_term_by_term():
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(size=40), rng.normal(size=40), rng.normal(size=40)
    terms = []
    for a, b, advantage in zip(new, old, advantages, strict=True):
        ratio = math.exp(a - b)
        terms.append(min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    result = clipped_loss(torch.tensor(new), torch.tensor(old), torch.tensor(advantages), 0.2)
    assert float(result) == pytest.approx(-sum(terms) / 40)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, -1.0, False), (0.7, 1.0, True), (1.0, 1.0, True)],
)
def test_the_gradient_vanishes_only_where_the_clip_binds(ratio, advantage, moves):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    clipped_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), 0.2).backward()
    assert bool(log_prob.grad.any()) == moves


def test_approximate_kl_estimates_the_kl_of_two_gaussians():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator)
    old, new = -0.5 * x**2, -0.5 * (x - 0.3) ** 2
    assert float(approximate_kl(new, old)) == pytest.approx(0.3**2 / 2, rel=0.02)
    assert float(approximate_kl(old, old)) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 1.5},
        {"gae_lambda": -0.1},
        {"learning_rate": 0.0},
        {"minibatch_size": 0},
        {"ent_coef": -1.0},
        {"target_kl": 0.0},
        {"learning_rate": math.nan},
    ],
)
def test_impossible_settings_are_refused_by_name(settings):
    with pytest.raises(AgentError, match=next(iter(settings))):
        PPOConfig(**settings)


def test_settings_round_trip_and_unknown_ones_are_refused():
    config = PPOConfig(hidden=8, target_kl=0.02)
    assert PPOConfig.from_dict(config.as_dict()) == config
    with pytest.raises(AgentError, match="no setting learning_speed"):
        PPOConfig.from_dict({"learning_speed": 1})


def one_step_episodes(learner, observation, reward_of):
    """Forty one-step episodes under the learner's policy, rewarded by the chosen site."""
    episodes, rng = [], np.random.default_rng(0)
    for _ in range(40):
        site, log_prob, value = learner.policy.choose(observation, rng)
        episodes.append(
            Episode(
                observations=[observation],
                sites=[site],
                rewards=[reward_of(site)],
                values=[value],
                log_probs=[log_prob],
                terminated=True,
            )
        )
    return episodes


def test_an_update_makes_what_paid_likelier_and_learns_the_values(sizes, random_observation):
    config = PPOConfig(hidden=16, rounds=1, minibatch_size=40, n_epochs=8, learning_rate=3e-3, scale_rewards=False)
    config = dataclasses.replace(config, normalise_values=False)  # in whose units the loss would be told
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, config, seed=0)
    observation = random_observation(np.random.default_rng(0), sites=6)
    observation = dataclasses.replace(observation, site_known=0.0 * observation.site_known)  # no prior

    def probability():
        with torch.no_grad():
            return float(learner.policy(collate([observation])).log_probs[2].exp())

    before, losses = probability(), []
    for _ in range(16):
        losses.append(learner.update(one_step_episodes(learner, observation, lambda site: float(site == 2))))
    assert probability() > 2 * before
    assert losses[-1]["value_loss"] < losses[0]["value_loss"]
    assert losses[0]["gradient_steps"] == 8


def test_new_units_of_values_leave_the_values_as_they_are(sizes, random_observation):
    policy = TwoStepPolicy(sizes, 16, 1)
    seen = [random_observation(np.random.default_rng(seed)) for seed in range(5)]
    before = [policy.value(each) for each in seen]
    for mean, deviation in ((3.0, 0.5), (-20.0, 40.0)):
        policy.normalise_values(mean, deviation)
        assert [policy.value(each) for each in seen] == pytest.approx(before, abs=1e-4)
    heads: list[torch.Tensor] = []
    policy.heads.value_head.register_forward_hook(lambda _module, _given, told: heads.append(told))
    policy(collate(seen))
    told = heads[0].squeeze(1)
    assert (told * 40.0 - 20.0).tolist() == pytest.approx(before, abs=1e-4)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_values_of_any_size_are_learnt_as_fast(scale, sizes, random_observation):
    config = PPOConfig(hidden=16, rounds=1, minibatch_size=40, n_epochs=8, learning_rate=3e-3, scale_rewards=False)
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, config, seed=0)
    seen = [random_observation(np.random.default_rng(seed), sites=6) for seed in range(2)]
    for _ in range(10):
        each = [
            one_step_episodes(learner, observation, lambda _site, p=paid: scale * (1 + p))
            for paid, observation in enumerate(seen)
        ]
        learner.update(each[0] + each[1])
    told = [learner.policy.value(observation) / scale for observation in seen]
    assert told == pytest.approx([1.0, 2.0], abs=0.2)


def test_units_of_values_are_running_means_without_a_beginning(sizes, random_observation):
    """As if those of 0.8 of the mean before, and so on, were divided by what their weights come to."""
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, PPOConfig(hidden=16, rounds=1, n_epochs=1, scale_rewards=False), seed=0)
    observation, seen = random_observation(np.random.default_rng(0)), []
    for scale in (0.01, 3.0, 0.5):
        episodes = one_step_episodes(learner, observation, lambda site, by=scale: by * (1 + site))
        rewards = np.concatenate([episode.rewards for episode in episodes])
        learner.update(episodes)
        seen.append((rewards.mean(), rewards.std()))
        weights = 0.8 ** np.arange(len(seen))[::-1]
        units = [float(learner.policy.value_mean), float(learner.policy.value_deviation)]
        assert units == pytest.approx(list(np.average(seen, axis=0, weights=weights)), rel=1e-3)


def test_target_kl_ends_the_epochs_early(sizes, random_observation):
    config = PPOConfig(hidden=16, rounds=1, minibatch_size=40, n_epochs=20, learning_rate=0.03, target_kl=0.01)
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, config, seed=0)
    observation = random_observation(np.random.default_rng(0), sites=6)
    losses = learner.update(one_step_episodes(learner, observation, lambda site: float(site == 2)))
    assert losses["gradient_steps"] < 20


def test_gradients_are_clipped_to_the_norm(sizes, random_observation):
    config = PPOConfig(hidden=16, rounds=1, n_epochs=1, max_grad_norm=1e-3, scale_rewards=False)
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, config, seed=0)
    observation = random_observation(np.random.default_rng(0), sites=6)
    losses = learner.update(one_step_episodes(learner, observation, lambda site: 50.0 * site))
    applied = torch.cat([value.grad.flatten() for value in learner.policy.parameters()]).norm()
    assert losses["grad_norm"] > 0.1
    assert float(applied) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("rewards", math.inf, "a reward"), ("rewards", math.nan, "a reward"), ("values", math.nan, "lower learning_rate")],
)
def test_what_is_not_finite_is_an_error_and_leaves_the_learner(field, value, message, sizes, random_observation):
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, PPOConfig(hidden=16, rounds=1, scale_rewards=False), seed=0)
    observation = random_observation(np.random.default_rng(0), sites=6)
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    episodes = one_step_episodes(learner, observation, lambda site: float(site))
    getattr(episodes[0], field)[0] = value
    with pytest.raises(AgentError, match=message):
        learner.update(episodes)
    assert math.isfinite(learner.reward_scale.deviation)
    assert all(torch.equal(old, new) for old, new in zip(before, learner.policy.parameters(), strict=True))


def test_part_of_the_optimizers_state_is_refused_and_none_is_not(sizes, random_observation):
    config = PPOConfig(hidden=8, rounds=1, n_epochs=1)
    with torch.random.fork_rng(devices=[]):
        learner, other = (make_ppo(sizes, config, seed=seed) for seed in (0, 1))
        learner.update(one_step_episodes(learner, random_observation(np.random.default_rng(0)), float))
        tensors, numbers = learner.tensors(), learner.numbers()
        lost = next(name for name in tensors if name.endswith(".exp_avg"))
        before = [parameter.clone() for parameter in other.policy.parameters()]
        with pytest.raises(AgentError, match=lost):
            other.restore({name: tensor for name, tensor in tensors.items() if name != lost}, numbers)
        assert all(torch.equal(old, new) for old, new in zip(before, other.policy.parameters(), strict=True))
        other.restore({name: t for name, t in tensors.items() if not name.startswith("optimizer.")}, numbers)
        assert not other.optimizer.state
        other.restore(tensors, numbers)
        assert len(other.optimizer.state) == len(before)


def play(env, seed, choose):
    """The return of one episode."""
    observation, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(choose(observation))
        total += reward
        done = terminated or truncated
    return total


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_solves_what_greedy_and_random_do_not(toy, tmp_path):
    env = toy.ToyRewriteEnv(length=6)
    env.reset(seed=0)
    best = toy.optimum(env.state)
    assert toy.greedy(env.state) < best
    rng = np.random.default_rng(0)
    random = [play(env, seed, lambda seen: rng.choice(np.argwhere(seen["location_mask"]))) for seed in range(200)]
    assert np.mean(random) < 0.3 * best

    def solved(seed: int) -> bool:
        config = PPOConfig(hidden=32, rounds=2, learning_rate=1e-3, ent_coef=0.03)
        result = train(env, config, total_steps=5000, seed=seed, out_dir=tmp_path / str(seed))
        agent = Agent.load(result.checkpoint, env.observation_space)
        sampled = [play(env, each, lambda seen: agent.act(seen, False, rng)) for each in range(20)]
        return play(env, 0, agent.act) == best and float(np.mean(sampled)) > 0.7 * best

    assert most_of(5, solved)


def test_sizes_alone_make_a_learner_and_equal_seeds_make_equal_ones(toy):
    sizes = ObservationSizes.from_space(toy.ToyRewriteEnv().observation_space)
    with torch.random.fork_rng(devices=[]):
        first, second, third = (make_ppo(sizes, PPOConfig(hidden=8, rounds=1), seed) for seed in (1, 1, 2))
    one, same, other = (torch.cat([p.flatten() for p in x.policy.parameters()]) for x in (first, second, third))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
