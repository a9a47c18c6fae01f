"""The list of kernels of a graph: counts, keys, what is no kernel, and that it is what gets compiled."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tvm
from kernel_checks import TARGET, graph, random_arrays, run
from tvm import relax

from rlflow_tvm.errors import KernelError
from rlflow_tvm.ir import detach
from rlflow_tvm.kernels import Lowering, extract_kernels, pipeline

op = relax.op


def two_layers(x: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
    """Two equal layers, each a product with a transposed weight and a rectifier."""
    hidden = op.nn.relu(op.matmul(x, op.permute_dims(first)))
    return op.nn.relu(op.matmul(hidden, op.permute_dims(second)))


SHAPES = [(8, 32), (32, 32), (32, 32)]


def test_equal_kernels_are_merged_and_weight_work_is_left_out() -> None:
    kernels = extract_kernels(graph(two_layers, SHAPES, weights=2), TARGET)
    assert [kernel.count for kernel in kernels] == [2]
    assert "relu" in kernels[0].name


def test_inputs_are_no_weights() -> None:
    kernels = extract_kernels(graph(two_layers, SHAPES), TARGET)
    assert sum(kernel.count for kernel in kernels) == 4
    assert sum("transpose" in kernel.name for kernel in kernels) == 1


def test_reshapes_and_unit_transposes_are_no_kernels() -> None:
    def build(x: relax.Expr) -> relax.Expr:
        moved = op.permute_dims(op.expand_dims(op.exp(x), 1), [1, 0, 2])
        return op.exp(op.squeeze(op.reshape(moved, (4, 1, 6)), 1))

    kernels = extract_kernels(graph(build, [(3, 8)]), TARGET)
    assert sum(kernel.count for kernel in kernels) == 2


def test_bound_and_working_form_have_the_same_kernels() -> None:
    mod = graph(two_layers, SHAPES, weights=2)
    arrays = random_arrays(SHAPES)
    params = mod["main"].params
    bound = mod["main"].bind_params({p: tvm.runtime.tensor(a) for p, a in zip(params[1:], arrays[1:], strict=True)})
    bound_mod = tvm.IRModule({tvm.ir.GlobalVar("main"): bound})
    keys = [(kernel.key, kernel.count) for kernel in extract_kernels(mod, TARGET)]
    assert [(kernel.key, kernel.count) for kernel in extract_kernels(bound_mod, TARGET)] == keys
    assert [(kernel.key, kernel.count) for kernel in extract_kernels(detach(bound_mod).mod, TARGET)] == keys


def test_one_lowering_serves_many_graphs() -> None:
    lowering = Lowering(TARGET)
    mod = graph(two_layers, SHAPES, weights=2)
    first = [(kernel.key, kernel.count) for kernel in lowering.kernels(mod)]
    lowering.kernels(graph(lambda x: op.nn.softmax(op.exp(x)), [(5, 9)]))
    assert [(kernel.key, kernel.count) for kernel in lowering.kernels(mod)] == first
    assert [(kernel.key, kernel.count) for kernel in extract_kernels(mod, TARGET)] == first


def test_keys_are_equal_in_another_process() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
        "from test_kernels_extract import *\n"
        "kernels = extract_kernels(graph(two_layers, SHAPES, weights=2), TARGET)\n"
        "print(*(kernel.key for kernel in kernels))"
    )
    folder = str(__file__).rsplit("/", 1)[0]
    other = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    kernels = extract_kernels(graph(two_layers, SHAPES, weights=2), TARGET)
    assert other == [kernel.key for kernel in kernels]
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in other)


def test_keys_ignore_names_and_tell_shapes_apart() -> None:
    def key(extent: int, hint: str) -> str:
        x = relax.Var(hint, relax.TensorType((3, extent), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                output = builder.emit_output(op.exp(x), name_hint=f"{hint}_out")
            builder.emit_func_output(output)
        (kernel,) = extract_kernels(builder.finalize(), TARGET)
        return kernel.key

    assert key(7, "a") == key(7, "elephant")
    assert key(7, "a") != key(8, "a")


def test_kernels_are_those_that_are_compiled() -> None:
    mod = graph(two_layers, SHAPES, weights=2)
    arrays = random_arrays(SHAPES)
    params = mod["main"].params
    bound = mod["main"].bind_params({p: tvm.runtime.tensor(a) for p, a in zip(params[1:], arrays[1:], strict=True)})
    lowered = pipeline(TARGET)(tvm.IRModule({tvm.ir.GlobalVar("main"): bound}))
    names = {kernel.name for kernel in extract_kernels(mod, TARGET)}
    compiled = {g.name_hint for g, f in lowered.functions_items() if isinstance(f, relax.ExternFunc)}
    assert compiled == names
    assert all(lowered.attrs["external_mods"][0].implements_function(name) for name in names)


def test_weight_work_is_done_once_and_right() -> None:
    arrays = random_arrays(SHAPES)
    outcome = run(graph(two_layers, SHAPES, weights=2), arrays, weights=2)
    hidden = np.maximum(arrays[0] @ arrays[1].T, 0)
    np.testing.assert_allclose(outcome.values[0], np.maximum(hidden @ arrays[2].T, 0), rtol=1e-4, atol=1e-4)


def test_constant_output() -> None:
    arrays = random_arrays([(2, 3), (2, 3)])
    outcome = run(graph(lambda x, w: op.exp(w), [(2, 3), (2, 3)], weights=1), arrays, weights=1)
    np.testing.assert_allclose(outcome.values[0], np.exp(arrays[1]), rtol=1e-6)


def test_parts_of_a_cut_weight() -> None:
    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.add(op.concat(op.split(w, 2, axis=0), axis=1), x)

    arrays = random_arrays([(2, 6), (4, 3)])
    outcome = run(graph(build, [(2, 6), (4, 3)], weights=1), arrays, weights=1)
    np.testing.assert_allclose(outcome.values[0], np.concatenate(np.split(arrays[1], 2), 1) + arrays[0], rtol=1e-6)


def test_operator_without_kernel_is_named() -> None:
    def build(x: relax.Expr) -> relax.Expr:
        return op.ewise_fma(x, x, x)

    with pytest.raises(KernelError, match=r"relax\.ewise_fma"):
        extract_kernels(graph(build, [(2, 3)]), TARGET)


def test_call_of_another_function_is_refused() -> None:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    y = relax.Var("y", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("helper", [y], private=True):
        with builder.dataflow():
            inner = builder.emit_output(op.exp(y))
        builder.emit_func_output(inner)
    helper = builder.get().get_global_var("helper")
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.Call(helper, [x]))
        builder.emit_func_output(output)
    with pytest.raises(KernelError, match="helper"):
        extract_kernels(builder.finalize(), TARGET)
