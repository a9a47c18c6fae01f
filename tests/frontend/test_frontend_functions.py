"""Operators that ONNX defines as functions of others: numbers against ONNX Runtime, or ONNX's reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from small_weights import drawn

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

node = helper.make_node
_HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
_QKV = {"q": (2, 4, 5, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 8)}
_ROTARY = {"cos": (2, 5, 4), "sin": (2, 5, 4)}
_OPERATORS: dict[str, tuple[int, onnx.NodeProto, dict[str, tuple[int, ...]], dict[str, np.ndarray]]] = {
    "celu-12": (12, node("Celu", ["x"], ["y"], alpha=0.5), {"x": (3, 4)}, {}),
    "celu": (18, node("Celu", ["x"], ["y"], alpha=2.0), {"x": (3, 4)}, {}),
    "swish": (24, node("Swish", ["x"], ["y"], alpha=1.5), {"x": (3, 4)}, {}),
    "swish-by-default": (24, node("Swish", ["x"], ["y"]), {"x": (3, 4)}, {}),
    "swiglu": (28, node("SwiGLU", ["a", "b"], ["y"]), {"a": (3, 8), "b": (3, 8)}, {}),
    "center-crop-pad": (18, node("CenterCropPad", ["x", "s"], ["y"]), {"x": (7, 4)}, {"s": np.array([4, 9])}),
    "center-crop-pad-axes": (
        18,
        node("CenterCropPad", ["x", "s"], ["y"], axes=[-1, 1]),
        {"x": (2, 7, 4)},
        {"s": np.array([7, 4])},
    ),
    "cross-entropy": (
        13,
        node("SoftmaxCrossEntropyLoss", ["x", "t", "w"], ["y", "p"], reduction="mean", ignore_index=2),
        {"x": (4, 5)},
        {"t": np.array([0, 2, 4, 1]), "w": np.abs(drawn(5))},
    ),
    "likelihood": (
        13,
        node("NegativeLogLikelihoodLoss", ["x", "t"], ["y"], reduction="sum"),
        {"x": (2, 5, 3)},
        {"t": np.array([[0, 2, 4], [1, 1, 3]])},
    ),
    "causal-convolution": (
        27,
        node("CausalConvWithState", ["x", "w", "", "past"], ["y", "state"], activation="silu"),
        {"x": (2, 4, 6), "past": (2, 4, 2)},
        {"w": drawn(4, 1, 3)},
    ),
    "rotary": (23, node("RotaryEmbedding", ["x", "cos", "sin"], ["y"]), {"x": (2, 3, 5, 8)} | _ROTARY, {}),
    "rotary-flat": (
        23,
        node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], num_heads=3, interleaved=1),
        {"x": (2, 5, 24)} | _ROTARY,
        {},
    ),
    "rotary-positions": (
        23,
        node("RotaryEmbedding", ["x", "cos", "sin", "p"], ["y"], rotary_embedding_dim=4),
        {"x": (2, 3, 5, 8), "cos": (9, 2), "sin": (9, 2)},
        {"p": np.arange(10).reshape(2, 5) % 9},
    ),
    "attention": (23, node("Attention", ["q", "k", "v"], ["y"]), _QKV, {}),
    "attention-causal": (23, node("Attention", ["q", "k", "v"], ["y"], is_causal=1, scale=0.2), _QKV, {}),
    "attention-masked": (
        24,
        node("Attention", ["q", "k", "v", "m"], ["y"]),
        _QKV,
        {"m": np.tri(5, 6, 1).astype(bool)},
    ),
    "attention-of-groups": (
        24,
        node("Attention", ["q", "k", "v"], ["y"], softcap=2.0, **_HEADS),
        {"q": (2, 5, 32), "k": (2, 6, 16), "v": (2, 6, 16)},
        {},
    ),
    "attention-with-a-past": (
        23,
        node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "key", "value"]),
        _QKV | {"pk": (2, 4, 3, 8), "pv": (2, 4, 3, 8)},
        {},
    ),
}


@pytest.mark.parametrize("name", sorted(_OPERATORS))
def test_operators(name: str, make_model, run) -> None:
    opset, operator, shapes, weights = _OPERATORS[name]
    model = make_model([operator], shapes, list(operator.output), weights, opset)
    mod = from_onnx(model)
    assert len(mod.functions) == 1, "the operator came as loops"
    inputs = {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    wanted = onnxruntime_outputs(model, inputs) if opset < 27 else ReferenceEvaluator(model).run(None, inputs)
    for ours in (False, True):
        for found, expected in zip(run(mod, inputs, ours), wanted, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_weights_of_what_is_inlined_stay_aside(make_model, run) -> None:
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("Celu", ["m"], ["y"])]
    model = make_model(nodes, {"x": (2, 64)}, ["y"], {"w": drawn(64, 64)})
    x = drawn(2, 64, seed=1)
    (found,), (expected,) = run(from_onnx(model), {"x": x}), onnxruntime_outputs(model, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_operator_of_that_name_in_another_domain(make_model) -> None:
    model = make_model([node("Swish", ["x"], ["y"], domain="com.example")], {"x": (3,)}, ["y"])
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(FrontendError, match=r"uses the operator com.example.Swish"):
        from_onnx(model)


def test_functions_of_the_file_that_call_themselves(make_model) -> None:
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    model = make_model([node("F", ["x"], ["y"], domain="local")], {"x": (3,)}, ["y"])
    model.functions.append(
        helper.make_function("local", "F", ["a"], ["b"], [node("F", ["a"], ["b"], domain="local")], sets)
    )
    model.opset_import.append(sets[1])
    with pytest.raises(FrontendError, match="its local functions cannot be inlined"):
        from_onnx(model)
