"""Scripts that measure: what was made otherwise is not gone on with, and what fails neither ends them nor is lost."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import bench_gpu
import bench_kernels
import bench_models
import kernel_table
import match_time
import numpy as np
import pytest
import random_nets
import step_time
from agents import prices
from fake_workers import workers_by
from papers.times import figure6
from run_rows import bench_row
from small_models import LANES, TARGET, bound, conv_chain, module
from tvm.relax import op as rx

from rlflow_tvm.cost import Candidate, EndToEnd, timer
from rlflow_tvm.errors import FrontendError, KernelError
from rlflow_tvm.passes import GraphState, default_rules


@pytest.fixture
def refused(monkeypatch, capsys) -> Callable[..., str]:
    """What a script says last where it refuses its arguments."""

    def called(main: Callable[[], None], *words: str) -> str:
        monkeypatch.setattr("sys.argv", ["script.py", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return called


def test_models_timed_with_other_options_are_not_gone_on_with(tmp_path, monkeypatch, refused):
    timed: list[str] = []
    words = ["script.py", "one", "--out", str(tmp_path / "bench.json")]

    def bench(model: str, _target: object, search: str, *_: object) -> dict[str, object]:
        timed.append(search)
        return {"model": model, "search": search, "runs": None}

    monkeypatch.setattr(bench_models, "bench", bench)
    monkeypatch.setattr(bench_models, "show", lambda _rows: None)
    for more in ((), (), ("--search", "none", "--rounds", "3")):  # nothing to those of another search
        monkeypatch.setattr("sys.argv", [*words, *more])
        bench_models.main()
    assert timed == ["greedy", "none"]
    for more, told in (
        (("--rounds", "3"), "rounds was 10, is 3; give that, or another --out"),
        (("--against", "torch"), "against was ['onnxruntime', 'torch', 'tvm-default'], is ['torch']"),
        (("--target", '{"kind": "llvm", "num-cores": 1}'), "target was llvm, is {"),
    ):
        assert told in refused(bench_models.main, *words[1:], *more)
    monkeypatch.setattr(bench_models, "prices", lambda _target: "another machine")
    assert "is another machine; give that" in refused(bench_models.main, *words[1:])
    assert timed == ["greedy", "none"]


def test_operators_timed_with_other_options_are_not_gone_on_with(tmp_path, monkeypatch, refused):
    out, made = tmp_path / "kernels.json", {"rounds": 3, "target": "llvm", "prices": prices("llvm")}
    out.write_text(json.dumps([{"operator": "conv2d", "made": made}]))
    monkeypatch.setattr(bench_kernels, "operators", lambda _model: [])
    monkeypatch.setattr(bench_kernels, "show", lambda _rows: None)
    monkeypatch.setattr("sys.argv", ["script.py", "one", "--out", str(out)])
    bench_kernels.main()
    assert "rounds was 3, is 5" in refused(bench_kernels.main, "one", "--out", str(out), "--rounds", "5")
    monkeypatch.setattr(bench_kernels, "prices", lambda _target: "another machine")
    assert "is another machine; give that" in refused(bench_kernels.main, "one", "--out", str(out))


def test_what_cannot_be_timed_or_written_is_told_at_once(tmp_path, refused):
    there, nowhere = str(tmp_path / "a.json"), str(tmp_path / "no" / "a.json")
    for script in (bench_models, bench_kernels):
        assert "does not exist or cannot be written" in refused(script.main, "zoo:demo", "--out", nowhere)
        assert "no.onnx" in refused(script.main, str(tmp_path / "no.onnx"), "--out", there)
        assert "nought" in refused(script.main, "zoo:demo", "--target", "nought", "--out", there)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_outputs_are_wrong_without_end_is_kept_and_shown(tmp_path, monkeypatch, capsys):
    """JSON has no word for infinity."""
    mod = bound(conv_chain())
    outputs = {"unsearched": np.nan, "onnxruntime": 1.0}
    measured = {name: EndToEnd(((1e-3,),), (np.array([value]),)) for name, value in outputs.items()}
    monkeypatch.setattr(bench_models, "model_path", Path)
    monkeypatch.setattr(bench_models, "from_onnx", lambda _path: mod)
    monkeypatch.setattr(bench_models, "compiled", lambda *_: Candidate("tvm", Path("none.so")))
    monkeypatch.setattr(bench_models, "measure_interleaved", lambda *_, **__: measured)
    alone = SimpleNamespace(timer=SimpleNamespace(in_turn=nullcontext))
    row = bench_models.bench("zoo:one", TARGET, "none", 1, alone, [], None)
    assert (row["unsearched_error"], row["onnxruntime_error"]) == (None, 0.0)
    bench_models.show([{**row, "unsearched_compile_secs": 1.0, "unsearched_link_secs": 1.0}])
    assert " inf " in capsys.readouterr().out
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([bench_row(unsearched_error=None)]))
    assert any(line.endswith("| inf |") for line in figure6([path]).lines)


def test_kernels_that_could_not_be_run_have_no_figures():
    row = {"kernel": "conv2d", "count": 2, "run_secs": math.nan, "flops_per_sec": math.nan, "share_of_peak": math.nan}
    run = {**row, "run_secs": 1e-3, "flops_per_sec": 1e9, "share_of_peak": 0.5}
    unknown = dict.fromkeys(kernel_table.MEASURED)
    assert kernel_table.as_json([row, run]) == [{**row, **unknown}, run]


def test_models_on_a_gpu_are_kept_as_they_come(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"

    def bench_model(model: str, *_: object) -> dict[str, float]:
        if model == "interrupted":
            raise KeyboardInterrupt
        if model == "unknown":
            raise FrontendError("unknown: no such file")
        return {"ours_secs": 1.0}

    monkeypatch.setattr(bench_gpu.tvm, "cuda", lambda: SimpleNamespace(device_name="a GPU"))
    monkeypatch.setattr(bench_gpu, "torch_with_cuda", lambda: None)
    monkeypatch.setattr(bench_gpu, "best_rates", lambda *_: (1e12, 1e9))
    monkeypatch.setattr(bench_gpu, "bench_model", bench_model)
    options = argparse.Namespace(dtype="float32", rounds=1, against=(), search=None, kernels=False, out=out)
    target = SimpleNamespace(attrs={"arch": "sm_90"})
    options.models = ["right", "unknown", "interrupted"]
    with pytest.raises(KeyboardInterrupt):
        bench_gpu.run(options, target)
    kept = [{"model": "right", "ours_secs": 1.0}, {"model": "unknown", "failed": "unknown: no such file"}]
    assert json.loads(out.read_text())["models"] == kept
    options.models = ["unknown", "right"]
    with pytest.raises(KernelError, match=r"^unknown: failed for the reason told above"):
        bench_gpu.run(options, target)
    assert json.loads(out.read_text())["models"] == kept[::-1]


@pytest.mark.timeout(60)
def test_matching_on_a_model_without_sites_ends(monkeypatch, capsys):
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.floor(x))
    monkeypatch.setattr(match_time, "from_onnx", lambda _path: mod)
    monkeypatch.setattr(match_time, "model_path", Path)
    monkeypatch.setattr("sys.argv", ["match_time.py", "--models", "one", "--rounds", "2"])
    assert match_time.main() == 0
    assert capsys.readouterr().out.endswith("; no rewrite\n")
    start = GraphState.from_module(conv_chain(), default_rules(LANES))
    assert 0 < len(match_time.after_rewrites(start, 3, 0)) <= 3


def test_a_model_without_steps_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(step_time, "from_onnx", lambda _path: module({"x": (3,)}, {}, lambda emit, x: rx.floor(x)))
    monkeypatch.setattr(step_time, "model_path", Path)
    monkeypatch.setattr("sys.argv", ["step_time.py", "one", "--steps", "3", "--episodes", "2"])
    with pytest.raises(SystemExit) as ended:
        step_time.main()
    assert ended.value.code == 2
    assert "one: no step can be made, of 6 that were asked for" in capsys.readouterr().err


def test_steps_of_a_whole_training_are_timed(tmp_path, monkeypatch, capsys):
    """Of kernels whose times are invented, and kept in a home of their own: steps are timed, not kernels."""
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    monkeypatch.setattr(timer, "LocalWorkers", workers_by(lambda features, _cold: 1e-6 + features["flops"] / 1e11))
    monkeypatch.setattr(step_time, "from_onnx", lambda _path: conv_chain())
    monkeypatch.setattr(step_time, "model_path", Path)
    out = tmp_path / "steps.json"
    words = ["one", "--steps", "3", "--episodes", "1", "--training", "4", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["step_time.py", *words])
    step_time.main()
    (row,) = json.loads(out.read_text())
    training = row["training"]
    assert training["steps"] >= 4
    assert 0 < training["median_secs"] <= training["percentile95_secs"] <= training["worst_secs"]
    assert 0 < training["candidates"] <= training["most_candidates"]
    assert "milliseconds a step of a training" in capsys.readouterr().out


def test_random_nets_that_cannot_be_built_are_counted(tmp_path, monkeypatch, capsys):
    def exported(seed: int, path: Path) -> None:
        if seed == 0:
            raise RuntimeError("cannot be exported:\nno such operator")
        path.touch()

    def wrong(_path: Path, seed: int, _steps: int, plan: Path) -> list[str]:
        if seed == 1:
            raise FrontendError("cannot be imported")
        plan.touch()
        return []

    monkeypatch.setattr(random_nets, "exported", exported)
    monkeypatch.setattr(random_nets, "wrong", wrong)
    monkeypatch.setattr("sys.argv", ["random_nets.py", "--count", "3", "--keep", str(tmp_path)])
    assert random_nets.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("net 0: not exported, imported or rewritten: RuntimeError: no such operator (")
    assert lines[1].startswith("net 1: not exported, imported or rewritten: FrontendError: cannot be imported (")
    assert lines[2].startswith("net 2: right (")
    assert lines[3] == "1 of 3 nets compute what ONNX Runtime computes"
    assert [path.name for path in tmp_path.iterdir()] == ["net1.onnx"]
    assert random_nets.told(ValueError()) == "ValueError: no message"
