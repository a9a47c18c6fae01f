"""Features of schedules against small ones counted by hand."""

from __future__ import annotations

import math

import pytest
import tvm
from cost_kernels import add, matmul
from small_models import MODELS, TARGET
from tvm import s_tir, te, tirx

from rlflow_tvm.cost.description import Descriptions
from rlflow_tvm.cost.schedule_features import schedule_features
from rlflow_tvm.errors import KernelError
from rlflow_tvm.kernels import RULE_ATTR, SCHEDULED_ATTR, Kernel, extract_kernels

TWO = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def of(func: tirx.PrimFunc, parallel: int = 0, vector: int = 0) -> dict[str, float]:
    """Of a function of one block: its first loop split for threads into `parallel` tasks, its last into vectors."""
    sch = s_tir.Schedule(func)
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    if vector:
        sch.vectorize(sch.split(sch.get_loops(block)[-1], [None, vector])[1])
    if parallel:
        sch.parallel(sch.split(sch.get_loops(block)[0], [parallel, None])[0])
    scheduled = sch.mod["main"].with_attr(RULE_ATTR, "by hand")
    return {name.removeprefix("schedule:"): number for name, number in schedule_features(scheduled, TWO).items()}


def elementwise(compute, *shapes: tuple[int, ...]) -> tirx.PrimFunc:
    inputs = [te.placeholder(shape, name=f"x{i}") for i, shape in enumerate(shapes)]
    return te.create_prim_func([*inputs, te.compute((6, 32), lambda i, j: compute(*inputs, i, j), name="y")])


def test_as_it_is():
    features = of(add(6, 32))
    assert (features["stores:scalar"], features["loads:scalar"]) == (6 * 32, 2 * 6 * 32)
    assert (features["tasks"], features["waves"], features["allocated"]) == (0, 2, 0)
    assert features["rule:by hand"] == 1
    assert not {"forks", "stores:vector", "loads:vector"} & set(features)


def test_vectors_count_once():
    features = of(add(6, 32), vector=8)
    assert (features["stores:vector"], features["loads:vector"]) == (6 * 4, 2 * 6 * 4)
    assert "stores:scalar" not in features


@pytest.mark.parametrize(("tasks", "waves"), [(2, 1.0), (3, 4 / 3), (6, 1.0), (1, 2.0)])
def test_tasks_are_shared_by_threads(tasks, waves):
    features = of(add(6, 32), parallel=tasks)
    assert (features["forks"], features["tasks"]) == (1, tasks)
    assert features["waves"] == pytest.approx(waves)
    assert features["stores:scalar"] == 6 * 32


def test_how_vectors_are_read():
    same = of(elementwise(lambda x, i, j: x[i] + 1.0, (6,)), vector=8)
    assert (same["stores:vector"], same["loads:same"]) == (24, 24)
    turned = of(elementwise(lambda x, i, j: x[j, i] + 1.0, (32, 6)), vector=8)
    assert (turned["stores:vector"], turned["loads:strided"]) == (24, 24)
    skipping = of(elementwise(lambda x, i, j: x[i, j * 2] + 1.0, (6, 64)), vector=8)
    assert skipping["loads:strided"] == 24
    shifted = of(elementwise(lambda x, i, j: x[i, j + 3] + 1.0, (6, 40)), vector=8)
    assert shifted["loads:vector"] == 24


def test_a_product_reads_its_sum_so_far():
    features = of(matmul(3, 5, 8))
    assert features["stores:scalar"] == 3 * 5 * 8
    assert features["loads:scalar"] == 3 * 3 * 5 * 8


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_model_is_described(name):
    descriptions = Descriptions(TARGET, scheduled=True)
    for kernel in extract_kernels(MODELS[name](), TARGET):
        features = descriptions.of(kernel)
        assert all(math.isfinite(number) and number >= 0 for number in features.values())
        assert sum(name.startswith("rule:") for name in features) == 1
        done = sum(number for name, number in features.items() if name.startswith("schedule:stores"))
        assert done > 0
        assert descriptions.of(kernel) is features


def test_a_kernel_that_came_with_its_schedule():
    """No rule took it: it is built as it was given."""
    kernel = Kernel(add(3, 5).with_attr(SCHEDULED_ATTR, True), "key", "add", 1)
    features = Descriptions(TARGET, scheduled=True).of(kernel)
    assert [name for name in features if name.startswith("rule:")] == ["rule:given"]
    assert features["schedule:stores:scalar"] == 15


def test_a_schedule_of_somebodys_own_is_not_looked_at():
    kernel = Kernel(add(3, 5), "key", "add", 1)
    assert not any(name.startswith("schedule:") for name in Descriptions(TARGET, scheduled=False).of(kernel))


@pytest.mark.parametrize("error", [KernelError("no schedule rule takes it"), RuntimeError("a schedule rule fails")])
def test_a_kernel_without_a_schedule(monkeypatch, error):
    def refuse(func, target):
        raise error

    monkeypatch.setattr("rlflow_tvm.cost.description.schedule_kernel", refuse)
    with pytest.raises(KernelError, match=str(error)):
        Descriptions(TARGET, scheduled=True).of(Kernel(add(3, 5), "key", "add", 1))
