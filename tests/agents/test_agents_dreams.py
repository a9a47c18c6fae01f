"""Dreams and the controller: the real environment's interface without it, masks, and training with both."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from training_checks import assert_same_training, curve, state

from rlflow_tvm.agents import load_agent
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes, legal_sites
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, Eyes, LatentObservation, SeeingPolicy
from rlflow_tvm.agents.world.dream import Dream, DreamEnv, imagine
from rlflow_tvm.agents.world.model import WorldModel
from rlflow_tvm.agents.world.real import RealEpisodes
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.agents.world.training import _Training, make_controller, train
from rlflow_tvm.errors import AgentError

SMALL = WorldModelConfig(
    latent=8, hidden=8, rounds=1, memory=16, gaussians=2, vision_steps=30, vision_batch=16, memory_steps=30,
    memory_batch=4, members=2, dream_horizon=6, dreams=5, iterations=3, controller_updates=3, patience=100,
    controller=PPOConfig(minibatch_size=16, n_epochs=2, hidden=8),
)  # fmt: skip


@pytest.fixture
def env(toy):
    return toy.ToyRewriteEnv(length=5, horizon=8, random_start=True)


@pytest.fixture
def model(env) -> WorldModel:
    torch.manual_seed(0)
    return WorldModel(ObservationSizes.from_space(env.observation_space), 8, 8, 1, 16, 2, 2)


@pytest.fixture
def dream(env, model) -> Dream:
    episodes = random_episodes(env, 6)
    return Dream.along(model, episodes[:4], [], known_of(episodes), SMALL)


def random_episodes(env, number: int) -> list[Episode]:
    """Of the random agent."""
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    return [collect_episode(env, policy, episode_rng(1, each)) for each in range(number)]


def known_of(episodes: list[Episode]) -> Places:
    """What they tell of places."""
    places = Places()
    places.learn(episodes)
    return places


def test_a_dream_keeps_gymnasiums_rules(dream):
    check_env(DreamEnv(dream), skip_render_check=True)


def test_a_dream_has_the_real_ones_actions_and_begins_with_its_masks(env, dream):
    """Or with those of a graph along an episode of it."""
    dreamt = DreamEnv(dream)
    assert dreamt.action_space == env.action_space
    real, places = set(), known_of(random_episodes(env, 6))
    for episode in random_episodes(env, 4):
        for kept in episode.observations:
            known = places.known(kept.site_places)
            for told in (known, 0.0 * known):  # in some dreams the controller is not told
                real.add((kept.site_rules.tobytes(), kept.site_locations.tobytes(), told.tobytes()))
    informed = []
    for seed in range(40):
        observation, _ = dreamt.reset(seed=seed)
        rules, locations = legal_sites(observation, dream.sizes)
        known = observation["location_known"][rules, locations]
        assert (rules.tobytes(), locations.tobytes(), known.tobytes()) in real
        informed.append(known.any())
    assert 0.3 < np.mean(informed) < 1.0


def test_an_action_outside_the_masks_costs_a_hundred_and_changes_nothing(dream):
    dreamt = DreamEnv(dream)
    before, _ = dreamt.reset(seed=0)
    for action in ((0, 7), (dream.sizes.stop_rule, 1), (-1, 0)):
        after, reward, terminated, truncated, _ = dreamt.step(np.array(action))
        assert (reward, terminated, truncated) == (-100.0, False, False)
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_stop_ends_a_dream_and_the_horizon_cuts_it_off(dream):
    dreamt = DreamEnv(dream)
    dreamt.reset(seed=0)
    assert dreamt.step(np.array([dream.sizes.stop_rule, 0]))[2:4] == (True, False)
    with torch.no_grad():
        dream.memories[0].terminal.bias.fill_(-50.0)  # never of itself
        dream.memories[0].rules.bias.fill_(50.0)  # and all rules apply
    dreamt.reset(seed=0)
    assert [dreamt.step(np.array([0, 0]))[2:4] for _ in range(6)] == [(False, False)] * 5 + [(False, True)]


def test_dreams_are_determined_by_their_seed(dream, model):
    controller = make_controller(model.sizes, SMALL)
    one, same, other = (imagine(dream, controller, 6, seed) for seed in (1, 1, 2))
    told = [[(e.sites, e.rewards, e.log_probs, e.terminated) for e in episodes] for episodes in (one, same, other)]
    assert told[0] == told[1] != told[2]
    env = DreamEnv(dream)
    runs = [collect_episode(env, controller, episode_rng(5, number)) for number in (0, 0, 1)]
    assert runs[0].rewards == runs[1].rewards != runs[2].rewards


def test_dreams_at_once_are_episodes_as_they_are_one_by_one(dream, model):
    """Whole, with the values and probabilities that the controller gives to what it saw."""
    controller = make_controller(model.sizes, SMALL)
    episodes = imagine(dream, controller, 12, 3)
    assert len({len(episode) for episode in episodes}) > 1
    for episode in episodes:
        assert len(episode) == len(episode.observations) == len(episode.sites) == len(episode.values)
        assert episode.terminated != episode.truncated
        assert episode.truncated == (len(episode) == 6 and not episode.terminated)
        for seen, site, log_prob, value in zip(
            episode.observations, episode.sites, episode.log_probs, episode.values, strict=True
        ):
            assert controller.value(seen) == pytest.approx(value, abs=1e-5)
            probability = controller.probabilities(seen)[seen.site_rules[site], seen.site_locations[site]]
            assert np.log(probability) == pytest.approx(log_prob, abs=1e-4)


def test_actions_drawn_at_once_are_the_distributions(sizes):
    torch.manual_seed(1)
    controller = Controller(sizes, 4, 8)
    torch.nn.init.normal_(controller.rule_head.weight)
    torch.nn.init.normal_(controller.location_head.weight)
    rules, locations = np.array([0, 0, 2, 5], np.int16), np.array([0, 3, 1, 0], np.int16)
    known = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
    seen = [LatentObservation(np.full(4, row, np.float32), rules, locations, known) for row in (0.5, -1.0)]
    batch = controller.collate(seen)
    with torch.inference_mode():
        output = controller(batch)
    rng = np.random.default_rng(0)
    drawn = np.stack([controller.choose_all(batch, output, rng) for _ in range(20_000)])
    for row in range(2):
        expected = controller.probabilities(seen[row])[rules, locations]
        np.testing.assert_allclose(np.bincount(drawn[:, row], minlength=4) / 20_000, expected, atol=0.015)


def test_masked_actions_have_no_probability(sizes, random_observation):
    controller = Controller(sizes, 4, 8)
    rng = np.random.default_rng(0)
    for _ in range(5):
        graph = random_observation(rng, sites=int(rng.integers(1, 30)))
        vector = rng.normal(size=4).astype(np.float32)
        seen = LatentObservation(vector, graph.site_rules, graph.site_locations, graph.site_known)
        probabilities = controller.probabilities(seen)
        legal = np.zeros(probabilities.shape, bool)
        legal[seen.site_rules, seen.site_locations] = True
        assert not probabilities[~legal].any()
        assert (probabilities[legal] > 0).all()
        assert probabilities.sum() == pytest.approx(1.0)


def prepared(env, folder) -> _Training:
    """A training whose world model has learnt."""
    identity = {"config": SMALL.as_dict(), "seed": 0, "metadata": {}}
    training = _Training(RealEpisodes(env, SMALL, 0, folder / "rollouts"), SMALL, 100, 0, folder, identity, 1e9)
    training.begin(resume=False)
    training.log = type("Log", (), {"write": lambda self, line: None})()
    training.collect()
    training.learn()
    return training


def test_the_controller_never_touches_the_real_environment_in_its_dreams(env, tmp_path, monkeypatch):
    """The environment is closed first: whatever is asked of it from then on is an error."""
    training = prepared(env, tmp_path)
    before = [value.clone() for value in training.ppo.policy.parameters()]

    def closed(*_arguments, **_options):
        raise AssertionError("the real environment was touched")

    env.close()
    for name in ("reset", "step", "_observation"):
        monkeypatch.setattr(env, name, closed)
    training.control()
    assert training.counts.updates == SMALL.controller_updates
    with pytest.raises(AssertionError, match="was touched"):
        training.try_out()
    assert any(not torch.equal(a, b) for a, b in zip(before, training.ppo.policy.parameters(), strict=True))


def test_steps_are_shared_out_and_the_best_controller_is_kept(env, tmp_path):
    steps: list[int] = []
    result = train(env, SMALL, 200, 0, tmp_path, on_step=steps.append)
    assert steps == list(range(1, result.env_steps + 1))
    assert 200 <= result.env_steps <= 200 + 8
    lines = curve(tmp_path)
    real = [line["real/return"] for line in lines if "real/return" in line]
    assert len(real) == 3
    assert state(tmp_path)[1]["counts"]["best_score"] == max(real)
    for name in ("vision/cost", "memory/nll", "held_out/reward_r2", "held_out/rule_mask_f1", "dream/return"):
        assert any(name in line for line in lines)


@pytest.mark.parametrize(
    "words",
    ["learning vision: 7 of 30", "learning memory1: 11 of 30", "learning memory: 3 of 7", "dreaming: 2 of 3", 40, 90],
    ids=str,
)
def test_a_resumed_training_equals_an_uninterrupted_one(env, tmp_path, words):
    train(env, SMALL, 120, 3, tmp_path / "straight", checkpoint_secs=0.0)

    def interrupt(what: object) -> None:
        if what == words:  # a number: of the step, in an episode of the random agent or of the controller
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(env, SMALL, 120, 3, tmp_path / "cut", on_work=interrupt, on_step=interrupt, checkpoint_secs=0.0)
    train(env, SMALL, 120, 3, tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "straight", tmp_path / "cut")


def test_random_episodes_of_workers_make_the_same_training(env, tmp_path):
    train(env, SMALL, 120, 3, tmp_path / "alone")
    toy = {"length": 5, "horizon": 8, "random_start": True}
    train(env, SMALL, 120, 3, tmp_path / "two", workers=Workers("toy_env:ToyRewriteEnv", toy, 2))
    assert_same_training(tmp_path / "alone", tmp_path / "two")


def test_a_dream_ends_where_the_members_disagree(env, model):
    episodes = random_episodes(env, 12)
    dream = Dream.along(model, episodes[:8], episodes[8:], known_of(episodes), SMALL, temperature=0.0)
    state = dream.draw(30, torch.Generator().manual_seed(0))
    first = state.sites.offsets[:-1]
    assert (state.sites.rules[first] == 0).sum() > 10
    state = state[torch.nonzero(torch.from_numpy(state.sites.rules[first] == 0)).squeeze(1)]
    first = state.sites.offsets[:-1]
    with torch.no_grad():
        for memory in model.members:
            memory.terminal.bias.fill_(-50.0)
            memory.rules.bias.fill_(50.0)
        before = dream.step(state, first, torch.Generator())
        assert not before[2].all()
        model.members[1].reward[-1].bias.fill_(40.0)
        after = dream.step(state, first, torch.Generator())
    assert after[2].all()
    assert (after[1] <= 0).all()  # the more cautious one's, and nothing for what is not known


def test_a_dream_pays_what_improves_on_its_best(env, model):
    dream = Dream.along(model, random_episodes(env, 1), [], Places(), SMALL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.memory.rules.bias.fill_(50.0)  # all rules apply
    state = dream.draw(8, generator)
    for told in (2.0, -3.0, 1.0, 2.5):
        with torch.no_grad():
            for memory in model.members:
                memory.reward[-1].weight.fill_(0.0)
                memory.reward[-1].bias.fill_(float(squeezed(torch.tensor(told))))
        before, (state, rewards, _) = state, dream.step(state, state.sites.offsets[:-1], generator)
        torch.testing.assert_close(state.saved, before.saved + told, rtol=0, atol=1e-4)
        improved = (state.saved - before.best).clamp(min=0.0)
        torch.testing.assert_close(rewards, 0.9 * improved + 0.1 * told, rtol=0, atol=1e-4)
    assert dream.step(state, state.sites.offsets[1:] - 1, generator)[1].tolist() == [0.0] * 8  # stop


def test_dreams_begin_along_real_episodes_with_what_was_remembered_there(env, model):
    episodes = random_episodes(env, 5)
    traces = [model.trace(episode) for episode in episodes]
    dream = Dream.along(model, episodes, [], Places(), SMALL)
    row = 0
    for trace in traces:
        state = model.memory.begin(1)
        for step in range(len(trace)):
            here = trace.steps[torch.tensor([step])]
            assert torch.allclose(dream._starts.memories[0].h[row], state.h[0], atol=1e-6)
            assert torch.equal(dream._starts.latents[row], here.latents[0])
            with torch.no_grad():
                _, state = model.memory.step(here, state)
            row += 1
    for episode, number in zip(episodes, dream._beginnings.tolist(), strict=True):
        saved = savings(episode).cumsum()
        rows = slice(number, number + len(saved))
        before = np.concatenate([[0.0], saved[:-1]])
        np.testing.assert_allclose(dream._starts.saved[rows], before, atol=1e-3)
        np.testing.assert_allclose(dream._starts.best[rows], np.maximum.accumulate(before), atol=1e-3)
    assert dream._beginnings.tolist() == list(np.cumsum([0, *map(len, traces)])[:-1])
    drawn = dream.draw(400, torch.Generator().manual_seed(0)).latents
    first = dream._starts.latents[dream._beginnings]
    at_first = (drawn.unsqueeze(1) == first).all(dim=2).any(dim=1).float().mean()
    assert 0.25 < float(at_first) < 0.75


def test_several_episodes_at_once_are_seen_as_each_alone(env, model):
    rng = np.random.default_rng(0)
    real = random_episodes(env, 3)
    together, alone = (Eyes(model.sizes, model.vision, model.memory) for _ in range(2))
    together.begin(3)
    told: dict[int, list[np.ndarray]] = {number: [] for number in range(3)}
    for step in range(max(map(len, real))):
        rows = [number for number in range(3) if step < len(real[number])]
        rng.shuffle(rows)
        kept = [real[number].observations[step] for number in rows]
        for number, seen in zip(rows, together.see(kept, rows), strict=True):
            told[number].append(seen.vector)
        together.acted([real[number].sites[step] for number in rows])
    for number, episode in enumerate(real):
        alone.begin()
        for step, kept in enumerate(episode.observations):
            np.testing.assert_allclose(alone.see([kept])[0].vector, told[number][step], atol=1e-5)
            alone.acted([episode.sites[step]])


def test_what_cannot_be_is_told(env, tmp_path):
    train(env, SMALL, 60, 0, tmp_path / "b")
    with pytest.raises(AgentError, match="total_steps was 60, is 100"):
        train(env, SMALL, 100, 0, tmp_path / "b", resume=True)
    (tmp_path / "b" / "rollouts" / "000001.safetensors").write_bytes(b"nothing")
    with pytest.raises(AgentError, match=r"000001\.safetensors: is no episode"):
        train(env, SMALL, 60, 0, tmp_path / "b", resume=True)
    with pytest.raises(AgentError, match="has no setting wings"):
        WorldModelConfig.from_dict({"wings": 2})
    for name, value in (("latent", 0), ("held_out", 1.0), ("learning_rate", 0.0), ("temperature", -1.0)):
        with pytest.raises(AgentError, match=name):
            dataclasses.replace(SMALL, **{name: value})
    assert WorldModelConfig.from_dict(SMALL.as_dict()) == SMALL


def test_a_loaded_agent_acts_as_the_best_controller(env, tmp_path):
    result = train(env, SMALL, 100, 0, tmp_path)
    agent = load_agent(result.checkpoint, env.observation_space)
    again = load_agent(result.checkpoint)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        agent.begin()
        again.begin()
        rng, same = np.random.default_rng(seed), np.random.default_rng(seed)
        over = False
        while not over:
            action = agent.act(observation, deterministic=False, rng=rng)
            assert observation["location_mask"][tuple(action)]
            assert np.array_equal(action, again.act(observation, deterministic=False, rng=same))
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated


def test_an_agent_knows_its_trainings_places_and_what_it_tried_until_it_begins_afresh(env, tmp_path):
    result = train(env, SMALL, 60, 0, tmp_path)
    rollouts = Rollouts(tmp_path / "rollouts")
    rollouts.load()
    observation, _ = env.reset(seed=3)
    agent, trained = load_agent(result.checkpoint), known_of(rollouts.episodes)

    def known(one) -> np.ndarray:
        one.begin()
        return one.policy.compact(observation).site_known

    before = known(agent)
    assert before.any()
    assert np.array_equal(before, trained.known(agent.policy.compact(observation).site_places))
    agent.tried([observation, observation], np.array([[1, 2], [3, 0]]), [-50.0, 0.0])
    assert not np.array_equal(known(agent), before)
    assert np.array_equal(known(agent.fresh()), before)


def test_episodes_are_kept_with_what_was_known_before_them(env, tmp_path):
    """So that M cannot read off an action's place what the action itself saved."""
    train(env, SMALL, 60, 0, tmp_path)
    rollouts, places = Rollouts(tmp_path / "rollouts"), Places()
    rollouts.load()
    for episode in rollouts.episodes:
        for kept in episode.observations:
            assert np.array_equal(kept.site_known, places.known(kept.site_places))
        places.learn([episode])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_controller_is_told_of_places_in_so_many_dreams_and_episodes(env, model, share):
    episodes = random_episodes(env, 4)
    places, told = known_of(episodes), []
    config = dataclasses.replace(SMALL, controller=dataclasses.replace(SMALL.controller, informed_share=share))
    dream = Dream.along(model, episodes, [], places, config)
    seen = dream.draw(20, torch.Generator().manual_seed(0)).seen
    assert any(each.site_known.any() for each in seen) == bool(share)

    class Controlling(Controller):
        def choose(self, observation, rng):
            told.append(observation.site_known.any())
            return super().choose(observation, rng)

    controller = Controlling(model.sizes, 8 + 16, 8)
    policy = SeeingPolicy(controller, Eyes(model.sizes, model.vision, model.memory), places, share)
    collect_episode(env, policy, episode_rng(0, 0))
    assert any(told) == bool(share)


def test_of_some_steps_nothing_is_known(env, model):
    episode = max(random_episodes(env, 8), key=len)
    observations = [dataclasses.replace(each, site_known=1.0 + each.site_known) for each in episode.observations]
    trace = model.trace(dataclasses.replace(episode, observations=observations))
    known = trace.forgetful(0.5, np.random.default_rng(0)).steps.known
    forgotten = (known == 0).all(dim=1)
    assert 0 < int(forgotten.sum()) < len(trace)
    assert torch.equal(known[~forgotten], trace.steps.known[~forgotten])


@pytest.mark.timeout(300)
def test_the_toy_is_solved_in_dreams(toy, tmp_path):
    """Greedy reaches 6 of 30: fusing pays only after two moves that cost."""
    env = toy.ToyRewriteEnv(length=6, horizon=20)
    config = WorldModelConfig(
        hidden=32, memory=128, vision_steps=600, memory_steps=800, members=2,
        controller=PPOConfig(minibatch_size=256, learning_rate=2e-3, hidden=32, informed_share=0.5),
    )  # fmt: skip
    result = train(env, config, 1500, 0, tmp_path)
    agent = load_agent(result.checkpoint)
    observation, _ = env.reset(seed=0)
    agent.begin()
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
        total, over = total + reward, terminated or truncated
    assert total > 20
