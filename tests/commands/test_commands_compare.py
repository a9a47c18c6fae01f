"""`compare` as a user calls it: several searches and plans at once, its files, and bad input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rlflow_tvm import ApplyPlan, cli, compare, comparison, from_onnx
from rlflow_tvm.comparison_figures import AGAINST
from rlflow_tvm.cost import cpu_model
from rlflow_tvm.kernels import Lowering, default_target, vector_lanes
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules
from rlflow_tvm.search import DEFAULT_SEARCH, SEARCHES

WAS_THERE = {
    *("model", "target", "rpc_key", "method", "seed", "rounds", "plan_length", "rows", "baseline", "graph_gain"),
    *("kernel_gain", "tuning_gain", "against_onnxruntime", "reference", "constant_outputs"),
}
"""The keys of the first version."""


def save(path: Path) -> Path:
    """relu(relu(x w)) v: two products, and something to cancel."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((16, 16)).astype("float32"), n) for n in "wv"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "v"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 16]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "small.onnx")


@pytest.fixture(scope="module")
def plan(model, tmp_path_factory) -> Path:
    """Of one rewrite, whatever that gains."""
    path = tmp_path_factory.mktemp("plan") / "best.plan.json"
    state = GraphState.from_module(from_onnx(model), default_rules(vector_lanes(default_target())))
    state.apply(RewriteAction("relu_idempotent", state.sites["relu_idempotent"][0])).plan.save(path)
    return path


@pytest.fixture(scope="module")
def compared(run, model, plan, tmp_path_factory):
    """A comparison of two searches and a plan with all others that an ONNX file can be compared with."""
    folder = tmp_path_factory.mktemp("compared")
    options = ("--search", "greedy", "family", "--plan", plan, "--rounds", 6, "--json", folder / "figures.json")
    options += ("--markdown", folder / "table.md", "--against", "tvm-default", "onnxruntime", "onnxruntime-export")
    done = run("compare", model, *options, columns=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "figures.json").read_text()), (folder / "table.md").read_text(), options


def test_each_search_has_its_row_and_its_gains(compared, plan):
    stdout, figures, _, _ = compared
    labels = [f"plan {plan.name}", "greedy", "family"]
    assert [row["name"] for row in figures["rows"]] == [
        *(f"rlflow_tvm, {label}" for label in labels), "rlflow_tvm, unsearched", "tvm-default", "onnxruntime",
        *(f"onnxruntime-export, {label}" for label in ("unsearched", *labels)),
    ]  # fmt: skip
    assert [each["label"] for each in figures["searches"]] == labels
    assert [each["method"] for each in figures["searches"]] == [f"plan {plan}", "search greedy", "search family"]
    assert figures["searches"][0]["plan_length"] == 1
    for each in figures["searches"]:
        assert each["tuning_gain"] is None
        assert each["against_torch"] is None
        for name in ("graph_gain", "export_gain", "against_onnxruntime"):
            low, high = each[f"{name}_interval"]
            assert 0 < low <= each[name] <= high
        assert f"{each['label']}: graph gain (same kernels, against rlflow_tvm, unsearched): " in stdout
        assert f"{each['label']}: graph gain with ONNX Runtime's kernels (exported graphs): " in stdout
        assert f"{each['label']}: ONNX Runtime's time over ours: " in stdout
    assert "kernel gain (same graph, against tvm-default): " in stdout


def test_what_was_in_the_file_still_is(compared):
    _, figures, _, _ = compared
    assert figures.keys() >= WAS_THERE
    first = figures["searches"][0]
    for name in ("method", "plan_length", "graph_gain", "tuning_gain", "against_onnxruntime"):
        assert figures[name] == first[name]
    assert all(row.keys() >= {"name", "run_secs", "quartiles", "error", "outputs_match"} for row in figures["rows"])


def test_all_compute_the_same(compared):
    """ONNX Runtime on the exported graphs too."""
    rows = {row["name"]: row for row in compared[1]["rows"]}
    assert rows["onnxruntime"]["error"] is None
    others = [row["error"] for name, row in rows.items() if name != "onnxruntime"]
    assert len(others) == 9
    assert max(others) < 1e-5


def test_costs_are_told(compared, model, plan):
    rows = {row["name"]: row for row in compared[1]["rows"]}
    mod, target = from_onnx(model), default_target()
    searched = ApplyPlan(plan)(mod)
    for name, graph in ((f"rlflow_tvm, plan {plan.name}", searched), ("rlflow_tvm, unsearched", mod)):
        assert rows[name]["kernels"] == sum(kernel.count for kernel in Lowering(target).kernels(graph))
    assert rows["tvm-default"]["kernels"] == 4
    for name, row in rows.items():
        assert row["compile_secs"] > 0
        assert row["peak_bytes"] is None or row["peak_bytes"] > 0
        assert (row["kernels"] is None) == name.startswith("onnxruntime")
        if name != "rlflow_tvm, unsearched":
            low, high = row["against_baseline_interval"]
            assert low <= row["against_baseline"] <= high


def test_the_markdown_file(compared, model):
    _, figures, text, options = compared
    assert f"```\npython -m rlflow_tvm.compare {shlex.join(map(str, (model, *options)))}\n```" in text
    assert f"- cpu: {cpu_model()}\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert head[0] == "candidate"
    assert {len(row) for row in (head, rule, *rows)} == {len(head)}
    assert [row[0] for row in rows] == [row["name"] for row in figures["rows"]]
    kernels = head.index("kernels")
    assert [row[kernels] for row in rows] == [str(row["kernels"] or "-") for row in figures["rows"]]
    for each in figures["searches"]:
        assert f"- {each['label']}: graph gain (same kernels, against rlflow_tvm, unsearched): " in text


def test_the_tables_fit_into_120_columns(compared):
    stdout, figures, _, _ = compared
    tables = [line for line in stdout.splitlines() if line.startswith("│")]
    assert len(tables) == 2 * len(figures["rows"])  # none is wrapped
    assert max(map(len, stdout.splitlines())) <= 120


def test_one_search_is_called_so_as_before(run, model, tmp_path):
    done = run(
        "compare", model, "--search", "greedy", "--against", "tvm-default", "--rounds", 1, "--json", tmp_path / "f"
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "f").read_text())
    assert [row["name"] for row in figures["rows"]] == [
        "rlflow_tvm, searched", "rlflow_tvm, unsearched", "tvm-default"
    ]  # fmt: skip
    assert figures["method"] == "search greedy"
    assert figures["graph_gain_interval"] is None  # of one round
    assert "no 95 % intervals: they need 6 rounds" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--against", "onnxruntime", "everything"), 2, ("--against everything", "tvm-default", "torch")),
        (("--against", "onnxruntime", "onnxruntime"), 2, ("--against onnxruntime", "twice")),
        (("--against", "torch"), 2, ("--against torch", "ONNX file", "zoo:resnet18")),
        (("--search", "greedy", "clever"), 2, ("clever", "variable-depth")),
        (("--search", "greedy", "family", "greedy"), 2, ("--search greedy", "twice")),
        (("--plan", "no.json", "absent.json"), 1, ("no.json",)),
        (("--agent", "no.safetensors"), 1, ("no.safetensors",)),
        (("--target", '{"kind": "cuda", "arch": "sm_90"}'), 2, ("--target cuda", "scripts/bench_gpu.py")),
        (("--markdown", "nowhere/table.md"), 2, ("nowhere",)),
    ],
)
def test_bad_input_is_one_line_before_the_work(tmp_path, monkeypatch, capsys, arguments, code, words):
    """The model is not even looked for."""
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "no.onnx"), *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.run(compare.main, compare.LISTS)
    assert caught.value.code == code
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert "no.onnx" not in line
    for word in words:
        assert word in line


def test_torch_is_refused_for_what_was_none(run):
    done = run("compare", "zoo:demo", "--against", "torch")
    assert done.returncode == 1
    assert "evaluation model 'demo' is no torch model" in done.stderr


def test_what_cannot_be_exported_is_told_before_the_search(run, tmp_path):
    node = helper.make_node("Pad", ["x", "p"], ["y"], mode="wrap")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4]), ("y", None)))
    graph = helper.make_graph([node], "g", [x], [y], [helper.make_tensor("p", TensorProto.INT64, [2], [1, 1])])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8), tmp_path / "pad.onnx"
    )
    done = run("compare", tmp_path / "pad.onnx", "--against", "onnxruntime-export")
    assert done.returncode == 1
    assert "cannot be exported to ONNX" in done.stderr


def test_names_are_known_without_the_library():
    assert (tuple(SEARCHES), DEFAULT_SEARCH) == (cli.SEARCHES, cli.DEFAULT_SEARCH)
    assert compare.AGAINST == AGAINST == comparison.AGAINST


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("m --search greedy family --rounds 2", "m --search greedy --search family --rounds 2"),
        ("--against onnxruntime torch m", "--against onnxruntime --against torch m"),
        ("--search beam m --against x y", "--search beam m --against x --against y"),
        ("--rounds 2 --plan a.json b.json m.onnx", "--rounds 2 --plan a.json --plan b.json m.onnx"),
        ("--rounds=2 m --plan a b --agent c d", "--rounds=2 m --plan a --plan b --agent c --agent d"),
        ("m --plan a --plan b", "m --plan a --plan b"),
        ("m extra --rounds 2", "m extra --rounds 2"),
    ],
)
def test_lists_are_told_from_the_model(given, meant):
    assert cli.spread(given.split(), compare.LISTS) == meant.split()
