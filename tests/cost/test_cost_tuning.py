"""Tuning: the bar is the schedule rules' own time, what was tried is not tried again, results stay the same."""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from cost_kernels import add, matmul
from tvm import relax
from tvm.s_tir.meta_schedule.builder import BuilderInput
from tvm.s_tir.meta_schedule.runner import RunnerInput

from rlflow_tvm.cost import KernelDatabase, KernelTimer, Measurement, TunedSchedules, tune
from rlflow_tvm.cost.database import TunedRow
from rlflow_tvm.cost.tuning_measure import Candidates
from rlflow_tvm.errors import CostError, KernelError
from rlflow_tvm.kernels import TUNED_RULE, Choices, explain, extract_kernels, pipeline
from rlflow_tvm.kernels.tuned import apply_trace, tunable

ROWS, DEPTH, COLUMNS = 37, 24, 33


@pytest.fixture(scope="module")
def module():
    """relu(x @ y), a single kernel."""
    x = relax.Var("x", relax.TensorType((ROWS, DEPTH), "float32"))
    y = relax.Var("y", relax.TensorType((DEPTH, COLUMNS), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y], attrs={"num_input": 2}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.relu(relax.op.matmul(x, y)))
        builder.emit_func_output(out)
    return builder.finalize()


@contextmanager
def few_at_once() -> Iterator[None]:
    """As few candidates in a generation as MetaSchedule takes: what it finds is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlflow_tvm.cost.tuning._POPULATION", 50)
        yield


@pytest.fixture
def invented(monkeypatch):
    """Candidates take times that are made up, and compute what they should."""
    secs = itertools.count(1)
    monkeypatch.setattr(KernelTimer, "time", lambda *_, **__: Measurement(run_secs=1e-6 * next(secs)))
    monkeypatch.setattr(KernelTimer, "difference", lambda *_: 0.0)
    with few_at_once():
        yield


@pytest.fixture(scope="module")
def tuned(module, target, tmp_path_factory):
    """The database after sixteen trials, the kernel, and what came of them."""
    path = tmp_path_factory.mktemp("tuning") / "kernels.sqlite"
    kernels = extract_kernels(module, target)
    steps = []
    with KernelDatabase(path) as database, KernelTimer(target, database) as timer, few_at_once():
        (result,) = tune(kernels, timer, 16, on_progress=lambda *step: steps.append(step))
    assert steps == [(i + 1, 16, kernels[0].name) for i in range(16)]
    return path, kernels[0], result


def records(path) -> list[str]:
    (found,) = path.parent.glob("tuning/*/database_tuning_record.json")
    return found.read_text().splitlines()


def run(module, target, choices: Choices) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline(target, choices)), tvm.cpu())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS))]
    return machine["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


def test_the_best_schedule_is_kept_with_both_times(tuned):
    path, _, result = tuned
    assert len(records(path)) == 16
    assert result.row.trials == 16
    assert result.row.run_secs > 0
    assert result.row.rule_secs > 0
    assert json.loads(result.row.trace)


def test_trials_are_made_once(tuned, target, invented):
    path, kernel, result = tuned
    steps = []
    with KernelDatabase(path) as database, KernelTimer(target, database) as timer:
        (again,) = tune([kernel], timer, 16, on_progress=lambda *step: steps.append(step))
        assert again == result
        assert not steps
        (more,) = tune([kernel], timer, 24, on_progress=lambda *step: steps.append(step[:2]))
        assert more.row.trials == 24
        assert steps == [(i + 17, 24) for i in range(8)]
    assert len(records(path)) == 24


@pytest.mark.parametrize(("rule_secs", "rule"), [(1.0, TUNED_RULE), (1.01e-3, "matmul"), (0.5e-3, "matmul")])
def test_only_a_faster_schedule_is_used(tuned, module, target, rule_secs, rule):
    _, kernel, result = tuned
    with KernelDatabase(":memory:") as database, KernelTimer(target, database) as timer:
        row = replace(result.row, run_secs=1e-3, rule_secs=rule_secs)
        database.put_tuned(kernel.key, timer.target_key, timer.version, row)
        choices = Choices(schedule=TunedSchedules(timer))
        assert [kernel.rule for kernel in explain(module, target, choices)] == [rule]
        np.testing.assert_allclose(run(module, target, choices), run(module, target, Choices()), rtol=0, atol=1e-5)


def test_half_a_line_is_taken_off(tuned, target, invented, monkeypatch):
    """Without writing the others again: a full disk, or another kill, would lose them."""
    monkeypatch.setattr(Path, "write_bytes", lambda *_: pytest.fail("it was written again"))
    path, kernel, _ = tuned
    (file,) = path.parent.glob("tuning/*/database_tuning_record.json")
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[-1][:40])  # the process was killed while it wrote
    wanted = len(whole.splitlines()) + 8
    told = []
    with KernelDatabase(path) as database, KernelTimer(target, database) as timer:
        (more,) = tune([kernel], timer, wanted, on_tuned=told.append)
    assert told == [more]
    assert more.row.trials == wanted
    assert len(records(path)) == wanted


def test_two_do_not_tune_at_once(tuned, target):
    path, kernel, _ = tuned
    (folder,) = path.parent.glob("tuning/*")
    with KernelDatabase(path) as database, KernelTimer(target, database) as timer, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CostError, match="another process is tuning"):
            tune([kernel], timer, 1000)


def test_an_interrupt_comes_through_metaschedule_as_what_it_is(target):
    """The command goes on with what the search has found, where it is told that it was interrupted."""

    class Interrupted:
        def time(self, *_arguments):
            raise KeyboardInterrupt

    candidates = Candidates(Interrupted(), "", lambda _measurement: None)
    (built,) = candidates.builder.build([BuilderInput(tvm.IRModule({"main": add(4)}), target)])
    with pytest.raises(KeyboardInterrupt):
        candidates.runner.run([RunnerInput(built.artifact_path, "cpu", [])])


def test_a_failure_by_chance_takes_no_schedule_away(tuned, target, monkeypatch, caplog):
    path, kernel, _ = tuned
    with KernelDatabase(path) as database, KernelTimer(target, database) as timer:
        kept = (kernel.key, timer.target_key, timer.version)
        before = database.get_tuned(*kept)
        fewer = replace(before, trials=8)  # of which there are sixteen on file: nothing more is tried
        database.put_tuned(*kept, fewer)
        for name, fails in (
            ("difference", lambda *_: None),
            ("time", lambda *_, **__: Measurement(error="the worker was killed", error_kind="crash")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(timer, name, fails)
                (result,) = tune([kernel], timer, 16)
                assert result.row == database.get_tuned(*kept) == fewer
                assert "tune again" in caplog.text
                caplog.clear()
        database.put_tuned(*kept, before)


def test_no_other_process_tunes_between_two_kernels(target, tmp_path, monkeypatch):
    heavy, light = (extract_kernels(_product(size), target)[0] for size in (256, 128))
    folders, kept = [], []

    def noted(_kernel, _timer, folder, trials, *_):
        folders.append(folder)
        return TunedRow(None, None, None, trials)

    def put(*row):
        with (folders[-1] / "lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.append(row)

    monkeypatch.setattr("rlflow_tvm.cost.tuning._tune", noted)
    with KernelDatabase(tmp_path / "k.sqlite") as database, KernelTimer(target, database) as timer:
        for kernel, secs in ((heavy, 2e-3), (light, 1e-3)):
            database.put(kernel.key, timer.target_key, timer.version, Measurement(secs))
        monkeypatch.setattr(database, "put_tuned", put)
        tune([light, heavy], timer, 90)
    assert len(kept) == 2
    with (folders[-1] / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (TunedRow(None, None, None, 32), "old"),
        (TunedRow("new", 1.0, 1.5, 32), "old"),
        (TunedRow("new", 1.0, 3.0, 32), "new"),
        (TunedRow("old", 1.0, 1.1, 32), "new measurement"),
    ],
)
def test_a_better_schedule_is_kept(target, monkeypatch, module, found, kept):
    """As one that was merged from another machine, of whose trials there are no records here."""
    (kernel,) = extract_kernels(module, target)
    monkeypatch.setattr("rlflow_tvm.cost.tuning._tune", lambda *_: found)
    monkeypatch.setattr(KernelTimer, "measure", lambda *_: [Measurement(run_secs=1.0)])
    old = TunedRow("old", 1.0, 2.0, 16)
    with KernelDatabase(":memory:") as database, KernelTimer(target, database) as timer:
        at = kernel.key, timer.target_key, timer.version
        database.put_tuned(*at, old)
        tune([kernel], timer, 32)
        assert database.get_tuned(*at) == (replace(old, trials=32) if kept == "old" else found)


def test_a_schedule_for_another_kernel_is_refused(tuned, target):
    _, _, result = tuned
    with pytest.raises(KernelError, match=r"does not fit it .*tune again"):
        apply_trace(add(4, 4), target, json.loads(result.row.trace))


def test_kernels_share_the_trials_by_their_time(target, monkeypatch):
    heavy, light = extract_kernels(_product(256), target)[0], extract_kernels(_product(128), target)[0]
    asked = {}

    def noted(kernel, _timer, _database, trials, *_):
        asked[kernel.key] = trials
        return TunedRow(None, None, None, trials)

    monkeypatch.setattr("rlflow_tvm.cost.tuning._tune", noted)
    with KernelDatabase(":memory:") as database, KernelTimer(target, database) as timer:
        for kernel, secs in ((heavy, 2e-3), (light, 1e-3)):
            database.put(kernel.key, timer.target_key, timer.version, Measurement(secs))
        results = tune([light, heavy], timer, 90)
        assert asked == {heavy.key: 60, light.key: 30}
        assert [result.kernel.key for result in results] == [heavy.key, light.key]
        asked.clear()
        tune([light, replace(heavy, count=20)], timer, 90)  # the light one is less than a tenth now
        assert asked == {heavy.key: 90}
        asked.clear()
        tune([light, heavy], timer, 20)  # too few for two
        assert not asked  # and more were made before


def test_nowhere_to_keep_them(target):
    with KernelTimer(target) as timer, pytest.raises(CostError, match="give the timer one"):
        tune([], timer, 16)


def test_what_two_kernels_write_is_compared(timer):
    product = matmul(8, 8, 8)
    assert timer.difference(product, product) == 0.0
    assert timer.difference(add(8, 8), _subtract(8, 8)) > 0.1
    assert timer.difference(product, add(3, 3, 3)) is None


def test_nobody_else_measures_while_two_kernels_are_compared(timer, monkeypatch):
    order: list[str] = []

    @contextmanager
    def quiet():
        order.append("quiet")
        yield
        order.append("no more")

    def answer(request, _limit):
        order.append(request["op"])
        return {"difference": 0.0}

    monkeypatch.setattr(timer, "_quiet", quiet)
    monkeypatch.setattr(timer, "_answer", answer)
    timer.difference(add(3), add(3))
    assert order == ["quiet", "difference", "no more"]


def test_winograd_is_left_alone(target):
    x = relax.Var("x", relax.TensorType((1, 16, 28, 28), "float32"))
    w = relax.Var("w", relax.TensorType((16, 16, 3, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.conv2d(x, w, padding=(1, 1)))
        builder.emit_func_output(out)
    (row,) = explain(builder.finalize(), target)
    (kernel,) = extract_kernels(builder.finalize(), target)
    assert tunable(kernel.func) == (row.rule != "winograd")


def _subtract(*shape: int) -> tvm.tirx.PrimFunc:
    a, b = (tvm.te.placeholder(shape, name=name) for name in "ab")
    return tvm.te.create_prim_func([a, b, tvm.te.compute(shape, lambda *i: a(*i) - b(*i))])


def _product(size: int) -> tvm.IRModule:
    x, y = (relax.Var(name, relax.TensorType((size, size), "float32")) for name in "xy")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y], attrs={"num_input": 2}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(x, y))
        builder.emit_func_output(out)
    return builder.finalize()
