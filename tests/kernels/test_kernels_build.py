"""Code generation in threads, and the list of schedule rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from kernel_checks import TARGET, graph, random_arrays
from tvm import relax, tirx

from rlflow_tvm.kernels import Lowering, compile_kernels, explain, pipeline, schedule_kernel
from rlflow_tvm.kernels.build import called_with_arguments, deal
from rlflow_tvm.kernels.llvm.rules import RULES
from rlflow_tvm.kernels.pipeline import bind_weights, finalize

op = relax.op


def layers(x: relax.Expr, kernel: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """A network with kernels of most rules."""
    image = op.nn.max_pool2d(op.nn.relu(op.nn.conv2d(x, kernel, padding=1)), (2, 2), strides=(2, 2))
    flat = op.nn.softmax(op.matmul(op.reshape(image, (5, 36)), weight))
    return op.concat([op.exp(flat), flat], axis=0)


SHAPES = [(1, 3, 12, 12), (5, 3, 3, 3), (36, 7)]


def finalized() -> tvm.IRModule:
    return finalize(bind_weights(Lowering(TARGET).lower(graph(layers, SHAPES))), TARGET)


def prim_funcs(mod: tvm.IRModule) -> list[str]:
    return [var.name_hint for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]


def outputs(module: object) -> np.ndarray:
    return relax.VirtualMachine(module, tvm.cpu())["main"](*map(tvm.runtime.tensor, random_arrays(SHAPES))).numpy()


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_threads_change_no_result(threads: int, tmp_path: Path) -> None:
    plain = tvm.compile(finalized(), TARGET, relax_pipeline=None)
    split = compile_kernels(finalized(), TARGET, threads)
    assert len(prim_funcs(split)) == 1
    executable = tvm.compile(split, TARGET, relax_pipeline=None)
    executable.export_library(tmp_path / "exported.so")
    expected = outputs(plain)
    np.testing.assert_array_equal(outputs(executable), expected)
    np.testing.assert_array_equal(outputs(tvm.runtime.load_module(tmp_path / "exported.so")), expected)


def test_few_kernels_need_no_thread() -> None:
    mod = finalize(Lowering(TARGET).lower(graph(op.exp, [(3, 5)])).mod, TARGET)
    assert compile_kernels(mod, TARGET, threads=8).same_as(mod)


def test_kernels_of_arguments_test_them() -> None:
    """A wrong argument is an error; kernels inside trust the memory that the module allocates."""
    libraries = compile_kernels(finalized(), TARGET, threads=1).attrs["external_mods"]
    texts = [library.inspect_source("ll") for library in libraries]
    assert ["Expect" in text or "expect" in text for text in texts] == [True, False]
    executable = tvm.compile(graph(op.nn.softmax, [(3, 5)]), TARGET, relax_pipeline=pipeline(TARGET))
    with pytest.raises(RuntimeError, match="match"):
        relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(np.zeros((3, 4), "float32")))


def test_views_of_arguments_are_arguments() -> None:
    def build(x: relax.Expr) -> relax.Expr:
        return op.nn.softmax(op.nn.relu(op.nn.softmax(op.reshape(x, (6, 4)))))

    mod = finalize(Lowering(TARGET).lower(graph(build, [(8, 3)])).mod, TARGET)
    first = next(row.name for row in explain(graph(build, [(8, 3)]), TARGET))
    assert [var.name_hint for var in called_with_arguments(mod["main"])] == [first]


def test_threads_see_the_configuration() -> None:
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        mod = compile_kernels(finalized(), TARGET, threads=2)
    assert not any("xpect" in library.inspect_source("ll") for library in mod.attrs["external_mods"])


def test_work_is_dealt_out_evenly() -> None:
    assert deal([5, 1, 1, 1, 4], 2) == [[0, 2], [1, 3, 4]]
    assert deal([1, 1], 5) == [[0], [1]]
    assert deal([], 3) == []


def test_every_kernel_has_a_rule() -> None:
    rows = explain(graph(layers, SHAPES, weights=2), TARGET)
    assert [row.rule for row in rows] == ["conv2d", "pool2d", "matmul", "reduction", "elementwise"]
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
