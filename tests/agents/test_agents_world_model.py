"""V and M: likelihoods against torch's, no step sees another episode's, and what they learn of the toy environment."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import ObservationSizes, collate
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed, stretched, worth
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.learning import MemoryLearner, SitesLearner, VisionLearner
from rlflow_tvm.agents.world.memory import Memory, Prediction, Steps
from rlflow_tvm.agents.world.model import (
    Experience,
    Followed,
    Trace,
    WorldModel,
    actions_of,
    facts_of,
    memory_losses,
    score,
    steps_of,
)
from rlflow_tvm.agents.world.training import make_model
from rlflow_tvm.agents.world.vision import site_counts
from rlflow_tvm.errors import AgentError

CONFIG = WorldModelConfig(hidden=24, memory=64, members=1, vision_steps=800, memory_steps=600, memory_patience=500)


@pytest.fixture(scope="module")
def episodes(toy) -> list[Episode]:
    """Of the random agent; chains of three to five nodes, with what those before told of places."""
    env = toy.ToyRewriteEnv(length=5, horizon=12, random_start=True)
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    places, found = Places(), []
    for number in range(220):
        episode = collect_episode(env, policy, episode_rng(0, number))
        seen = [dataclasses.replace(each, site_known=places.known(each.site_places)) for each in episode.observations]
        found.append(dataclasses.replace(episode, observations=seen))
        places.learn([episode])
    return found


@pytest.fixture(scope="module")
def toy_sizes(toy) -> ObservationSizes:
    return ObservationSizes.from_space(toy.ToyRewriteEnv().observation_space)


@pytest.fixture(scope="module")
def learnt(toy_sizes, episodes) -> WorldModel:
    """A world model of the toy, trained on all but the last 20 episodes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(toy_sizes, CONFIG)
    seen, held = Experience(model, episodes[:200]), Experience(model, episodes[200:])
    for learner in (VisionLearner(model, CONFIG, 0), MemoryLearner(model, CONFIG, 0), SitesLearner(model, CONFIG, 0)):
        learner.prepare(seen, held)
        while not learner.finished:
            learner.step()
            if learner.done % 100 == 0:
                learner.judge()
        learner.take_best()
    return model


def random_prediction(rows: int, gaussians: int, latent: int) -> Prediction:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    weights = torch.log_softmax(draw(rows, gaussians), dim=1)
    deviations = 0.3 * draw(rows, gaussians, latent)
    rest = [draw(rows), draw(rows), draw(rows, 6), draw(rows, 2)]
    return Prediction(weights, draw(rows, gaussians, latent), deviations, *rest)


def test_likelihood_is_torchs():
    foreseen = random_prediction(20, 5, 3)
    normals = Independent(Normal(foreseen.means, foreseen.log_deviations.exp()), 1)
    mixture = MixtureSameFamily(Categorical(logits=foreseen.log_weights), normals)
    points = torch.randn(20, 3)
    torch.testing.assert_close(foreseen.nll(points), -mixture.log_prob(points), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_samples_are_the_mixtures_at_that_temperature(temperature):
    one = random_prediction(1, 4, 2)
    many = Prediction(*(getattr(one, name).expand(40_000, *[-1] * (getattr(one, name).ndim - 1)) for name in vars(one)))
    found = many.sample(temperature, torch.Generator().manual_seed(2))
    weights = torch.softmax(one.log_weights[0] / temperature, dim=0).unsqueeze(1)
    variances = temperature * (2 * one.log_deviations[0]).exp()
    mean = (weights * one.means[0]).sum(0)
    variance = (weights * (variances + one.means[0].square())).sum(0) - mean.square()
    torch.testing.assert_close(found.mean(0), mean, rtol=0, atol=0.03)
    torch.testing.assert_close(found.var(0), variance, rtol=0.05, atol=0)


def test_at_temperature_nought_the_likeliest_gaussians_mean_is_taken():
    foreseen = random_prediction(10, 4, 3)
    best = foreseen.log_weights.argmax(dim=1)
    assert torch.equal(foreseen.sample(0.0, torch.Generator()), foreseen.means[torch.arange(10), best])


def random_steps(sizes: ObservationSizes, number: int, latent: int) -> Steps:
    rng = np.random.default_rng(number)
    counts = rng.integers(0, 4, (number, sizes.num_rules)).astype(np.float32)
    rules, latents = rng.integers(0, sizes.num_rules, number), rng.normal(size=(number, latent)).astype(np.float32)
    known = rng.normal(size=(number, sizes.num_known)).astype(np.float32)
    locations = rng.integers(0, sizes.num_locations, number)
    return Steps(*map(torch.from_numpy, (latents, counts, rules, locations, known)))


def test_episodes_of_any_lengths_are_foreseen_as_each_alone_and_as_step_by_step(sizes):
    """What is foreseen of one does not depend on what it is batched with, nor on its end."""
    torch.manual_seed(0)
    memory = Memory(sizes, latent=5, width=16, gaussians=3)
    lengths = [7, 1, 12, 3]
    parts = [random_steps(sizes, length, 5) for length in lengths]
    together = memory(*steps_of([Trace(part, part.known[:, 0], part.known[:, 0]) for part in parts]))
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        alone, state = memory(part, [length]), memory.begin(1)
        for step in range(length):
            row = Steps(*(value[step : step + 1] for value in vars(part).values()))
            single, state = memory.step(row, state)
            for name in vars(single):
                here = getattr(together, name)[start + step]
                torch.testing.assert_close(here, getattr(alone, name)[step], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(here, getattr(single, name)[0], rtol=1e-5, atol=1e-6)
        start += length


def test_what_follows_is_the_next_step_of_the_same_episode(toy_sizes, episodes):
    torch.manual_seed(0)
    model = WorldModel(toy_sizes, 8, 8, 1, 16, 2, 1)
    traces = [model.trace(episode) for episode in episodes[:6]]
    followed = Followed.of(model.memory, traces)
    before = torch.cat([trace.steps.counts[:-1] for trace in traces])
    after = torch.cat([trace.steps.counts[1:] for trace in traces])
    assert len(followed) == len(after) == sum(len(trace) - 1 for trace in traces)
    assert torch.equal(followed.foreseen.counts, before)
    assert torch.equal(followed.counts, after)
    assert torch.equal(followed.latents, torch.cat([trace.steps.latents[1:] for trace in traces]))


def test_an_episode_of_one_step_teaches_its_reward_alone(toy_sizes, episodes):
    torch.manual_seed(0)
    model = WorldModel(toy_sizes, 8, 8, 1, 16, 2, 1)
    short = [model.trace(episode) for episode in episodes if len(episode) == 1][:2]
    assert short
    assert set(memory_losses(model.memory, short)) == {"reward", "terminal"}


def test_the_heads_for_sites_learn_alone(learnt, episodes):
    """What M foresees beside them stays; with nothing to learn from they stay themselves."""
    model = copy.deepcopy(learnt)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one_step = Experience(model, [episode for episode in episodes if len(episode) == 1][:2])
    learner = SitesLearner(model, CONFIG, 1)
    learner.prepare(one_step, one_step)
    assert learner.finished
    learner = SitesLearner(model, CONFIG, 1)
    learner.prepare(Experience(model, episodes[:20]), Experience(model, episodes[200:]))
    wrong = learner.judge()
    for _ in range(5):
        learner.step()
    assert learner.held_out_loss() != wrong
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("memories.0.site_head.") for name in changed)


def test_facts_are_those_of_the_graphs(toy_sizes, episodes):
    observations, facts = facts_of(episodes[:5], toy_sizes)
    assert len(observations) == sum(map(len, episodes[:5])) == len(facts.nodes)
    torch.testing.assert_close(facts.log_cost[0].item(), math.log(episodes[0].run_secs[0]))
    for row, observation in enumerate(observations):
        assert facts.nodes[row].expm1().round() == len(observation.nodes)
        assert facts.operators[row].expm1().sum().round() == len(observation.nodes)
        assert facts.counts[row].sum() == len(observation.site_rules)
    actions = actions_of(episodes[:5])
    for episode, saved in zip(episodes[:5], actions.rewards.split([len(each) for each in episodes[:5]]), strict=True):
        first, drops = episode.run_secs[0], -np.diff(episode.run_secs)
        np.testing.assert_allclose(stretched(saved).numpy(), (100 * drops / first).clip(-100, 100), rtol=1e-4)
    assert bool((facts.counts[torch.arange(len(observations)), actions.rules] > actions.locations).all())
    row = len(episodes[0])
    assert np.array_equal(actions.known[row], episodes[1].observations[0].site_known[episodes[1].sites[0]])


def test_an_environment_must_tell_times(toy_sizes, episodes):
    silent = Episode(**{**vars(episodes[0]), "run_secs": []})
    with pytest.raises(AgentError, match="run_secs"):
        savings(silent)


def test_latents_have_mean_nought_and_deviation_one(learnt, episodes):
    latents = learnt.latents(episodes[0].observations + episodes[1].observations)
    torch.testing.assert_close(latents.mean(1), torch.zeros(len(latents)), rtol=0, atol=1e-5)
    torch.testing.assert_close(latents.std(1, correction=0), torch.ones(len(latents)), rtol=0, atol=1e-3)


def test_vision_tells_graphs_apart(learnt, episodes, toy_sizes):
    """Costs, sizes and masks of graphs that it has not seen are read off the latent."""
    observations, facts = facts_of(episodes[200:], toy_sizes)
    with torch.no_grad():
        told = learnt.vision.decoder(learnt.latents(observations))
        costs = learnt.vision.log_cost(told).squeeze(1) * learnt.vision.cost_deviation + learnt.vision.cost_mean
        rules = learnt.vision.rules(told) > 0
    assert float((costs - facts.log_cost).abs().mean()) < 0.15 * float(facts.log_cost.std())
    legal = facts.counts > 0
    shares = legal.float().mean(0)
    guessed = torch.minimum(shares, 1 - shares).mean()  # wrong where each rule's commoner case is told
    assert float((rules != legal).float().mean()) < 0.5 * float(guessed)


def test_memory_foresees_episodes_that_it_has_not_seen(learnt, episodes):
    found = score(Experience(learnt, episodes[200:]))
    untrained = score(Experience(make_model(learnt.sizes, CONFIG), episodes[200:]))
    assert found["nll"] < untrained["nll"] - 20
    assert found["reward_r2"] > 0.5
    assert found["rule_mask_f1"] > 0.92
    assert found["rule_change_f1"] > 0.25  # a mask that stays as it is has none
    assert found["locations_exact"] > 0.9


def test_what_heads_tell_stays_where_the_units_change(learnt, episodes):
    """As in a second iteration, of dearer episodes."""
    model = make_model(learnt.sizes, CONFIG)
    model.load_state_dict(learnt.state_dict())
    observations, facts = facts_of(episodes[:5], learnt.sizes)
    actions = actions_of(episodes[:5])
    trace = model.trace(episodes[0])

    @torch.no_grad()
    def told() -> list[torch.Tensor]:
        seen = model.vision.decoder(model.latents(observations))
        costs = model.vision.log_cost(seen) * model.vision.cost_deviation + model.vision.cost_mean
        foreseen = model.memory(*steps_of([trace])).rewards * model.memory.reward_deviation
        return [costs, foreseen]

    before = told()
    costs, rewards = 3 * facts.log_cost + 1, 5 * actions.rewards
    dearer = dataclasses.replace(facts, log_cost=costs), dataclasses.replace(actions, rewards=rewards)
    model.set_scales(*dearer, learnt=True)
    assert float(model.memory.reward_deviation) == pytest.approx(5 * float(actions.rewards.std(correction=0)), rel=1e-4)
    for now, then in zip(told(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("limit", "paid"), [(1.1, 26.0), (math.inf, 7.0)])
def test_an_episode_is_worth_what_its_environment_counts(limit, paid):
    """Thirty percent are gained, then lost with a graph that takes three times as long, of which 1.1 times count."""
    episode = Episode([], [], [30.0, -4.0], [], [], run_secs=[1.0, 0.7, 3.0], terminated=True)
    assert worth(episode, limit) == pytest.approx(paid)


def test_savings_are_squeezed_and_stretched_back():
    values = torch.tensor([-99.0, -3.0, -0.05, 0.0, 0.001, 0.1, 7.0, 80.0])
    told = squeezed(values)
    torch.testing.assert_close(stretched(told), values)
    assert float(told[5]) == pytest.approx(math.log(2))
    assert bool((told.diff() > 0).all())
    assert stretched(squeezed(torch.tensor([-1e5, 1e5]))).tolist() == [-100.0, 100.0]


def test_counts_are_those_of_the_masks(random_observation, sizes):
    observation = random_observation(np.random.default_rng(3), sites=20)
    counts = site_counts([observation], sizes)[0]
    assert counts.sum() == 21
    assert [counts[rule] for rule in range(sizes.num_rules)] == [
        int((observation.site_rules == rule).sum()) for rule in range(sizes.num_rules)
    ]


def test_the_site_order_does_not_enter_the_latent(learnt, episodes):
    from dataclasses import replace

    seen = episodes[0].observations[0]
    turned = replace(seen, site_locations=seen.site_locations[::-1].copy(), site_nodes=seen.site_nodes[::-1].copy())
    with torch.no_grad():
        assert torch.equal(learnt.vision(collate([seen])), learnt.vision(collate([turned])))


def test_a_part_learns_until_it_knows_what_was_held_out_no_better(toy_sizes, episodes):
    """And is then what it was at its best."""
    torch.manual_seed(0)
    config = dataclasses.replace(
        CONFIG, latent=8, hidden=8, rounds=1, memory=32, gaussians=2, memory_steps=3000, memory_patience=60,
        learning_rate=0.01,
    )  # fmt: skip
    model = make_model(toy_sizes, config)
    learner = MemoryLearner(model, config, 0)
    learner.prepare(Experience(model, episodes[:8]), Experience(model, episodes[200:]))
    losses = {}
    while not learner.finished:
        learner.step()
        if learner.done % 20 == 0:
            losses[learner.done] = learner.judge()
    assert learner.done < 3000
    assert losses[learner.best_step] == learner.best_loss == min(losses.values())
    assert learner.done == learner.best_step + 60
    assert learner.held_out_loss() == losses[learner.done] > learner.best_loss
    learner.take_best()
    assert learner.held_out_loss() == learner.best_loss


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"remembered_share": 0.0},
            r"controller\.remembered_share means nothing .*, or set remembered_share of",
        ),
        ({"steps_per_update": 64}, r"controller\.steps_per_update means nothing to a controller; leave it out$"),
    ],
)
def test_settings_that_a_controller_has_no_use_for_are_refused(given, told):
    with pytest.raises(AgentError, match=told):
        WorldModelConfig.from_dict({"controller": given})
