"""What is computed from constants before the model runs: the numbers that ONNX Runtime gives."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from small_weights import NORM, drawn, norm_weights

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import fold, from_onnx, onnxruntime_outputs
from rlflow_tvm.frontend.clean import clean

node = helper.make_node


@pytest.mark.parametrize("opset", [10, 13, 18, 19, 21])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int32"])
def test_quantised_weights_are_dequantised(kind: str, opset: int, make_model, assert_imports_right, operators) -> None:
    by_channel = opset >= 13
    scale, zero = (np.array([0.1, 0.2, 0.3], np.float32), np.array([3, 1, 2], kind))
    weights = {"w": (50 * drawn(4, 3)).astype(kind), "s": scale, "z": zero * (kind != "int32")}
    if not by_channel:
        weights |= {"s": scale[0], "z": weights["z"][0]}
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["d"]), node("Mul", ["x", "d"], ["y"])]
    mod = assert_imports_right(make_model(nodes, {"x": (4, 3)}, ["y"], weights, opset))
    assert operators(mod) == ["multiply"]


_SAME_LOWER = {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}
_GRID = np.linspace(-0.9, 0.9, 2 * 4 * 3 * 2, dtype=np.float32).reshape(2, 4, 3, 2)
_ROWS = {"r": drawn(1, 512), "i": np.array([[3, 0, 511, -1, 40]])}
_TABLES = {"t": drawn(3, 40, 4), "j": np.arange(2 * 5 * 4).reshape(2, 5, 4) - 20}  # fewer tables than there are
_OF_CONSTANTS = {
    "softmax-12": (12, node("Softmax", ["w"], ["c"], axis=1), {}),
    "log-softmax-11": (11, node("LogSoftmax", ["w"], ["c"], axis=2), {}),
    "hardmax-12": (12, node("Hardmax", ["w"], ["c"], axis=1), {}),
    "lp-normalization": (18, node("LpNormalization", ["w"], ["c"], axis=1, p=1), {}),
    "softmax-13": (13, node("Softmax", ["w"], ["c"], axis=1), {}),
    "batch-norm-13": (13, node("BatchNormalization", ["w", *NORM], ["c"]), norm_weights(4)),
    "batch-norm-15": (15, node("BatchNormalization", ["w", *NORM], ["c"]), norm_weights(4)),
    "lrn": (18, node("LRN", ["w"], ["c"], size=3, alpha=0.5, beta=0.75, bias=2.0), {}),
    "max-pool": (18, node("MaxPool", ["w"], ["c"], **_SAME_LOWER), {}),
    "average-pool": (18, node("AveragePool", ["w"], ["c"], **_SAME_LOWER), {}),
    "lp-pool": (18, node("LpPool", ["w"], ["c"], **_SAME_LOWER), {}),
    "conv-transpose": (18, node("ConvTranspose", ["w", "k"], ["c"], group=2), {"k": drawn(4, 3, 2, 2)}),
    "group-norm": (
        21,
        node("GroupNormalization", ["w", "g", "b"], ["c"], num_groups=2),
        {"g": drawn(4), "b": drawn(4)},
    ),
    "lstm": (
        14,
        node("LSTM", ["v", "W", "R"], ["c"], hidden_size=4, activations=["HardSigmoid", "Relu", "Tanh"]),
        {"v": drawn(3, 2, 5), "W": drawn(1, 16, 5), "R": drawn(1, 16, 4)},
    ),
    "grid-sample": (16, node("GridSample", ["w", "g"], ["c"], mode="bicubic"), {"g": _GRID}),
    # of more than the 32 elements that the reference takes
    "gather-elements": (18, node("GatherElements", ["r", "i"], ["c"], axis=1), _ROWS),
    "gather-elements-3d": (18, node("GatherElements", ["t", "j"], ["c"], axis=-2), _TABLES),
    "pad-edge": (18, node("Pad", ["w", "p"], ["c"], mode="edge"), {"p": np.array([0, 0, 1, -1] * 2)}),
    "pad-constant": (18, node("Pad", ["w", "p"], ["c"]), {"p": np.array([0, -1, 1, -1] * 2)}),
}


@pytest.mark.parametrize("name", sorted(_OF_CONSTANTS))
def test_operators_of_constants(name: str, make_model, assert_imports_right) -> None:
    opset, of_constants, weights = _OF_CONSTANTS[name]
    nodes = [of_constants, node("Mul", ["x", "c"], ["y"])]
    assert_imports_right(make_model(nodes, {"x": (1,)}, ["y"], {"w": drawn(2, 4, 5, 6), **weights}, opset))


_LARGE = np.array([3e9, -3e9, 7, -200], np.float32)
_OF_EXTREMES = {
    "one-hot": (
        node("OneHot", ["i", "d", "v"], ["c"]),
        {"i": np.array([0, 2]), "d": np.array(3), "v": np.array([-np.inf, 0], np.float32)},
    ),
    "log-sum-exp": (
        node("ReduceLogSumExp", ["w", "a"], ["c"]),
        {"w": np.array([[-np.inf, -np.inf], [0, 1]], np.float32), "a": np.array([1])},
    ),
    "log-softmax": (node("LogSoftmax", ["w"], ["c"], axis=-1), {"w": np.array([[0, -200], [-1e4, 3]], np.float32)}),
    "quantised-zeros": (node("DynamicQuantizeLinear", ["w"], ["q", "c", "z"]), {"w": np.zeros(4, np.float32)}),
    "quantised": (node("QuantizeLinear", ["w", "s", "z"], ["q"]), {"w": _LARGE, "s": np.float32(1), "z": np.int8(-5)}),
    "unique": (node("Unique", ["w"], ["c"], sorted=0), {"w": np.array([3, 1, 2, 1, 3, 0], np.float32)}),
    "unique-rows": (
        node("Unique", ["w"], ["v", "f", "q"], sorted=0, axis=0),
        {"w": np.array([[3, 1], [0, 1], [3, 1]], np.float32)},
    ),
}


@pytest.mark.parametrize("name", sorted(_OF_EXTREMES))
def test_extremes_of_constants(name: str, make_model, run) -> None:
    of_constants, weights = _OF_EXTREMES[name]
    casts = [node("Cast", ["q"], ["c"], to=1)] if "c" not in of_constants.output else []
    model = make_model([of_constants, *casts, node("Add", ["x", "c"], ["y"])], {"x": (1,)}, ["y"], weights)
    x = {"x": np.zeros(1, np.float32)}
    (found,), (expected,) = run(from_onnx(model), x, ours=True), onnxruntime_outputs(model, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_range_without_end_is_refused(make_model) -> None:
    nodes = [node("Range", ["a", "b", "d"], ["r"], name="it"), node("Add", ["x", "r"], ["y"])]
    weights = {"a": np.float32(0), "b": np.float32(np.inf), "d": np.float32(1)}
    with pytest.raises(FrontendError, match=r"node 'it' \(Range\) makes a constant of shape .* are refused"):
        from_onnx(make_model(nodes, {"x": (1,)}, ["y"], weights))


def test_dropout_of_constants_in_training(make_model) -> None:
    nodes = [node("Dropout", ["w", "", "t"], ["d"], name="drop"), node("Add", ["x", "d"], ["y"])]

    def model(training: bool):
        return make_model(nodes, {"x": (3,)}, ["y"], {"w": drawn(3), "t": np.array(training)})

    with pytest.raises(FrontendError, match=r"node 'drop' \(Dropout\) is in training mode"):
        from_onnx(model(True))
    assert len(from_onnx(model(False))["main"].body.blocks[0].bindings) == 1


def test_the_long_name_of_the_standard_domain(make_model, assert_imports_right, operators) -> None:
    nodes = [node("Exp", ["w"], ["e"], domain="ai.onnx"), node("Mul", ["x", "e"], ["y"], domain="ai.onnx")]
    model = make_model(nodes, {"x": (3,)}, ["y"], {"w": drawn(3)})
    model.opset_import[0].domain = "ai.onnx"
    assert operators(assert_imports_right(model)) == ["multiply"]


_REFUSED = {  # by the reference, or by ONNX Runtime too, though the standard allows it; and what they are
    "cumsum-axis-of-one-element": (
        18,
        node("CumSum", ["w", "a"], ["c"]),
        {"w": np.array([[1, 2], [3, 5]], np.float32), "a": np.array([1])},
        [[1, 3], [3, 8]],
    ),
    "one-hot-of-booleans": (
        18,
        node("OneHot", ["i", "d", "v"], ["c"]),
        {"i": np.array([0, 2]), "d": np.array(3), "v": np.array([False, True])},
        [[1, 0, 0], [0, 0, 1]],
    ),
    "unsqueeze-unsorted": (
        11,
        node("Unsqueeze", ["w"], ["c"], axes=[2, 0]),
        {"w": np.array([1, 2], np.float32)},
        [[[1], [2]]],
    ),
}


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_what_the_reference_refuses_is_left_to_tvm(name: str, make_model, run) -> None:
    opset, of_constants, weights, expected = _REFUSED[name]
    nodes = [of_constants, node("Cast", ["c"], ["f"], to=1), node("Mul", ["x", "f"], ["y"])]
    mod = from_onnx(make_model(nodes, {"x": (1,)}, ["y"], weights, opset))
    for ours in (False, True):
        (found,) = run(mod, {"x": np.array([2], np.float32)}, ours)
        np.testing.assert_array_equal(found, 2 * np.array(expected, np.float32))


def test_what_the_reference_gives_another_type_is_left_to_tvm(make_model, operators, monkeypatch) -> None:
    monkeypatch.setattr(fold.ReferenceEvaluator, "run", lambda *_: [np.exp(drawn(3).astype("float64"))])
    nodes = [node("Exp", ["w"], ["c"]), node("Mul", ["x", "c"], ["y"])]
    assert operators(from_onnx(make_model(nodes, {"x": (3,)}, ["y"], {"w": drawn(3)}))) == ["exp", "multiply"]


def test_an_index_of_a_constant_that_is_out_of_bounds(make_model) -> None:
    nodes = [node("Gather", ["w", "i"], ["c"], name="it"), node("Mul", ["x", "c"], ["y"])]
    with pytest.raises(FrontendError, match=r"node 'it' \(Gather\) of constants cannot be evaluated"):
        from_onnx(make_model(nodes, {"x": (1,)}, ["y"], {"w": drawn(3), "i": np.array([7])}))


@pytest.mark.parametrize(
    ("extent", "told"), [(3, r"'it' is to fill a tensor of shape \(-3,\)"), (-(2**40), r"makes a constant of shape")]
)
def test_a_tensor_to_be_filled_of_a_shape_that_is_computed(extent: int, told: str, make_model) -> None:
    nodes = [
        node("Neg", ["n"], ["s"]),
        node("ConstantOfShape", ["s"], ["c"], name="it"),
        node("Add", ["x", "c"], ["y"]),
    ]
    with pytest.raises(FrontendError, match=told):
        from_onnx(make_model(nodes, {"x": (1,)}, ["y"], {"n": np.array([extent])}))


@pytest.mark.parametrize(
    ("repeated", "weights"),
    [
        (node("Expand", ["w", "n"], ["c"]), {"w": drawn(1, 1, 2), "n": np.array([4096, 1024, 2])}),
        (node("Tile", ["w", "n"], ["c"]), {"w": drawn(1, 1, 2), "n": np.array([4096, 1024, 1])}),
    ],
)
def test_a_constant_is_not_repeated_to_a_very_large_one(repeated, weights, make_model, operators) -> None:
    nodes = [repeated, node("Add", ["x", "c"], ["y"])]
    mod = from_onnx(make_model(nodes, {"x": (1, 1, 2)}, ["y"], weights))
    assert operators(mod)[-1] == "add"
    assert len(operators(mod)) == 2
    weights["n"][0] = 2
    assert operators(from_onnx(make_model(nodes, {"x": (1, 1, 2)}, ["y"], weights))) == ["add"]


_NORMALISED = {"LayerNormalization": ("s",), "Softmax": (), "CumSum": ("i",)}


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean", "ReduceL2", *_NORMALISED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_constant_halves_are_not_summed_as_halves(operator: str, dtype: str, make_model) -> None:
    """Of which 4096 ones are 2048, in bfloat16 256, and the square of 300 is infinite."""
    wide = 300.0 if operator == "ReduceL2" else 1.0
    w = np.full((4096, 8), wide, np.float64) + np.arange(8)
    if operator == "Softmax":
        w = np.tile(np.arange(8.0), (4096, 1)).T.reshape(8, 4096)
    weights = {"w": w.astype(dtype), "a": np.array([0]), "i": np.array(0), "s": np.ones(8, dtype)}
    second = _NORMALISED.get(operator, ("a",))
    graph = clean(
        make_model(
            [node(operator, ["w", *second], ["c"]), node("Cast", ["c"], ["f"], to=1), node("Mul", ["x", "f"], ["y"])],
            {"x": (1,)}, ["y"], weights,
        ),
        "halves",
    )  # fmt: skip
    (found,) = (array for name, array in graph.constants.items() if name == "f")
    given = w.astype(dtype).astype(np.float64)
    expected = {
        "ReduceSum": lambda: given.sum(0, keepdims=True),
        "ReduceMean": lambda: given.mean(0, keepdims=True),
        "ReduceL2": lambda: np.sqrt((given**2).sum(0, keepdims=True)),
        "CumSum": lambda: given.cumsum(0),
        "Softmax": lambda: np.full(given.shape, 1 / 4096),
        "LayerNormalization": lambda: (given - given.mean(1, keepdims=True)) / given.std(1, keepdims=True),
    }[operator]()
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=1e-2)
