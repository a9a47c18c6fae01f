"""The registered pipeline, targets, and schedules as values."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, random_arrays, run
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


@pytest.mark.parametrize("target", [tvm.target.Target("llvm"), {"kind": "llvm"}])
def test_target_without_attributes_is_this_machine(target: object) -> None:
    assert str(as_target(target)) == str(default_target())


@pytest.mark.parametrize("attributes", [{"mcpu": "generic"}, {"mcpu": "x86-64"}, {"num-cores": 3}])
def test_target_with_attributes_is_left_alone(attributes: dict) -> None:
    target = tvm.target.Target({"kind": "llvm", **attributes})
    assert as_target(target).same_as(target)


def test_pipeline_by_name_compiles_for_this_machine() -> None:
    """TVM's own code generator, which sees a bare "llvm" as the oldest processor of its kind, is given no kernel."""
    mod = graph(op.exp, [(64, 64)])
    executable = tvm.compile(mod, "llvm", relax_pipeline="rlflow")
    pending, sources = [executable.mod], []
    while pending:
        module = pending.pop()
        pending.extend(module.imports)
        sources += [module.inspect_source("ll")] if module.kind == "llvm" else []
    vectors = f"<{vector_lanes(TARGET)} x float>"
    assert any(vectors in source and f'"target-cpu"="{TARGET.attrs["mcpu"]}"' in source for source in sources)


@pytest.mark.parametrize("target", ["lvm", "llvm -mcpu=znver4", {"kind": "no such"}])
def test_unreadable_target(target: object) -> None:
    with pytest.raises(UsageError, match="kind"):
        as_target(target)


def test_target_without_rules() -> None:
    with pytest.raises(UsageError, match="opencl"):
        as_target({"kind": "opencl"})


@pytest.mark.parametrize("attribute", [{"num-cores": 0}, {"num-cores": -2}, {"mcpu": "abacus"}])
def test_impossible_targets(attribute: dict) -> None:
    with pytest.raises(UsageError, match=str(next(iter(attribute.values())))):
        as_target({"kind": "llvm", **attribute})


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


def attention(x: relax.Expr, query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Expr:
    """One head over 19 tokens, and a GELU."""
    scores = op.matmul(op.matmul(x, query), op.permute_dims(op.matmul(x, key)))
    return op.nn.gelu(op.matmul(op.nn.softmax(scores), op.matmul(x, value)))


@pytest.mark.parametrize("mcpu", ["haswell", "x86-64"])
def test_narrower_vectors_compute_the_same(mcpu: str) -> None:
    shapes = [(19, 24), (24, 13), (24, 13), (24, 30)]
    arrays = random_arrays(shapes)
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    ours = run(graph(attention, shapes, weights=3), arrays, weights=3, target=target)
    wide = run(graph(attention, shapes, weights=3), arrays, weights=3)
    np.testing.assert_allclose(ours.values[0], wide.values[0], rtol=1e-4, atol=1e-4)
    assert ours.rules == wide.rules


def test_one_core_starts_no_threads() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
    for kernel in extract_kernels(graph(attention, [(19, 24), (24, 13), (24, 13), (24, 30)], weights=3), target):
        assert "T.parallel" not in schedule_kernel(kernel.func, target).script()


def test_weights_without_values_are_inputs() -> None:
    mod = graph(op.matmul, [(3, 8), (8, 5)], weights=1)
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    left, right = random_arrays([(3, 8), (8, 5)])
    result = machine["main"](tvm.runtime.tensor(left), tvm.runtime.tensor(right))
    np.testing.assert_allclose(result.numpy(), left @ right, rtol=1e-4, atol=1e-5)
