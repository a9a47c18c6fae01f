"""What ONNX Runtime's optimizer fuses: expanded, it computes what the fused operator does."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from expanded import both, microsoft, small_model, standard
from frontend_error import message
from onnx import helper
from small_weights import drawn

from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

_X, _Y = drawn(2, 3, 8), drawn(2, 3, 8, seed=1)
_G, _B, _C = 1 + drawn(8, seed=2) / 9, drawn(8, seed=3), drawn(8, seed=4)
_IMAGE, _FILTERS, _Z = drawn(2, 4, 7, 6), drawn(6, 2, 3, 3, seed=1), drawn(2, 6, 4, 6, seed=2)
_WINDOW = {"group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1], "kernel_shape": [3, 3]}
_A, _K = drawn(4, 5), drawn(5, 6, seed=1)
_BATCHES = drawn(3, 2, 4, 5), drawn(3, 2, 5, 6, seed=1)
_IDS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
_KINDS = np.array([[0, 1, 1, 0], [1, 0, 0, 0]], np.int32)
_MASK = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], np.int32)
_TABLES = {"w": drawn(10, 8), "p": drawn(6, 8, seed=1), "k": drawn(2, 8, seed=2), "g": _G, "b": _B}
_WHOLE = {"m": np.int32, "n": np.int32}
_Case = tuple[onnx.NodeProto, dict[str, np.ndarray], dict[str, np.ndarray]]


def _conv(activation: str, numbers: tuple[float, ...] = (), more: tuple[str, ...] = (), **attrs) -> _Case:
    node = microsoft(
        "FusedConv", ["x", "w", *more], activation=activation, activation_params=numbers or None, **{**_WINDOW, **attrs}
    )
    return node, {"x": _IMAGE}, {"w": _FILTERS, "b": drawn(6, seed=5), "z": _Z}


def _gemm(activation: str, **attrs) -> _Case:
    shapes = {
        name: (b if attrs.get(flag) else a)
        for name, flag, a, b in (("x", "transA", _A, _A.T), ("w", "transB", _K, _K.T))
    }
    node = microsoft("FusedGemm", ["x", "w", "b"], activation=activation, **attrs)
    return node, {"x": shapes["x"]}, {"w": shapes["w"], "b": drawn(6, seed=2)}


def _matmul(a: np.ndarray, b: np.ndarray, **attrs) -> _Case:
    return microsoft("FusedMatMul", ["x", "w"], **attrs), {"x": a, "w": b}, {}


_CASES: dict[str, _Case] = {
    "conv-relu": _conv("Relu", more=("b",)),
    "conv-sigmoid": _conv("Sigmoid"),
    "conv-tanh": _conv("Tanh", dilations=[1, 2]),
    "conv-leaky": _conv("LeakyRelu", (0.2,), ("b",)),
    "conv-clip": _conv("Clip", (-0.5, 0.75), ("b",)),
    "conv-hard-sigmoid": _conv("HardSigmoid", (0.3, 0.4)),
    "conv-hard-swish": _conv("HardSwish"),
    "conv-sum": _conv("Relu", more=("b", "z")),
    "conv-sum-alone": _conv("Relu", more=("", "z")),
    "conv-same": _conv("Relu", pads=None, auto_pad="SAME_LOWER"),
    "gemm-relu": _gemm("Relu", alpha=0.5, beta=2.0),
    "gemm-sigmoid": _gemm("Sigmoid", transA=1),
    "gemm-tanh": _gemm("Tanh", transB=1),
    "gemm-leaky": _gemm("LeakyRelu", transA=1, transB=1, activation_alpha=0.3),
    "gemm-elu": _gemm("Elu", activation_alpha=0.7),
    "gemm-hard-sigmoid": _gemm("HardSigmoid", activation_alpha=0.3, activation_beta=0.4),
    "gemm-selu": _gemm("Selu", activation_alpha=1.5, activation_gamma=1.1),
    "gemm-softplus": _gemm("Softplus"),
    "gemm-softsign": _gemm("Softsign"),
    "gemm-thresholded": _gemm("ThresholdedRelu", activation_alpha=0.3),
    "matmul": _matmul(_A, _K, alpha=0.25),
    "matmul-a": _matmul(_A.T, _K, transA=1),
    "matmul-b": _matmul(_A, _K.T, transB=1, alpha=2.0),
    "matmul-both": _matmul(_A.T, _K.T, transA=1, transB=1),
    "matmul-batches": _matmul(*_BATCHES),
    "matmul-batches-b": _matmul(_BATCHES[0], _BATCHES[1].swapaxes(2, 3), transB=1),
    "matmul-first-axis": _matmul(_BATCHES[0].transpose(2, 0, 1, 3), _BATCHES[1], transBatchA=1),
    "matmul-first-axes": _matmul(
        _BATCHES[0].transpose(2, 0, 1, 3), _BATCHES[1].transpose(2, 0, 1, 3), transBatchA=1, transBatchB=1
    ),
    "matmul-first-axis-and-last": _matmul(
        _BATCHES[0].transpose(3, 0, 1, 2), _BATCHES[1].transpose(3, 0, 1, 2),
        transA=1, transBatchA=1, transB=1, transBatchB=1,
    ),
    "matmul-doubles": _matmul(_A.astype(np.float64), _K.astype(np.float64), alpha=0.1),
    "matmul-vector": _matmul(_A[0], _K, transA=1),
    "transpose-matmul": (microsoft("TransposeMatMul", ["x", "w"], transA=1), {"x": _A.T, "w": _K}, {}),
    "gelu": (microsoft("Gelu", ["x"]), {"x": 3 * _X}, {}),
    "bias-gelu": (microsoft("BiasGelu", ["x", "b"]), {"x": 3 * _X}, {"b": _B}),
    "fast-gelu": (microsoft("FastGelu", ["x"]), {"x": 3 * _X}, {}),
    "fast-gelu-of-a-sum": (microsoft("FastGelu", ["x", "b"]), {"x": 3 * _X}, {"b": _B}),
    "quick-gelu": (microsoft("QuickGelu", ["x"]), {"x": 3 * _X}, {}),
    "silu": (microsoft("QuickGelu", ["x"], alpha=1.0), {"x": 3 * _X}, {}),
    "skip": (microsoft("SkipLayerNormalization", ["x", "y0", "g"]), {"x": _X, "y0": _Y}, {"g": _G}),
    "skip-by-rows": (
        microsoft("SkipLayerNormalization", ["x", "y0", "g", "b"], epsilon=1e-3), {"x": _X, "y0": _Y[:1]},
        {"g": _G, "b": _B},
    ),
    "skip-by-matrix": (
        microsoft("SkipLayerNormalization", ["x", "y0", "g", "b"]), {"x": _X, "y0": _Y[0]}, {"g": _G, "b": _B}
    ),
    "skip-bias-sum": (
        microsoft("SkipLayerNormalization", ["x", "y0", "g", "b", "c"], ["y", "", "", "s"]),
        {"x": _X, "y0": _Y},
        {"g": _G, "b": _B, "c": _C},
    ),
    "skip-rms": (microsoft("SkipSimplifiedLayerNormalization", ["x", "y0", "g"]), {"x": _X, "y0": _Y}, {"g": _G}),
    "skip-rms-bias-sum": (
        microsoft("SkipSimplifiedLayerNormalization", ["x", "y0", "g", "c"], ["y", "", "", "s"], epsilon=1e-4),
        {"x": _X, "y0": _Y},
        {"g": _G, "c": _C},
    ),
    "rms": (helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-3), {"x": _X}, {"g": _G}),
    "rms-of-two-axes": (
        helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=1), {"x": _X}, {"g": drawn(3, 8)}
    ),
    "norm": (helper.make_node("LayerNormalization", ["x", "g", "b"], ["y"]), {"x": _X}, {"g": _G, "b": _B}),
    "norm-of-two-axes": (
        helper.make_node("LayerNormalization", ["x", "g"], ["y"], axis=-2, epsilon=1e-3), {"x": _X}, {"g": drawn(3, 8)}
    ),
    "embedding": (
        microsoft("EmbedLayerNormalization", ["x", "", "w", "p", "", "g", "b"], ["y", "m"]), {"x": _IDS}, _TABLES
    ),
    "embedding-masked": (
        microsoft(
            "EmbedLayerNormalization", ["x", "s", "w", "p", "k", "g", "b", "m"], ["y", "n", "e"], epsilon=1e-5
        ),
        {"x": _IDS, "s": _KINDS, "m": _MASK},
        _TABLES,
    ),
    "embedding-placed": (
        microsoft("EmbedLayerNormalization", ["x", "s", "w", "p", "k", "g", "b", "", "at"], ["y", "n"]),
        {"x": _IDS, "s": _KINDS, "at": np.array([[0, 1, 2, 3], [2, 3, 4, 5]], np.int32)},
        _TABLES,
    ),
}  # fmt: skip


def _only_read(node: onnx.NodeProto, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in weights.items() if name in node.input}


@pytest.mark.parametrize("opset", [11, 16, 21])
@pytest.mark.parametrize("name", sorted(_CASES))
def test_fusions(name: str, opset: int) -> None:
    node, inputs, weights = _CASES[name]
    for found, expected in both(small_model([node], inputs, _only_read(node, weights), opset, _WHOLE), inputs):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["conv-sum", "gemm-elu", "matmul-first-axis-and-last", "skip-bias-sum", "embedding-masked"]
)
def test_fusions_are_imported(name: str, run) -> None:
    node, inputs, weights = _CASES[name]
    model = small_model([node], inputs, _only_read(node, weights), 14, _WHOLE)
    expected = [b for _, b in both(model, inputs)]
    for found, wanted in zip(run(from_onnx(model), inputs, ours=True), expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _computed(node: onnx.NodeProto, inputs: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> np.ndarray:
    """By the expansion: ONNX Runtime has no such operator for the CPU."""
    (found,) = onnxruntime_outputs(standard(small_model([node], inputs, weights)), inputs)
    return found


def test_fusions_of_the_gpu() -> None:
    found = _computed(microsoft("BiasAdd", ["x", "b", "s"]), {"x": _X, "s": _Y}, {"b": _B})
    np.testing.assert_allclose(found, _X + _B + _Y, rtol=1e-6)
    split = _computed(microsoft("BiasSplitGelu", ["x", "b"]), {"x": _X}, {"b": _B})
    ((gelu, _),) = both(small_model([microsoft("Gelu", ["x"])], {"x": _X + _B}, {}), {"x": _X + _B})
    np.testing.assert_allclose(split, (_X + _B)[..., :4] * gelu[..., 4:], rtol=1e-5, atol=1e-6)
    plain = helper.make_node("Conv", ["x", "w", "b"], ["y"], **_WINDOW)
    weights = {"w": _FILTERS, "b": drawn(6)}
    ((expected, _),) = both(small_model([plain], {"x": _IMAGE}, weights), {"x": _IMAGE})
    last = microsoft("NhwcConv", ["x", "w", "b"], **_WINDOW)
    image = np.ascontiguousarray(_IMAGE.transpose(0, 2, 3, 1))
    found = _computed(last, {"x": image}, weights | {"w": np.ascontiguousarray(_FILTERS.transpose(0, 2, 3, 1))})
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), expected, rtol=1e-5, atol=1e-5)


def test_halves_are_normed_in_floats() -> None:
    x, scale = (300 * _X).astype(np.float16), _G.astype(np.float16)
    node = microsoft("SkipSimplifiedLayerNormalization", ["x", "x", "g"])
    found = _computed(node, {"x": x}, {"g": scale})
    wide = 2 * x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True)) * scale
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=3e-3)


@pytest.mark.parametrize(("data", "scaled"), [(np.float16, np.float32), (np.float32, np.float16)])
def test_a_norm_has_the_type_of_its_scale(data: type, scaled: type) -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"])
    x = _X.astype(data)
    ((found, expected),) = both(small_model([node], {"x": x}, {"g": _G.astype(scaled)}, types={"y": scaled}), {"x": x})
    assert found.dtype == scaled
    np.testing.assert_allclose(found, expected, rtol=3e-3, atol=1e-3)


def test_group_norm_by_a_scale_of_each_group() -> None:
    """ONNX's checker (1.23) refuses this form, which is that of opset 18 to 20."""
    node = helper.make_node("GroupNormalization", ["x", "g", "b"], ["y"], num_groups=2, epsilon=1e-3)
    model = small_model([node], {"x": _IMAGE}, {"g": _G[:2], "b": _B[:2]}, 18)
    ((found, expected),) = both(model, {"x": _IMAGE})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_types_that_do_not_fit_are_one_line() -> None:
    nodes = [microsoft("FastGelu", ["x"], ["g"]), helper.make_node("Mul", ["g", "h"], ["y"], name="it")]
    model = small_model(nodes, {"x": _X, "h": _Y.astype(np.float16)}, {})
    assert "node 'it'" in message(lambda: from_onnx(model))


_REFUSED = {
    r"com.microsoft.FusedConv with the activation 'Mish'": _conv("Mish"),
    r"com.microsoft.FusedConv with 1 numbers for its Relu": _conv("Relu", (0.1,)),
    r"com.microsoft.FusedConv with the attribute 'channels_last'": _conv("Relu", channels_last=1),
    r"com.microsoft.SkipLayerNormalization with its output 1, 'm'": (
        microsoft("SkipLayerNormalization", ["x", "y0", "g"], ["y", "m"]), {"x": _X, "y0": _Y}, {"g": _G}
    ),
    r"com.microsoft.QuickGelu with its input 1": (microsoft("QuickGelu", ["x", "b"]), {"x": _X}, {"b": _B}),
    r"com.microsoft.BiasGelu without its input 1": (microsoft("BiasGelu", ["x"]), {"x": _X}, {}),
    r"com.microsoft.nchwc.Conv, in blocks .*ORT_ENABLE_EXTENDED": (
        helper.make_node("Conv", ["x", "w"], ["y"], domain="com.microsoft.nchwc", **_WINDOW),
        {"x": _IMAGE},
        {"w": _FILTERS},
    ),
    r"com.microsoft.BiasSoftmax, which TVM cannot import": (
        microsoft("BiasSoftmax", ["x", "y0"], axis=1, is_inner_broadcast=0), {"x": _X, "y0": _Y}, {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("expected", sorted(_REFUSED))
def test_what_is_not_expanded_is_refused(expected: str) -> None:
    node, inputs, weights = _REFUSED[expected]
    node.name = "fused"
    model = small_model([node], inputs, _only_read(node, weights))
    if node.domain not in ("", "com.microsoft"):
        model.opset_import.append(helper.make_opsetid(node.domain, 1))
    text = message(lambda: from_onnx(model))
    assert re.search(expected, text), text
    assert "node 'fused' uses the operator" in text
