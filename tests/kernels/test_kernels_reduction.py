"""Softmax, layer norm, sums and their like over any axis and extent, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import TARGET, check, graph, random_arrays, run
from tvm import relax
from tvm.error import InternalError

from rlflow_tvm.kernels import extract_kernels, schedule_kernel
from rlflow_tvm.kernels.llvm.reduction import Reduction

op = relax.op
LENGTHS = [1, 7, 16, 31, 64, 197, 300]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """In double precision."""
    shifted = np.exp(x.astype("float64") - x.max(axis=axis, keepdims=True))
    return (shifted / shifted.sum(axis=axis, keepdims=True)).astype("float32")


def layer_norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Over the last axis, epsilon 1e-5, in double precision."""
    wide = x.astype("float64")
    centred = wide - wide.mean(axis=-1, keepdims=True)
    norm = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return (norm * scale + shift).astype("float32")


@pytest.mark.parametrize("length", LENGTHS)
def test_softmax_over_the_last_axis(length: int) -> None:
    outcome = check(op.nn.softmax, softmax, [(2, 5, length)])
    assert outcome.rules == ["reduction"]


@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_over_another_axis(axis: int) -> None:
    check(lambda x: op.nn.softmax(x, axis=axis), lambda x: softmax(x, axis), [(6, 11, 19)])


@pytest.mark.parametrize("length", LENGTHS)
def test_layer_norm(length: int) -> None:
    outcome = check(
        lambda x, scale, shift: op.nn.layer_norm(x, scale, shift, axes=[-1]),
        layer_norm,
        [(3, 9, length), (length,), (length,)],
        weights=2,
        tolerance=1e-5,
    )
    assert outcome.rules == ["reduction"]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (3, 16, 41), (2, 1, 2048)])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "variance", "std"])
def test_a_single_number(name: str, shape: tuple[int, ...]) -> None:
    exact = np.var if name == "variance" else getattr(np, name)
    outcome = check(
        getattr(op, name), lambda x: np.asarray(exact(x.astype("float64")), "float32"), [shape], tolerance=1e-5
    )
    assert outcome.rules == ["reduction" if shape else "elementwise"]


def test_the_mean_of_many_is_no_sum_that_stands_still() -> None:
    """One float32 gets no further than 2^24 by steps of one."""
    ones = np.ones((24, 1024, 1024), "float32")
    outcome = run(graph(op.mean, [ones.shape]), [ones])
    assert outcome.values[0] == 1.0
    assert outcome.rules == ["reduction"]


@pytest.mark.parametrize("length", [5, 300])
def test_a_scale_that_is_computed_leaves_softmax_its_schedule(length: int) -> None:
    outcome = check(
        lambda x, s, t: op.nn.softmax(op.multiply(x, op.exp(op.multiply(s, t)))),
        lambda x, s, t: softmax(x * np.exp(s * t)), [(4, length), (), ()], tolerance=1e-5,
    )  # fmt: skip
    assert "fallback" not in outcome.rules


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    data=st.data(),
    keepdims=st.booleans(),
    name=st.sampled_from(["sum", "mean", "max", "min"]),
)
def test_reductions_over_any_axes(shape: tuple[int, ...], data: st.DataObject, keepdims: bool, name: str) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, max_size=len(shape), unique=True))

    # of positive numbers: where a sum cancels, its rounding is no small share of it
    def build(x: relax.Expr) -> relax.Expr:
        return getattr(op, name)(op.exp(x), axis=axes, keepdims=keepdims)

    def expected(x: np.ndarray) -> np.ndarray:
        return np.asarray(getattr(np, name)(np.exp(x), axis=tuple(axes), keepdims=keepdims))

    check(build, expected, [shape], tolerance=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 3, 11), (1, 3, 1, 11), (1, 33), (1, 1, 5, 1, 27), (1, 131)])
def test_nothing_beyond_the_input_is_read(shape: tuple[int, ...]) -> None:
    """Chunks that do not fill the axis, axes of extent 1 beside it, and NaN behind the input."""
    mod = graph(lambda x: op.sum(x, axis=list(range(1, len(shape)))), [shape])
    (kernel,) = extract_kernels(mod, TARGET)
    func = schedule_kernel(kernel.func, TARGET).with_attr("global_symbol", "main")
    size = int(np.prod(shape))
    whole = np.full(size + 4096, np.nan, "float32")
    start = -(whole.ctypes.data // 4) % 16  # kernels rely on 64 bytes
    inside = whole[start : start + size].reshape(shape)
    inside[...] = random_arrays([shape])[0]
    result = tvm.runtime.tensor(np.empty(1, "float32"))
    tvm.tirx.build(tvm.IRModule({"main": func}), target=TARGET)["main"](tvm.runtime.from_dlpack(inside), result)
    np.testing.assert_allclose(result.numpy(), inside.astype("float64").sum(), rtol=0, atol=1e-4)


def test_long_sum_is_split_into_vector_sums() -> None:
    check(lambda x: op.sum(x, axis=[-1]), lambda x: x.astype("float64").sum(-1).astype("float32"), [(3, 1001)])


def test_whole_tensor_to_one_number() -> None:
    check(op.mean, lambda x: np.asarray(x.astype("float64").mean(), "float32"), [(7, 33, 65)], tolerance=1e-5)


@pytest.mark.parametrize("length", [5, 48, 197])
def test_what_follows_a_softmax_is_in_its_kernel(length: int) -> None:
    def build(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        return op.multiply(op.nn.softmax(x), y)

    outcome = check(build, lambda x, y: softmax(x) * y, [(4, length), (4, length)])
    assert outcome.rules == ["reduction"]


@pytest.mark.parametrize("shape", [(1, 2, 64), (1, 33, 1, 64), (1, 3, 32, 32)])
def test_an_image_by_its_own_statistics(shape: tuple[int, ...]) -> None:
    """A scalar's block has no loops once a batch of one is left out."""
    check(lambda x: op.subtract(x, op.mean(x)), lambda x: x - x.mean(), [shape], tolerance=1e-5)
    check(lambda x: op.divide(x, op.std(x)), lambda x: x / x.std(), [shape], tolerance=1e-4)


def test_a_rule_that_fails_a_check_of_tvms_leaves_the_kernel_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise InternalError("Check failed: block_realize == old_block_realize_.get()")

    monkeypatch.setattr(Reduction, "apply", fails)
    outcome = check(op.nn.softmax, softmax, [(4, 33)])
    assert outcome.rules == ["fallback"]


def test_index_of_the_greatest() -> None:
    check(lambda x: op.argmax(x, axis=1), lambda x: x.argmax(1), [(5, 37)])


def test_cumulative_sum() -> None:
    check(lambda x: op.cumsum(x, axis=1), lambda x: x.cumsum(1), [(3, 21)], tolerance=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training: bool) -> None:
    def build(
        x: relax.Expr, scale: relax.Expr, shift: relax.Expr, mean: relax.Expr, variance: relax.Expr
    ) -> relax.Expr:
        normal = relax.op.nn.batch_norm(x, scale, shift, mean, variance, axis=1, training=training)
        return relax.TupleGetItem(normal, 0)

    def expected(
        x: np.ndarray, scale: np.ndarray, shift: np.ndarray, mean: np.ndarray, variance: np.ndarray
    ) -> np.ndarray:
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
        column = (slice(None), None, None)
        return (x - mean[column]) / np.sqrt(variance[column] + 1e-5) * scale[column] + shift[column]

    shapes = [(2, 6, 5, 7), (6,), (6,), (6,), (6,)]
    arrays = random_arrays(shapes)
    arrays[4] = np.abs(arrays[4]) + 0.5
    outcome = run(graph(build, shapes, weights=4), arrays, weights=4)
    np.testing.assert_allclose(outcome.values[0], expected(*arrays), rtol=1e-4, atol=1e-4)
