"""Numbers that TVM's importer takes for others: infinities of one sign, means of integers, negative pads that wrap."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from frontend_error import message
from onnx import AttributeProto, TensorProto, helper

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


@pytest.mark.parametrize("operator", ["Cosh", "Sinh"])
@pytest.mark.parametrize(("dtype", "edge"), [("float32", 89.3), ("float64", 710.3)])
def test_hyperbolic_functions_are_infinite_no_sooner_than_they_have_to(
    operator: str, dtype: str, edge: float, make_model, run
) -> None:
    """Where exp(x) is, and its half is not."""
    model = make_model([node(operator, ["x"], ["y"])], {"x": (8,)}, ["y"], dtypes={"x": dtype}, out_dtype=dtype)
    x = np.array([edge, -edge, 0.0, 0.5, -1.5, 2.0, np.inf, -np.inf], dtype)
    expected = {"Cosh": np.cosh, "Sinh": np.sinh}[operator](x)
    assert np.isfinite(expected[:6]).all()
    np.testing.assert_allclose(run(from_onnx(model), {"x": x})[0], expected, rtol=1e-5)


def test_halves_are_quantised_to_16_bits(make_model, run) -> None:
    """Above 2048 halves do not hold all of them."""
    weights = {"s": np.float16(0.021), "z": np.uint16(30001)}
    model = make_model([node("QuantizeLinear", ["x", "s", "z"], ["y"])], {"x": (4,)}, ["y"], weights, 21,
                       {"x": "float16"})  # fmt: skip
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT16
    x = np.zeros(4, np.float16)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    np.testing.assert_array_equal(run(from_onnx(model), {"x": x})[0], expected)


def test_numbers_of_4_bits_at_run_time_are_refused(make_model) -> None:
    weights = {"s": np.full(4, 0.1, np.float32), "z": np.zeros(4, ml_dtypes.int4)}
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1, name="it"),
             node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1)]  # fmt: skip
    text = message(lambda: from_onnx(make_model(nodes, {"x": (2, 4)}, ["y"], weights, 21)))
    assert "node 'it' uses the operator QuantizeLinear with 'z' of int4" in text


def test_lists_without_elements_say_nothing(make_model, assert_imports_right) -> None:
    nodes = [node("LSTM", ["x", "w", "r"], ["h"], hidden_size=4), node("ReduceSum", ["h"], ["y"], keepdims=1)]
    for each, name, kind in zip(nodes, ("activation_alpha", "axes"), ("FLOATS", "INTS"), strict=True):
        each.attribute.append(AttributeProto(name=name, type=AttributeProto.AttributeType.Value(kind)))
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((1, 16, width)).astype(np.float32) for name, width in (("w", 5), ("r", 4))}
    assert_imports_right(make_model(nodes, {"x": (3, 2, 5)}, ["h", "y"], weights, 11))
