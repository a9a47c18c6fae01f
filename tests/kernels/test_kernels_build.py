"""Code generation in threads, and the list of schedule rules."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, random_arrays
from tvm import relax, s_tir, te, tirx

from rlflow_tvm.errors import KernelError
from rlflow_tvm.kernels import (
    Lowering,
    compile_kernels,
    explain,
    extract_kernels,
    pipeline,
    schedule_kernel,
    tir_pipeline,
)
from rlflow_tvm.kernels.build import called_with_inputs, link_kernels
from rlflow_tvm.kernels.llvm.rules import RULES
from rlflow_tvm.kernels.pipeline import bind_weights, finalize

op = relax.op


def layers(x: relax.Expr, kernel: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """A network with kernels of most rules."""
    image = op.nn.max_pool2d(op.nn.relu(op.nn.conv2d(x, kernel, padding=1)), (2, 2), strides=(2, 2))
    flat = op.nn.softmax(op.matmul(op.reshape(image, (5, 36)), weight))
    return op.concat([op.exp(flat), flat], axis=0)


SHAPES = [(1, 3, 12, 12), (5, 3, 3, 3), (36, 7)]


def bound() -> tvm.IRModule:
    return bind_weights(Lowering(TARGET).lower(graph(layers, SHAPES)))


def compiled(mod: tvm.IRModule, threads: int, part: int = 1) -> list[tvm.runtime.Module]:
    return compile_kernels(mod, TARGET, lambda func: schedule_kernel(func, TARGET), threads, part)


def prim_funcs(mod: tvm.IRModule) -> list[str]:
    return [var.name_hint for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]


def outputs(module: object) -> np.ndarray:
    return relax.VirtualMachine(module, tvm.cpu())["main"](*map(tvm.runtime.tensor, random_arrays(SHAPES))).numpy()


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_threads_change_no_result(threads: int, tmp_path: Path) -> None:
    mod = bound()
    plain = tvm.compile(finalize(mod, TARGET), TARGET, relax_pipeline=None)
    split = link_kernels(finalize(mod, TARGET), compiled(mod, threads))
    assert len(prim_funcs(split)) == 1
    executable = tvm.compile(split, TARGET, relax_pipeline=None)
    executable.export_library(tmp_path / "exported.so")
    expected = outputs(plain)
    np.testing.assert_array_equal(outputs(executable), expected)
    np.testing.assert_array_equal(outputs(tvm.runtime.load_module(tmp_path / "exported.so")), expected)


def test_one_kernel_needs_no_thread_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "CC", "CXX"):
        monkeypatch.setenv(name, "/nowhere")
    executable = tvm.compile(graph(op.exp, [(3, 5)]), TARGET, relax_pipeline=pipeline(TARGET))
    (x,) = random_arrays([(3, 5)])
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, np.exp(x), rtol=1e-6)


def test_sums_of_a_tile_lie_on_the_stack() -> None:
    """TVM's own pipeline takes them from a pool, with two calls a tile."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2})  # a tile is of 28 vectors
    shapes = [(1, 64, 28, 28), (64, 64, 1, 1)]
    (kernel,) = extract_kernels(graph(op.nn.conv2d, shapes, weights=1), target)
    scheduled = schedule_kernel(kernel.func, target).with_attr("global_symbol", "kernel")
    mod = tvm.IRModule({"kernel": scheduled})
    theirs, ours = (
        tvm.tirx.build(mod, target=target, pipeline=name).inspect_source("ll")
        for name in ("default", tir_pipeline(target))
    )
    assert "TVMBackendAllocWorkspace" in theirs
    assert "TVMBackendAllocWorkspace" not in ours


def test_kernels_of_arguments_test_them() -> None:
    """A wrong argument is an error; kernels inside trust the memory that the module allocates."""
    libraries = compiled(bound(), threads=1, part=10_000)
    texts = [library.inspect_source("ll") for library in libraries]
    assert ["Expect" in text or "expect" in text for text in texts] == [True, False]
    executable = tvm.compile(graph(op.nn.softmax, [(3, 5)]), TARGET, relax_pipeline=pipeline(TARGET))
    with pytest.raises(RuntimeError, match="match"):
        relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(np.zeros((3, 4), "float32")))


def test_views_of_arguments_are_arguments() -> None:
    def build(x: relax.Expr) -> relax.Expr:
        return op.nn.softmax(op.nn.relu(op.nn.softmax(op.reshape(x, (6, 4)))))

    mod = Lowering(TARGET).lower(graph(build, [(8, 3)])).mod
    first = next(row.name for row in explain(graph(build, [(8, 3)]), TARGET))
    assert [var.name_hint for var in called_with_inputs(mod["main"])] == [first]


def test_what_a_packed_function_hands_out_is_tested() -> None:
    """It may be of any shape, whatever the function is called with."""

    def build(x: relax.Expr) -> relax.Expr:
        inner = op.nn.softmax(x)  # a kernel's result, which needs no test
        return op.nn.softmax(op.call_pure_packed("tests.three", inner, ty_args=[relax.TensorType((8, 3), "float32")]))

    three = np.zeros(3, "float32")
    tvm_ffi.register_global_func("tests.three", lambda _: tvm.runtime.tensor(three), override=True)
    executable = tvm.compile(graph(build, [(8, 3)]), TARGET, relax_pipeline=pipeline(TARGET))
    with pytest.raises(ValueError, match="expected 2"):
        relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(np.zeros((8, 3), "float32")))


def test_threads_see_the_configuration() -> None:
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        libraries = compiled(bound(), threads=2)
    assert not any("xpect" in library.inspect_source("ll") for library in libraries)


def test_kernels_are_compiled_in_parts_of_about_one_size() -> None:
    def names(part: int) -> list[list[str]]:
        texts = [library.inspect_source("ll") for library in compiled(bound(), threads=2, part=part)]
        return [re.findall(r"^define .*@__tvm_ffi_(?!main\()(\w+)\(", text, re.MULTILINE) for text in texts]

    whole, single = names(10_000), names(1)
    assert len(whole) == 2  # those that test their arguments, and the others
    assert [len(group) for group in single] == [1] * sum(map(len, whole))
    assert [name for group in whole for name in group] == [name for group in single for name in group]


def test_a_kernel_that_cannot_be_scheduled_ends_the_build() -> None:
    def refuse(func: tirx.PrimFunc) -> tirx.PrimFunc:
        raise KernelError("no schedule rule takes it")

    with pytest.raises(KernelError, match="no schedule rule"):
        compile_kernels(bound(), TARGET, refuse)


def test_every_kernel_has_a_rule() -> None:
    rows = explain(graph(layers, SHAPES, weights=2), TARGET)
    assert [row.rule for row in rows] == ["conv2d_window_pixels", "pool2d", "matmul", "reduction", "elementwise"]
    assert {row.rule for row in rows} <= set(RULES)
    assert rows[0].shapes[-1] == (1, 5, 12, 12)
    assert len({row.key for row in rows}) == len(rows)
    assert all(row.count == 1 for row in rows)


def test_rule_of_a_kernel_made_of_other_things() -> None:
    (row,) = explain(graph(lambda x: op.cumsum(x, axis=1), [(3, 5)]), TARGET)
    assert row.rule == "fallback"


def test_equal_kernels_are_one_row() -> None:
    (row,) = explain(graph(lambda x: op.nn.softmax(op.reshape(op.nn.softmax(x), (6, 4))), [(6, 4)]), TARGET)
    assert (row.rule, row.count) == ("reduction", 2)


def test_rule_is_the_scheduled_functions() -> None:
    mod = graph(layers, SHAPES, weights=2)
    scheduled = [schedule_kernel(kernel.func, TARGET) for kernel in Lowering(TARGET).kernels(mod)]
    assert [row.rule for row in explain(mod, TARGET)] == [str(f.attrs["rlflow.schedule_rule"]) for f in scheduled]


@pytest.mark.parametrize("parallel", [True, False])
def test_vectors_on_the_stack_are_aligned(parallel: bool) -> None:
    """Those of every function that a thread runs: LLVM aligns all that is there where one thing has to be."""
    a = te.placeholder((64, 64), name="a")
    schedule = s_tir.Schedule(te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[j, i] + 1.0, name="b")]))
    loop, _ = schedule.get_loops(schedule.get_sblock("b"))
    if parallel:
        schedule.parallel(loop)
    func = schedule.mod["main"].with_attr("global_symbol", "kernel")
    executable = tvm.compile(tvm.IRModule({"kernel": func}), target=TARGET, tir_pipeline=tir_pipeline(TARGET))
    assert ("alloca <16 x float>, align 64" in executable.mod.inspect_source("ll")) == parallel
    x, y = np.random.default_rng(0).random((64, 64), dtype="float32"), tvm.runtime.empty((64, 64))
    executable.jit()["kernel"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x.T + 1.0)


@pytest.mark.parametrize(("floats", "alignment"), [(7, 64), (53, 512), (300, 4096)])
def test_floats_on_the_stack_do_not_reach_a_pages_end(floats: int, alignment: int) -> None:
    """What begins with a multiple of `alignment` has them beside it, and they are less than half of that."""
    a = te.placeholder((64, floats), name="a")
    row = te.compute((64, floats), lambda i, j: a[i, j] * 2.0, name="row")
    mirrored = te.compute((64, floats), lambda i, j: row[i, floats - 1 - j] + 1.0, name="mirrored")
    schedule = s_tir.Schedule(te.create_prim_func([a, mirrored]))
    loop, _ = schedule.get_loops(schedule.get_sblock("mirrored"))
    schedule.parallel(loop)
    schedule.compute_at(schedule.get_sblock("row"), loop)
    func = schedule.mod["main"].with_attr("global_symbol", "kernel")
    executable = tvm.compile(tvm.IRModule({"kernel": func}), target=TARGET, tir_pipeline=tir_pipeline(TARGET))
    assert f"alloca <{alignment // 4} x float>, align {alignment}" in executable.mod.inspect_source("ll")
    x, y = np.random.default_rng(0).random((64, floats), dtype="float32"), tvm.runtime.empty((64, floats))
    executable.jit()["kernel"](tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy(), x[:, ::-1] * 2.0 + 1.0)
