"""One agent on unseen models: who does which seed, and what the table tells."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import generalise
import pytest
from agents_results import locked, read_json
from papers.shapes import shapes


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call the script, with trainings and searches that take no time; the seeds that it trained."""
    trainings = []

    def trained(options, seed):
        trainings.append(seed)
        return SimpleNamespace(checkpoint=Path("agent"), wall_secs=10.0 * (seed + 1))

    def tried(options, model, seed, checkpoint):
        found = {"start_secs": 1.2, "best_secs": 1.0, "env_steps": 20, "curve": [[0, 1.2], [7, 1.0]], "wall_secs": 3.0}
        family = {"family": {**found, "best_secs": 0.8}} if seed == 0 else {}
        return {"model": model, "seed": seed, "agent": found, "random-restarts": {**found, "best_secs": 1.1}, **family}

    monkeypatch.setattr(generalise, "trained", trained)
    monkeypatch.setattr(generalise, "tried", tried)
    monkeypatch.setattr(generalise, "prices", lambda target: "some machine")
    command = ["generalise.py", "--train", "zoo:one", "--unseen", "zoo:two", "zoo:three", "--seeds", "3"]

    def called(*more):
        trainings.clear()
        monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path), *more])
        assert generalise.main() == 0
        return list(trainings)

    return called


def test_a_seed_is_done_by_one_process(call, tmp_path, capsys):
    with locked(tmp_path / "ppo.1.lock") as ours:
        assert ours
        assert call() == [0, 2]
    assert "seed 1: another process does it" in capsys.readouterr().out
    assert call() == [1], "what is there is not done again"
    assert call() == []
    rows = read_json(tmp_path / "results.json")
    assert sorted((row["model"], row["seed"]) for row in rows) == [
        (f"zoo:{model}", seed) for model in ("three", "two") for seed in range(3)
    ]
    assert [row["training_secs"] for row in rows] == [10.0, 10.0, 30.0, 30.0, 20.0, 20.0]
    header, _, *lines = [line for line in shapes([tmp_path]).lines if line.startswith("|")]
    told = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (header, lines[0])), strict=True))
    assert (told["unseen"], told["seeds"], told["its training, s"]) == ("two", "3", "20")
    assert (told["share of its gain"], told["agent's steps until its best"]) == ("0.40 ± 0.00", "7")


def test_a_model_given_twice_is_tried_once(call, tmp_path):
    call("--unseen", "zoo:two", "zoo:two")
    assert [(row["model"], row["seed"]) for row in read_json(tmp_path / "results.json")] == [
        ("zoo:two", seed) for seed in range(3)
    ]


def test_a_folder_that_cannot_be_made_is_told(call, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        call("--out", str(tmp_path / "file" / "out"))
    assert "cannot be written (Not a directory); give another --out" in capsys.readouterr().err
