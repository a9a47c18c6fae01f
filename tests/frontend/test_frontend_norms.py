"""Normalisations and norms that TVM's importer or its kernels get wrong: numbers against ONNX Runtime and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from small_weights import drawn

from rlflow_tvm.frontend import from_onnx

node = helper.make_node
_SHAPE = (2, 3, 4, 5)


@pytest.mark.parametrize("axis", [0, -2, 1])
def test_rms_normalization(axis: int, make_model, run) -> None:
    model = make_model([node("RMSNormalization", ["x", "s"], ["y"], axis=axis)], {"x": (3, 4)}, ["y"], {}, 23)
    model.graph.input.append(helper.make_tensor_value_info("s", 1, [4]))
    x, scale = drawn(3, 4), drawn(4) + 2
    mean = np.mean(x * x, axis=None if axis in (0, -2) else 1, keepdims=True)
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x, "s": scale}, ours)
        np.testing.assert_allclose(found, x / np.sqrt(mean + 1e-5) * scale, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("axes", [None, (1, 3), (-1,)])
def test_a_mean_variance_normalization_with_parts_that_are_one_value(axes, dtype: str, make_model, run) -> None:
    normed = node("MeanVarianceNormalization", ["x"], ["y"], **({} if axes is None else {"axes": axes}))
    model = make_model([normed], {"x": _SHAPE}, ["y"], dtypes={"x": dtype}, out_dtype=dtype)
    x = drawn(*_SHAPE)
    x[:, 1], x[:, 2] = 0, 1e3 + x[:, 2]
    x = x.astype(dtype)
    centred = x.astype("float64") - x.mean(axes or (0, 2, 3), keepdims=True, dtype="float64")
    expected = centred / (np.sqrt((centred**2).mean(axes or (0, 2, 3), keepdims=True)) + 1e-9)
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)


_OF_HALVES = {
    "instance-norm": ([node("InstanceNormalization", ["x", "g", "b"], ["y"])], {"g": drawn(3), "b": drawn(3)}),
    "l2": ([node("ReduceL2", ["x", "a"], ["y"])], {"a": np.array([-1])}),
    "l2-noop": ([node("ReduceL2", ["x"], ["y"], noop_with_empty_axes=1)], {}),
    "global-lp-pool": ([node("GlobalLpPool", ["x"], ["y"])], {}),
    "lp-pool": ([node("LpPool", ["x"], ["y"], kernel_shape=[2, 2])], {}),
}


@pytest.mark.parametrize("name", sorted(_OF_HALVES))
def test_halves_whose_squares_leave_their_range(name: str, make_model, assert_imports_right) -> None:
    nodes, weights = _OF_HALVES[name]
    weights = {k: v.astype("float16") if v.dtype.kind == "f" else v for k, v in weights.items()}
    model = make_model(nodes, {"x": _SHAPE}, ["y"], weights, dtypes={"x": "float16"}, out_dtype="float16")
    assert_imports_right(model, 1e-3, given={"x": (500 * drawn(*_SHAPE)).astype("float16")})


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1,), ()])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_scale_of_an_rms_normalization_is_broadcast(shape: tuple[int, ...], axis: int, make_model, run) -> None:
    scale = drawn(*shape) + np.float32(2)
    model = make_model(
        [node("RMSNormalization", ["x", "s"], ["y"], axis=axis)], {"x": (2, 3, 4)}, ["y"], {"s": scale}, 23
    )
    x = drawn(2, 3, 4)
    mean = np.mean(x * x, axis=tuple(range(axis, 3)), keepdims=True)
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        np.testing.assert_allclose(found, x / np.sqrt(mean + 1e-5) * scale, rtol=1e-4)


@pytest.mark.parametrize("bias", [["b"], []])
def test_a_layer_norm_of_doubles(bias: list[str], make_model, run) -> None:
    weights = {"g": drawn(4).astype("float64"), "b": drawn(3, 1).astype("float64")}
    model = make_model(
        [node("LayerNormalization", ["x", "g", *bias], ["y"], axis=1)],
        {"x": (2, 3, 4)},
        ["y"],
        weights,
        dtypes={"x": "float64"},
        out_dtype="float64",
    )
    x = 1e3 + drawn(2, 3, 4).astype("float64")
    centred = x - x.mean((1, 2), keepdims=True)
    expected = centred / np.sqrt((centred**2).mean((1, 2), keepdims=True) + 1e-5) * weights["g"]
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        np.testing.assert_allclose(found, expected + (weights["b"] if bias else 0), rtol=1e-9, atol=1e-9)


def test_a_layer_norm_is_over_more_axes_than_its_scale_has(make_model, assert_imports_right) -> None:
    nodes = [node("LayerNormalization", ["x", "g"], ["y"], axis=1)]
    assert_imports_right(make_model(nodes, {"x": (2, 5, 5)}, ["y"], {"g": drawn(5)}))
