"""Scripts that take a trained world model apart."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import temperature

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))

from fake_cost import FakeCostModel
from small_models import LANES, bound, conv_chain
from toy_env import ToyRewriteEnv
from training_checks import SMALL

from rlflow_tvm.agents.world.controller import Eyes, SeeingPolicy
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


@pytest.fixture(scope="module")
def on_chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GraphRewriteEnv]:
    """A training on a chain of convolutions, whose steps are predicted."""
    problem = RewriteProblem(bound(conv_chain()), FakeCostModel(wrong_by=0.37), default_rules(LANES))
    folder, env = tmp_path_factory.mktemp("chain") / "run", GraphRewriteEnv(problem=problem, horizon=6)
    train(env, SMALL, 60, 0, folder)
    return folder, env


def scored(folder: Path, env: GraphRewriteEnv, informed_share: float) -> dict[str, Any]:
    model, config, rollouts, _ = temperature.learnt_model(folder)
    controller = dataclasses.replace(config.controller, informed_share=informed_share)
    config = dataclasses.replace(config, controller=controller)
    seen = temperature.experience(model, config, rollouts, {"total_steps": 60})
    dream = Dream.along(seen, temperature.places_of(rollouts), config, 1.0, env.limit)
    eyes = Eyes(model.sizes, model.vision, model.memory)
    return temperature.scores(dream, eyes, temperature.places_of(rollouts), config, env, 0)


def test_a_controller_is_scored_by_measured_graphs(on_chain: tuple[Path, GraphRewriteEnv]) -> None:
    row = scored(*on_chain, 0.5)
    assert len(row["real_returns"]) == temperature.EPISODES
    microseconds = 1e6 * on_chain[1].problem.start_secs / row["best_gain"]
    assert microseconds == pytest.approx(round(microseconds), abs=1e-6)  # all costs are whole, predictions are not


@pytest.mark.parametrize("informed_share", [0.0, 0.5])
def test_a_controller_knows_places_if_it_did_in_its_dreams(on_chain, monkeypatch, informed_share) -> None:
    seen, see = [], SeeingPolicy._see

    def looked(self, *arguments):
        seen.extend(found := see(self, *arguments))
        return found

    monkeypatch.setattr(SeeingPolicy, "_see", looked)
    scored(*on_chain, informed_share)
    assert any(each.site_known.any() for each in seen) == (informed_share > 0.0)


def test_a_folder_without_a_world_model_is_told_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    words = ["temperature.py", str(tmp_path), "zoo:demo", "--out", str(tmp_path / "scores.json")]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        temperature.main()
    assert ended.value.code == 2
    assert "agent.safetensors" in capsys.readouterr().err.splitlines()[-1]
