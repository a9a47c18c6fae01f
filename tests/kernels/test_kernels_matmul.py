"""Matrix products of any extents, weights packed or not, with and without what follows them, against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm_ffi
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_checks import TARGET, check, graph, predicates, random_arrays, run
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.kernels import extract_kernels, schedule_kernel
from rlflow_tvm.kernels.llvm.matmul_tile import choose_blocks, choose_tile

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
@example(batch=1, rows=2, columns=65, depth=3, weight=False)  # the last tile of columns holds vectors beyond the end
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


def unrolled(build: Callable[..., relax.Expr], shapes: list[tuple[int, ...]], weights: int) -> list[int]:
    """The extents of the unrolled loops of the only kernel, a register tile's among them."""
    (kernel,) = extract_kernels(graph(build, shapes, weights), TARGET)
    extents: list[int] = []

    def note(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.UNROLLED and int(loop.extent) > 1:
            extents.append(int(loop.extent))

    tvm_ffi.structural_walk(schedule_kernel(kernel.func, TARGET).body, (tirx.For, note))
    return extents


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize("left", [(64, 1, 48), (32, 2, 48), (8, 8, 48), (4, 1, 16, 48), (1, 64, 48)])
def test_tiles_take_the_rows_of_all_axes(left: tuple[int, ...], weights: int) -> None:
    flat = unrolled(op.matmul, [(64, 48), (48, 96)], weights)
    assert unrolled(op.matmul, [left, (48, 96)], weights) == flat
    check(op.matmul, np.matmul, [left, (48, 96)], weights)


def product_and_sum(x: relax.Expr, other: relax.Expr, matrix: relax.Expr) -> relax.Expr:
    return op.add(op.matmul(x, matrix), other)


@pytest.mark.parametrize("weights", [0, 1])
def test_an_axis_of_one_step_in_the_result(weights: int) -> None:
    shapes = [(64, 48), (1, 64, 96), (48, 96)]
    flat = unrolled(product_and_sum, [(64, 48), (64, 96), (48, 96)], weights)
    assert unrolled(product_and_sum, shapes, weights) == flat
    check(product_and_sum, lambda x, other, matrix: x @ matrix + other, shapes, weights)


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize(
    ("left", "other"),
    [
        ((12, 1, 16), (12, 4, 40)),
        ((3, 7, 16), (5, 3, 7, 40)),
        ((3, 7, 16), (7, 40)),
        ((11, 2, 5, 16), (1, 11, 2, 1, 40)),
        ((600, 1030), (3, 600, 40)),  # the depth in blocks
        ((1, 2, 1, 3, 16), (40,)),
    ],
)
def test_result_broadcast_with_another(left: tuple[int, ...], other: tuple[int, ...], weights: int) -> None:
    shapes = [left, other, (left[-1], 40)]
    check(product_and_sum, lambda x, y, matrix: (x.astype("float64") @ matrix + y).astype("float32"), shapes, weights)


@pytest.mark.parametrize(("lanes", "registers"), [(4, 16), (4, 32), (8, 16), (16, 32)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 4096), (197, 197), (128, 3072), (3, 5)])
def test_tile_fits_the_registers(lanes: int, registers: int, height: int, width: int) -> None:
    rows, vectors = choose_tile(height, width, lanes, registers)
    assert 1 <= rows <= height
    assert 1 <= vectors <= -(-width // lanes)
    assert rows * vectors + vectors < registers  # with a row of the right side


TARGETS = {
    "host": TARGET,
    "avx2": Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2}),
    "sse": Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2}),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("left", "columns"),
    [
        ((130, 2100), 100),  # the depth in blocks
        ((300, 3001), 65),  # rows too; a depth that no unrolling divides
        ((3, 50, 2501), 96),
        ((1, 3000), 33),
        ((2, 2, 400, 1030), 40),  # rows in blocks, several batches on the same weights
    ],
)
def test_blocks_for_the_caches(name: str, left: tuple[int, ...], columns: int) -> None:
    def build(x: relax.Expr, residual: relax.Expr, bias: relax.Expr, matrix: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.add(op.matmul(x, matrix), bias), residual))

    shapes = [left, (*left[:-1], columns), (columns,), (left[-1], columns)]
    x, residual, bias, matrix = arrays = random_arrays(shapes)
    outcome = run(graph(build, shapes, 2), arrays, 2, TARGETS[name])
    expected = np.maximum(x.astype("float64") @ matrix + bias + residual, 0)
    assert outcome.rules == ["matmul"]
    np.testing.assert_allclose(outcome.values[0], expected, rtol=0, atol=5e-6 * expected.max())


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 33), columns=st.integers(1, 80), depth=st.integers(1, 150), weight=st.booleans(),
    name=st.sampled_from(sorted(TARGETS)),
)  # fmt: skip
def test_any_extents_on_any_target(rows: int, columns: int, depth: int, weight: bool, name: str) -> None:
    shapes = [(rows, depth), (depth, columns)]
    x, matrix = arrays = random_arrays(shapes)
    outcome = run(graph(op.matmul, shapes, int(weight)), arrays, int(weight), TARGETS[name])
    np.testing.assert_allclose(outcome.values[0], x.astype("float64") @ matrix, rtol=0, atol=1e-4)


@pytest.mark.parametrize("depth", [2304, 2560, 3001, 11008])
def test_no_step_asks_where_the_depth_ends(depth: int) -> None:
    """Which is divided: for a few hundred rows it is too long for the cache."""
    target = Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 1})
    kernels = extract_kernels(graph(op.matmul, [(128, depth), (depth, 96)], 1), target)
    (product,) = (schedule_kernel(k.func, target) for k in kernels if "matmul" in k.name)
    assert predicates(product) == []
    assert choose_blocks(128, depth, 6, 6, 1).depth < depth


@settings(deadline=None)
@given(
    height=st.integers(1, 5000), depth=st.integers(1, 20_000), panels=st.integers(1, 100), rows=st.integers(1, 10),
    cores=st.integers(1, 64),
)  # fmt: skip
def test_blocks_cover_the_product(height: int, depth: int, panels: int, rows: int, cores: int) -> None:
    blocks = choose_blocks(height, depth, panels, rows, cores)
    assert 1 <= blocks.depth <= depth
    assert blocks.rows == height or blocks.rows % rows == 0
    assert panels % blocks.panels == 0
