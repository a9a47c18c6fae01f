"""Operators that a GPU's schedule rules or TVM's code generator for CUDA once refused: modules of each are built."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from cuda_checks import HOST, TARGET, device_source, run_on_host, serialised
from kernel_checks import module_of
from tvm import relax

from rlflow_tvm.differences import range_error
from rlflow_tvm.kernels import pipeline
from rlflow_tvm.verify import run_module

op = relax.op
Build = Callable[..., relax.Expr]

WEIGHTS = np.random.default_rng(0).standard_normal((8, 16)).astype("float32")


def variable(shape: tuple[int, ...], dtype: str = "float32") -> relax.Var:
    return relax.Var("x", relax.TensorType(shape, dtype))


def rounded(x: relax.Expr) -> relax.Expr:
    return op.astype(op.multiply(op.astype(x, "float32"), relax.const(0.5)), "int8")


BUILT: dict[str, tuple[Build, tuple[int, ...], str]] = {
    "the greatest of few": (lambda x: op.argmax(x, 1), (1, 21, 64, 64), "float32"),
    "the least of few": (lambda x: op.argmin(x, 1), (1, 21, 64, 64), "float16"),
    "sort": (lambda x: op.sort(x, -1), (4, 1000), "float32"),
    "argsort": (lambda x: op.argsort(x, -1), (4, 1000), "float32"),
    "comparisons of halves": (op.nn.leakyrelu, (64, 1024), "float16"),
    "floats between bytes": (rounded, (64, 1024), "int8"),
    "wide integers between halves": (
        lambda x: op.astype(op.astype(op.multiply(x, x), "int64"), "float16"), (64, 1024), "float16"
    ),
    "mean of integers": (lambda x: op.nn.adaptive_avg_pool2d(x, (2, 2)), (1, 4, 8, 8), "int32"),
    "sums of weights along the last axis": (
        lambda x: op.add(x, op.cumsum(relax.const(WEIGHTS), -1)), WEIGHTS.shape, "float32"
    ),
    "sorted weights": (lambda x: op.add(x, op.sort(relax.const(WEIGHTS), -1)), WEIGHTS.shape, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT)
def test_code_is_generated(case: str) -> None:
    build, shape, dtype = BUILT[case]
    executable = tvm.compile(module_of(build, [variable(shape, dtype)]), TARGET, relax_pipeline=pipeline(TARGET))
    assert "__global__" in device_source(executable.mod)


@pytest.mark.parametrize("case", ["sums of weights along the last axis", "sorted weights"])
def test_work_on_weights_is_right(case: str) -> None:
    """It is done on the host."""
    build, shape, dtype = BUILT[case]
    mod = module_of(build, [variable(shape, dtype)])
    x = np.zeros(shape, dtype)
    expected = np.cumsum(WEIGHTS, -1) if "sums" in case else np.sort(WEIGHTS, -1)
    for found in (run_on_host(mod, [x], serialised), run_module(mod, HOST, [x])):
        assert range_error(found, [expected]) < 1e-5


def test_mean_of_integers_is_what_it_is_on_the_host() -> None:
    build, shape, dtype = BUILT["mean of integers"]
    mod, x = module_of(build, [variable(shape, dtype)]), np.arange(256, dtype="int32").reshape(shape)
    assert range_error(run_on_host(mod, [x], serialised), run_module(mod, HOST, [x])) == 0.0
