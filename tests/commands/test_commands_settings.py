"""Settings of agents on the command line, and what else of `train` is told before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from rlflow_tvm import cli, train
from rlflow_tvm.agents.candidate.config import PRESETS
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.errors import AgentError, UsageError
from tests.error_lines import one_line


class Asked(Exception):
    """What `train_on_models` was asked for is known."""


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The settings that the command hands on."""
    asked: dict[str, object] = {}

    def noted(*_: object, settings: object, **__: object) -> None:
        asked["settings"] = settings
        raise Asked

    monkeypatch.setattr("rlflow_tvm.training.train_on_models", noted)

    def call(**options: object) -> object:
        with pytest.raises(Asked):
            train.main(out=tmp_path / "out", **options)  # type: ignore[arg-type]
        return asked["settings"]

    return call


def test_settings_are_handed_on(settings_of, tmp_path):
    assert settings_of() == {}
    assert settings_of(settings='{"hidden": 8, "gamma": 1}') == {"hidden": 8, "gamma": 1}
    file = tmp_path / "settings.json"
    file.write_text('{"learning_rate": 0.5}')
    assert settings_of(settings=str(file)) == {"learning_rate": 0.5}
    both = settings_of(agent="candidate", preset="x-rlflow", settings=str(file))
    assert both == {**PRESETS["x-rlflow"], "learning_rate": 0.5}


def test_what_are_no_settings_is_one_line(run, tmp_path):
    out = tmp_path / "out"
    for settings, told in (
        ("{hidden: 8}", "--settings: not valid JSON"),
        ("nowhere.json", "--settings nowhere.json: cannot be read"),
        ('{"wings": 2}', "PPOConfig has no setting wings"),
        ('{"hidden": "8"}', "PPOConfig: hidden is '8', it must be a whole number"),
        ('{"gamma": 2}', "gamma is 2, it must lie in [0, 1]"),
    ):
        one_line(
            run("train", "--settings", settings, "--out", out), 1 if "PPOConfig" in told or "gamma" in told else 2, told
        )
    one_line(run("train", "--env", "pass-ordering", "--settings", "{}", "--out", out), 2, "--settings does not go with")
    assert not out.exists()
    file = tmp_path / "list.json"
    file.write_text("[1]")
    with pytest.raises(UsageError, match=r"list\.json: an object is expected"):
        cli.parse_settings(str(file))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"normalise_values": 1}, "true or false"),
        ({"n_epochs": True}, "a whole number"),
        ({"n_epochs": 2.0}, "a whole number"),
        ({"ent_coef": None}, "a number"),
        ({"learning_rate": float("inf")}, "a number"),
        ({"target_kl": "0.1"}, "a number or null"),
    ],
)
def test_types_of_settings_are_looked_at(values, told):
    (name,) = values
    with pytest.raises(AgentError, match=f"PPOConfig: {name} is .*, it must be {told}$"):
        PPOConfig.from_dict(values)
    with pytest.raises(AgentError, match=f"PPOConfig: {name} is .*, it must be {told}$"):
        WorldModelConfig.from_dict({"controller": values})


def test_settings_may_be_written_as_numbers_are():
    assert PPOConfig.from_dict({"gamma": 1, "target_kl": None}) == PPOConfig(gamma=1.0, target_kl=None)
    assert WorldModelConfig.from_dict(json.loads(json.dumps(WorldModelConfig().as_dict()))) == WorldModelConfig()
    with pytest.raises(AgentError, match="controller is 3, it must be an object of settings"):
        WorldModelConfig.from_dict({"controller": 3})


def test_figures_may_be_written_into_the_folder_of_the_training(settings_of, tmp_path):
    out = tmp_path / "out"
    assert settings_of(json=out / "figures.json") == {}  # which the training will make
    with pytest.raises(typer.Exit) as ended:
        train.main(out=out, json=tmp_path / "nowhere" / "figures.json")
    assert ended.value.exit_code == UsageError.exit_code
