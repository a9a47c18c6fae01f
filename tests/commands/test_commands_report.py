"""The report as a user calls it: from a training's folder and from a plan, and bad input told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from report_parts import BEST, LOG, write_checkpoint, write_run

from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.kernels import as_target, vector_lanes
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules
from tests.error_lines import one_line


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Two activations, of which one does nothing: a graph of one kernel."""
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    path = tmp_path_factory.mktemp("model") / "relu.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def state(model) -> GraphState:
    start = GraphState.from_module(from_onnx(model), default_rules(vector_lanes(as_target("llvm"))))
    return start.apply(RewriteAction("relu_idempotent", start.sites["relu_idempotent"][0]))


@pytest.fixture
def folder(tmp_path, model, state) -> Path:
    return write_run(tmp_path / "run", state, str(model))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_page_of_a_training(run, folder, tmp_path):
    before = names(folder)
    completed = run("report", folder, "--json", tmp_path / "told.json")
    assert completed.returncode == 0, completed.stderr
    assert "by 1 rewrites" in completed.stdout
    told = json.loads((tmp_path / "told.json").read_text())
    assert [step["rule"] for step in told["steps"]] == ["relu_idempotent"]
    assert told["start"]["secs"] == told["steps"][0]["before"] > 0
    assert told["agent"] == "ppo"
    assert sum(row["secs"] for row in told["kernels"]["after"]) + told["end"]["launch_secs"] == pytest.approx(
        told["end"]["secs"]
    )
    assert names(folder) - before == {"report.html"}
    page = (folder / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "relu_idempotent" in page


def test_page_and_plots_of_a_plan(run, folder, model, tmp_path):
    plan, out = folder / "best.plan.json", tmp_path / "page.html"
    completed = run("report", model, "--plan", plan, "--out", out)
    assert completed.returncode == 0, completed.stderr
    assert "relu_idempotent" in out.read_text()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it is in the extra plots")
    completed = run("report", folder, "--format", "png")
    assert completed.returncode == 0, completed.stderr
    assert names(folder / "plots") == {"cost.png", "rules.png", "training.png"}
    nothing = tmp_path / "nothing.plan.json"
    told = json.loads(plan.read_text())
    nothing.write_text(json.dumps(told | {"actions": [], "end_hash": told["start_hash"]}))
    completed = run("report", model, "--plan", nothing, "--format", "png", "--out", folder / "plots")
    assert completed.returncode == 0, completed.stderr
    assert names(folder / "plots") == {"cost.png"}  # of the plan before nothing is left


def test_model_that_was_moved(run, folder, model, tmp_path):
    moved = tmp_path / "moved.onnx"
    moved.write_bytes(model.read_bytes())
    metadata = {"models": ["gone/relu.onnx"], "shapes": {}, "target": "llvm"}
    write_checkpoint(folder / "agent.safetensors", {"agent": "ppo", "metadata": metadata})
    one_line(run("report", folder), 1, "gone/relu.onnx", "--model")
    assert run("report", folder, "--model", moved).returncode == 0


def test_bad_arguments(run, folder, model, tmp_path):
    plan = folder / "best.plan.json"
    one_line(run("report", model), 2, "relu.onnx", "--plan")
    one_line(run("report", folder, "--plan", plan), 2, "is a folder")
    one_line(run("report", model, "--plan", plan, "--model", "x"), 2, "--model")
    one_line(run("report", folder, "--format", "pdf"), 2, "pdf", "html and png")
    one_line(run("report", folder, "--out", tmp_path / "no" / "page.html"), 2, "page.html")
    one_line(run("report", folder, "--format", "png", "--out", plan), 2, "is a file")
    one_line(run("report", tmp_path / "none"), 1, "no such folder")
    one_line(run("report", "a" * 300), 1, "no such folder")
    one_line(run("report", tmp_path), 1, "agent.safetensors")


def test_damaged_files(run, folder, model, tmp_path):
    plan = folder / "best.plan.json"
    other = tmp_path / "other.json"
    other.write_text(plan.read_text().replace("relu_idempotent@", "nothing@"))
    one_line(run("report", model, "--plan", other), 1, "nothing", "search again")
    other.write_text("{")
    one_line(run("report", model, "--plan", other), 1, "other.json")
    (folder / "progress.jsonl").write_text("[]\n")
    one_line(run("report", folder), 1, "progress.jsonl", "line 1")
    (folder / "progress.jsonl").unlink()
    plan.unlink()
    one_line(run("report", folder), 1, "no plan was found yet")
    assert not {name for name in names(folder) if "report" in name}


def test_training_on_other_machines(run, folder, model):
    metadata = {"models": [str(model)], "shapes": {}, "target": "llvm rpc:lab"}
    write_checkpoint(folder / "agent.safetensors", {"agent": "ppo", "metadata": metadata})
    one_line(run("report", folder), 2, "lab", "--rpc", "--target llvm")
    told = folder.parent / "told.json"
    assert run("report", folder, "--target", "llvm", "--json", told).returncode == 0
    found = [[line["env_steps"], line["run_secs"]] for line in BEST]
    found.append([LOG[-1]["env_steps"], BEST[-1]["run_secs"]])  # where the training ended
    assert json.loads(told.read_text())["best"] == found, "this machine's price of the start is none of that curve"


def test_several_models(run, folder, model):
    shapes = {"x": [1, 64], "image": [1, 3, 32, 32]}  # of either model's input
    metadata = {"models": [str(model), "zoo:demo"], "shapes": shapes, "target": "llvm"}
    write_checkpoint(folder / "agent.safetensors", {"agent": "ppo", "metadata": metadata})
    one_line(run("report", folder), 2, "several models", "--model", "zoo:demo")
    one_line(run("report", folder, "--model", "zoo:other"), 2, "no zoo:other", "zoo:demo")
    (folder / "best.plan.json").rename(folder / "best.relu.plan.json")
    assert run("report", folder, "--model", model).returncode == 0
