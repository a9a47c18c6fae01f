"""The cost of a graph: the sum over its kernels, memoised, with failures as infinity."""

from __future__ import annotations

import math
import sqlite3

import numpy as np
import pytest
import tvm
from cost_kernels import SCHEDULE, two_layers
from tvm import relax

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, graph_cost
from rlflow_tvm.errors import CostError
from rlflow_tvm.ir import detach

F32 = 4


def weight_work() -> tvm.IRModule:
    """x + exp(w): the exponential is of weights alone."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((32,), "float32"))
    w = relax.const(np.ones(32, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, builder.emit(relax.op.exp(w))))
        builder.emit_func_output(out)
    return builder.get()


@pytest.fixture(scope="module")
def model(target, timer):
    return CostModel(target, timer=timer)


def test_sum_over_kernels(model, timer):
    cost = model.cost(detach(two_layers()).mod)
    (kernel,) = model.kernels(detach(two_layers()).mod)
    measurement = timer.lookup(kernel, in_graph=True)
    assert cost.kernels == kernel.count == 2
    assert cost.launch_secs == pytest.approx(2 * timer.launch_secs())
    assert cost.run_secs == pytest.approx(2 * measurement.run_secs + cost.launch_secs)
    assert cost.flops == 2 * (2 * 4 * 16 * 16 + 4 * 16)  # multiply-adds, and the maximum counts one
    assert cost.bytes_moved == 2 * F32 * (4 * 16 + 16 * 16 + 4 * 16)
    assert cost.peak_bytes == 3 * F32 * 4 * 16  # input, output, and what is between
    assert cost.failed == ()


def test_weight_only_work_is_free(model):
    cost = model.cost(weight_work())
    assert cost.kernels == 1
    assert cost.bytes_moved == 3 * 32 * F32
    assert cost.flops == 32


def test_what_is_learnt_from_is_stored_of_known_kernels_too(target, tmp_path):
    """As of those whose description an earlier version of the database kept for another target alone."""
    path, mod = tmp_path / "kernels.sqlite", detach(two_layers()).mod
    seen = []
    for drop in ("DELETE FROM description", "SELECT 1"):
        with KernelDatabase(path) as database, KernelTimer(target, database, schedule=SCHEDULE) as timer:
            CostModel(target, timer=timer).cost(mod)
            seen.append(database.described(timer.target_key, timer.graph_version))
            assert timer.measured == (len(seen) == 1)
        with sqlite3.connect(path) as raw:
            raw.execute(drop)
        raw.close()
    assert len(seen[0]) == 1
    assert seen[0] == seen[1]


def test_nothing_to_do(model):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.reshape(x, (2, 4)))
        builder.emit_func_output(out)
    cost = model.cost(builder.get())
    assert (cost.kernels, cost.run_secs, cost.flops) == (0, 0.0, 0)


def test_no_kernel_is_tried_where_launching_one_fails(target, monkeypatch):
    """Nothing can be built then, and what fails is remembered for good."""

    def fails(_timer):
        raise CostError("no compiler")

    monkeypatch.setattr(KernelTimer, "launch_secs", fails)
    with (
        KernelDatabase(":memory:") as database,
        KernelTimer(target, database, schedule="cost_kernels:refuse") as timer,
        pytest.raises(CostError, match="no compiler"),
    ):
        CostModel(target, timer=timer).cost(detach(two_layers()).mod)
    assert timer.measured == 0


def test_memoised(target, timer):
    model = CostModel(target, timer=timer)
    first = model.cost(detach(two_layers(width=24)).mod)
    assert (model.asked, model.misses, model.measured) == (1, 1, 1)
    # The same graph with other weights, in the working form: known.
    assert model.cost(detach(two_layers(weight=3.0, width=24)).mod) is first
    assert (model.asked, model.misses, model.measured) == (2, 1, 1)
    # In the bound form it is another graph of the same kernels.
    assert model.cost(two_layers(width=24)) == first
    assert (model.asked, model.misses, model.measured) == (3, 2, 1)


def test_failed_kernel_is_infinite(target, tmp_path):
    with CostModel(target, timer=None) as closed:
        assert closed.measured == 0
    with KernelTimer(target, schedule="cost_kernels:refuse") as timer:
        cost = graph_cost(two_layers(), target, timer)
    assert cost.run_secs == math.inf
    assert math.isfinite(cost.launch_secs)
    assert len(cost.failed) == 1
    assert "build: ValueError: no schedule for 3 parameters" in cost.failed[0]
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        with KernelTimer(target, database, schedule="cost_kernels:refuse") as timer:
            assert f"[kept in {tmp_path}/k.sqlite]" in graph_cost(two_layers(), target, timer).failed[0]


def test_next_process_measures_nothing(target, tmp_path):
    costs, measured = [], []
    for _ in range(2):
        with KernelDatabase(tmp_path / "k.sqlite") as database:
            with KernelTimer(target, database, schedule=SCHEDULE) as timer:
                model = CostModel(target, timer=timer)
                costs.append(model.cost(two_layers()))
                measured.append(model.measured)
    assert costs[0] == costs[1]
    assert measured == [1, 0]


def test_default_database_and_schedule(target, tmp_path, monkeypatch):
    """As a user calls it: the kernels room schedules, the default database keeps."""
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    first = graph_cost(two_layers(), target)
    assert first.failed == ()
    assert 0 < first.run_secs < math.inf
    assert (tmp_path / "kernels.sqlite").exists()
    assert graph_cost(two_layers(), target) == first


def test_progress(target, timer):
    calls = []
    cost_model = CostModel(target, timer=timer)
    cost_model.on_progress = lambda *how_far: calls.append(how_far)
    cost_model.cost(two_layers(width=40))
    assert calls == [(1, 1)]
