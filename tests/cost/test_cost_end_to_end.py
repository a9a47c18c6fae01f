"""Whole models in processes of their own: results, statistics, and clear errors."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from rlflow_tvm.cost import (
    Candidate,
    CostModel,
    EndToEnd,
    KernelDatabase,
    Runners,
    export_library,
    measure_interleaved,
    measure_module,
)
from rlflow_tvm.cost import end_to_end as module
from rlflow_tvm.cost.runner import read_arrays, write_arrays
from rlflow_tvm.cost.worker_process import WorkerProcess
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Lowering

X = np.arange(6, dtype="float32").reshape(2, 3)
Y = np.full((2, 3), 10, "float32")
FAKE = {"model": EndToEnd(((2.0,),), ())}


@pytest.fixture(scope="module")
def library(target, tmp_path_factory):
    """A library of main(x, y) -> (x + y, (x * y,))."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((2, 3), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            total, product = builder.emit(relax.op.add(x, y)), builder.emit(relax.op.multiply(x, y))
            out = builder.emit_output(relax.Tuple([total, relax.Tuple([product])]))
        builder.emit_func_output(out)
    path = tmp_path_factory.mktemp("library") / "model.so"
    return export_library(builder.get(), target, path, relax.get_pipeline("default"))


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    """An ONNX file of main(a, b) -> a - b."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Sub", ["a", "b"], ["c"])], "sub", values[:2], values[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx.save(model, path)
    return Candidate("onnx", path)


def test_every_other_round_is_run_by_a_new_process(library, monkeypatch):
    """One binary's time varies from process to process."""
    started, start = [], WorkerProcess._start
    monkeypatch.setattr(WorkerProcess, "_start", lambda self: started.append(self) or start(self))
    monkeypatch.setattr(module, "_ROUNDS_A_PROCESS", 2)
    results = measure_interleaved({"ours": library, "again": library}, [X, Y], rounds=5, threads=1)
    assert [started.count(each) for each in dict.fromkeys(started)] == [3, 3]
    for result in results.values():
        assert len(result.rounds) == 5
        np.testing.assert_array_equal(result.outputs[0], X + Y)
    with Runners(1) as runners:
        runners.measure({"ours": library}, [X, Y], 5)
    assert len(started) == 7, "a process is kept where nobody asks for others"


def test_interleaved(library, onnx_file):
    progress = []
    results = measure_interleaved(
        {"ours": library, "theirs": onnx_file, "again": library},
        [X, Y],
        rounds=2,
        threads=2,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert list(results) == ["ours", "theirs", "again"]
    assert progress == [(i, 6) for i in range(1, 7)]
    for result in results.values():
        first, second = (len(calls) for calls in result.rounds)
        # as many in each round; how many tells the machine's load, below the bound of so small a model
        assert module._MIN_CALLS < first == second <= module._MAX_CALLS
        low, high = result.quartiles
        assert 0 < low <= result.run_secs <= high
    for name in ("ours", "again"):
        for got, want in zip(results[name].outputs, [X + Y, X * Y], strict=True):
            np.testing.assert_array_equal(got, want)
    (got,) = results["theirs"].outputs
    np.testing.assert_array_equal(got, X - Y)


def test_what_was_built_tells_what_it_took(library):
    assert library.kernels == 2
    assert library.compile_secs is not None
    assert library.compile_secs > 0
    assert library.link_secs is not None
    assert library.link_secs > 0


def test_kernels_are_the_launches_of_a_run(target, tmp_path):
    """Of ours as `Lowering` counts them, equal ones as often as they are launched; a reshape is no kernel."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 16), "float32"))
    weight = relax.const(np.ones((16, 16), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            step = x
            for _ in range(3):
                step = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(step, weight))))
            out = builder.emit_output(relax.op.exp(builder.emit(relax.op.reshape(step, (16, 4)))))
        builder.emit_func_output(out)
    mod = builder.get()
    ours = export_library(mod, target, tmp_path / "ours.so")
    assert ours.kernels == 4
    assert ours.kernels == sum(kernel.count for kernel in Lowering(target).kernels(mod))
    default = export_library(mod, target, tmp_path / "default.so", relax.get_pipeline("default_build"))
    assert default.kernels == 7  # which fuses nothing


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak")
def test_peak_memory_is_the_models(tmp_path):
    """In a process that is used again, too; the other models' and the runtime's memory are no part of it."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    size = {"small": 1 << 10, "large": 1 << 25}  # bytes of weights
    for name, weights in size.items():
        x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, k]) for n, k in (("x", 1), ("y", 4)))
        w = onnx.numpy_helper.from_array(np.ones((weights // 4,), "float32"), "w")
        four = onnx.numpy_helper.from_array(np.arange(4), "four")
        nodes = [
            onnx.helper.make_node("Mul", ["x", "w"], ["v"]),
            onnx.helper.make_node("Gather", ["v", "four"], ["y"], axis=1),
        ]
        graph = onnx.helper.make_graph(nodes, "g", [x], [y], [w, four])
        onnx.save(
            onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8),
            tmp_path / name,
        )
    with Runners(1) as runners:
        peaks = []
        for name in ("small", "large", "small"):
            candidate = Candidate("onnx", tmp_path / name)
            result = runners.measure({"model": candidate}, [np.ones((1, 1), "float32")], rounds=1)["model"]
            assert result.load_secs > 0
            assert result.first_secs > 0
            peaks.append(result.peak_bytes)
    assert 0 <= peaks[0] < size["large"]
    assert peaks[1] >= size["large"]
    assert 0 <= peaks[2] < size["large"]


def test_processes_take_one_model_after_the_other(library, onnx_file):
    with Runners(2) as runners:
        first = runners.measure({"one": library}, [X, Y], rounds=1)
        own = replace(library, inputs=(Y, X))
        second = runners.measure({"one": own, "two": onnx_file}, [X, Y], rounds=1)
    np.testing.assert_array_equal(first["one"].outputs[0], X + Y)
    np.testing.assert_array_equal(second["one"].outputs[1], X * Y)
    np.testing.assert_array_equal(second["two"].outputs[0], X - Y)


def test_torch_candidate(tmp_path):
    torch = pytest.importorskip("torch")

    class Sub(torch.nn.Module):
        def forward(self, a, b):
            return a - b, {"sum": a + b}

    torch.export.save(torch.export.export(Sub(), (torch.from_numpy(X), torch.from_numpy(Y))), tmp_path / "sub.pt2")
    result = measure_interleaved({"torch": Candidate("torch", tmp_path / "sub.pt2")}, [X, Y], rounds=1, threads=2)
    difference, total = result["torch"].outputs
    np.testing.assert_array_equal(difference, X - Y)
    np.testing.assert_array_equal(total, X + Y)


@pytest.mark.usefixtures("usual_bursts")
@pytest.mark.parametrize("kind", ["tvm", "onnx", "torch"])
@pytest.mark.parametrize(
    ("first", "second", "bursts"),
    [
        (0.5, None, [(1, True), (4, True)]),
        (9.0, 0.1, [(1, False), (1, True), (4, True)]),
        (9.0, 2.0, [(1, False), (1, False)]),
    ],
    ids=["fast", "cold", "slow"],
)
def test_what_a_burst_is_the_first_call_does_not_decide(kind, first, second, bursts, tmp_path):
    """It is cold, and torch compiles in it."""
    asked = []

    def answer(request, _limit):
        if request["op"] == "load":
            return {"load_secs": 0.1, "first_secs": first, "peak_bytes": None}
        asked.append((request["calls"], request["wake"]))
        return {"samples": [0.07 if request["wake"] else second] * request["calls"], "peak_bytes": None}

    runner = module._Runner("model", 1, 10.0, str(tmp_path))
    runner._process = SimpleNamespace(call=answer)
    runner.load(Candidate(kind, tmp_path / "model"), tmp_path / "inputs.npz", tmp_path / "outputs.npz")
    runner.burst()
    assert asked == bursts


def addition() -> tvm.IRModule:
    """main(x) -> x + Y."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, relax.const(Y)))
        builder.emit_func_output(out)
    mod = builder.get()
    mod["main"] = mod["main"].with_attr("num_input", 1)
    return mod


def test_measure_module_with_our_pipeline(target):
    result = measure_module(addition(), target, [X], rounds=1)
    (got,) = result.outputs
    np.testing.assert_array_equal(got, X + Y)
    assert len(result.rounds) == 1


def test_a_whole_model_is_timed_while_nobody_measures(target, tmp_path, monkeypatch):
    def free() -> bool:
        with (tmp_path / "k.sqlite.busy").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    timed: list[bool] = []
    monkeypatch.setattr(module, "measure_interleaved", lambda *_args, **_options: timed.append(free()) or FAKE)
    with KernelDatabase(tmp_path / "k.sqlite") as database, CostModel(target, database) as cost_model:
        assert cost_model.end_to_end(addition()) == 2.0
    assert timed == [False]
    assert free()


def test_statistics():
    result = EndToEnd(rounds=((1.0, 3.0), (2.0, 4.0, 9.0)), outputs=())
    assert result.samples == (1.0, 3.0, 2.0, 4.0, 9.0)
    assert result.run_secs == 3.0
    assert result.quartiles == (2.0, 4.0)
    assert result.round_secs == (2.0, 4.0)


def test_a_full_disk(target, library, tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    told = "temporary files cannot be written .*TMPDIR"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_arrays", full)
        with pytest.raises(CostError, match=told):
            measure_interleaved({"ours": library}, [X, Y])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CostError, match=r"cannot link .*No space left on device.*check"):
            export_library(of_exp(), target, tmp_path / "m.so", relax.get_pipeline("default"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    for measure in (
        lambda: measure_module(of_exp(), target),
        lambda: measure_interleaved({"ours": library}, [X, Y]),
    ):
        with pytest.raises(CostError, match=told):
            measure()


def of_exp() -> tvm.IRModule:
    """main(x) -> exp(x)."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    return builder.get()


def test_wrong_inputs(library, onnx_file):
    with pytest.raises(CostError, match=r"candidate theirs .*2 inputs"):
        measure_interleaved({"theirs": onnx_file}, [X], rounds=1)
    with pytest.raises(CostError, match="candidate ours cannot be timed"):
        measure_interleaved({"ours": library}, [X], rounds=1)


def test_missing_file(tmp_path):
    with pytest.raises(CostError, match="candidate absent cannot be timed"):
        measure_interleaved({"absent": Candidate("tvm", tmp_path / "absent.so")}, [X], rounds=1)


def test_onnxruntime_missing(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CostError, match="pip install onnxruntime"):
        measure_interleaved({"theirs": Candidate("onnx", "x.onnx")}, [X])


def test_no_rounds(library):
    with pytest.raises(CostError, match="0 rounds"):
        measure_interleaved({"ours": library}, [X, Y], rounds=0)


def test_linker_missing(target, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(CostError, match=r"install a C\+\+ compiler"):
        export_library(of_exp(), tvm.target.Target("llvm"), tmp_path / "m.so", relax.get_pipeline("default"))


def test_arrays_of_any_type_travel(tmp_path):
    arrays = [X, X.astype(ml_dtypes.bfloat16), np.array(True), X.astype("float16"), np.array(3, ml_dtypes.bfloat16)]
    write_arrays(tmp_path / "a.npz", arrays)
    for a, b in zip(arrays, read_arrays(tmp_path / "a.npz"), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
