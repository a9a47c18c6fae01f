"""Which elements are taken, and where they are put: the nearest, the greatest, the scattered."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from small_weights import drawn

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

node = helper.make_node


@pytest.mark.parametrize("dtype", ["int32", "float64"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners"])
def test_the_nearest_of_numbers_that_float32_does_not_hold(
    dtype: str, rounding: str, coordinates: str, make_model, run
) -> None:
    given = {"nearest_mode": rounding, "coordinate_transformation_mode": coordinates}
    nodes, x = [node("Resize", ["x", "", "", "n"], ["y"], **given)], (2**24 + 1 + np.arange(30)).reshape(1, 2, 5, 3)

    def model(dtype: str) -> onnx.ModelProto:
        return make_model(nodes, {"x": x.shape}, ["y"], {"n": np.array([1, 2, 8, 6])}, 18, {"x": dtype}, dtype)

    (expected,) = onnxruntime_outputs(model("int32"), {"x": x.astype("int32")})  # it has no Resize of doubles
    for ours in (False, True):
        (found,) = run(from_onnx(model(dtype)), {"x": x.astype(dtype)}, ours)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize(("shape", "axis"), [((2, 2, 4), 2), ((1, 3, 2), 1), ((2, 3, 3), 0), ((2, 2, 2), -1)])
def test_fewer_elements_are_scattered_than_there_are(shape, axis: int, reduction: str, make_model, run) -> None:
    rng = np.random.default_rng(0)
    extent = (2, 3, 4)[axis]
    places = np.argsort(rng.random((*shape[: axis % 3], extent, *shape[axis % 3 + 1 :])), axis=axis)
    indices = np.take(places, np.arange(shape[axis]), axis) if shape[axis] <= extent else None
    indices = np.resize(places, shape) if indices is None else indices
    indices[..., 0] -= extent * (indices[..., 0] > 0)  # some are counted from the end
    nodes = [node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis, reduction=reduction)]
    model = make_model(nodes, {"x": (2, 3, 4), "i": shape, "u": shape}, ["y"], {}, 18, {"i": "int64"})
    given = {"x": drawn(2, 3, 4), "i": indices, "u": 5 * drawn(*shape, seed=1)}
    (expected,) = onnxruntime_outputs(model, given)
    for ours in (False, True):
        np.testing.assert_allclose(run(from_onnx(model), given, ours)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(("operator", "dtype"), [("ArgMax", "uint8"), ("ArgMax", "float32"), ("ArgMin", "float32")])
def test_where_all_is_as_small_as_can_be(operator: str, dtype: str, last: int, make_model, run) -> None:
    nodes = [node(operator, ["x"], ["y"], axis=1, select_last_index=last)]
    model = make_model(nodes, {"x": (3, 70)}, ["y"], {}, 18, {"x": dtype}, "int64")
    least = 0 if dtype == "uint8" else -np.inf if operator == "ArgMax" else np.inf
    x = np.full((3, 70), least, dtype)
    x[1, 5], x[2] = 3, np.arange(70) % 4
    (expected,) = onnxruntime_outputs(model, {"x": x})
    np.testing.assert_array_equal(run(from_onnx(model), {"x": x}, ours=True)[0], expected)


def test_a_resize_of_old_that_rounds_two_ways_is_refused(make_model) -> None:
    scales = {"s": np.array([1, 1, 0.75, 1.2], np.float32)}
    with pytest.raises(FrontendError, match=r"node 'it' .* grows one dimension and shrinks another"):
        from_onnx(make_model([node("Resize", ["x", "s"], ["y"], name="it")], {"x": (2, 3, 4, 5)}, ["y"], scales, 10))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scale", [0.75, 1.5])
def test_a_resize_of_old_whose_scales_a_node_makes(scale: float, mode: str, make_model, assert_imports_right) -> None:
    """As exporters of PyTorch's write them: known once constants are folded."""
    scales = numpy_helper.from_array(np.array([1, 1, 1, scale], np.float32))
    nodes = [node("Constant", [], ["s"], value=scales), node("Resize", ["x", "s"], ["y"], mode=mode)]
    assert_imports_right(make_model(nodes, {"x": (1, 2, 3, 8)}, ["y"], {}, 10))


def test_a_resize_of_old_whose_scales_are_computed_is_refused(make_model) -> None:
    model = make_model([node("Resize", ["x", "s"], ["y"], name="it")], {"x": (1, 2, 3, 8), "s": (4,)}, ["y"], {}, 10)
    with pytest.raises(FrontendError, match=r"node 'it' \(Resize\) has scales computed at run time"):
        from_onnx(model)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_the_nearest_as_tensorflow_has_it(dtype: str, make_model, run) -> None:
    given = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    weights = {"r": np.empty(0, np.float32), "s": np.array([1, 1, 0.5, 2], np.float32)}
    nodes = [node("Resize", ["x", "r", "s"], ["y"], **given)]
    model = make_model(nodes, {"x": (1, 1, 4, 3)}, ["y"], weights, 11, {"x": dtype}, dtype)
    x = np.arange(12).reshape(1, 1, 4, 3).astype(dtype)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    np.testing.assert_array_equal(run(from_onnx(model), {"x": x}, ours=True)[0], expected)


def test_a_constant_is_resized_as_an_input_is(make_model, run) -> None:
    """ONNX's reference divides by 1.2 as float32 has it, in 64 bits, and takes 4 for 6 / 1.2."""
    given = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    nodes = [node("Resize", ["w", "", "s"], ["c"], **given), node("Mul", ["x", "c"], ["y"])]
    weights = {"w": np.arange(10, dtype=np.float32).reshape(1, 1, 1, 10), "s": np.array([1, 1, 1, 1.2], np.float32)}
    model, x = make_model(nodes, {"x": (1,)}, ["y"], weights, 13), np.ones(1, np.float32)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    np.testing.assert_array_equal(run(from_onnx(model), {"x": x})[0], expected)
