"""Episodes collected by worker processes: the same training, whatever their number and whatever befalls them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_env import ToyRewriteEnv
from training_checks import assert_same_training

from rlflow_tvm.agents.collect import Quota, collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.messages import pack, pack_episode, unpack, unpack_episode
from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.policy import TwoStepPolicy
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.ppo import policy_tensors
from rlflow_tvm.agents.training import train
from rlflow_tvm.agents.worker import RolloutWorker
from rlflow_tvm.errors import AgentError

CONFIG = PPOConfig(hidden=16, rounds=1, steps_per_update=40, minibatch_size=16, n_epochs=2)
TOY = {"length": 5, "horizon": 4, "random_start": True}
STEPS, SEED = 160, 3


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> Path:
    """The training in one process that all others have to equal."""
    folder = tmp_path_factory.mktemp("serial")
    train(ToyRewriteEnv(**TOY), CONFIG, STEPS, SEED, folder)
    return folder


def with_workers(out, count, factory="toy_env:ToyRewriteEnv", steps=STEPS, config=CONFIG, resume=False, **options):
    """The same with workers: (its result, the steps at each call of on_step, its episodes)."""
    workers = Workers(factory, {**TOY, **options}, count)
    steps_seen, episodes = [], []
    result = train(
        ToyRewriteEnv(**TOY), config, steps, SEED, out,
        resume=resume, workers=workers, on_step=steps_seen.append, on_episode=episodes.append,
    )  # fmt: skip
    return result, steps_seen, episodes


def reset_seed(number: int) -> int:
    """What episode `number` begins with."""
    return int(episode_rng(SEED, number).integers(2**31))


def resets(folder: Path) -> list[int]:
    """The seeds of all resets in all workers that announced themselves in `folder`."""
    return [int(line) for file in folder.iterdir() if file.name.isdigit() for line in file.read_text().splitlines()]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_workers_gives_the_training_of_one_process(serial, tmp_path, count, request):
    if count != 2:  # which are started as a user's are
        request.getfixturevalue("copied_workers")
    (tmp_path / "pids").mkdir()
    options = {"factory": "training_checks:Announced", "folder": str(tmp_path / "pids"), "company": count}
    result, steps, episodes = with_workers(tmp_path / "out", count, **options)
    assert_same_training(serial, tmp_path / "out")
    files = list((tmp_path / "pids").iterdir())
    assert len(files) == count
    assert all(file.read_text() for file in files)  # nobody was idle
    assert len(set(resets(tmp_path / "pids"))) == result.episodes  # no two alike
    # every episode once, none for nothing, and told in the order of their numbers
    assert sorted(resets(tmp_path / "pids")) == sorted(reset_seed(number) for number in range(result.episodes))
    assert len(episodes) == result.episodes == len(steps)
    assert steps == sorted(steps)
    assert steps[-1] == result.env_steps == sum(map(len, episodes))


@pytest.mark.usefixtures("copied_workers")
def test_a_training_goes_on_with_another_number_of_workers(serial, tmp_path):
    folder = tmp_path / "out"
    with_workers(folder, 2, steps=60)
    train(ToyRewriteEnv(**TOY), CONFIG, 100, SEED, folder, resume=True)
    with_workers(folder, 1, resume=True)
    assert_same_training(serial, folder)


@pytest.mark.usefixtures("copied_workers")
@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_workers_episode_is_begun_again(serial, tmp_path, times):
    (tmp_path / "pids").mkdir()
    fatal = reset_seed(17)
    options = {"factory": "training_checks:Mortal", "folder": str(tmp_path / "pids"), "fatal": fatal, "times": times}
    result, _, episodes = with_workers(tmp_path / "out", 2, **options)
    assert_same_training(serial, tmp_path / "out")
    assert (tmp_path / "pids" / "deaths").read_text() == "x" * times
    expected = [reset_seed(number) for number in range(result.episodes)] + [fatal] * times
    assert sorted(resets(tmp_path / "pids")) == sorted(expected)
    assert len(episodes) == result.episodes


def refusal(out, count=1, **options) -> str:
    """The one-line message with which a training with workers ends."""
    with pytest.raises(AgentError) as caught:
        with_workers(out, count, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("copied_workers")
def test_an_episode_that_kills_three_workers_ends_the_training(tmp_path):
    (tmp_path / "pids").mkdir()
    options = {"folder": str(tmp_path / "pids"), "fatal": reset_seed(2), "times": 9}
    message = refusal(tmp_path / "out", 2, factory="training_checks:Mortal", **options)
    assert "3 died at episode 2" in message
    assert "killed by SIGKILL" in message
    assert (tmp_path / "pids" / "deaths").read_text() == "xxx"
    assert_gone(tmp_path / "pids")


@pytest.mark.usefixtures("copied_workers")
def test_what_goes_wrong_in_a_worker_is_told(tmp_path):
    assert "no environment with" in refusal(tmp_path / "a", factory="training_checks:refuses")
    assert "factory 'training_checks:absent'" in refusal(tmp_path / "b", factory="training_checks:absent")
    assert "factory 'nowhere:absent'" in refusal(tmp_path / "c", factory="nowhere:absent")
    assert "num_locations=3" in refusal(tmp_path / "d", num_locations=3)
    message = refusal(tmp_path / "e", factory="training_checks:ends")
    assert "3 died while starting" in message
    assert "exit code 7, no room for me" in message
    with pytest.raises(RuntimeError, match="LookupError: no such thing"):
        with_workers(tmp_path / "f", 1, factory="training_checks:Faulty")


def test_a_worker_that_fails_gives_back_what_its_environment_holds(monkeypatch):
    """The training may wait for it before it hears of the failure."""
    closed = []

    class Holding(ToyRewriteEnv):
        def step(self, action):
            raise RuntimeError("no such thing")

        def close(self):
            closed.append(True)

    monkeypatch.setattr("rlflow_tvm.agents.worker.make_env", lambda *_: Holding())
    worker = RolloutWorker()
    start = {"op": "start", "factory": "a:b", "arguments": {}, "config": dataclasses.asdict(CONFIG), "seed": 0}
    assert "sizes" in unpack(worker.handle(pack({**start, "policy": "ppo"})))[0]
    assert worker.handle(pack({"op": "load"}, policy_tensors(worker._policy))) == b""
    episode = pack({"op": "episode", "number": 0, "opening": dataclasses.asdict(Opening())})
    assert "no such thing" in unpack(worker.handle(episode))[0]["bug"]
    assert closed == [True]


def test_impossible_numbers_of_workers_are_refused():
    with pytest.raises(AgentError, match="give at least 1"):
        Workers("a:b", {}, 0)
    with pytest.raises(AgentError, match="say how many"):
        Workers("a:b", {}, None)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_gone(folder: Path) -> None:
    """Wait until every worker announced in `folder` has ended; the test's time limit says when that has failed."""
    pids = [int(file.name) for file in folder.iterdir() if file.name.isdigit()]
    assert pids
    while not all(map(gone, pids)):
        time.sleep(0.05)


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it starts in the background
from toy_env import ToyRewriteEnv
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.training import train

options = {"length": 6, "horizon": 20, "random_start": True}
workers = Workers("training_checks:Announced", {**options, "folder": sys.argv[2], "company": 2}, 2)
config = PPOConfig(hidden=16, rounds=1, steps_per_update=4000)
train(ToyRewriteEnv(**options), config, 10**6, 0, sys.argv[1], workers=workers, on_episode=lambda e: print(flush=True))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_no_worker_outlives_its_training(tmp_path, number):
    (tmp_path / "pids").mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "out"), str(tmp_path / "pids")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        for _ in range(6):
            assert parent.stdout.readline() == "\n"
        parent.send_signal(number)
        parent.communicate()
        assert parent.returncode != 0
    assert len(list((tmp_path / "pids").iterdir())) == 2
    assert_gone(tmp_path / "pids")


@given(st.integers(1, 300), st.none() | st.integers(1, 60), st.lists(st.integers(1, 60), min_size=300, max_size=300))
def test_an_update_takes_all_episodes_that_were_begun_and_not_many_too_many(steps, longest, lengths):
    quota = Quota(steps, longest)
    planned = [quota.planned]
    while quota.open:
        quota.add(lengths[quota.taken])
        planned.append(quota.planned)
    assert planned == sorted(planned)
    assert quota.taken == quota.planned >= 1
    total = sum(lengths[: quota.taken])
    assert total >= steps
    if longest is not None and max(lengths[: quota.taken]) <= longest:  # none was begun for nothing
        assert total - lengths[quota.taken - 1] < steps
    if longest is None:  # begun before anything is known: never more than twice the episodes there are
        assert all(ahead <= 2 * max(1, there) for there, ahead in enumerate(planned))
    alike = Quota(steps, 7)
    assert alike.planned == max(1, steps // 7)
    while alike.open:
        alike.add(7)
    assert alike.taken == -(-steps // 7)


def test_messages_keep_every_bit():
    env = ToyRewriteEnv(**TOY)
    toy_policy = TwoStepPolicy(ObservationSizes.from_space(env.observation_space), 16, 1)
    for number in range(20):
        episode = collect_episode(env, toy_policy, episode_rng(1, number))
        episode.summary = {"plan": ["a", 1, 0.1, None]}
        again = unpack_episode(pack_episode(episode), CompactObservation)
        for name, value in vars(episode).items():
            if name != "observations":
                assert vars(again)[name] == value
        for one, other in zip(episode.observations, again.observations, strict=True):
            for field in dataclasses.fields(one):
                name, array = field.name, getattr(one, field.name)
                assert getattr(other, name).dtype == array.dtype
                np.testing.assert_array_equal(getattr(other, name), array)
