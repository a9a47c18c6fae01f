"""Per-channel affine nodes, folded into convolutions or written as one batch norm: numbers against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from small_weights import NORM, drawn, norm_weights

from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

node = helper.make_node


def test_batch_norm_and_scale_fold_into_the_convolution(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [
            node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", *NORM], ["n"], epsilon=1e-2),
            node("Mul", ["scale", "n"], ["m"]),
            node("Sub", ["m", "shift"], ["y"]),
        ],
        {"x": (1, 4, 6, 6)},
        ["y"],
        {"w": drawn(8, 4, 3, 3), **norm_weights(8), "scale": drawn(8, 1, 1), "shift": drawn(1, 8, 1, 1, seed=2)},
    )
    assert operators(assert_imports_right(model)) == ["nn.conv2d", "add"]


@pytest.mark.parametrize(
    ("scale", "names"),
    [(0.5, ["nn.conv2d", "add"]), (1e-5, ["nn.conv2d", "multiply"]), (6e4, ["nn.conv2d", "multiply"])],
)
def test_halves_are_not_scaled_out_of_their_range(scale, names, make_model, run, operators) -> None:
    """Against the convolution alone, scaled here: ONNX Runtime scales the weights, whatever they become."""
    weights = {"k": 0.3 * drawn(8, 16, 3, 3), "s": np.full((1, 8, 1, 1), scale)}
    weights["k"][:, 0, 0, 0] = 2.0  # times 6e4 infinite, the sums of small data are not
    nodes = [node("Conv", ["x", "k"], ["c"]), node("Mul", ["c", "s"], ["y"])]
    halves = {name: array.astype(np.float16) for name, array in weights.items()}
    whole, alone = (
        make_model(part, {"x": (1, 16, 7, 7)}, [out], halves, dtypes={"x": "float16"}, out_dtype="float16")
        for part, out in ((nodes, "y"), (nodes[:1], "c"))
    )
    x = {"x": (min(10.0, 600.0 / scale) * drawn(1, 16, 7, 7)).astype(np.float16)}
    mod = from_onnx(whole)
    assert [name for name in operators(mod) if name != "astype"] == names
    expected = onnxruntime_outputs(alone, x)[0].astype(np.float64) * scale
    (found,) = run(mod, x, ours=True)
    assert np.abs(found - expected).max() <= 3e-3 * np.ptp(expected)


def test_nodes_of_one_name_are_told_apart(make_model, operators) -> None:
    model = make_model(
        [
            node("Conv", ["x", "w"], ["c"], name="same"),
            node("BatchNormalization", ["c", *NORM], ["n"], name="same"),
            node("Relu", ["n"], ["y"], name="same"),
        ],
        {"x": (1, 4, 6, 6)},
        ["y"],
        {"w": drawn(8, 4, 3, 3), **norm_weights(8)},
    )
    assert operators(from_onnx(model)) == ["nn.conv2d", "add", "nn.relu"]


def test_a_convolution_read_twice_is_left_alone(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [
            node("Conv", ["x", "w", "b"], ["c"]),
            node("BatchNormalization", ["c", *NORM], ["n"]),
            node("Relu", ["c"], ["r"]),
            node("Add", ["n", "r"], ["y"]),
        ],
        {"x": (1, 4, 6, 6)},
        ["y"],
        {"w": drawn(8, 4, 3, 3), "b": drawn(8), **norm_weights(8)},
    )
    names = operators(assert_imports_right(model))
    assert sorted(names) == ["add", "add", "add", "multiply", "nn.conv2d", "nn.relu"]


def test_a_convolution_that_is_an_output_is_left_alone(make_model, assert_imports_right) -> None:
    model = make_model(
        [node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", *NORM], ["n"])],
        {"x": (1, 4, 6, 6)},
        ["c", "n"],
        {"w": drawn(8, 4, 3, 3), **norm_weights(8)},
    )
    assert_imports_right(model)


def test_a_lone_batch_norm_is_one_product_and_one_sum(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [node("BatchNormalization", ["x", *NORM], ["n"]), node("Relu", ["n"], ["y"])],
        {"x": (2, 8, 5, 5)},
        ["y"],
        norm_weights(8),
    )
    assert operators(assert_imports_right(model)) == ["multiply", "add", "nn.relu"]


@pytest.mark.parametrize("is_output", [True, False])
def test_a_batch_norm_of_unknown_rank_is_not_folded(is_output: bool, make_model, assert_imports_right) -> None:
    """Inference stops at an operator that only TVM knows. The extents are equal: along any axis the parameters would
    fit."""
    nodes = [
        node("Cast", ["x"], ["c"], to=onnx.TensorProto.INT16),
        node("MatMulInteger16", ["c", "w"], ["m"], domain="com.microsoft"),
        node("Cast", ["m"], ["g"], to=onnx.TensorProto.FLOAT),
        node("BatchNormalization", ["g", *NORM], ["y" if is_output else "n"]),
    ]
    nodes += [] if is_output else [node("Relu", ["n"], ["y"])]
    weights = norm_weights(4) | {"w": np.arange(-8, 8, dtype=np.int16).reshape(4, 4)}
    model = make_model(nodes, {"x": (2, 4, 4, 4)}, ["y"], weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert_imports_right(model)


@pytest.mark.parametrize(
    ("data", "given", "names"),
    [("float16", "float32", ["astype", "multiply", "add", "astype"]), ("float32", "float16", ["multiply", "add"])],
)
def test_a_batch_norm_with_parameters_of_another_type(
    data: str, given: str, names: list[str], make_model, assert_imports_right, operators
) -> None:
    parameters = {name: array.astype(given) for name, array in norm_weights(4).items()}
    nodes = [node("BatchNormalization", ["x", *NORM], ["y"])]
    model = make_model(nodes, {"x": (2, 4, 5, 5)}, ["y"], parameters, dtypes={"x": data}, out_dtype=data)
    assert operators(assert_imports_right(model, tolerance=5e-4)) == names


@pytest.mark.parametrize(
    ("operator", "name"), [("Mul", "multiply"), ("Add", "add"), ("Sub", "subtract"), ("Div", "divide")]
)
def test_what_makes_colours_of_grey_is_not_folded(
    operator: str, name: str, make_model, assert_imports_right, operators
) -> None:
    model = make_model(
        [node("Conv", ["x", "w"], ["c"]), node(operator, ["c", "s"], ["y"])],
        {"x": (1, 2, 5, 5)},
        ["y"],
        {"w": drawn(1, 2, 1, 1), "s": np.array([0.5, -1, 2], np.float32).reshape(3, 1, 1)},
    )
    assert operators(assert_imports_right(model)) == ["nn.conv2d", name]


def test_a_product_along_another_axis_is_not_folded(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [node("Conv", ["x", "w"], ["c"]), node("Mul", ["c", "s"], ["y"])],
        {"x": (1, 4, 6, 6)},
        ["y"],
        {"w": drawn(4, 4, 3, 3), "s": drawn(4)},
    )
    assert operators(assert_imports_right(model)) == ["nn.conv2d", "multiply"]
