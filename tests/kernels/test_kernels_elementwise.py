"""Element-wise kernels, transposes, layout changes, joins, cuts and pads of any shape, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import check
from tvm import relax

op = relax.op
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
