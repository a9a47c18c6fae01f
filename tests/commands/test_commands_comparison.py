"""What `compare` makes of times and outputs; where those are wrong the table and the figures, then an error."""

from __future__ import annotations

import io
import json
import math
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper
from rich.console import Console
from scipy.stats import binom
from tvm import relax, tirx

from rlflow_tvm import compare, comparison, comparison_methods, comparison_tables, from_onnx
from rlflow_tvm.comparison import CONVERTED, ONNXRUNTIME, UNSEARCHED, searched_name, summary, tuned_name
from rlflow_tvm.comparison_figures import Comparison, Gains, Row
from rlflow_tvm.comparison_methods import methods
from rlflow_tvm.cost import Candidate, EndToEnd, Ratio
from rlflow_tvm.cost.ratio import median_interval
from rlflow_tvm.errors import CostError, FrontendError, RewriteError, UsageError
from rlflow_tvm.frontend import zoo
from rlflow_tvm.kernels import Choices, default_target, vector_lanes
from rlflow_tvm.kernels.tuned import marked
from rlflow_tvm.passes import GraphState, Plan, default_rules
from rlflow_tvm.search import Budget
from tests.small_models import bound, module

SEARCHED, TUNED = searched_name("searched"), tuned_name("searched")


def _comparison(error: float) -> Comparison:
    quartiles = (1e-3, 1e-3)
    rows = (
        Row(SEARCHED, 1e-3, quartiles, error),
        Row(UNSEARCHED, 1e-3, quartiles, 1e-6),
        Row(ONNXRUNTIME, 1e-3, quartiles, None),
    )
    even = Ratio(1.0, None)
    return Comparison(rows, UNSEARCHED, (Gains("searched", even, onnxruntime=even),), None, ONNXRUNTIME)


@pytest.mark.parametrize("error", [0.5, math.inf, math.nan])
def test_wrong_outputs_are_an_error(error: float) -> None:
    with pytest.raises(RewriteError, match=r"searched by .*report the model"):
        _comparison(error).check()
    rows = json.loads(json.dumps(_comparison(error).to_json(), allow_nan=False))["rows"]
    assert [row["outputs_match"] for row in rows] == [False, True, True]
    assert rows[0]["error"] == (0.5 if error == 0.5 else None)


def test_rounding_is_none() -> None:
    _comparison(1e-5).check()


def _saved(path: Path) -> Path:
    """A model of one Relu."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_the_command_shows_the_table_first(tmp_path, monkeypatch, capsys) -> None:
    path, figures = _saved(tmp_path / "relu.onnx"), tmp_path / "figures.json"
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: _comparison(np.inf))
    with pytest.raises(typer.Exit) as caught:
        compare.main(str(path), json=figures)
    assert caught.value.exit_code == 1
    printed = capsys.readouterr()
    assert " inf " in printed.out
    assert "error: outputs differ" in printed.err
    assert json.loads(figures.read_text())["rows"][0]["error"] is None


@pytest.mark.parametrize(
    ("fails", "code", "kept"),
    [("beam", 130, ["greedy"]), ("timing", 1, ["beam", "greedy"])],
)
def test_plans_are_kept_whatever_comes_behind(fails, code, kept, tmp_path, monkeypatch, capsys) -> None:
    path, plans = _saved(tmp_path / "relu.onnx"), tmp_path / "plans"
    state = GraphState.from_module(from_onnx(path), default_rules(vector_lanes(default_target())))

    def find(way: comparison_methods.Method, *_: object) -> GraphState:
        if way.label == fails:
            raise KeyboardInterrupt
        return state

    def timed(*_: object, **__: object) -> None:
        raise CostError("tvm-default: takes too long")

    monkeypatch.setattr(comparison_methods.Method, "find", find)
    monkeypatch.setattr(comparison, "compare", timed)
    with pytest.raises(typer.Exit) as caught:
        compare.main(str(path), search=["greedy", "beam"], plans=plans)
    assert caught.value.exit_code == code
    assert sorted(file.name for file in plans.iterdir()) == [f"{name}.plan.json" for name in kept]
    assert Plan.load(plans / "greedy.plan.json") == state.plan
    assert f"plan written to {plans / 'greedy.plan.json'}" in capsys.readouterr().out


def test_a_folder_for_plans_that_cannot_be_is_told_before_the_searches(tmp_path, monkeypatch, capsys) -> None:
    path = _saved(tmp_path / "relu.onnx")
    monkeypatch.setattr(comparison_methods.Method, "find", lambda *_: pytest.fail("it searched"))
    for plans, told in ((path, "is a file; give a folder"), (tmp_path / "no" / "plans", "does not exist")):
        with pytest.raises(typer.Exit) as caught:
            compare.main(str(path), plans=plans)
        assert caught.value.exit_code == 2
        assert told in capsys.readouterr().err


def test_what_tvms_passes_make_of_the_model_is_made_before_the_searches(tmp_path, monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise RewriteError("TVM's passes fail")

    monkeypatch.setattr(comparison, "unsearched", fails)
    monkeypatch.setattr(comparison_methods.Method, "find", lambda *_: pytest.fail("it searched"))
    with pytest.raises(typer.Exit):
        compare.main(str(_saved(tmp_path / "relu.onnx")))
    assert "error: TVM's passes fail" in capsys.readouterr().err


def test_what_onnxruntime_cannot_run_is_told_before_the_searches(tmp_path, monkeypatch, capsys) -> None:
    def refused(_mod: object, file: Path, _seed: int) -> None:
        raise FrontendError(f"{file}: ONNX Runtime cannot run it")

    monkeypatch.setattr("rlflow_tvm.exporting.check_original", refused)
    monkeypatch.setattr(comparison_methods.Method, "find", lambda *_: pytest.fail("it searched"))
    with pytest.raises(typer.Exit):
        compare.main(str(_saved(tmp_path / "relu.onnx")))
    assert "ONNX Runtime cannot run it" in capsys.readouterr().err


def test_a_file_that_onnxruntime_cannot_run_is_compared_where_it_was_not_asked_for(
    tmp_path, monkeypatch, caplog
) -> None:
    def refused(*_: object) -> None:
        raise FrontendError("ONNX Runtime cannot run it")

    monkeypatch.setattr(comparison, "reference_run", refused)
    mod = from_onnx(_saved(tmp_path / "relu.onnx"))
    result = comparison.compare(mod, {"searched": mod}, tmp_path / "relu.onnx", default_target(), [], rounds=1)
    result.check()
    assert "ONNX Runtime cannot run it" in caplog.text


def test_without_a_compiler_it_is_told_before_the_searches(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: None)
    monkeypatch.setattr(comparison_methods.Method, "find", lambda *_: pytest.fail("it searched"))
    with pytest.raises(typer.Exit):
        compare.main(str(_saved(tmp_path / "relu.onnx")))
    assert "error: cannot link the modules to be timed: install a C++ compiler" in capsys.readouterr().err


def test_searches_that_share_what_they_measure_in_a_time_are_told_apart(tmp_path, monkeypatch, caplog) -> None:
    def ended(*_: object) -> None:
        raise CostError("ended")

    path = _saved(tmp_path / "relu.onnx")
    monkeypatch.setattr(comparison_methods.Method, "find", ended)
    for searches, budget, told in (
        (["greedy", "beam"], "5m", True),
        (["greedy", "beam"], "50", False),
        (["greedy"], "5m", False),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", "rlflow_tvm"), pytest.raises(typer.Exit):
            compare.main(str(path), search=searches, budget=budget)
        assert ("what one search measures the next ones know" in caplog.text) == told


def test_a_slow_candidate_is_waited_for(tmp_path, monkeypatch) -> None:
    """TVM's default build of a large model takes minutes a run."""
    mod, asked = from_onnx(_saved(tmp_path / "relu.onnx")), {}

    def measured(*_: object, **options: float) -> None:
        asked.update(options)
        raise CostError("ended")

    monkeypatch.setattr(comparison, "_built", lambda *_: {})
    monkeypatch.setattr(comparison, "measure_interleaved", measured)
    with pytest.raises(CostError, match="ended"):
        comparison.compare(mod, {"searched": mod}, tmp_path / "relu.onnx", default_target(), [])
    assert asked["timeout_secs"] == 900.0


def test_tuned_kernels_have_a_row_of_their_own(tmp_path, monkeypatch) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [24, 24]) for name in "xyz"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "y"], ["z"])], "g", values[:2], values[2:])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    mod, target = from_onnx(path), default_target()
    asked = []

    def schedule(func):
        asked.append(func)
        return marked(func)  # plain loops: correct, and slow

    choices, searched = Choices(schedule=schedule), {"searched": mod}
    result = comparison.compare(mod, searched, path, target, [ONNXRUNTIME], choices=choices, rounds=2)
    result.check()
    assert {row.name for row in result.rows} == {SEARCHED, UNSEARCHED, TUNED, ONNXRUNTIME}
    assert len(asked) == 2  # to see whether there is one, and for its own row: the others have none
    assert result.gains[0].tuning is not None
    turn, measure = threading.Lock(), comparison.measure_interleaved

    def measured(*arguments, **options):
        assert turn.locked()
        return measure(*arguments, **options)

    monkeypatch.setattr(comparison, "measure_interleaved", measured)
    untuned = comparison.compare(mod, searched, path, target, [], rounds=2, turn=turn)
    assert not turn.locked()
    assert untuned.gains[0].tuning is None
    assert {row.name for row in untuned.rows} == {SEARCHED, UNSEARCHED}


def test_a_model_that_tvm_cannot_convert_is_compared_without(caplog) -> None:
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in
            (("x", (1, 16, 8, 1)), ("w", (16, 16, 1, 1))))  # fmt: skip
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.squeeze(builder.emit(relax.op.nn.conv2d(x, w)), [-1]))
        builder.emit_func_output(output)
    assert set(comparison.unsearched(builder.get(), 16)) == {UNSEARCHED}
    assert "ConvertLayout fails on this model" in caplog.text


def test_a_bare_number_beside_a_tensor_does_not_end_the_process() -> None:
    """TVM's own `ConvertLayout` does, with a segmentation fault."""

    def body(emit, x, w):
        return emit(relax.op.add(emit(relax.op.nn.conv2d(x, w)), relax.prim_value(tirx.FloatImm("float32", 0.5))))

    mod = bound(module({"x": (1, 16, 6, 6)}, {"w": (16, 16, 3, 3)}, body))
    assert set(comparison.unsearched(mod, 16)) == {UNSEARCHED, CONVERTED}


def test_constant_outputs_are_told() -> None:
    def measured(*outputs: np.ndarray) -> dict[str, EndToEnd]:
        return {name: EndToEnd(((1e-3,),), outputs) for name in (SEARCHED, UNSEARCHED)}

    def constant(*outputs: np.ndarray) -> bool:
        candidates = {name: Candidate("tvm", name) for name in (SEARCHED, UNSEARCHED)}
        return summary(measured(*outputs), candidates, ["searched"]).constant_outputs

    same, varied = np.full((1, 8), 0.125, "float32"), np.arange(3, dtype="int64")
    assert constant(same)
    assert constant(same, np.full(4, np.nan))
    assert not constant(same, varied)
    assert not constant(np.array([np.nan, 1.0]))
    assert not constant(np.float32(1.0).reshape(()))


def test_outputs_that_are_not_finite_are_told() -> None:
    candidates = {name: Candidate("tvm", name) for name in (SEARCHED, UNSEARCHED)}

    def told(*outputs: np.ndarray) -> str:
        measured = {name: EndToEnd(((1e-3,),), outputs) for name in candidates}
        return "\n".join(comparison_tables.lines(summary(measured, candidates, ["searched"])))

    good, bad = np.arange(3, dtype="float32"), np.array([np.nan, np.inf, 1.0], "float32")
    assert "67 % of an output" in told(good, bad)
    assert "100 % of an output" in told(np.float32(np.nan).reshape(()))
    assert "of an output" not in told(good)


def test_ratios_are_of_rounds_and_their_median_has_an_interval() -> None:
    old, new = (EndToEnd(tuple((secs,) for secs in rounds), ()) for rounds in ((2.0, 3.0, 8.0), (1.0, 2.0, 1.0)))
    assert Ratio.of(old, new) == Ratio(2.0, None)
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) is None
    assert median_interval([3.0, 1.0, 6.0, 2.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_interval([float(n) for n in range(10)]) == (1.0, 8.0)


@pytest.mark.parametrize("number", [6, 7, 8, 9, 20, 61])
def test_the_interval_is_the_narrowest_that_is_sure_enough(number: int) -> None:
    """The median lies below the k-th smallest where less than k values lie below the median: binomially distributed."""
    interval = median_interval([float(n) for n in range(number)])
    assert interval is not None
    low, high = map(round, interval)
    assert low == number - 1 - high
    assert 1 - 2 * binom.cdf(low, number, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low + 1, number, 0.5) < 0.95


def test_gains_are_kept_apart() -> None:
    """Each ratio is of the two sides that it says, whatever else was measured."""
    secs = {UNSEARCHED: 6.0, "tvm-default": 60.0, ONNXRUNTIME: 9.0, "torch": 12.0}
    for label, run_secs in (("greedy", 3.0), ("family", 4.0)):
        secs |= {searched_name(label): run_secs, f"onnxruntime-export, {label}": 3 * run_secs / 2}
    secs[tuned_name("family")] = 2.0
    secs["onnxruntime-export, unsearched"] = 7.5
    measured = {name: EndToEnd(((each,),) * 6, (np.zeros(1),), 0.25, 0.5) for name, each in secs.items()}
    kinds = {ONNXRUNTIME: "onnx", "torch": "torch"}
    candidates = {
        name: Candidate(kinds.get(name.split("-export")[0], "tvm"), name, None, 7, 0.125, 0.0625)  # type: ignore[arg-type]
        for name in secs
    }
    result = summary(measured, candidates, ["greedy", "family"])
    figures = result.to_json()
    greedy, family = figures["searches"]
    assert (greedy["graph_gain"], family["graph_gain"], figures["graph_gain"]) == (2.0, 1.5, 2.0)
    assert (greedy["tuning_gain"], family["tuning_gain"]) == (None, 2.0)
    assert (greedy["export_gain"], family["export_gain"]) == (7.5 / 4.5, 1.25)
    assert (greedy["against_onnxruntime"], family["against_onnxruntime"]) == (3.0, 4.5)  # the tuned module is ours
    assert (greedy["against_torch"], family["against_torch"]) == (4.0, 6.0)
    assert (figures["kernel_gain"], figures["kernel_gain_interval"]) == (10.0, [10.0, 10.0])
    rows = {row.name: row for row in result.rows}
    assert rows["tvm-default"].compile_secs == 0.1875
    assert rows[ONNXRUNTIME].compile_secs == 0.25
    assert rows["torch"].compile_secs == 0.75
    assert rows[UNSEARCHED].against_baseline is None
    assert rows["tvm-default"].against_baseline == Ratio(0.1, (0.1, 0.1))


def test_a_wrong_graph_shows_in_its_export_too(tmp_path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    for op in ("Relu", "Sigmoid"):
        graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / op)
    right, wrong = (from_onnx(tmp_path / op) for op in ("Relu", "Sigmoid"))
    against = ["onnxruntime", "onnxruntime-export"]
    result = comparison.compare(
        right, {"right": right, "wrong": wrong}, tmp_path / "Relu", default_target(), against, rounds=1
    )
    with pytest.raises(RewriteError, match=r"rlflow_tvm, wrong by .*, onnxruntime-export, wrong by "):
        result.check()
    matching = {row.name for row in result.rows if row.outputs_match}
    assert matching == {
        "rlflow_tvm, right", UNSEARCHED, ONNXRUNTIME, "onnxruntime-export, unsearched", "onnxruntime-export, right"
    }  # fmt: skip


def test_one_kind_of_method_twice_is_told_apart(tmp_path, monkeypatch) -> None:
    """By the ends of the paths: agents are all called `agent.safetensors`."""
    monkeypatch.setattr(comparison_methods, "agent_search", lambda path, seed, budget: (path, seed, budget))
    agents = [tmp_path / folder / "agent.safetensors" for folder in ("one/a", "two/a", "two/b")]
    budget = Budget.parse("20")
    found = methods([], agents, ["greedy"], 3, budget)
    assert [method.label for method in found] == [
        "agent one/a/agent.safetensors", "agent two/a/agent.safetensors", "agent two/b/agent.safetensors", "greedy"
    ]  # fmt: skip
    assert found[0].source == (agents[0], 3, budget)
    assert found[0].described == f"agent {agents[0]}"
    assert [found[0].plan_name, found[3].plan_name] == ["agent-one_a_agent.safetensors.plan.json", "greedy.plan.json"]
    assert [method.label for method in methods([], agents[:1], [])] == ["searched"]
    assert [(way.described, way.plan_name) for way in methods([], [], [])] == [("search family", "family.plan.json")]
    with pytest.raises(UsageError, match="is given twice"):
        methods([], [agents[0], tmp_path / "two/../one/a/agent.safetensors"], [])


@pytest.mark.slow
def test_torch_compile_is_a_candidate(monkeypatch) -> None:
    """On a stem and a residual block: torch has a C++ compiler make each fused kernel."""
    for library in ("torch", "onnxscript"):
        pytest.importorskip(library)
    monkeypatch.setitem(zoo.TORCH_MODELS, "one-block", zoo._Image("resnet", 32, ((1,), False, 1, 10)))
    path = zoo.path("one-block")
    mod = from_onnx(path)
    result = comparison.compare(
        mod, {"searched": mod}, path, default_target(), ["torch"], zoo_name="one-block", rounds=1
    )
    result.check()
    (row,) = (row for row in result.rows if row.name == "torch")
    assert row.error is not None
    assert row.kernels is None
    assert result.gains[0].torch is not None
    assert result.gains[0].onnxruntime is None


def test_tables_hold_any_name() -> None:
    """Brackets are no markup, and bars divide no cells."""
    name = searched_name("plan [red]a|b[/red].json")
    quartiles = (1e-3, 1e-3)
    rows = (Row(name, 1e-3, quartiles, 0.0, Ratio(1e-3, None)), Row(UNSEARCHED, 1e-3, quartiles, None))
    result = Comparison(rows, UNSEARCHED, (Gains("plan [red]a|b[/red].json", Ratio(1e-3, None)),), None, UNSEARCHED)
    console = Console(record=True, width=120, file=io.StringIO())
    for table in comparison_tables.tables("[bold]model", result):
        console.print(table)
    printed = console.export_text()
    assert name in printed
    assert "[bold]model" in printed
    assert "0.001" in printed
    text = comparison_tables.markdown("model", {}, "command", result)
    assert "| rlflow_tvm, plan [red]a\\|b[/red].json |" in text
