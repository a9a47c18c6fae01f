"""The polynomials that stand for library calls, against double precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, run
from scipy.special import erf, expit
from tvm import relax

from rlflow_tvm.kernels import extract_kernels, schedule_kernel

op = relax.op


def values(build: Callable[[relax.Expr], relax.Expr], x: np.ndarray) -> np.ndarray:
    """`build` of `x` through our pipeline."""
    return run(graph(build, [x.shape]), [x]).values[0]


@pytest.mark.parametrize(
    ("build", "exact", "error"),
    [(op.erf, erf, 5e-7), (op.tanh, np.tanh, 5e-7), (op.sigmoid, expit, 3e-7)],
    ids=["erf", "tanh", "sigmoid"],
)
def test_absolute_error(build: Callable, exact: Callable, error: float) -> None:
    x = np.concatenate([np.linspace(-12, 12, 200_001), [0.0, -0.0, 1e-20, -1e-20, 1e4, -1e4]]).astype("float32")
    assert np.abs(values(build, x) - exact(x.astype("float64"))).max() < error


def test_exp_relative_error_and_ends() -> None:
    x = np.linspace(-86.98, 88.72, 200_001).astype("float32")
    exact = np.exp(x.astype("float64"))
    assert np.abs(values(op.exp, x) / exact - 1).max() < 2e-7
    ends = values(op.exp, np.array([-np.inf, -200, -89, 88.73, 200, np.inf], "float32"))
    np.testing.assert_array_equal(ends, [0, 0, 0, np.inf, np.inf, np.inf])


def test_log_error_and_ends() -> None:
    x = np.concatenate([np.geomspace(1.2e-38, 3e38, 200_001), np.linspace(0.5, 2, 100_001)]).astype("float32")
    exact = np.log(x.astype("float64"))
    assert (np.abs(values(op.log, x) - exact) / np.maximum(np.abs(exact), 1)).max() < 2e-7
    ends = values(op.log, np.array([-1, -np.inf, 0, np.inf], "float32"))
    np.testing.assert_array_equal(ends, [np.nan, np.nan, -np.inf, np.inf])


@pytest.mark.parametrize("exponent", [0.75, -0.5, 2.7, -1.0, 5.0])
def test_other_powers(exponent: float) -> None:
    x = np.geomspace(1e-3, 1e3, 10_001).astype("float32")
    got = values(lambda v: op.power(v, relax.const(exponent, "float32")), x)
    exact = x.astype("float64") ** exponent
    bound = (1 + 2 * np.abs(exponent * np.log(x))) * 2e-7
    assert np.all(np.abs(got / exact - 1) < bound)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, 4.0])
def test_constant_powers(exponent: float) -> None:
    x = np.linspace(0.01, 9, 1001).astype("float32")
    got = values(lambda v: op.power(v, relax.const(exponent, "float32")), x)
    np.testing.assert_allclose(got, x.astype("float64") ** exponent, rtol=1e-6)


@pytest.mark.parametrize("build", [op.exp, op.log, op.erf, op.tanh, op.sigmoid])
def test_no_library_call_is_left(build: Callable[[relax.Expr], relax.Expr]) -> None:
    (kernel,) = extract_kernels(graph(build, [(64,)]), TARGET)
    calls: list[str] = []

    def note(call: tvm.ir.Call) -> None:
        calls.append(getattr(call.op, "name", ""))

    tvm_ffi.structural_walk(schedule_kernel(kernel.func, TARGET), (tvm.ir.Call, note))
    assert not {"tirx.exp", "tirx.log", "tirx.erf", "tirx.tanh", "tirx.sigmoid"} & set(calls)


@pytest.mark.parametrize("build", [op.exp, op.log, op.erf, op.tanh, op.sigmoid])
def test_nan_stays_nan(build: Callable[[relax.Expr], relax.Expr]) -> None:
    x = np.full(33, 0.5, "float32")
    x[[3, 20, 32]] = np.nan
    assert np.flatnonzero(np.isnan(values(build, x))).tolist() == [3, 20, 32]
