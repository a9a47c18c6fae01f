"""`optimize` with a budget, with Ctrl-C, and writing ONNX and libraries."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import onnx
import pytest
import tvm
import typer

from rlflow_tvm import ApplyPlan, compare, from_onnx, optimize, to_onnx
from rlflow_tvm.differences import range_error
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs
from rlflow_tvm.frontend.net import Net
from rlflow_tvm.passes import Plan
from rlflow_tvm.verify import run_executable


@pytest.mark.parametrize("search", ["backtracking", "variable-depth"])
def test_budget_in_steps(run, network, tmp_path, search):
    done = run("optimize", network, "--search", search, "--budget", 20, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["method"] == search
    assert 20 <= figures["env_steps"] <= 21
    assert figures["run_secs_after"] <= figures["run_secs_before"]


def test_what_is_no_budget_is_told(run, network):
    done = run("optimize", network, "--budget", "soon")
    assert done.returncode == 2
    assert "error: --budget soon: steps are expected, as 20000, or a time, as 90s, 5m or 2h" in done.stderr


@pytest.fixture
def branches(tmp_path: Path) -> Path:
    """A network of which most is a sum of four convolutions that are one: beside other tests too, what rewrites gain is
    more than whole modules' times vary by, so that it is not given up as slower."""
    net = Net(0)
    x = net.conv_relu("image", 3, 32, 3, stride=2)
    for _ in range(2):
        branches = [net.conv(x, 32, 32, 3) for _ in range(4)]
        sums = [net.node("Add", pair) for pair in (branches[:2], branches[2:])]
        x = net.node("Relu", [net.node("Add", sums)])
    net.dense(net.global_average(net.fire(net.max_pool(x), 32, 8, 16)), 32, 10, "logits")
    path = tmp_path / "branches.onnx"
    onnx.save(net.model("branches", {"image": (onnx.TensorProto.FLOAT, (1, 3, 64, 64))}, {"logits": (1, 10)}), path)
    return path


def test_the_optimised_model_as_onnx_and_as_a_library(run, branches, tmp_path):
    plan, out, library = tmp_path / "plan.json", tmp_path / "out.onnx", tmp_path / "out.so"
    files = ("--plan", plan, "--onnx", out, "--library", library)
    done = run("optimize", branches, "--search", "family", "--budget", 40, *files)
    assert done.returncode == 0, done.stderr
    for what, path in (("model", out), ("library", library)):
        said = rf"^{what} written to {path} \(outputs differ by \d.\de[-+]\d\d of range\)$"
        assert re.search(said, done.stdout, re.MULTILINE)
    model, original = onnx.load(out), onnx.load(branches)
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.input == original.graph.input
    assert model.graph.output == original.graph.output
    assert len(Plan.load(plan)) > 0
    replayed = ApplyPlan(plan)(from_onnx(branches))
    assert to_onnx(replayed) == model
    assert sorted(p.name for p in tmp_path.iterdir()) == ["branches.onnx", "out.onnx", "out.so", "plan.json"]
    inputs = random_inputs(replayed, 1)
    found = run_executable(tvm.runtime.load_module(str(library)), list(inputs.values()))
    assert range_error(found, onnxruntime_outputs(original, inputs)) < 1e-4


def test_shapes_may_stand_behind_the_file(tmp_path, capsys):
    """Before those of --shape, in `optimize` and in `compare`."""
    path, figures = tmp_path / "relus.onnx", tmp_path / "figures.json"
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy")
    nodes = [onnx.helper.make_node("Relu", [a], [b]) for a, b in ("xa", "ay")]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]), ir_version=8), path)
    plan = tmp_path / "plan.json"
    optimize.main(f"{path}@x=3,4", search="greedy", plan=plan, shape=["x=5,4"], json=figures)
    assert json.loads(figures.read_text())["model"] == f"{path}@x=3,4"
    relus = from_onnx(path, {"x": (3, 4)})
    ApplyPlan(plan)(relus)  # refuses any other module
    compare.main(f"{path}@x=3,4", against=["tvm-default"], plan=[plan], rounds=1)
    capsys.readouterr()
    for command in (optimize.main, compare.main):
        with pytest.raises(typer.Exit):
            command(f"{path}@x=3,4x")
        assert "NAME=EXTENT,EXTENT,... is expected" in capsys.readouterr().err


def test_what_cannot_be_written_as_onnx_is_told_before_the_search(run, network, tmp_path):
    done = run("optimize", network, "--onnx", tmp_path / "nowhere" / "out.onnx")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    node = onnx.helper.make_node("Pad", ["x", "p"], ["y"], mode="wrap")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    x.type.tensor_type.shape.dim.add(dim_value=4)
    pads = onnx.helper.make_tensor("p", onnx.TensorProto.INT64, [2], [1, 1])
    graph = onnx.helper.make_graph([node], "g", [x], [y], [pads])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)]), tmp_path / "pad.onnx")
    done = run("optimize", tmp_path / "pad.onnx", "--onnx", tmp_path / "out.onnx")
    assert done.returncode == 1
    assert "cannot be exported to ONNX: there is no exporter for call_tir of circular_pad" in done.stderr
    assert not (tmp_path / "out.onnx").exists()


def moves_priced(database: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute("select count(*) from measurement").fetchone()[0]
    except sqlite3.OperationalError:  # not there yet, or without its tables
        return 0


@pytest.mark.timeout(300)
def test_ctrl_c_takes_the_best_so_far(network, tmp_path):
    """Of a search that would go on for an hour."""
    plan = tmp_path / "plan.json"
    command = ["optimize", str(network), "--search", "random", "--budget", "1h", "--plan", str(plan)]
    with subprocess.Popen(
        [sys.executable, "-m", f"rlflow_tvm.{command[0]}", *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLFLOW_TVM_HOME": str(tmp_path), "COLUMNS": "200"},
    ) as search:
        while moves_priced(tmp_path / "kernels.sqlite") < 25 and search.poll() is None:
            time.sleep(0.1)
        search.send_signal(signal.SIGINT)
        out, err = search.communicate()
    assert search.returncode == 0, err
    assert "interrupted: the best graph so far is taken" in err
    assert f"by {len(Plan.load(plan))} rewrites" in out
