"""Remembered graphs: the cheapest of each model, and episodes that begin there."""

from __future__ import annotations

import dataclasses

import pytest
from training_checks import TwoModels, assert_same_training

from rlflow_tvm.agents.archive import Archive
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError
from rlflow_tvm.jsonl import read_lines

CONFIG = PPOConfig(hidden=8, rounds=1, steps_per_update=40, minibatch_size=32, n_epochs=1)


def told(model: str, run_secs: float, plan: object) -> Episode:
    return Episode(summary={"model": model, "run_secs": run_secs, "plan": plan, "rows": [1, 2]})


def test_the_cheapest_of_each_model_are_kept_once_each():
    archive = Archive(2, 0.5)
    for secs, plan in ((5.0, "a"), (3.0, "b"), (3.0, "c"), (4.0, "d"), (1.0, "e")):
        archive.add(told("one", secs, plan))
    archive.add(told("two", 9.0, "f"))
    archive.add(Episode())  # an environment that tells nothing
    archive.add(told("two", float("inf"), "g"))  # a graph whose kernels fail
    archive.add(told("two", 0.0, "j"))  # one that is free
    assert [each["plan"] for each in archive.kept["one"]] == ["e", "b"]
    assert archive.kept["two"] == [{"model": "two", "run_secs": 9.0, "plan": "f"}]
    archive.add(Episode(summary={"model": "two", "run_secs": 8.0, "plan": "h", "step": 0}))  # its own beginning
    archive.add(Episode(summary={"model": "two", "run_secs": 8.5, "plan": "i", "step": 1}))
    assert [each["plan"] for each in archive.kept["two"]] == ["i", "f"]


def test_one_graph_of_two_prices_is_kept_once():
    """As machines of a cluster differ."""
    archive = Archive(3, 0.5)
    for secs, end in ((5.0, 1), (4.0, 2), (4.5, 1), (4.2, 2), (3.0, 3), (4.6, 1)):
        archive.add(told("one", secs, {"end_hash": end}))
    assert [(each["run_secs"], each["plan"]["end_hash"]) for each in archive.kept["one"]] == [(3, 3), (4, 2), (4.5, 1)]


def test_the_cheapest_may_be_favoured():
    archive = Archive(3, 1.0, favour=0.5)
    for number in range(3):
        archive.add(told("one", 1.0 + number, number))
    starts = [archive.start(0, number)["plan"] for number in range(1000)]
    assert [starts.count(number) / 1000 for number in range(3)] == pytest.approx([0.5, 0.25, 0.25], abs=0.05)


def test_a_share_of_the_episodes_begins_there_the_same_ones_each_time():
    archive = Archive(3, 0.3)
    assert [archive.start(0, number) for number in range(50)] == [None] * 50
    for number in range(6):
        archive.add(told("ab"[number % 2], 1.0 + number, number))
    starts = [archive.start(0, number) for number in range(3000)]
    assert (
        starts
        == [archive.start(0, number) for number in range(3000)]
        != [archive.start(1, number) for number in range(3000)]
    )
    share = {plan: sum(each is not None and each["plan"] == plan for each in starts) / 3000 for plan in range(6)}
    assert all(abs(each - 0.05) < 0.015 for each in share.values())
    archive.kept["c"] = []  # of which nothing is found
    began = [each for number in range(3000) if (each := archive.start(0, number)) is not None]
    share = [sum(each["model"] == model and "plan" in each for each in began) / 3000 for model in "abc"]
    assert share == pytest.approx([0.1, 0.1, 0.0], abs=0.02)
    assert began.count({"model": "c"}) / 3000 == pytest.approx(0.1, abs=0.02), "it has as many, from the beginning"
    never = Archive(3, 0.0)
    never.add(told("a", 1.0, 1))
    assert never.kept == {}


def test_an_episode_goes_on_from_where_it_is_told(toy):
    env = toy.ToyRewriteEnv(length=6)
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    start = {"model": "toy", "run_secs": 0.0, "plan": [[toy.HOT, toy.HOT, toy.RED], [1, 0]]}
    episode = collect_episode(env, policy, episode_rng(0, 0), opening=Opening(start))
    assert (episode.remembered, len(episode.observations[0].nodes)) == (True, 3)
    assert not collect_episode(env, policy, episode_rng(0, 0)).remembered


def test_training_begins_episodes_at_the_cheapest_graphs_and_tells_returns_of_the_others(toy, tmp_path):
    """An episode that begins with nothing left to gain says nothing about the policy."""
    env, seen = toy.ToyRewriteEnv(length=6, horizon=8), []
    config = dataclasses.replace(CONFIG, remembered_share=0.9, remembered=2)
    result = train(env, config, 400, 0, tmp_path, on_episode=seen.append)
    assert not seen[0].remembered
    remembered = [episode for episode in seen if episode.remembered]
    assert len(remembered) > len(seen) / 2
    before = read_lines(tmp_path / "progress.jsonl")[-2]["episodes"]  # all of an update's begin at the same ones
    best = min(each.summary["run_secs"] for each in seen[:before])
    assert any(each.run_secs[0] == pytest.approx(best) for each in seen[before:] if each.remembered)
    assert result.best_return == max(each.total_reward for each in seen if not each.remembered)


def test_a_model_of_which_nothing_is_found_has_its_part_of_the_episodes(tmp_path):
    """They begin at no remembered graph; and a resumed training has the same."""

    env, config, seen = TwoModels(length=4), dataclasses.replace(CONFIG, remembered_share=0.75), []
    train(env, config, 800, 0, tmp_path / "straight", on_episode=seen.append)
    poor = [episode for episode in seen if episode.summary["model"] == "poor"]
    assert len(poor) / len(seen) == pytest.approx(0.5, abs=0.08)
    assert not any(episode.remembered for episode in poor)
    assert any(episode.remembered for episode in seen)
    train(env, config, 400, 0, tmp_path / "cut")
    train(env, config, 800, 0, tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "straight", tmp_path / "cut")


@pytest.mark.parametrize(("name", "value"), [("remembered", 0), ("remembered_share", 1.0), ("remembered_share", -0.1)])
def test_impossible_shares_are_refused(name, value):
    with pytest.raises(AgentError, match=name):
        dataclasses.replace(CONFIG, **{name: value})


def test_a_training_may_begin_at_a_graph_that_it_is_given(toy, tmp_path):
    """Until it has met cheaper ones; a resumed one has it from the checkpoint."""
    given = {"model": "toy", "run_secs": 1e-3, "plan": [[toy.HOT, toy.HOT, toy.RED], [1, 0]]}
    config, seen = dataclasses.replace(CONFIG, remembered_share=0.5), []
    env = toy.ToyRewriteEnv(length=6, horizon=8)
    train(env, config, 80, 1, tmp_path / "straight", on_episode=seen.append, starts=[given])
    begun = [episode for episode in seen if episode.remembered]
    assert begun
    assert any(len(episode.observations[0].nodes) == 3 for episode in begun)
    train(env, config, 40, 1, tmp_path / "cut", starts=[given])
    train(env, config, 80, 1, tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "straight", tmp_path / "cut")
