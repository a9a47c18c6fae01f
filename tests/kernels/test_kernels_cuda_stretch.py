"""Products on a GPU whose result is stretched by the operator behind them: added to several tensors of its size."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from cuda_checks import HOST, TARGET, How, run_on_host, serialised, unscheduled
from kernel_checks import graph, random_arrays
from tvm import relax, tirx

from rlflow_tvm.cost.metrics import kernel_buffers
from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.differences import range_error
from rlflow_tvm.kernels import RULE_ATTR, extract_kernels, schedule_kernel
from rlflow_tvm.kernels.cuda.layout import channels_last
from rlflow_tvm.kernels.fuse import FusedCall, Fuser
from rlflow_tvm.kernels.legalize import Legalizer
from rlflow_tvm.kernels.precision import to_half

op = relax.op

M, K, N = 40, 64, 48
TOLERANCE = {"float32": 1e-5, "float16": 1e-2}


def added(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.add(op.matmul(x, w), b)


def biased_first(x: relax.Expr, w: relax.Expr, bias: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.relu(op.multiply(op.add(op.matmul(x, w), bias), b))


def gated(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    product = op.matmul(x, w)
    return op.multiply(op.sigmoid(product), op.subtract(b, product))


def reshaped(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.add(op.reshape(op.matmul(x, w), (2, 1, M, N)), b)


def convolved(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.relu(op.add(op.nn.conv2d(x, w, padding=(1, 1, 1, 1)), b))


def convolved_by_groups(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.add(op.nn.conv2d(x, w, padding=(1, 1, 1, 1), groups=2), b)


STRETCHED = {
    "leading axis": (added, [(M, K), (K, N), (3, M, N)]),
    "unit batch": (added, [(1, M, K), (K, N), (3, M, N)]),
    "two leading axes": (added, [(1, 1, M, K), (K, N), (3, 2, M, N)]),
    "batch": (added, [(2, M, K), (2, K, N), (3, 2, M, N)]),
    "middle axis": (added, [(2, 1, M, K), (2, 1, K, N), (2, 3, M, N)]),
    "middle axis, reshaped": (reshaped, [(2, M, K), (2, K, N), (2, 3, M, N)]),
    "rows": (added, [(2, 1, K), (K, N), (2, 7, N)]),
    "columns": (added, [(M, K), (K, 1), (M, 9)]),
    "all": (added, [(K,), (K,), (3, 5)]),
    "behind a bias": (biased_first, [(M, K), (K, N), (N,), (3, M, N)]),
    "two readers": (gated, [(M, K), (K, N), (3, M, N)]),
    "convolution": (convolved, [(1, 16, 9, 9), (24, 16, 3, 3), (3, 24, 9, 9)]),
    "convolution of one pixel": (convolved, [(2, 16, 1, 1), (24, 16, 3, 3), (2, 24, 5, 5)]),
    "grouped convolution": (convolved_by_groups, [(1, 32, 9, 9), (48, 16, 3, 3), (3, 48, 9, 9)]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", STRETCHED)
def test_product_stays_a_product(case: str, dtype: str) -> None:
    build, shapes = STRETCHED[case]
    plain, arrays = graph(build, shapes), random_arrays(shapes)
    mod = plain if dtype == "float32" else to_half(plain, dtype)
    rules = {str(schedule_kernel(k.func, TARGET).attrs[RULE_ATTR]) for k in extract_kernels(mod, TARGET)}
    assert rules <= {"elementwise", "gemv", "matmul", "reduction", "tensor_core"}
    reference = relax.VirtualMachine(tvm.compile(plain, "llvm"), tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    assert range_error(run_on_host(mod, arrays, serialised), [reference.numpy()]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", ["leading axis", "middle axis", "rows", "behind a bias", "two readers", "convolution"])
def test_fused_into_the_product(case: str, dtype: str) -> None:
    """A kernel that our fusion does not make for a GPU: some rule takes it all the same, and does it right."""
    plain = graph(*STRETCHED[case])
    flow = Dataflow.from_module(channels_last(plain if dtype == "float32" else to_half(plain, dtype)))
    launches = [step for step in Fuser()(*Legalizer(TARGET)(flow)) if isinstance(step, FusedCall)]
    (func,) = (each.func for each in launches if each.name.startswith(("fused_matmul", "fused_conv2d")))
    assert range_error([run_kernel(func, serialised)], [run_kernel(func, unscheduled)]) < TOLERANCE[dtype]


def run_kernel(func: tirx.PrimFunc, how: How) -> np.ndarray:
    """What `func`, changed by `how` and compiled for the CPU, writes from random inputs."""
    changed = how(func).with_attrs({"tirx.is_scheduled": True, "global_symbol": "main"})
    buffers = kernel_buffers(func)
    arrays = random_arrays([shape for shape, _ in buffers])
    given = [tvm.runtime.tensor(a.astype(dtype)) for a, (_, dtype) in zip(arrays, buffers, strict=True)]
    tvm.compile(tvm.IRModule({"main": changed}), HOST).jit()["main"](*given)
    return given[-1].numpy()


@pytest.mark.parametrize(("width", "vectors"), [(85, False), (84, True), (4, True)])
def test_rows_of_a_slice_are_loaded_in_vectors_where_each_begins_at_one(width: int, vectors: bool) -> None:
    """A detector's boxes, cut from its scores: a vector is loaded from where its size divides the address, or not."""
    mod = graph(lambda x: op.nn.relu(op.strided_slice(x, [2], [0], [4])), [(1, 25200, width)])
    (kernel,) = extract_kernels(mod, TARGET)
    lanes: list[int] = []

    def note(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.VECTORIZED:
            lanes.append(int(loop.extent))

    tvm_ffi.structural_walk(schedule_kernel(kernel.func, TARGET).body, (tirx.For, note))
    assert lanes == ([4] if vectors else [])
