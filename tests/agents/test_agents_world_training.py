"""Training with a world model: dreams alone, steps shared out, resumed and parallel runs, the toy, the agent."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from training_checks import SMALL, TwoModels, assert_same_training, curve, known_of, most_of, state

from rlflow_tvm.agents import load_agent
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.opening import SHORT, Opening
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import worth
from rlflow_tvm.agents.world import real as real_episodes
from rlflow_tvm.agents.world.act import WorldAgent
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.learning import Learner, SitesLearner
from rlflow_tvm.agents.world.real import JUDGED, RealEpisodes
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.agents.world.training import _Training, mean_return, train
from rlflow_tvm.errors import AgentError


@pytest.fixture
def env(toy):
    return toy.ToyRewriteEnv(length=5, horizon=8, random_start=True)


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory) -> Path:
    """The folder of a training that nothing interrupted, to look at alone."""
    folder = tmp_path_factory.mktemp("straight")
    train(toy.ToyRewriteEnv(length=5, horizon=8, random_start=True), SMALL, 120, 3, folder, checkpoint_secs=0.0)
    return folder


@pytest.fixture(scope="module")
def short(toy, tmp_path_factory) -> Path:
    """The folder of a short one."""
    folder = tmp_path_factory.mktemp("short")
    train(toy.ToyRewriteEnv(length=5, horizon=8, random_start=True), SMALL, 60, 0, folder)
    return folder


def prepared(env, folder, config: WorldModelConfig = SMALL) -> _Training:
    """A training whose world model has learnt."""
    identity = {"config": config.as_dict(), "seed": 0, "metadata": {}}
    training = _Training(RealEpisodes(env, config, 0, folder / "rollouts"), config, 100, 0, folder, identity, 1e9)
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
    for name in ("reset", "step", "begin", "move", "observed"):
        monkeypatch.setattr(env, name, closed)
    training.control()
    assert training.counts.updates == SMALL.controller_updates
    with pytest.raises(AssertionError, match="was touched"):
        training.try_out()
    assert any(not torch.equal(a, b) for a, b in zip(before, training.ppo.policy.parameters(), strict=True))


def test_steps_are_shared_out_and_the_best_controller_is_kept(env, tmp_path):
    steps: list[int] = []
    episodes: list[Episode] = []
    result = train(env, SMALL, 200, 0, tmp_path, on_step=steps.append, on_episode=episodes.append)
    assert steps == list(range(1, result.env_steps + 1))
    assert 200 <= result.env_steps <= 200 + 8
    lines = curve(tmp_path)
    real = [line["real/return"] for line in lines if "real/return" in line]
    assert len(real) == 3
    counts = state(tmp_path)[1]["counts"]
    tried = episodes[counts["tried_from"] :]
    judged = tried[JUDGED - 1 :: JUDGED]
    assert len(judged) > 1
    assert not any(episode.remembered for episode in judged)
    assert real[-1] == pytest.approx(np.mean([episode.total_reward for episode in judged]))
    assert counts["best_scores"]["toy"] >= np.mean([worth(episode, math.inf) for episode in judged])
    assert any(episode.remembered for episode in tried)
    for name in ("vision/cost", "memory/nll", "held_out/reward_r2", "held_out/rule_mask_f1", "dream/return"):
        assert any(name in line for line in lines)


@pytest.mark.parametrize(
    "words",
    ["learning vision: 7 of 30", "learning memory1: 11 of 30", "learning memory: 3 of 7", "dreaming: 2 of 3", 40, 90],
    ids=str,
)
def test_a_resumed_training_equals_an_uninterrupted_one(env, straight, tmp_path, words):
    def interrupt(what: object) -> None:
        if what == words:  # a number: of the step, in an episode of the random agent or of the controller
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(env, SMALL, 120, 3, tmp_path / "cut", on_work=interrupt, on_step=interrupt, checkpoint_secs=0.0)
    train(env, SMALL, 120, 3, tmp_path / "cut", resume=True)
    assert_same_training(straight, tmp_path / "cut")


def test_heads_for_sites_that_have_learnt_on_are_gone_on_with(env, tmp_path, monkeypatch):
    """M was done before them: what was best of it holds its heads for sites as they were then."""
    monkeypatch.setattr(Learner, "judge_every", 10)
    train(env, SMALL, 120, 3, tmp_path / "straight")

    def interrupt(what: str) -> None:
        if what == "learning sites: 17 of 30":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(env, SMALL, 120, 3, tmp_path / "cut", on_work=interrupt, checkpoint_secs=0.0)
    assert state(tmp_path / "cut")[1]["learnt"]["sites"]["done"] == 10
    train(env, SMALL, 120, 3, tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "straight", tmp_path / "cut")


@pytest.mark.parametrize("patience", [1, 7, 70])
def test_what_is_learnt_is_judged_before_patience_is_over(env, tmp_path, patience):
    config = dataclasses.replace(SMALL, vision_steps=80, memory_steps=80, patience=patience, memory_patience=patience)
    untrained = _Training(RealEpisodes(env, config, 0, tmp_path), config, 100, 0, tmp_path, {}, 1e9).model.state_dict()
    training = prepared(env, tmp_path, config)
    for learner in training.learners.values():
        assert learner.best_step > 0
        assert learner.done in (learner.steps, learner.best_step + patience)
    learnt = training.model.state_dict()
    for part in ("vision", "memories.0", "memories.1", "memories.0.site_head"):
        names = [name for name, _ in training.model.named_parameters() if name.startswith(part)]
        assert any(not torch.equal(learnt[name], untrained[name]) for name in names), part


def test_what_a_later_iteration_knows_no_better_stays_as_it_was(env, tmp_path):
    """By the episodes held out then."""
    training = prepared(env, tmp_path)
    training.counts.iteration = 1
    training._make_learners()
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    for learner in training.learners.values():
        learner._learning_rate = 5.0  # nothing is learnt so
    training.learn()
    assert [learner.best_step for learner in training.learners.values()] == [0] * len(training.learners)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(("random", "later"), [(1, 0), (2, 1), (4, 9), (9, 20), (30, 40), (3, 200)])
def test_at_least_two_episodes_are_held_out_and_no_later_one_changes_sides(tmp_path, random, later):
    def episodes(number: int) -> list[Episode]:
        return [Episode(rewards=[0.0] * 10) for _ in range(number)]

    rollouts = Rollouts(tmp_path)
    rollouts.episodes = episodes(random)
    held, learnt = rollouts.split(0.1, 10 * random)
    assert min(2, random // 2) <= len(held) <= max(2, random // 4)
    rollouts.episodes = [*rollouts.episodes, *episodes(later)]
    again = rollouts.split(0.1, 10 * random)
    assert random == 1 or all(each in part for part, was in zip(again, (held, learnt), strict=True) for each in was)
    assert len(rollouts.episodes) == 1 or sum(map(len, again)) == len(rollouts.episodes)
    assert random < 3 or len(again[0]) - len(held) <= later // 11 + 1, "of later ones no larger share"


def test_some_settings_of_the_controller_leave_the_others_as_they_are():
    config = WorldModelConfig.from_dict({"controller": {"n_epochs": 3}})
    assert config.controller == dataclasses.replace(WorldModelConfig().controller, n_epochs=3)
    assert WorldModelConfig.from_dict(config.as_dict()) == config
    with pytest.raises(AgentError, match="threads is 0"):
        WorldModelConfig.from_dict({"threads": 0})


def test_an_agent_that_was_never_told_of_places_acts_without(env, tmp_path):
    controller = dataclasses.replace(SMALL.controller, informed_share=0.0)
    result = train(env, dataclasses.replace(SMALL, controller=controller), 60, 0, tmp_path)
    agent = load_agent(result.checkpoint)
    observation, _ = env.reset(seed=0)
    agent.begin()
    seen = agent.policy.compact(observation)
    assert (seen.site_known != Places().known(seen.site_places)).any(), "the training knew some"
    (looked,) = agent.policy._see([seen])
    np.testing.assert_array_equal(looked.site_known, Places().known(seen.site_places))


def test_heads_for_sites_with_nothing_to_learn_stay_as_m_learnt_them(env, tmp_path, monkeypatch):
    """As where all episodes held out are of one step."""
    monkeypatch.setattr(SitesLearner, "prepare", lambda self, learnt, held: setattr(self, "steps", self.done))
    training = prepared(env, tmp_path)
    best = training.learners["memory"].best
    for name, value in training.model.memory.state_dict().items():
        assert torch.equal(value, best[name]), name


@pytest.mark.usefixtures("copied_workers")
def test_random_episodes_of_workers_make_the_same_training(env, straight, tmp_path):
    toy = {"length": 5, "horizon": 8, "random_start": True}
    train(env, SMALL, 120, 3, tmp_path / "two", workers=Workers("toy_env:ToyRewriteEnv", toy, 2))
    assert_same_training(straight, tmp_path / "two")


def test_nothing_is_learnt_again_from_what_is_met_since(env, tmp_path, monkeypatch):
    """Heads for sites that had nothing to learn are in no checkpoint: with a longer episode, met before a kill, they
    would have."""
    training = prepared(env, tmp_path)
    training.control()
    monkeypatch.setattr(SitesLearner, "prepare", lambda *_: pytest.fail("it learns again"))
    again = _Training(training.real, SMALL, 100, 0, tmp_path, training._identity, 1e9)
    again.begin(resume=True)
    again.log = training.log
    again.learners["sites"].done = 0  # as those that were never judged
    again.learn()
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_what_cannot_be_is_told(env, short, tmp_path):
    shutil.copytree(short, tmp_path / "b")
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


def test_a_loaded_agent_acts_as_the_best_controller(env, short):
    agent, again = (load_agent(short / "agent.safetensors", space) for space in (env.observation_space, None))
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


def test_an_agent_knows_its_trainings_places_and_what_it_tried_until_it_begins_afresh(env, short):
    rollouts = Rollouts(short / "rollouts")
    rollouts.load()
    observation, _ = env.reset(seed=3)
    agent, trained = load_agent(short / "agent.safetensors"), known_of(rollouts.episodes)

    def known(one) -> np.ndarray:
        one.begin()
        return one.policy.compact(observation).site_known

    before = known(agent)
    assert before.any()
    assert np.array_equal(before, trained.known(agent.policy.compact(observation).site_places))
    agent.tried([observation, observation], np.array([[1, 2], [3, 0]]), [-50.0, 0.0])
    assert not np.array_equal(known(agent), before)
    assert np.array_equal(known(agent.fresh()), before)


def test_episodes_are_kept_with_what_was_known_before_them(short):
    """So that M cannot read off an action's place what the action itself saved."""
    rollouts, places = Rollouts(short / "rollouts"), Places()
    rollouts.load()
    for episode in rollouts.episodes:
        for kept in episode.observations:
            assert np.array_equal(kept.site_known, places.known(kept.site_places))
        places.learn([episode])


def test_controllers_are_compared_by_savings_on_models_that_both_were_judged_on(env, tmp_path, monkeypatch):
    """Whatever the environment pays, which dreams do not: models gain more and less, and not all have their turn."""
    training = prepared(env, tmp_path)

    def best_after(saved: dict[str, float]) -> dict[str, torch.Tensor]:
        episodes = training.real.rollouts.episodes
        training.counts.tried_from = len(episodes)
        judged = [
            Episode(rewards=[-each], run_secs=[2.0, 2.0 - each / 50], summary={"model": model})
            for model, each in saved.items()
        ]
        between = [Episode(rewards=[0.0], run_secs=[2.0, 0.1])] * (JUDGED - 1)
        monkeypatch.setattr(
            training.real, "collect_until", lambda *_: episodes.extend(e for one in judged for e in (*between, one))
        )
        training.try_out()
        return training.best

    first = best_after({"a": 10.0, "b": 0.25})
    assert best_after({"a": 9.0}) is first
    assert training.counts.best_scores == {"a": pytest.approx(10.0), "b": pytest.approx(0.25)}
    assert best_after({"a": 9.0, "b": 1.0}) is first
    second = best_after({"a": 10.5, "b": 0.0})
    assert second is not first
    assert best_after({}) is second
    assert best_after({"a": 10.5, "b": 1.0}) is not second


def test_in_use_m_foresees_by_what_was_known_before_the_episode(env, short):
    """As it learnt to; the controller is told what the episode's own steps saved, as it was."""
    agent = load_agent(short / "agent.safetensors")
    assert isinstance(agent, WorldAgent)
    observation, _ = env.reset(seed=3)
    agent.begin()
    kept = agent.policy.compact(observation)
    place = np.argwhere(observation["location_mask"])[0]
    (before,) = agent.policy._see([kept])
    agent.tried([observation], [place], [-50.0])
    np.testing.assert_array_equal(agent.policy.compact(observation).site_known, kept.site_known)
    (after,) = agent.policy._see([kept])
    assert (after.site_known != before.site_known).any()
    agent.begin()
    assert (agent.policy.compact(observation).site_known != kept.site_known).any()


def test_of_several_models_controllers_are_judged_on_each_in_turn(tmp_path):
    """Whatever is drawn: else the best would be one that was judged where much is to be gained."""
    for seed in range(3):
        real = RealEpisodes(TwoModels(length=4, horizon=8), SMALL, seed, tmp_path / str(seed))
        real.begin()
        real.collect_until(100, 0, UniformPolicy(real.sizes))
        judged = real.rollouts.episodes[JUDGED - 1 :: JUDGED]
        assert len(judged) > 3
        assert [each.summary["model"] for each in judged] == [("poor", "rich")[n % 2] for n in range(len(judged))]
        assert all(each.likeliest and not each.remembered for each in judged)
    returns = [("a", 1.0), ("b", 5.0), ("a", 3.0)]
    assert mean_return([Episode(rewards=[paid], summary={"model": model}) for model, paid in returns]) == 3.5


def test_episodes_begin_at_graphs_of_the_same_iteration(env, tmp_path, monkeypatch):
    """Each is cheaper than those before it here; those that judge begin at the start, and act as is likeliest."""
    config = dataclasses.replace(SMALL, remembered=1, remembered_share=0.9)
    real = RealEpisodes(env, config, 0, tmp_path / "rollouts")
    real.begin()
    began, collect = [], real_episodes.collect_episode

    def collected(environment, policy, rng, on_step, opening):
        began.append(opening)
        episode, number = collect(environment, policy, rng, on_step), len(began)
        return dataclasses.replace(episode, summary={"model": "m", "run_secs": 1 / number, "plan": {"number": number}})

    monkeypatch.setattr(real_episodes, "collect_episode", collected)
    policy = UniformPolicy(real.sizes)
    real.collect_until(100, 0, policy)
    assert set(began[JUDGED - 1 :: JUDGED]) == {Opening(None, likeliest=True)}
    kinds = [(each.likeliest, each.gathers, (each.options or {}).get("patience")) for each in began]
    assert kinds[:8] == 2 * [(True, True, 10), (False, False, SHORT), (True, True, 10), (True, False, 20)]
    starts = {number: each.start for number, each in enumerate(began) if each.start is not None}
    remembered = {number: start["plan"]["number"] for number, start in starts.items()}
    assert len(remembered) > 2
    assert all(number == found for number, found in remembered.items())


@pytest.mark.timeout(900)
def test_the_toy_is_solved_in_dreams(toy, tmp_path):
    """Greedy reaches 6 of 30: fusing pays only after two moves that cost. Of sixteen plans sampled, as `optimize` asks
    for them, one is the optimum; of sixteen random ones that is so once in a hundred times, and they have 2 on average.
    """
    env = toy.ToyRewriteEnv(length=6, horizon=20)
    env.reset(seed=0)
    best, greedy = toy.optimum(env.state), toy.greedy(env.state)
    config = WorldModelConfig(
        hidden=32, memory=128, vision_steps=600, memory_steps=400, members=2, iterations=2,
        controller=PPOConfig(minibatch_size=256, learning_rate=2e-3, hidden=32, informed_share=0.5),
    )  # fmt: skip

    def solved(seed: int) -> bool:
        agent = load_agent(train(env, config, 1500, seed, tmp_path / str(seed)).checkpoint)
        rng, returns = np.random.default_rng(seed), []
        for number in range(16):
            observation, _ = env.reset(seed=number)
            agent.begin()
            total, over = 0.0, False
            while not over:
                action = agent.act(observation, deterministic=False, rng=rng)
                observation, reward, terminated, truncated, _ = env.step(action)
                total, over = total + reward, terminated or truncated
            returns.append(total)
        return max(returns) == best and float(np.mean(returns)) > 1.5 * greedy

    assert most_of(5, solved)
