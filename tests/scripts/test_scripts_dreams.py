"""Scripts that take a trained world model apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import temperature

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))

from toy_env import ToyRewriteEnv
from training_checks import SMALL

from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.training import make_controller, train

STEPS = 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "run"
    train(ToyRewriteEnv(length=4, horizon=10), SMALL, STEPS, 0, folder)
    return folder


def test_dreams_go_on_along_the_episodes_that_were_learnt_from(trained: Path) -> None:
    model, config, rollouts, metadata = temperature.learnt_model(trained)
    seen = temperature.experience(model, config, rollouts, metadata)
    held, learnt = rollouts.split(config.held_out, math.ceil(config.random_share * STEPS))
    assert seen.episodes == learnt
    assert held
    dream = Dream.along(seen, temperature.places_of(rollouts), config, temperature=0.5)
    episodes = imagine(dream, make_controller(model.sizes, config), 3, 0)
    assert len(episodes) == 3
    assert np.isfinite([episode.total_reward for episode in episodes]).all()


def test_a_folder_without_a_world_model_is_told_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    words = ["temperature.py", str(tmp_path), "zoo:demo", "--out", str(tmp_path / "scores.json")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        temperature.main()
    assert ended.value.code == 2
    assert "agent.safetensors" in capsys.readouterr().err.splitlines()[-1]
