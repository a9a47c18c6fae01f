"""Features against small kernels counted by hand."""

from __future__ import annotations

import json
import math

import pytest
from cost_kernels import add, gather, matmul
from small_models import MODELS, TARGET
from tvm import te, tirx

from rlflow_tvm.cost.features import kernel_features
from rlflow_tvm.kernels import extract_kernels

F32 = 4


def test_features_of_a_sum():
    features = kernel_features(add(3, 5))
    assert features["flops"] == 15
    assert [features[f"bytes:{i}"] for i in range(3)] == [15 * F32] * 3
    assert (features["params"], features["bits"], features["blocks"], features["reductions"]) == (3, 32, 1, 0)
    assert (features["spatial"], features["spatial:0"], features["spatial:1"]) == (15, 5, 3)
    assert features["reduced"] == 1
    assert features["work:add"] == 15
    assert "work:mul" not in features


def test_features_of_a_product():
    features = kernel_features(matmul(3, 5, 7))
    assert features["flops"] == 2 * 3 * 5 * 7
    assert (features["spatial"], features["spatial:0"], features["spatial:1"]) == (21, 7, 3)
    assert (features["reduced"], features["reduced:0"], features["reductions"]) == (5, 5, 1)
    assert (features["work:mul"], features["work:add"]) == (105, 105)


def test_indices_are_not_counted_as_arithmetic():
    features = kernel_features(gather(10, 4, 3))
    assert features["bytes:1"] == 3 * 8
    assert "work:add" not in features


@pytest.mark.parametrize("name", sorted(MODELS))
def test_features_of_a_models_kernels_are_finite_and_the_same_each_time(name):
    for kernel in extract_kernels(MODELS[name](), TARGET):
        features = kernel_features(kernel.func)
        assert all(math.isfinite(value) for value in features.values())
        assert features == kernel_features(kernel.func)
        json.dumps(features)


def test_a_table_from_which_rows_are_picked_counts_by_the_rows():
    features = kernel_features(gather(1000, 4, 3))
    assert (features["bytes:0"], features["bytes:2"]) == (3 * 4 * F32, 3 * 4 * F32)


def transposed(rows: int, columns: int) -> tirx.PrimFunc:
    a = te.placeholder((rows, columns), name="a")
    return te.create_prim_func([a, te.compute((columns, rows), lambda i, j: a[j, i], name="b")])


def test_steps_through_memory():
    features = kernel_features(transposed(3, 5))
    assert (features["step:0:spatial:0"], features["step:0:spatial:1"], features["worst_step"]) == (5, 1, 5)
    assert kernel_features(add(3, 5))["worst_step"] == 1
    product = kernel_features(matmul(3, 5, 70))  # the larger operand is the second one: 5 x 70
    assert [product[f"step:{i}:reduced:0"] for i in range(2)] == [70, 1]
    assert [product[f"step:{i}:spatial:0"] for i in range(2)] == [1, 0]


def test_axes_are_told_in_the_order_of_the_result():
    """Whatever the order in which the block names them."""
    a = te.placeholder((4, 6, 8), name="a")
    swapped = te.create_prim_func([a, te.compute((8, 4, 6), lambda i, j, k: a[j, k, i] + 1.0, name="b")])
    features = kernel_features(swapped)
    assert [features[f"spatial:{i}"] for i in range(3)] == [6, 4, 8]
    assert [features[f"step:0:spatial:{i}"] for i in range(3)] == [8, 48, 1]
