"""Numbers that TVM's importer takes for others: infinities of one sign, means of integers, negative pads that wrap."""

from __future__ import annotations

import numpy as np
import pytest
from frontend_error import message
from onnx import TensorProto, helper

from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

node = helper.make_node


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("negative", [0, 1])
def test_infinities_of_one_sign(positive: int, negative: int, make_model, run) -> None:
    nodes = [node("IsInf", ["x"], ["y"], detect_positive=positive, detect_negative=negative)]
    model = make_model(nodes, {"x": (5,)}, ["y"], out_dtype="bool")
    x = np.array([1, np.inf, -np.inf, np.nan, -2], np.float32)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    for ours in (False, True):
        np.testing.assert_array_equal(run(from_onnx(model), {"x": x}, ours)[0], expected)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("axes", [[1], [-1, 0], []])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_means_of_integers(dtype: str, axes: list[int], keepdims: int, make_model, run) -> None:
    nodes = [node("ReduceMean", ["x", "a"], ["y"], keepdims=keepdims)]
    weights = {"a": np.array(axes, np.int64)}
    model = make_model(nodes, {"x": (2, 3, 5)}, ["y"], weights, dtypes={"x": dtype}, out_dtype=dtype)
    x = np.random.default_rng(0).integers(-90, 90, (2, 3, 5)).astype(dtype)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_negative_pads_that_wrap_are_refused(make_model) -> None:
    nodes = [node("Pad", ["x", "p"], ["y"], mode="wrap", name="it")]
    model = make_model(nodes, {"x": (3, 4)}, ["y"], {"p": np.array([-1, 2, 2, 0])}, 19)
    assert "'it' (operator Pad): mode 'wrap' with negative pads" in message(lambda: from_onnx(model))


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_one_hot_of_floats_and_of_8_bits(dtype: str, make_model, run) -> None:
    weights = {"d": np.array(300), "v": np.array([0, 1], np.float32)}
    model = make_model([node("OneHot", ["x", "d", "v"], ["y"])], {"x": (3,)}, ["y"], weights, dtypes={"x": dtype})
    (found,) = run(from_onnx(model), {"x": np.array([0, 200, 7], dtype)})
    np.testing.assert_array_equal(found, np.eye(300, dtype=np.float32)[[0, 200, 7]])


@pytest.mark.parametrize("attrs", [{}, {"k": -1}, {"k": 2, "dtype": TensorProto.FLOAT}])
def test_identity_matrices(attrs: dict[str, int], make_model, run) -> None:
    nodes = [node("EyeLike", ["i"], ["e"], **attrs), node("Cast", ["e"], ["f"], to=1), node("Add", ["x", "f"], ["y"])]
    model = make_model(nodes, {"x": (3, 4), "i": (3, 4)}, ["y"], dtypes={"i": "int64"})
    x = np.zeros((3, 4), np.float32)
    (found,) = run(from_onnx(model), {"x": x, "i": np.ones((3, 4), np.int64)})
    np.testing.assert_array_equal(found, np.eye(3, 4, attrs.get("k", 0), np.float32))
