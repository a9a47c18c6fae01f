"""Training with several workers, as a user calls it: with the same kernel times the same agent as with one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from rlflow_tvm.agents.checkpoint import load_checkpoint

OPTIONS = ("--horizon", 4, "--seed", 1)
STEPS = ("--steps", 300)  # two updates


def left_in(folder: Path) -> tuple:
    """A training's tensors, description, log and best plan, without the clock."""
    tensors, description = load_checkpoint(folder / "agent.safetensors")
    del description["counts"]["wall_secs"]
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    curve = [{name: value for name, value in line.items() if name != "wall_secs"} for line in lines]
    return tensors, description, curve, (folder / "best.plan.json").read_text()


def assert_same(one: Path, other: Path) -> None:
    (tensors, *rest), (tensors2, *rest2) = left_in(one), left_in(other)
    assert tensors.keys() == tensors2.keys()
    assert [name for name, value in tensors.items() if not torch.equal(value, tensors2[name])] == []
    assert rest == rest2


def kernels(home: Path) -> list[tuple]:
    """The times in the database."""
    with closing(sqlite3.connect(home / "kernels.sqlite")) as connection:
        return connection.execute("SELECT kernel, target, version, run_secs, measured_at FROM measurement").fetchall()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with few kernels and some rewrites: relu(relu(x w) v)."""
    weights = [numpy_helper.from_array(np.ones((8, 8), "float32"), name) for name in "wv"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def alone(run, home, model, tmp_path_factory) -> Path:
    """A training in one process, of which the database knew all kernels."""
    return settled(run, home, model, tmp_path_factory.mktemp("alone"), *STEPS, "--workers", 1)


def settled(run, home: Path, model: Path, folder: Path, *options) -> Path:
    """A training during which no price has changed: one was made before, and what it measured is for good."""
    for number in range(5):
        before, out = kernels(home) if number else [], folder / str(number)
        completed = run("train", model, *OPTIONS, "--out", out, *options)
        assert completed.returncode == 0, completed.stderr
        if kernels(home) == before:
            return out
        # what is measured for the second time, or again as the machine was disturbed, costs something else
        with closing(sqlite3.connect(home / "kernels.sqlite", isolation_level=None)) as connection:
            connection.execute("UPDATE measurement SET slowdown = 1.0, confirmed = error IS NULL")
    raise AssertionError("each training measures kernels that the one before has not met")


def test_two_workers_train_the_same_agent_as_one(run, home, model, alone, tmp_path):
    before = kernels(home)
    out, figures = tmp_path / "agent", tmp_path / "figures.json"
    completed = run("train", model, *STEPS, *OPTIONS, "--out", out, "--workers", 2, "--json", figures)
    assert completed.returncode == 0, completed.stderr
    assert_same(alone, out)
    assert kernels(home) == before  # nothing was measured again
    (outcome,) = json.loads(figures.read_text())["models"]
    assert outcome["run_secs_after"] <= outcome["run_secs_before"]


def test_a_training_goes_on_with_workers(run, model, alone, tmp_path):
    for options in (("--steps", 1), (*STEPS, "--workers", 2, "--resume")):
        completed = run("train", model, *options, *OPTIONS, "--out", tmp_path / "agent")
        assert completed.returncode == 0, completed.stderr
    assert_same(alone, tmp_path / "agent")


def test_workers_measure_for_each_other(run, home, model, tmp_path):
    """Of another target the database knows nothing; what the workers measured together trains the same agent again."""
    options = ("--steps", 1, "--workers", 2, "--target", '{"kind": "llvm", "num-cores": 1}')
    first = settled(run, home, model, tmp_path, *options)
    before = kernels(home)
    completed = run("train", model, *OPTIONS, "--out", tmp_path / "again", *options)
    assert completed.returncode == 0, completed.stderr
    assert kernels(home) == before
    assert_same(first, tmp_path / "again")


def test_wrong_numbers_and_clusters_are_one_line(run, model, tmp_path):
    pytest.importorskip("ray")
    assert run("train", model, "--workers", 0, "--out", tmp_path / "a").returncode == 2
    completed = run("train", model, "--ray", "127.0.0.1:1", "--out", tmp_path / "b")
    assert completed.returncode == 1
    (line,) = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
    assert "Ray cluster 127.0.0.1:1" in line
    assert "ray start --head" in line
