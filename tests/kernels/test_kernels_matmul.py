"""Matrix products of any extents, weights packed or not, with and without what follows them, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import check
from tvm import relax

from rlflow_tvm.kernels.llvm.matmul_tile import choose_tile

op = relax.op

# rows, columns, depth: ones, primes, whole tiles, one more or less than a tile
SIZES = [(1, 1, 1), (1, 64, 32), (7, 5, 3), (8, 32, 16), (13, 17, 1), (33, 31, 19), (64, 1, 40), (197, 65, 8)]


@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
@pytest.mark.parametrize("weights", [0, 1])
def test_product_equals_numpy(rows: int, columns: int, depth: int, weights: int) -> None:
    outcome = check(op.matmul, np.matmul, [(rows, depth), (depth, columns)], weights)
    assert outcome.rules == ["matmul"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.integers(1, 3), rows=st.integers(1, 40), columns=st.integers(1, 70), depth=st.integers(1, 24),
    weight=st.booleans(),
)  # fmt: skip
def test_product_with_bias_and_residual(batch: int, rows: int, columns: int, depth: int, weight: bool) -> None:
    def build(x: relax.Expr, residual: relax.Expr, bias: relax.Expr, matrix: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.add(op.matmul(x, matrix), bias), residual))

    def expected(x: np.ndarray, residual: np.ndarray, bias: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return np.maximum(x @ matrix + bias + residual, 0)

    shapes = [(batch, rows, depth), (batch, rows, columns), (columns,), (depth, columns)]
    outcome = check(build, expected, shapes, weights=2 if weight else 0)
    assert outcome.rules == ["matmul"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 17, 9), (2, 3, 9, 21)),
        ((2, 3, 17, 9), (9, 21)),
        ((5, 1, 8, 16), (1, 3, 16, 33)),  # both sides broadcast
        ((12, 8), (3, 8, 20)),
        ((19,), (19, 40)),
        ((6, 19), (19,)),
    ],
)
def test_batches_and_vectors(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check(op.matmul, np.matmul, [left, right])


@pytest.mark.parametrize("weights", [0, 1])
def test_transposed_right_side(weights: int) -> None:
    def build(x: relax.Expr, matrix: relax.Expr) -> relax.Expr:
        return op.matmul(x, op.permute_dims(matrix))

    outcome = check(build, lambda x, matrix: x @ matrix.T, [(23, 40), (50, 40)], weights)
    assert outcome.rules[-1] == "matmul"


def test_gelu_behind_a_product_is_in_its_kernel() -> None:
    def build(x: relax.Expr, matrix: relax.Expr) -> relax.Expr:
        return op.nn.gelu(op.matmul(x, matrix))

    def expected(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        product = (x @ matrix).astype("float64")
        return (product * 0.5 * (1 + erf(product / np.sqrt(2)))).astype("float32")

    assert check(build, expected, [(31, 12), (12, 47)], weights=1).rules == ["matmul"]


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 4096), (197, 197), (128, 3072), (3, 5)])
def test_tile_fits_the_registers(lanes: int, height: int, width: int) -> None:
    rows, vectors = choose_tile(height, width, lanes)
    assert 1 <= rows <= height
    assert 1 <= vectors <= -(-width // lanes)
    assert rows * vectors <= (12 if lanes == 8 else 28)
