"""Element-wise kernels, transposes, layout changes, joins, cuts and pads of any shape, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import TARGET, check, graph
from tvm import relax

from rlflow_tvm.kernels import extract_kernels, schedule_kernel, tir_pipeline, vector_lanes

op = relax.op


def _by_lanes(build: Callable[..., relax.Expr], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether LLVM's code of the kernels puts whole vectors together lane by lane."""
    functions = {}
    for i, kernel in enumerate(extract_kernels(graph(build, shapes), TARGET)):
        functions[f"kernel_{i}"] = schedule_kernel(kernel.func, TARGET).with_attr("global_symbol", f"kernel_{i}")
    module = tvm.compile(tvm.IRModule(functions), target=TARGET, tir_pipeline=tir_pipeline(TARGET))
    return f"insertelement <{vector_lanes(TARGET)} x float>" in module.mod.inspect_source("ll")


SHAPES = [(1,), (17,), (1, 1, 1), (5, 33), (4, 1, 200), (3, 7, 31, 2), (1, 13, 97, 19), (64, 512)]


@pytest.mark.parametrize("shape", SHAPES)
def test_same_shape(shape: tuple[int, ...]) -> None:
    outcome = check(lambda x, y: op.multiply(op.add(x, y), x), lambda x, y: (x + y) * x, [shape, shape])
    assert outcome.rules == ["elementwise"]


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 33), (33,)), ((4, 33), (4, 1)), ((1, 9, 35), (7, 1, 35)), ((40, 300), (1,)), ((2, 3, 90, 90), (3, 1, 1))],
)
def test_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check(op.add, np.add, [left, right])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), shape=st.lists(st.integers(1, 40), min_size=2, max_size=4).map(tuple))
def test_transpose(data: st.DataObject, shape: tuple[int, ...]) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    check(lambda x: op.permute_dims(x, list(axes)), lambda x: np.transpose(x, axes), [shape])


@pytest.mark.parametrize("block", [4, 16])
def test_blocked_layout_and_back(block: int) -> None:
    plain, blocked = (1, 2 * block, 7, 5), (1, 2, 7, 5, block)
    check(
        lambda x: op.layout_transform(x, lambda n, c, h, w: (n, c // block, h, w, c % block)),
        lambda x: x.reshape(1, 2, block, 7, 5).transpose(0, 1, 3, 4, 2),
        [plain],
    )
    check(
        lambda x: op.layout_transform(x, lambda n, c, h, w, b: (n, c * block + b, h, w)),
        lambda x: x.transpose(0, 1, 4, 2, 3).reshape(plain),
        [blocked],
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_join(axis: int) -> None:
    shapes = [[3, 5, 18], [3, 5, 18], [3, 5, 18]]
    for i, extent in enumerate((4, 16, 31)):
        shapes[i][axis] = extent
    check(
        lambda *parts: op.concat(list(parts), axis=axis),
        lambda *parts: np.concatenate(parts, axis),
        [tuple(shape) for shape in shapes],
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_cut_into_parts(axis: int) -> None:
    def build(x: relax.Expr) -> relax.Expr:
        return op.split(x, [3, 9], axis=axis)

    check(build, lambda x: np.split(x, [3, 9], axis), [(20, 37)])


def test_pad() -> None:
    check(lambda x: op.nn.pad(x, (1, 2, 0, 3)), lambda x: np.pad(x, ((1, 2), (0, 3))), [(19, 30)])


@pytest.mark.parametrize("shape", [(1, 128, 28, 28), (3, 7, 28, 28), (2, 19, 12, 12), (64, 48, 28), (1, 40, 54, 54)])
def test_rows_that_no_whole_vectors_fill_are_copied_in_vectors(shape: tuple[int, ...]) -> None:
    check(op.nn.relu, lambda x: np.maximum(x, 0), [shape])
    assert not _by_lanes(lambda x: op.nn.relu(x), [shape])


@pytest.mark.parametrize(
    ("left", "right"), [((3, 0), (0, 3)), ((0, 0), (1, 1)), ((2, 5), (0, 17)), ((0, 1), (0, 0)), ((4, 4), (40, 3))]
)
def test_pad_of_any_row(left: tuple[int, int], right: tuple[int, int]) -> None:
    widths = [0, 0, 0, 0, *left, *right]
    pairs = [(0, 0), (0, 0), left, right]
    check(lambda x: op.nn.pad(x, widths), lambda x: np.pad(x, pairs), [(1, 5, 17, 33)])
    assert not _by_lanes(lambda x: op.nn.pad(x, widths), [(1, 5, 17, 33)])


@pytest.mark.parametrize("extents", [(384, 384), (7, 250), (3, 5, 41), (16, 1, 16, 1)])
def test_work_on_joined_rows(extents: tuple[int, ...]) -> None:
    shapes = [(2, 19, extent) for extent in extents]

    def build(bias: relax.Expr, *parts: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.concat(list(parts), axis=2), bias))

    check(build, lambda b, *p: np.maximum(np.concatenate(p, 2) + b, 0), [(sum(extents),), *shapes])
    assert not _by_lanes(build, [(sum(extents),), *shapes])


def test_rows_of_many_pieces_are_not_cut() -> None:
    shapes = [(3, 2)] * 20
    check(lambda *parts: op.concat(list(parts), axis=1), lambda *parts: np.concatenate(parts, 1), shapes)


def test_gather_rows() -> None:
    index = np.array([3, 0, 0, 6], "int64")
    check(lambda x: op.take(x, relax.const(index), axis=0), lambda x: x[index], [(7, 33)])


def test_output_that_only_views_an_input() -> None:
    check(lambda x: op.reshape(x, (6, 4)), lambda x: x.reshape(6, 4), [(2, 12)])


def test_reshape_between_kernels_is_no_kernel() -> None:
    def build(x: relax.Expr) -> relax.Expr:
        flat = op.reshape(op.exp(x), (3, 40))
        return op.nn.softmax(flat)

    def expected(x: np.ndarray) -> np.ndarray:
        grown = np.exp(np.exp(x.astype("float64")).reshape(3, 40))
        return (grown / grown.sum(-1, keepdims=True)).astype("float32")

    outcome = check(build, expected, [(3, 5, 8)])
    assert outcome.rules == ["elementwise", "reduction"]


def test_same_tensor_twice() -> None:
    check(op.multiply, np.multiply, [(5, 7), (5, 7)])
    check(lambda x: op.multiply(x, x), lambda x: x * x, [(5, 7)])
    check(lambda x: op.add(op.multiply(x, x), x), lambda x: x * x + x, [(5, 7)])
