"""The training loop: exact resume, refusals, callbacks, logs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_checks import assert_same_training, curve, make_ppo, state

from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError
from rlflow_tvm.jsonl import read_lines

CONFIG = PPOConfig(hidden=16, rounds=1, steps_per_update=40, minibatch_size=16, n_epochs=2)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def env(toy):
    return toy.ToyRewriteEnv(length=5, horizon=4, random_start=True)


@pytest.fixture(scope="module")
def uninterrupted(toy, tmp_path_factory):
    """A training of six updates or so, and where it was after each."""
    folder = tmp_path_factory.mktemp("training") / "straight"
    train(toy.ToyRewriteEnv(length=5, horizon=4, random_start=True), CONFIG, 240, seed=3, out_dir=folder)
    return folder


@pytest.fixture
def straight(uninterrupted, tmp_path):
    """Its folder, to do with as one likes."""
    return shutil.copytree(uninterrupted, tmp_path / "straight")


@pytest.mark.parametrize("updates", [1, 3])
def test_a_resumed_training_equals_an_uninterrupted_one(toy, straight, tmp_path, updates):
    folder = tmp_path / "resumed"
    stop_at = curve(straight)[updates - 1]["env_steps"]
    for steps, resume in ((stop_at, False), (240, True)):
        torch.manual_seed(steps)  # whatever the process did before must not matter
        env = toy.ToyRewriteEnv(length=5, horizon=4, random_start=True)
        result = train(env, CONFIG, steps, seed=3, out_dir=folder, resume=resume)
    assert result.updates == len(curve(straight)) > updates
    assert_same_training(straight, folder)


def test_resuming_from_an_older_checkpoint_writes_no_line_twice(env, straight, tmp_path):
    folder = tmp_path / "late"
    stop_at = curve(straight)[1]["env_steps"]
    train(env, CONFIG, stop_at, seed=3, out_dir=folder)
    old = (folder / "agent.safetensors").read_bytes()
    train(env, CONFIG, 200, seed=3, out_dir=folder, resume=True)
    # as after a kill: the checkpoint two updates behind the log, and the log's last line cut in half
    (folder / "agent.safetensors").write_bytes(old)
    with (folder / "progress.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"update": 6, "env_st')
    train(env, CONFIG, 240, seed=3, out_dir=folder, resume=True)
    assert [line["update"] for line in curve(folder)] == list(range(1, len(curve(straight)) + 1))
    assert_same_training(straight, folder)


def test_resuming_a_finished_training_changes_nothing(env, straight, tmp_path):
    before = state(straight), curve(straight)
    result = train(env, CONFIG, 240, seed=3, out_dir=straight, resume=True)
    assert result.env_steps == before[1][-1]["env_steps"]
    assert curve(straight) == before[1]
    assert state(straight)[1] == before[0][1]


CHILD = """
import sys
sys.path[:0] = sys.argv[2:4]
from toy_env import ToyRewriteEnv
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.training import train

config = PPOConfig(hidden=16, rounds=1, steps_per_update=40, minibatch_size=16, n_epochs=2)
env = ToyRewriteEnv(length=5, horizon=4, random_start=True)


def step_done(steps):
    if steps == 130:
        print("there", flush=True)
        sys.stdin.read()  # until killed


train(env, config, 240, 3, sys.argv[1], on_step=step_done, checkpoint_secs=0.0)
"""


def test_a_training_killed_with_9_resumes_to_the_same_end(env, straight, tmp_path):
    folder = tmp_path / "killed"
    arguments = [sys.executable, "-c", CHILD, str(folder), str(REPOSITORY), str(Path(__file__).parent)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        child.send_signal(signal.SIGKILL)
    assert 80 <= state(folder)[1]["counts"]["env_steps"] <= 130
    train(env, CONFIG, 240, seed=3, out_dir=folder, resume=True)
    assert_same_training(straight, folder)


def test_a_training_killed_in_its_first_update_can_be_resumed(toy, env, straight, tmp_path):
    folder = tmp_path / "early"

    def interrupt(steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(env, CONFIG, 240, seed=3, out_dir=folder, on_step=interrupt)
    train(env, CONFIG, 240, seed=3, out_dir=folder, resume=True)
    assert_same_training(straight, folder)


def refusal(*arguments, **options):
    """The one-line message with which `train` refuses."""
    with pytest.raises(AgentError) as caught:
        train(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ambiguous_folders_are_refused(env, straight, tmp_path):
    assert "resume it, or give another" in refusal(env, CONFIG, 300, 3, straight)
    assert "start without resume" in refusal(env, CONFIG, 300, 3, tmp_path / "none", resume=True)
    (straight / "agent.safetensors").unlink()
    assert "progress.jsonl" in refusal(env, CONFIG, 300, 3, straight)
    assert "start without resume" in refusal(env, CONFIG, 300, 3, straight, resume=True)
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refusal(env, CONFIG, 300, 3, file)
    assert "is a file" in refusal(env, CONFIG, 300, 3, file / "below")
    assert "total_steps 0" in refusal(env, CONFIG, 0, 3, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("left", ["rollouts/000000.safetensors", "best.jsonl", "end_to_end.jsonl"])
def test_what_an_older_training_left_is_not_mixed_with_a_new_one(env, tmp_path, left):
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}\n")
    told = refusal(env, CONFIG, 40, 3, tmp_path)
    assert f"({left.partition('/')[0]})" in told
    assert "give another" in told
    assert not (tmp_path / "agent.safetensors").exists()


def test_an_empty_folder_for_episodes_is_no_training(env, tmp_path):
    (tmp_path / "rollouts").mkdir()
    assert train(env, CONFIG, 1, 3, tmp_path).env_steps


def test_resuming_with_anything_else_names_what_differs(toy, env, straight):
    other = dataclasses.replace(CONFIG, learning_rate=0.1, gamma=0.5)
    message = refusal(env, other, 300, 3, straight, resume=True)
    assert "gamma was 0.99, is 0.5" in message
    assert "learning_rate was 0.001, is 0.1" in message
    assert "minibatch_size" not in message
    assert "seed was 3, is 4" in refusal(env, CONFIG, 300, 4, straight, resume=True)
    assert "metadata rules was None, is" in refusal(
        env, CONFIG, 300, 3, straight, resume=True, metadata={"rules": ["a"]}
    )
    small = toy.ToyRewriteEnv(length=3, num_locations=3)
    assert "num_locations 8 there, 3 here" in refusal(small, CONFIG, 300, 3, straight, resume=True)


def test_callbacks_see_every_step_and_every_episode_at_its_end(toy, env, tmp_path):
    steps, episodes = [], []

    def episode_done(episode):
        # before the next reset: the environment still stands where the episode ended
        assert episode.run_secs[-1] == pytest.approx(toy.cost(env.state) * 1e-3)
        episodes.append(episode)

    result = train(env, CONFIG, 100, seed=0, out_dir=tmp_path / "out", on_step=steps.append, on_episode=episode_done)
    assert steps == list(range(1, result.env_steps + 1))
    assert len(episodes) == result.episodes
    assert sum(len(episode) for episode in episodes) == result.env_steps >= 100
    assert result.best_return == max(episode.total_reward for episode in episodes)
    assert result.best_run_secs == min(min(episode.run_secs) for episode in episodes)
    assert all(episode.terminated or episode.truncated for episode in episodes)
    assert not all(episode.terminated for episode in episodes)


def test_the_log_and_tensorboard_tell_the_same(env, straight, tmp_path):
    lines = read_lines(straight / "progress.jsonl")
    wanted = {"update", "env_steps", "episodes", "mean_return", "best_return", "best_run_secs", "policy_loss"}
    assert wanted | {"value_loss", "entropy", "approx_kl", "wall_secs"} <= lines[0].keys()
    assert lines[0]["env_steps"] >= CONFIG.steps_per_update
    train(env, CONFIG, 300, seed=3, out_dir=straight, resume=True)
    lines = read_lines(straight / "progress.jsonl")
    events = EventAccumulator(str(straight))
    events.Reload()
    scalars = events.Scalars("mean_return")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [
        (line["env_steps"], pytest.approx(line["mean_return"], rel=1e-6)) for line in lines
    ]


def test_the_callers_torch_is_left_as_it_was(env, tmp_path):
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(CONFIG.threads + 1)
    try:
        random = torch.get_rng_state()
        train(env, CONFIG, 1, 0, tmp_path / "out", on_step=lambda steps: seen.append(torch.get_num_threads()))
        assert set(seen) == {CONFIG.threads}
        assert torch.get_num_threads() == CONFIG.threads + 1
        assert torch.equal(torch.get_rng_state(), random)
    finally:
        torch.set_num_threads(before)


def test_metadata_comes_back_with_the_agent(env, tmp_path):
    metadata = {"rules": ("paint", "heat", "fuse"), "models": ["toy"]}
    result = train(env, CONFIG, 1, 0, tmp_path / "out", metadata=metadata)
    assert Agent.load(result.checkpoint).metadata == {"rules": ["paint", "heat", "fuse"], "models": ["toy"]}
    train(env, CONFIG, 60, 0, tmp_path / "out", metadata=metadata, resume=True)


def test_a_truncated_episode_ends_with_the_value_of_its_last_observation(toy):
    sizes = ObservationSizes.from_space(toy.ToyRewriteEnv().observation_space)
    with torch.random.fork_rng(devices=[]):
        learner = make_ppo(sizes, CONFIG, seed=0)
    ends = set()
    for number in range(150):
        env = toy.ToyRewriteEnv(length=6, horizon=3)
        episode = collect_episode(env, learner.policy, episode_rng(0, number))
        ends.add(episode.truncated)
        assert episode.terminated != episode.truncated
        seen = learner.policy.compact(env.observed())  # with what the episode itself has told of places
        expected = learner.policy.value(seen) if episode.truncated else 0.0
        assert episode.bootstrap == expected
        replay = toy.ToyRewriteEnv(length=6, horizon=3)
        replay.reset()
        assert len(episode.rules) == len(episode)
        for kept, site, reward in zip(episode.observations, episode.sites, episode.rewards, strict=True):
            _, again, *_ = replay.step((kept.site_rules[site], kept.site_locations[site]))
            assert again == reward
        assert replay.state == env.state
    assert ends == {True, False}


def test_failed_measurements_are_not_the_best_time(toy, tmp_path):
    class Failing(toy.ToyRewriteEnv):
        def step(self, action):
            *rest, info = super().step(action)
            return (*rest, {**info, "run_secs": np.inf})

        def reset(self, **options):
            return super().reset(**options)[0], {}

    result = train(Failing(length=3), CONFIG, 1, 0, tmp_path / "out")
    assert result.best_run_secs is None
    line = json.loads((tmp_path / "out" / "progress.jsonl").read_text(encoding="utf-8"))
    assert line["best_run_secs"] is None
    assert sorted(os.listdir(tmp_path / "out"))[0] == "agent.safetensors"
