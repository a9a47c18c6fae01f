"""Dreams and the controller: the real environment's interface without it, and masks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from training_checks import SMALL, known_of

from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import ObservationSizes, SiteKinds, legal_sites
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.prior import features
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed
from rlflow_tvm.agents.world.controller import Controller, Eyes, LatentObservation, SeeingPolicy
from rlflow_tvm.agents.world.dream import Dream, DreamEnv, imagine
from rlflow_tvm.agents.world.memory import Memory
from rlflow_tvm.agents.world.model import Experience, WorldModel
from rlflow_tvm.agents.world.training import make_controller


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
    return Dream.along(Experience(model, episodes[:4]), known_of(episodes), SMALL)


def random_episodes(env, number: int) -> list[Episode]:
    """Of the random agent."""
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    return [collect_episode(env, policy, episode_rng(1, each)) for each in range(number)]


def foresees(model: WorldModel, saving: float) -> None:
    """From now on, of every step."""
    with torch.no_grad():
        for memory in model.members:
            memory.reward[-1].weight.fill_(0.0)
            memory.reward[-1].bias.fill_(float(squeezed(torch.tensor(saving))))


def all_rules_apply(memory: Memory) -> None:
    """From now on, in all that it foresees."""
    memory.site_head.changes[-1].bias.chunk(2)[0].fill_(50.0)


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
            for told in (known, np.zeros_like(known)):  # in some dreams the controller is not told
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
        all_rules_apply(dream.memories[0])
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
    torch.nn.init.normal_(controller.heads.rule_head.weight)
    torch.nn.init.normal_(controller.heads.location_head.weight)
    rules, locations = np.array([0, 0, 2, 5], np.int16), np.array([0, 3, 1, 0], np.int16)
    known = np.random.default_rng(1).normal(size=(4, sizes.num_known)).astype(np.float32)
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


def test_sites_that_are_alike_are_worked_out_once(sizes, random_observation):
    """Outputs and gradients are those of every site by itself."""
    torch.manual_seed(2)
    controller, rng, observations = Controller(sizes, 4, 8), np.random.default_rng(2), []
    for head in (controller.heads.rule_head, controller.heads.location_head):
        torch.nn.init.normal_(head.weight)
    for number in (1, 40, 25, 40):
        graph = random_observation(rng, sites=number)
        known = rng.integers(-1, 2, (len(graph.site_rules), 1)) * np.ones(sizes.num_known, np.float32)
        vector = rng.normal(size=4).astype(np.float32)
        observations.append(LatentObservation(vector, graph.site_rules, graph.site_locations, known.astype(np.float32)))
    batch = controller.collate(observations)
    assert len(batch.kinds.sizes) < 0.75 * len(batch.site_pair)
    output = controller(batch)
    known = torch.from_numpy(np.concatenate([each.site_known for each in observations]))
    trunk = controller.trunk(batch.vectors)
    pairs = trunk[batch.pair_graph] + controller.rule(batch.pair_rule)
    every = [np.arange(each.num_sites) for each in observations]
    apart = SiteKinds.joined(batch, list(zip(every, every, strict=True)))
    sites = pairs[batch.site_pair] + controller.known(features(known))
    each = controller.output(batch, sites, pairs, trunk, known, apart)
    for name in ("rule_log_probs", "location_log_probs", "log_probs", "values", "entropy"):
        torch.testing.assert_close(getattr(output, name), getattr(each, name), atol=1e-5, rtol=1e-5)
    gradients = []
    for found in (output, each):
        controller.zero_grad()
        (found.log_probs.square().sum() + found.values.sum() + found.entropy.sum()).backward(retain_graph=True)
        gradients.append([parameter.grad.clone() for parameter in controller.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_dream_pays_what_the_most_cautious_member_foresees(env, model):
    dream = Dream.along(Experience(model, random_episodes(env, 8)), Places(), SMALL, temperature=0.0)
    state = dream.draw(30, torch.Generator().manual_seed(0))
    told = torch.tensor([3.0, -1.0])
    with torch.no_grad():
        for memory, saving in zip(model.members, squeezed(told), strict=True):
            memory.reward[-1].weight.fill_(0.0)
            memory.reward[-1].bias.fill_(float(saving))
    stops = torch.from_numpy(state.sites.rules[state.sites.offsets[:-1]] == model.sizes.stop_rule)
    after, _, _ = dream.step(state, state.sites.offsets[:-1], torch.Generator())
    torch.testing.assert_close(after.saved - state.saved, torch.where(stops, 0.0, -1.0), rtol=0, atol=1e-4)


def test_a_dream_pays_what_improves_on_its_best(env, model):
    dream = Dream.along(Experience(model, random_episodes(env, 1)), Places(), SMALL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        all_rules_apply(model.memory)
    state = dream.draw(8, generator)
    for told in (2.0, -3.0, 1.0, 2.5):
        foresees(model, told)
        before, (state, rewards, _) = state, dream.step(state, state.sites.offsets[:-1], generator)
        torch.testing.assert_close(state.saved, before.saved + told, rtol=0, atol=1e-4)
        improved = (state.saved - before.best).clamp(min=0.0)
        torch.testing.assert_close(rewards, 0.9 * improved + 0.1 * told, rtol=0, atol=1e-4)
    assert dream.step(state, state.sites.offsets[1:] - 1, generator)[1].tolist() == [0.0] * 8  # stop


def test_a_dream_ends_where_a_real_episode_would(env, model):
    dream = Dream.along(Experience(model, random_episodes(env, 8)), Places(), SMALL, limit=1.03)
    with torch.no_grad():
        all_rules_apply(model.memory)
        for memory in model.members:  # M foresees no end
            memory.terminal.weight.fill_(0.0)
            memory.terminal.bias.fill_(-50.0)
    generator = torch.Generator().manual_seed(0)
    state = dream.draw(30, generator)
    for told in (-2.0, -200.0):
        foresees(model, told)
        after, rewards, terminated = dream.step(state, state.sites.offsets[:-1], generator)
        reached = state.saved + max(told, -100.0)
        assert terminated.tolist() == (reached < -3.0).tolist()
        torch.testing.assert_close(after.saved, reached.clamp(min=-3.0), rtol=0, atol=1e-4)
        torch.testing.assert_close(rewards, 0.1 * (after.saved - state.saved), rtol=0, atol=1e-4)
    assert terminated.all()


def test_dreams_begin_along_real_episodes_with_what_was_remembered_there(env, model):
    episodes = random_episodes(env, 5)
    traces = [model.trace(episode) for episode in episodes]
    dream = Dream.along(Experience(model, episodes), Places(), SMALL)
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
    begun = [dataclasses.replace(each, remembered=True) if number else each for number, each in enumerate(episodes)]
    from_start = Dream.along(Experience(model, begun), Places(), SMALL)
    assert from_start._beginnings.tolist() == [0], "the others begin where the agent will not"
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
        for number, seen in zip(rows, together.see(kept, [each.site_known for each in kept], rows), strict=True):
            told[number].append(seen.vector)
        together.acted([real[number].sites[step] for number in rows])
    for number, episode in enumerate(real):
        alone.begin()
        for step, kept in enumerate(episode.observations):
            np.testing.assert_allclose(alone.see([kept], [kept.site_known])[0].vector, told[number][step], atol=1e-5)
            alone.acted([episode.sites[step]])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_controller_is_told_of_places_in_so_many_dreams_and_episodes(env, model, share):
    episodes = random_episodes(env, 4)
    places, told = known_of(episodes), []
    config = dataclasses.replace(SMALL, controller=dataclasses.replace(SMALL.controller, informed_share=share))
    dream = Dream.along(Experience(model, episodes), places, config)
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


def test_the_controller_knows_what_its_episode_has_saved_and_m_only_what_was_known_before(env, model):
    places, told = known_of(random_episodes(env, 4)), []

    class Controlling(Controller):
        def choose(self, observation, rng):
            told.append(observation.site_known)
            return super().choose(observation, rng)

    controller = Controlling(model.sizes, 8 + 16, 8)
    policy = SeeingPolicy(controller, Eyes(model.sizes, model.vision, model.memory), places, 1.0)
    episode = next(e for n in range(20) if len(e := collect_episode(env, policy, episode_rng(0, n))) > 3)
    now, saved = places.copy(), squeezed(torch.from_numpy(savings(episode))).numpy()
    steps = zip(episode.observations, told[-len(episode) :], episode.sites, saved, strict=True)
    for kept, known, site, saving in steps:
        assert np.array_equal(kept.site_known, places.known(kept.site_places))
        np.testing.assert_allclose(known[:, :-1], now.known(kept.site_places)[:, :-1], atol=1e-6)
        now.add(kept.site_places[[site]], saving[None])
    assert not np.array_equal(now.tries, places.tries)
    # and afterwards, outside of trainings, it is told what is known
    policy.begin()
    policy.choose(episode.observations[0], None)
    assert np.array_equal(told[-1], places.known(episode.observations[0].site_places))


@pytest.mark.parametrize("gathers", [False, True])
def test_in_episodes_of_likeliest_actions_the_controller_is_told_what_is_known_as_it_is(env, model, gathers):
    places, told = known_of(random_episodes(env, 6)), []

    class Controlling(Controller):
        def choose(self, observation, rng):
            told.append((observation.site_known, rng))
            return super().choose(observation, rng)

    controller = Controlling(model.sizes, 8 + 16, 8)
    policy = SeeingPolicy(controller, Eyes(model.sizes, model.vision, model.memory), places, 1.0)
    opening = Opening(likeliest=True, gathers=gathers)
    episode = collect_episode(env, policy, episode_rng(0, 0), opening=opening)
    known, rng = told[0]
    assert rng is None, "nothing is drawn"
    first = episode.observations[0].site_places
    np.testing.assert_array_equal(known, places.known(first, by_rule=gathers))
    assert not np.array_equal(places.known(first, by_rule=True), places.known(first))
