"""The registered pipeline, targets, and schedules as values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, random_arrays, run
from tvm import relax

from rlflow_tvm.errors import KernelError, UsageError
from rlflow_tvm.kernels import (
    as_target,
    default_target,
    explain,
    extract_kernels,
    num_cores,
    pipeline,
    register,
    schedule_kernel,
    vector_lanes,
)
from rlflow_tvm.kernels.target import is_of_this_machine

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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "800000 100000\n"}, 4),
        ({"cpu.max": "no numbers"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 4),
    ],
)
def test_a_containers_share_of_the_processors(files: dict, expected: int, tmp_path: Path, monkeypatch) -> None:
    """As `docker run --cpus=2` gives it, which hides no processor."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("rlflow_tvm.processors._CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1, 2, 3}, raising=False)
    assert num_cores(default_target()) == num_cores(tvm.target.Target("llvm")) == expected


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


@pytest.mark.parametrize(
    "attribute", [{"num-cores": 0}, {"num-cores": -2}, {"mcpu": "abacus"}, {"mtriple": "abacus-linux-gnu"}]
)
def test_impossible_targets(attribute: dict) -> None:
    with pytest.raises(UsageError, match=str(next(iter(attribute.values())))):
        as_target({"kind": "llvm", **attribute})


def test_impossible_host() -> None:
    with pytest.raises(UsageError, match="abacus"):
        as_target({"kind": "cuda", "arch": "sm_90", "host": {"kind": "llvm", "mcpu": "abacus"}})


@pytest.mark.parametrize(
    ("triple", "lanes"), [("armv7l-linux-gnueabihf", 4), ("i686-linux-gnu", 4), ("arm64-apple-macos", 4)]
)
def test_other_names_of_machines(triple: str, lanes: int) -> None:
    assert vector_lanes(as_target({"kind": "llvm", "mtriple": triple, "num-cores": 2})) == lanes


@pytest.mark.parametrize(
    ("attributes", "runs"),
    [
        ({}, True),
        ({"mcpu": "x86-64"}, True),
        ({"mcpu": "znver3"}, True),
        ({"mcpu": "znver4"}, False),
        ({"mcpu": "haswell", "mattr": ["+avx512f"]}, False),
        ({"mcpu": "alderlake"}, False),
        ({"mtriple": "aarch64-linux-gnu"}, False),
    ],
    ids=str,
)
def test_code_with_instructions_that_a_machine_lacks_is_not_of_it(
    attributes: dict[str, object], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow_tvm.kernels.target.llvm_get_system_triple", lambda: "x86_64-pc-linux-gnu")
    monkeypatch.setattr("rlflow_tvm.kernels.target.llvm_get_system_cpu", lambda: "haswell")
    assert is_of_this_machine(tvm.target.Target({"kind": "llvm", **attributes})) is runs


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


def with_symbols(build: Callable[[relax.Expr], relax.Expr], shape: tuple[object, ...]) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(build(x))
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("build", [op.exp, lambda x: op.matmul(x, op.permute_dims(x)), op.nn.softmax])
def test_symbolic_extents_are_refused_in_one_line(build: Callable[[relax.Expr], relax.Expr]) -> None:
    batch = tvm.tirx.Var("batch", "int64")
    mod = with_symbols(build, (batch, 8))
    for refused in (lambda: pipeline(TARGET)(mod), lambda: explain(mod, TARGET)):
        with pytest.raises(KernelError, match=r'extents \(batch\).*BindSymbolicVars\({"batch": ') as caught:
            refused()
        assert "\n" not in str(caught.value)
    bound = relax.transform.BindSymbolicVars({"batch": 3})(mod)
    assert explain(bound, TARGET)[0].shapes[0] == (3, 8)


def test_symbolic_extents_on_a_gpu() -> None:
    cuda = as_target({"kind": "cuda", "arch": "sm_90"})
    mod = with_symbols(op.exp, (tvm.tirx.Var("batch", "int64"), 8))
    with pytest.raises(KernelError, match=r"a kernel has symbolic extents \(batch\)"):
        pipeline(cuda)(mod)


def test_shape_that_depends_on_data_is_refused_in_one_line() -> None:
    mod = with_symbols(op.unique, (8,))
    pipeline(TARGET)(mod)  # runs in the virtual machine
    mod = with_symbols(lambda x: op.exp(op.unique(x)), (8,))
    with pytest.raises(KernelError, match=r"relax\.exp reads .*known shapes only"):
        pipeline(TARGET)(mod)


def without_dataflow(build: Callable[[relax.BlockBuilder, relax.Expr], relax.Expr]) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((3, 5), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(build(builder, x))
    return builder.get()


def test_plain_bindings_are_a_graph() -> None:
    mod = without_dataflow(lambda builder, x: builder.emit(op.exp(builder.emit(op.nn.relu(x)))))
    assert not isinstance(mod["main"].body.blocks[0], relax.DataflowBlock)
    (x,) = random_arrays([(3, 5)])
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(x))
    np.testing.assert_allclose(result.numpy(), np.exp(np.maximum(x, 0)), rtol=1e-6)
    assert [row.name for row in explain(mod, TARGET)] == ["fused_relu_tir_exp"]


@pytest.mark.parametrize("nested", [False, True])
def test_main_may_return_what_it_is_given(nested: bool) -> None:
    weight = relax.const(np.full((2, 2), 7, "float32"))
    mod = without_dataflow(lambda _, x: relax.Tuple([x, relax.Tuple([weight, x])]) if nested else x)
    (x,) = random_arrays([(3, 5)])
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(x))
    np.testing.assert_array_equal((result[1][1] if nested else result).numpy(), x)
    if nested:
        np.testing.assert_array_equal(result[1][0].numpy(), np.full((2, 2), 7))
    assert explain(mod, TARGET) == []


def test_side_effects_are_refused() -> None:
    mod = without_dataflow(lambda builder, x: (builder.emit(op.print(x, format="{}")), builder.emit(op.exp(x)))[1])
    with pytest.raises(UsageError, match=r"not one dataflow block .*impure calls"):
        pipeline(TARGET)(mod)


def test_weights_without_values_are_inputs() -> None:
    mod = graph(op.matmul, [(3, 8), (8, 5)], weights=1)
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    left, right = random_arrays([(3, 8), (8, 5)])
    result = machine["main"](tvm.runtime.tensor(left), tvm.runtime.tensor(right))
    np.testing.assert_allclose(result.numpy(), left @ right, rtol=1e-4, atol=1e-5)


def test_a_shape_is_returned() -> None:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    for build in (op.shape_of, lambda x: relax.Tuple([op.exp(x), op.shape_of(x)])):
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                output = builder.emit_output(builder.normalize(build(x)))
            builder.emit_func_output(output)
        executable = tvm.compile(builder.finalize(), TARGET, relax_pipeline=pipeline(TARGET))
        found = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(np.ones((2, 3), "float32")))
        assert tuple(found if build is op.shape_of else found[1]) == (2, 3)


def test_two_long_pieces_are_joined_by_several_threads() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": TARGET.attrs["mcpu"], "num-cores": 8})
    (kernel,) = extract_kernels(graph(lambda a, b: op.concat([a, b], 0), [(1 << 18,)] * 2), target)
    assert "T.parallel" in schedule_kernel(kernel.func, target).script()
