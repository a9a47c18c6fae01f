"""Scripts that take a trained world model apart."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import temperature

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))

from fake_cost import FakeCostModel
from small_models import LANES, bound, conv_chain
from toy_env import ToyRewriteEnv
from training_checks import SMALL

from rlflow_tvm.agents.world.controller import Eyes
from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.training import make_controller, train
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.passes import default_rules

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


def test_a_controller_is_scored_by_measured_graphs(tmp_path: Path) -> None:
    problem = RewriteProblem(bound(conv_chain()), FakeCostModel(wrong_by=0.37), default_rules(LANES))
    env = GraphRewriteEnv(problem=problem, horizon=6)
    train(env, SMALL, 60, 0, tmp_path)
    model, config, rollouts, _ = temperature.learnt_model(tmp_path)
    seen = temperature.experience(model, config, rollouts, {"total_steps": 60})
    dream = Dream.along(seen, temperature.places_of(rollouts), config, 1.0, env.limit)
    eyes = Eyes(model.sizes, model.vision, model.memory)
    row = temperature.scores(dream, eyes, temperature.places_of(rollouts), config, env, 0)
    assert len(row["real_returns"]) == temperature.EPISODES
    microseconds = 1e6 * problem.start_secs / row["best_gain"]
    assert microseconds == pytest.approx(round(microseconds), abs=1e-6)  # all costs are whole, predictions are not


def test_a_folder_without_a_world_model_is_told_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    words = ["temperature.py", str(tmp_path), "zoo:demo", "--out", str(tmp_path / "scores.json")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        temperature.main()
    assert ended.value.code == 2
    assert "agent.safetensors" in capsys.readouterr().err.splitlines()[-1]
