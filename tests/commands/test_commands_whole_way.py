"""The whole way on the bundled model: train, resume, optimise with the agent, replay the plan, compare."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS, HORIZON = 40, 5


@pytest.fixture(scope="module")
def trained(run, network, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    completed = run(
        "train", network, "--steps", STEPS, "--horizon", HORIZON, "--out", out / "agent", "--json", out / "train.json"
    )
    assert completed.returncode == 0, completed.stderr
    return out


def test_train_leaves_agent_plan_and_figures(trained):
    figures = json.loads((trained / "train.json").read_text())
    assert figures["env_steps"] >= STEPS
    (model,) = figures["models"]
    assert model["run_secs_after"] <= model["run_secs_before"]
    assert (trained / "agent" / "agent.safetensors").exists()
    assert Path(model["plan"]) == trained / "agent" / "best.plan.json"
    assert (trained / "agent" / "best.plan.json").exists()


def test_agent_searches_and_its_plan_compares(run, network, trained, tmp_path):
    plan, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    completed = run(
        "optimize", network, "--agent", trained / "agent" / "agent.safetensors", "--plan", plan, "--json", figures
    )
    assert completed.returncode == 0, completed.stderr
    data = json.loads(figures.read_text())
    names = {"model", "target", "method", "seed", "env_steps", "wall_secs", "run_secs_before", "run_secs_after"}
    assert names | {"plan_length"} <= data.keys()
    assert data["run_secs_after"] <= data["run_secs_before"]
    assert len(json.loads(plan.read_text())["actions"]) == data["plan_length"]
    table = tmp_path / "compare.json"
    completed = run(
        "compare", network, "--plan", plan, "--against", "tvm-default", "onnxruntime", "--rounds", 2, "--json", table
    )
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(table.read_text())["rows"]
    assert {"tvm-default", "onnxruntime"} <= {row["name"] for row in rows}
    assert all(row["error"] is None or row["error"] < 1e-4 for row in rows)
    assert "graph gain" in completed.stdout
    assert "kernel gain" in completed.stdout


def test_train_refuses_an_existing_folder_and_resumes_it(run, network, trained):
    again = run("train", network, "--steps", STEPS, "--horizon", HORIZON, "--out", trained / "agent")
    assert again.returncode == 1
    assert "resume" in again.stderr
    more = run("train", network, "--steps", 2 * STEPS, "--horizon", HORIZON, "--out", trained / "agent", "--resume")
    assert more.returncode == 0, more.stderr


def test_killed_training_goes_on_and_the_database_is_whole(run, home, network, tmp_path):
    out = tmp_path / "agent"
    options = ("--steps", "100000", "--horizon", str(HORIZON), "--out", str(out))
    arguments = [sys.executable, "-m", "rlflow_tvm.train", str(network), *options]
    process = subprocess.Popen(
        arguments, env={**os.environ, "RLFLOW_TVM_HOME": str(home)}, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while not (out / "progress.jsonl").exists() or not (out / "progress.jsonl").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = run("train", network, "--steps", 1, "--horizon", HORIZON, "--out", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    with sqlite3.connect(home / "kernels.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
