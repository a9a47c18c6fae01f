"""Episodes collected by the actors of a Ray cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray_cluster import quiet, ray_cluster
from toy_env import ToyRewriteEnv
from training_checks import assert_same_training

from rlflow_tvm.agents.collect import episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError

CONFIG = PPOConfig(hidden=16, rounds=1, steps_per_update=40, minibatch_size=16, n_epochs=2)
TOY = {"length": 5, "horizon": 4, "random_start": True}
STEPS, SEED = 120, 3


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch, ray_cluster() as address:
        for name, value in quiet().items():
            patch.setenv(name, value)
        yield address


@pytest.fixture(scope="module")
def serial(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serial")
    train(ToyRewriteEnv(**TOY), CONFIG, STEPS, SEED, folder)
    return folder


def train_on(address, out, count=None, factory="toy_env:ToyRewriteEnv", **options):
    workers = Workers(factory, {**TOY, **options}, count, ray=address)
    return train(ToyRewriteEnv(**TOY), CONFIG, STEPS, SEED, out, workers=workers)


def test_a_cluster_gives_the_training_of_one_process(address, serial, tmp_path):
    import ray

    (tmp_path / "pids").mkdir()
    options = {"factory": "training_checks:Announced", "folder": str(tmp_path / "pids"), "company": 2}
    train_on(address, tmp_path / "out", **options)  # as many workers as there are processors
    assert_same_training(serial, tmp_path / "out")
    files = list((tmp_path / "pids").iterdir())
    assert len(files) == 2
    assert all(file.read_text() for file in files)
    assert not ray.is_initialized()


def test_a_killed_actors_episode_is_begun_again(address, serial, tmp_path):
    (tmp_path / "pids").mkdir()
    fatal = int(episode_rng(SEED, 9).integers(2**31))
    options = {"factory": "training_checks:Mortal", "folder": str(tmp_path / "pids"), "fatal": fatal, "times": 2}
    result = train_on(address, tmp_path / "out", 2, **options)
    assert (tmp_path / "pids" / "deaths").read_text() == "xx"
    assert_same_training(serial, tmp_path / "out")
    assert result.env_steps >= STEPS


def test_errors_are_one_line(address, tmp_path):
    with pytest.raises(AgentError, match=r"2 processors cannot take 3 workers; add machines") as caught:
        train_on(address, tmp_path / "a", 3)
    assert "\n" not in str(caught.value)
    with pytest.raises(AgentError, match=r"no environment with") as caught:
        train_on(address, tmp_path / "b", 1, factory="training_checks:refuses")
    assert "\n" not in str(caught.value)


def test_without_ray_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AgentError, match=r"pip install 'rlflow_tvm\[ray\]'"):
        train_on("auto", tmp_path)
