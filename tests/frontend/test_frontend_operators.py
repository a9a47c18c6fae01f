"""Operators that TVM's importer or its kernels get wrong: converted here, or refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, to_onnx

node = helper.make_node
_SHAPE = (2, 3, 4, 5)


def _array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


_SCALES = np.array([1, 1, 1.5, 1.2], np.float32)
_OLD = {
    "upsample-7": (7, [node("Upsample", ["x"], ["y"], scales=[1.0, 1.0, 1.5, 1.2])], {}),
    "upsample-7-linear": (7, [node("Upsample", ["x"], ["y"], scales=[1.0, 1.0, 2.0, 3.0], mode="linear")], {}),
    "upsample-9": (9, [node("Upsample", ["x", "s"], ["y"])], {"s": _SCALES}),
    "resize-10": (10, [node("Resize", ["x", "s"], ["y"])], {"s": _SCALES}),
    "resize-10-linear": (10, [node("Resize", ["x", "s"], ["y"], mode="linear")], {"s": _SCALES}),
    "resize-10-smaller": (10, [node("Resize", ["x", "s"], ["y"])], {"s": np.array([1, 1, 0.75, 0.6], np.float32)}),
    "topk-9": (9, [node("TopK", ["x"], ["y", "i"], k=2, axis=2)], {}),
    "topk-10": (10, [node("TopK", ["x", "k"], ["y", "i"])], {"k": np.array([2])}),
    "slice-9": (9, [node("Slice", ["x"], ["y"], starts=[1, -3], ends=[3, -1], axes=[1, 3])], {}),
    "softmax-8": (8, [node("Softmax", ["x"], ["y"], axis=1)], {}),
    "hardmax-8": (8, [node("Hardmax", ["x"], ["y"], axis=1)], {}),
    "squeeze-10": (10, [node("ReduceSum", ["x"], ["s"], axes=[1]), node("Squeeze", ["s"], ["y"], axes=[1])], {}),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_become_int32_at_once(dtype: str, make_model, assert_imports_right, operators) -> None:
    nodes = [node("Cast", ["x"], ["y"], to=onnx.TensorProto.INT32)]
    model = make_model(nodes, {"x": _SHAPE}, ["y"], dtypes={"x": dtype}, out_dtype="int32")
    x = (1e4 * _array(*_SHAPE)).astype(dtype)
    assert operators(assert_imports_right(model, tolerance=0, given={"x": x})) == ["astype"]


@pytest.mark.parametrize("name", sorted(_OLD))
def test_old_operator_sets(name: str, make_model, assert_imports_right) -> None:
    opset, nodes, weights = _OLD[name]
    assert_imports_right(make_model(nodes, {"x": _SHAPE}, ["y"], weights, opset))


def test_slopes_of_old_operator_sets_are_by_channel(make_model, run) -> None:
    model = make_model([node("PRelu", ["x", "s"], ["y"])], {"x": _SHAPE}, ["y"], {"s": _array(3)}, 6)
    x = _array(*_SHAPE)
    (found,) = run(from_onnx(model), {"x": x}, ours=True)
    np.testing.assert_allclose(found, np.where(x < 0, x * _array(3).reshape(3, 1, 1), x), rtol=1e-5)


_PADS = np.array([0, 0, 1, 2] * 2)
_BOXES = np.array([[0, 0, 7, 5], [1.5, 2, 6, 8], [2, 1, 9, 9.5]], np.float32)
_EQUATION = "bcij,cj->bi"
_OPERATORS = {
    "resize-sizes": ([node("Resize", ["x", "", "", "n"], ["y"], mode="linear")], {"n": np.array([2, 3, 7, 3])}),
    "resize-empty-scales": (
        [node("Resize", ["x", "r", "s", "n"], ["y"])],
        {"r": np.empty(0, np.float32), "s": np.empty(0, np.float32), "n": np.array([2, 3, 7, 3])},
    ),
    "resize-nhwc": ([node("Resize", ["x", "", "s"], ["y"], mode="linear")], {"s": np.array([1, 2, 2, 1], np.float32)}),
    "resize-one-of-nhwc": (
        [node("Resize", ["x", "", "", "n"], ["y"], coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"n": np.array([2, 6, 4, 5])},
    ),
    "resize-nhwc-within": (
        [
            node("Resize", ["x", "", "s"], ["r"], mode="linear"),
            node("GlobalAveragePool", ["r"], ["p"]),
            node("ReduceSum", ["p", "a"], ["y"]),
        ],
        {"s": np.array([1, 2, 2, 1], np.float32), "a": np.array([1])},
    ),
    "layer-norm-of-more-axes": (
        [node("LayerNormalization", ["x", "g", "b"], ["y"], axis=2)],
        {"g": _array(5), "b": _array(4, 1)},
    ),
    "layer-norm-of-all-axes": ([node("LayerNormalization", ["x", "g"], ["y"], axis=-4)], {"g": _array(3, 1, 1)}),
    "layer-norm-computed": (
        [node("ReduceMax", ["x", "a"], ["g"], keepdims=0), node("LayerNormalization", ["x", "g"], ["y"], axis=1)],
        {"a": np.array([0, 1, 2])},
    ),
    "l1-noop": ([node("ReduceL1", ["x"], ["y"], noop_with_empty_axes=1)], {}),
    "l2-noop": ([node("ReduceL2", ["x"], ["y"], noop_with_empty_axes=1)], {}),
    "l2": ([node("ReduceL2", ["x", "a"], ["y"], noop_with_empty_axes=1)], {"a": np.array([1])}),
    "sum-square-noop": ([node("ReduceSumSquare", ["x"], ["y"], noop_with_empty_axes=1)], {}),
    "tile": ([node("Tile", ["x", "r"], ["y"])], {"r": np.array([1, 2, 1, 3])}),
    "einsum": ([node("Einsum", ["x", "w"], ["y"], equation=_EQUATION)], {"w": _array(3, 5)}),
    "pad-reflect": ([node("Pad", ["x", "p"], ["y"], mode="reflect")], {"p": _PADS}),
    "roi-align": (
        [node("RoiAlign", ["x", "r", "i"], ["y"], output_height=3, output_width=2, spatial_scale=0.5)],
        {"r": _BOXES, "i": np.array([0, 1, 1])},
    ),
    "roi-align-whole-pixels": (
        [
            node(
                "RoiAlign",
                ["x", "r", "i"],
                ["y"],
                output_height=3,
                output_width=2,
                spatial_scale=0.5,
                coordinate_transformation_mode="output_half_pixel",
            ),
        ],
        {"r": _BOXES, "i": np.array([0, 1, 1])},
    ),
    "thresholded-relu": ([node("ThresholdedRelu", ["x"], ["y"], alpha=0.5)], {}),
    "thresholded-relu-of-infinity": (
        [
            node("Mul", ["x", "z"], ["u"]),
            node("Log", ["u"], ["v"]),
            node("ThresholdedRelu", ["v"], ["w"]),
            node("Add", ["w", "x"], ["y"]),
        ],
        {"z": np.float32(0)},
    ),
    "dynamic-quantize": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "p"]),
            node("DequantizeLinear", ["q", "s", "p"], ["y"]),
        ],
        {},
    ),
    "dynamic-quantize-of-zeros": (
        [
            node("Mul", ["x", "z"], ["u"]),
            node("DynamicQuantizeLinear", ["u"], ["q", "s", "p"]),
            node("DequantizeLinear", ["q", "s", "p"], ["v"]),
            node("Add", ["v", "s"], ["w"]),
            node("Add", ["w", "x"], ["y"]),
        ],
        {"z": np.float32(0)},
    ),
    "pad-edge": ([node("Pad", ["x", "p"], ["y"], mode="edge")], {"p": _PADS}),
    "pad-negative": ([node("Pad", ["x", "p"], ["y"])], {"p": -_PADS}),
    "pad-of-both-signs": (
        [node("Pad", ["x", "p", "", "a"], ["y"])],
        {"p": np.array([-1, 2, 1, -3]), "a": np.array([3, -2])},
    ),
    "cumsum-reverse-exclusive": (
        [node("CumSum", ["x", "a"], ["y"], reverse=1, exclusive=1)],
        {"a": np.array([-1])},
    ),
    "einsum-of-one": ([node("Einsum", ["x"], ["y"], equation="...ij->...ji")], {}),
    "cumsum-reverse": ([node("CumSum", ["x", "a"], ["y"], reverse=1)], {"a": np.array(2)}),
    "reverse-sequence": (
        [node("ReverseSequence", ["x", "n"], ["y"], time_axis=1, batch_axis=0)],
        {"n": np.array([2, 3])},
    ),
    "reverse-sequence-by-default": ([node("ReverseSequence", ["x", "n"], ["y"])], {"n": np.array([2, 1, 2])}),
    "top-k-in-any-order": (
        [node("TopK", ["x", "k"], ["t", "i"], axis=1, sorted=0), node("ReduceSum", ["t"], ["y"])],
        {"k": np.array([2])},
    ),
    "lp-norm": ([node("LpNormalization", ["x"], ["y"])], {}),
    "lp-norm-1": ([node("LpNormalization", ["x"], ["y"], p=1, axis=1)], {}),
    "lp-norm-of-zeros": (
        [
            node("Mul", ["x", "z"], ["u"]),
            node("LpNormalization", ["u"], ["v"]),
            node("Add", ["v", "x"], ["y"]),
        ],
        {"z": np.array([0, 0, 0, 0, 0], np.float32)},
    ),
    "resize-of-axes": (
        [node("Resize", ["x", "", "", "n"], ["y"], mode="linear", axes=[3, 2])],
        {"n": np.array([3, 7])},
    ),
    "resize-of-axes-by-scales": (
        [node("Resize", ["x", "", "s"], ["y"], axes=[-2])],
        {"s": np.array([2], np.float32)},
    ),
    "cast": ([node("Cast", ["x"], ["i"], to=6), node("Cast", ["i"], ["y"], to=1)], {}),
    "sinh": ([node("Sinh", ["x"], ["y"])], {}),
    "cosh": ([node("Cosh", ["x"], ["y"])], {}),
}


@pytest.mark.parametrize("name", sorted(_OPERATORS))
def test_operators(name: str, make_model, assert_imports_right) -> None:
    nodes, weights = _OPERATORS[name]
    model = make_model(nodes, {"x": _SHAPE}, ["y"], weights)
    mod = assert_imports_right(model)
    assert len(mod.functions) == 1, "the operator came as loops"
    x = _array(*_SHAPE)
    for found, expected in zip(
        onnxruntime_outputs(to_onnx(mod), {"x": x}), onnxruntime_outputs(model, {"x": x}), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_loops_whose_names_clash(make_model, assert_imports_right) -> None:
    nodes = [
        node("Pad", ["x", "p"], ["u"], mode="edge"),
        node("Pad", ["u", "p"], ["v"], mode="edge"),
        node("Max", ["v", "v"], ["y"]),
    ]
    mod = assert_imports_right(make_model(nodes, {"x": _SHAPE}, ["y"], {"p": np.array([0, 0, -1, 2, 0, 0, 0, 1])}))
    assert len(mod.functions) == 3


@pytest.mark.parametrize(
    "product", [node("MatMul", ["a", "b"], ["y"]), node("Einsum", ["a", "b"], ["y"], equation="i,i")]
)
def test_vectors_are_multiplied(product: onnx.NodeProto, make_model, assert_imports_right) -> None:
    assert_imports_right(make_model([product], {"a": (5,), "b": (5,)}, ["y"]))
    assert_imports_right(make_model([product], {"a": (5,)}, ["y"], {"b": _array(5)}))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 0, 2), (0, 1, 0, 3, 0)])
@pytest.mark.parametrize("opset", [11, 18])
def test_a_split_with_empty_parts(sizes: tuple[int, ...], opset: int, make_model, run) -> None:
    parts = [f"y{i}" for i in range(len(sizes))]
    split = (
        node("Split", ["x"], parts, axis=-2, split=sizes) if opset < 13 else node("Split", ["x", "n"], parts, axis=2)
    )
    model = make_model([split], {"x": _SHAPE}, parts, {"n": np.array(sizes)} if opset >= 13 else {}, opset)
    x = _array(*_SHAPE)
    for ours in (False, True):
        found = run(from_onnx(model), {"x": x}, ours)
        for part, expected in zip(found, np.split(x, np.cumsum(sizes)[:-1], 2), strict=True):
            np.testing.assert_array_equal(part, expected)


def test_bounds_that_are_computed(make_model, assert_imports_right, operators) -> None:
    model = make_model([node("Clip", ["x", "lo", "hi"], ["y"])], {"x": (4, 9), "lo": (), "hi": ()}, ["y"])
    mod = assert_imports_right(model, given={"lo": np.array(-0.3, np.float32), "hi": np.array(0.4, np.float32)})
    assert operators(mod) == ["maximum", "minimum"]


def test_booleans_are_compared(make_model, assert_imports_right) -> None:
    model = make_model(
        [node("Equal", ["a", "b"], ["y"])],
        {"a": (2, 1), "b": (1, 2)},
        ["y"],
        dtypes={"a": "bool", "b": "bool"},
        out_dtype="bool",
    )
    given = {"a": np.array([[False], [True]]), "b": np.array([[False, True]])}
    assert_imports_right(model, given=given)


@pytest.mark.parametrize("value", [-(2**63), 2**62, 2**60 + 1, 2**63 - 1])
def test_integers_that_are_padded_with(value: int, make_model, run) -> None:
    model = make_model(
        [node("Pad", ["x", "p", "v"], ["y"], name="it")],
        {"x": (1,)},
        ["y"],
        {"p": np.array([1, 0]), "v": np.array(value)},
        dtypes={"x": "int64"},
        out_dtype="int64",
    )
    if value % 2:
        with pytest.raises(FrontendError, match=rf"'it' .*: it pads with {value}, which TVM keeps as float64"):
            from_onnx(model)
    else:
        assert run(from_onnx(model), {"x": np.array([5])})[0].tolist() == [value, 5]


@pytest.mark.parametrize(("low", "high"), [(np.inf, np.inf), (-np.inf, -np.inf), (-np.inf, np.inf)])
def test_bounds_that_are_infinite(low: float, high: float, make_model, run) -> None:
    bounds = {"lo": np.float32(low), "hi": np.float32(high)}
    mod = from_onnx(
        make_model([node("Clip", ["x", "lo", "hi"], ["c"]), node("Exp", ["c"], ["y"])], {"x": (4,)}, ["y"], bounds)
    )
    x = np.array([-1, 0, 1, 2], np.float32)
    np.testing.assert_allclose(run(mod, {"x": x})[0], np.exp(np.clip(x, low, high)), rtol=1e-6)


@pytest.mark.parametrize("base", ["int32", "int64", "float32"])
@pytest.mark.parametrize("exponent", [np.array(3), np.array(0), np.array(0.5, np.float32), np.array([0, 1, 2, 3])])
def test_powers(base: str, exponent: np.ndarray, make_model, run) -> None:
    model = make_model(
        [node("Pow", ["x", "e"], ["y"])], {"x": (4,)}, ["y"], {"e": exponent}, dtypes={"x": base}, out_dtype=base
    )
    x = np.array([4, 9, 16, 25], base)
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        assert found.dtype == base
        np.testing.assert_allclose(found, x.astype(np.float64) ** exponent, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("activation", [node("Elu", ["x"], ["y"], alpha=0.5), node("Selu", ["x"], ["y"])])
def test_exponential_units_of_other_types(activation, dtype: str, make_model, assert_imports_right) -> None:
    model = make_model([activation], {"x": _SHAPE}, ["y"], dtypes={"x": dtype}, out_dtype=dtype)
    assert_imports_right(model, 1e-3 if dtype == "float16" else 1e-6, given={"x": (4 * _array(*_SHAPE)).astype(dtype)})


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_one_hot_has_the_type_of_its_values(dtype: str, make_model, assert_imports_right) -> None:
    model = make_model(
        [node("OneHot", ["x", "d", "v"], ["y"], axis=0)],
        {"x": (5,)},
        ["y"],
        {"d": np.array([3]), "v": np.array([-1, 2], dtype)},
        dtypes={"x": "int64"},
        out_dtype=dtype,
    )
    assert_imports_right(model, given={"x": np.array([0, -1, 2, 5, -3])})


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
def test_one_hot_along_every_axis(axis: int, make_model, assert_imports_right) -> None:
    model = make_model(
        [node("OneHot", ["x", "d", "v"], ["y"], axis=axis)],
        {"x": (2, 5)},
        ["y"],
        {"d": np.array([3]), "v": np.array([-1, 2], np.float32)},
        dtypes={"x": "int64"},
    )
    assert_imports_right(model, given={"x": np.array([[0, -1, 2, 5, -3], [1, 1, 0, -4, 3]])})


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_extrema_of_infinities_and_booleans(operator: str, make_model, run) -> None:
    model = make_model([node(operator, ["x", "a"], ["y"])], {"x": (3, 70)}, ["y"], {"a": np.array([1])})
    lowest = np.float32(-np.inf if operator == "ReduceMax" else np.inf)
    x = np.full((3, 70), lowest)
    x[1, 5], x[2, 60:] = 3, np.finfo(np.float32).min if operator == "ReduceMax" else np.finfo(np.float32).max
    (found,) = run(from_onnx(model), {"x": x}, ours=True)
    np.testing.assert_array_equal(found, [[lowest], [3], [x[2, 60]]])
    model = make_model(
        [node(operator, ["x", "a"], ["y"], keepdims=0)],
        {"x": (3, 2)},
        ["y"],
        {"a": np.array([1])},
        20,
        dtypes={"x": "bool"},
        out_dtype="bool",
    )
    x = np.array([[0, 0], [0, 1], [1, 1]], bool)
    (found,) = run(from_onnx(model), {"x": x}, ours=True)
    assert found.tolist() == [False, operator == "ReduceMax", True]


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("opset", "axes"), [(13, [1]), (18, [1]), (18, [])])
def test_the_logarithm_of_a_sum_of_infinities(opset: int, axes: list[int], keepdims: int, make_model, run) -> None:
    of_old = opset < 18
    reduced = node("ReduceLogSumExp", ["x"] if of_old else ["x", "a"], ["y"], keepdims=keepdims)
    if of_old:
        reduced.attribute.append(helper.make_attribute("axes", axes))
    model = make_model([reduced], {"x": (4, 5)}, ["y"], {} if of_old else {"a": np.array(axes, np.int64)}, opset)
    x = 100 * _array(4, 5)
    for lowest in (-np.inf, np.inf):
        x[1], x[2, 3] = -np.inf, lowest
        (expected,) = onnxruntime_outputs(model, {"x": x})
        for ours in (False, True):
            (found,) = run(from_onnx(model), {"x": x}, ours)
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert expected.shape == (() if not axes else (4,)) or keepdims


_REFUSED = {
    "TVM rounds that before it resizes": node(
        "Resize", ["x", "", "s"], ["y"], name="it", mode="linear", coordinate_transformation_mode="half_pixel"
    ),
    "half_pixel_symmetric": node(
        "Resize", ["x", "", "s"], ["y"], name="it", coordinate_transformation_mode="half_pixel_symmetric"
    ),
    "its slope of shape [2] cannot be broadcast": node("PRelu", ["x", "two"], ["y"], name="it"),
    "it resizes [2, 3, 4, 5] to [2, 6, 8, 10]": node("Resize", ["x", "", "channels"], ["y"], name="it"),
    "its scale of shape [3, 4, 5] cannot be broadcast to the normalised [5]": node(
        "LayerNormalization", ["x", "three"], ["y"], name="it"
    ),
    "its scale of shape [2] cannot be broadcast to the normalised [5]": node(
        "RMSNormalization", ["x", "two"], ["y"], name="it"
    ),
    "its bias of shape [2] cannot be broadcast to the normalised [3, 4, 5]": node(
        "LayerNormalization", ["x", "three", "two"], ["y"], name="it", axis=1
    ),
    "mode 'reflect' pads [2, 3, 4, 5] by [0, 0, 4, 0, 0, 0, 0, 0]": node(
        "Pad", ["x", "far"], ["y"], name="it", mode="reflect"
    ),
}


@pytest.mark.parametrize("message", sorted(_REFUSED))
def test_what_is_refused(message: str, make_model) -> None:
    weights = {
        "s": np.array([1, 1, 0.6, 0.6], np.float32),
        "channels": np.array([1, 2, 2, 2], np.float32),
        "three": _array(3, 4, 5),
        "two": _array(2),
        "far": np.array([0, 0, 4, 0, 0, 0, 0, 0]),
    }
    model = make_model([_REFUSED[message]], {"x": _SHAPE}, ["y"], weights, 23)
    with pytest.raises(FrontendError, match=r"'it'|'y'") as caught:
        from_onnx(model)
    assert message in str(caught.value)
