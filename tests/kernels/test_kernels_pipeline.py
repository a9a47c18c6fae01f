"""The registered pipeline, targets, and schedules as values."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph
from tvm import relax

from rlflow_tvm.errors import UsageError
from rlflow_tvm.kernels import (
    as_target,
    default_target,
    extract_kernels,
    num_cores,
    pipeline,
    register,
    schedule_kernel,
    vector_lanes,
)

op = relax.op


def test_pipeline_by_name() -> None:
    register()
    register()  # a second time is no error
    mod = graph(op.exp, [(3, 5)])
    with TARGET:
        executable = tvm.compile(mod, TARGET, relax_pipeline=relax.get_pipeline("rlflow"))
    x = np.linspace(-1, 1, 15, dtype="float32").reshape(3, 5)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x))
    np.testing.assert_allclose(result.numpy(), np.exp(x), rtol=1e-6)


def test_pipeline_leaves_its_argument_alone() -> None:
    mod = graph(lambda x: op.nn.softmax(op.exp(x)), [(3, 5)])
    before = tvm_ffi.structural_hash(mod)
    pipeline(TARGET)(mod)
    assert tvm_ffi.structural_hash(mod) == before


@pytest.mark.parametrize(
    ("attributes", "lanes"),
    [
        ({"mcpu": "skylake-avx512"}, 16),
        ({"mcpu": "znver4"}, 16),
        ({"mcpu": "haswell"}, 8),
        ({"mcpu": "x86-64"}, 4),
        ({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}, 4),
        ({"mattr": ["+avx2"]}, 8),
    ],
)
def test_vector_lanes(attributes: dict, lanes: int) -> None:
    assert vector_lanes(tvm.target.Target({"kind": "llvm", **attributes})) == lanes


def test_default_target_is_this_machine() -> None:
    target = default_target()
    assert target.kind.name == "llvm"
    assert num_cores(target) >= 1
    assert str(as_target("llvm")) == str(target)
    assert str(as_target(None)) == str(target)
    assert num_cores(tvm.target.Target({"kind": "llvm", "num-cores": 6})) == 6


@pytest.mark.parametrize("target", ["lvm", "llvm -mcpu=znver4", {"kind": "no such"}])
def test_unreadable_target(target: object) -> None:
    with pytest.raises(UsageError, match="kind"):
        as_target(target)


def test_target_without_rules() -> None:
    with pytest.raises(UsageError, match="opencl"):
        as_target({"kind": "opencl"})


@pytest.mark.parametrize("mcpu", ["haswell", "x86-64", "skylake-avx512"])
def test_vectors_follow_the_target(mcpu: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    (kernel,) = extract_kernels(graph(op.exp, [(64, 64)]), target)
    assert f"T.vectorized(T.int64({vector_lanes(target)}))" in schedule_kernel(kernel.func, target).script()


def test_scheduled_kernel_is_left_alone() -> None:
    (kernel,) = extract_kernels(graph(op.exp, [(64, 64)]), TARGET)
    scheduled = schedule_kernel(kernel.func, TARGET)
    assert scheduled.attrs["rlflow.schedule_rule"] == "elementwise"
    assert schedule_kernel(scheduled, TARGET).same_as(scheduled)
