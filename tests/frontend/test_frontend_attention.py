"""Attention as ONNX Runtime fuses it: expanded, it computes what the fused operator does."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from expanded import both, microsoft, small_model
from frontend_error import message
from small_weights import drawn

from rlflow_tvm.frontend import from_onnx

_B, _S, _N, _H, _PAST = 2, 5, 4, 6, 3
_X, _W, _BIAS = drawn(_B, _S, 7), drawn(7, 3 * _N * _H, seed=1) / 2, drawn(3 * _N * _H, seed=2)
_ENDS, _BEGINS = np.array([5, 3], np.int32), np.array([5, 4, 1, 0], np.int32)
_ROWS = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
_CUBE = np.tril(np.ones((_B, _S, _S), np.int32))
_CUBE[1, :, 0] = 0
_SCORES = drawn(_B, _N, _S, _S, seed=3)
_KEPT = drawn(2, _B, _N, _PAST, _H, seed=4)
_Q, _K, _V = drawn(_B, _S, _N * _H), drawn(_B, 4, _N * _H, seed=1), drawn(_B, 4, _N * 3, seed=2)
_HEADS = drawn(_B, _N, 4, _H, seed=1), drawn(_B, _N, 4, _H, seed=2)
_COS, _SIN = np.cos(drawn(9, _H // 2)), np.sin(drawn(9, _H // 2))
_PLACES = np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
_SHORT = {"seqlens": np.full(_B, _S - 1, np.int32), "total": np.int32(_S)}
_Case = tuple[onnx.NodeProto, dict[str, np.ndarray], dict[str, np.ndarray]]


def _attention(*more: tuple[str, np.ndarray] | None, outputs: tuple[str, ...] = ("y",), **attrs) -> _Case:
    """`more`: what follows the bias."""
    given = dict(each for each in more if each)
    names = [each[0] if each else "" for each in more]
    node = microsoft("Attention", ["x", "w", "b", *names], outputs, num_heads=_N, **attrs)
    return node, {"x": _X} | given, {"w": _W, "b": _BIAS}


def _multi(*more: tuple[str, np.ndarray] | None, outputs: tuple[str, ...] = ("y",), **attrs) -> _Case:
    """`more`: what follows queries, keys and values."""
    given = dict(each for each in more if each)
    names = [each[0] if each else "" for each in more]
    node = microsoft("MultiHeadAttention", ["q", "k", "v", *names], outputs, num_heads=_N, **attrs)
    return node, {"q": _Q, "k": _K, "v": _V} | given, {}


def _grouped(heads: int, rotary: tuple[str, ...] = (), **attrs) -> _Case:
    inputs = {n: drawn(_B, _S, m * 16, seed=m) for n, m in (("q", 4), ("k", heads), ("v", heads))}
    node = microsoft(
        "GroupQueryAttention",
        ["q", "k", "v", "", "", "seqlens", "total", *rotary],
        ["y", "ky", "vy"],
        num_heads=4,
        kv_num_heads=heads,
        **attrs,
    )
    return (
        node,
        inputs,
        _SHORT | {"cos": np.cos(drawn(9, 8)), "sin": np.sin(drawn(9, 8)), "at": _PLACES + 1, "s": _SCORES},
    )


def _rotary(x: np.ndarray, places: np.ndarray, **attrs) -> _Case:
    node = microsoft("RotaryEmbedding", ["x", "at", "cos", "sin"], **attrs)
    return node, {"x": x, "at": places}, {"cos": _COS, "sin": _SIN}


_CASES: dict[str, _Case] = {
    "attention": _attention(),
    "without-bias": (microsoft("Attention", ["x", "w"], num_heads=_N), {"x": _X}, {"w": _W}),
    "scaled": _attention(scale=0.7),
    "causal": _attention(unidirectional=1),
    "masked-by-ends": _attention(("m", _ENDS)),
    "masked-by-begins": _attention(("m", _BEGINS)),
    "masked-by-rows": _attention(("m", _ROWS), mask_filter_value=-3.0),
    "masked-by-rows-and-causal": _attention(("m", _ROWS), unidirectional=1, mask_filter_value=-1e9),
    "causal-of-rows-that-begin-with-padding": _attention(
        ("m", _ROWS[:, ::-1].copy()), unidirectional=1, mask_filter_value=float(np.finfo(np.float32).min)
    ),
    "with-an-empty-past": (
        microsoft("Attention", ["x", "w", "b", "", "p"], ["y", "kept"], num_heads=_N),
        {"x": _X},
        {"w": _W, "b": _BIAS, "p": _KEPT[:, :, :, :0]},
    ),
    "masked-by-pairs": _attention(("m", _CUBE)),
    "with-scores": _attention(None, None, ("s", _SCORES)),
    "with-one-heads-scores": _attention(("m", _ENDS), None, ("s", _SCORES[:1])),
    "with-a-past": _attention(
        ("m", np.ones((_B, _S + _PAST), np.int32)), ("p", _KEPT), outputs=("y", "kept"), unidirectional=1
    ),
    "with-a-present": _attention(outputs=("y", "kept")),
    "of-unequal-extents": (
        microsoft("Attention", ["x", "w", "b"], num_heads=_N, qkv_hidden_sizes=[8, 8, 20]),
        {"x": _X},
        {"w": _W[:, :36], "b": _BIAS[:36]},
    ),
    "multi": _multi(),
    "multi-bias": _multi(("b", drawn(2 * _N * _H + _N * 3, seed=5)), scale=0.3),
    "multi-masked": _multi(None, ("m", np.array([[1, 1, 1, 0], [1, 0, 1, 1]], np.int32))),
    "multi-masked-by-ends": _multi(None, ("m", np.array([4, 2], np.int32)), mask_filter_value=-2.0),
    "multi-scores": _multi(None, None, ("s", drawn(1, _N, _S, 4, seed=6))),
    "multi-with-a-past": (
        microsoft("MultiHeadAttention", ["q", "k", "k", "", "", "", "pk", "pv"], ["y", "ky", "vy"], num_heads=_N),
        {"q": _Q, "k": _K, "pk": drawn(_B, _N, _PAST, _H, seed=7), "pv": drawn(_B, _N, _PAST, _H, seed=8)},
        {},
    ),
    "multi-causal": (
        microsoft("MultiHeadAttention", ["q", "q", "q"], num_heads=_N, unidirectional=1), {"q": _Q}, {}
    ),
    "multi-causal-of-fewer": _multi(unidirectional=1),
    "multi-causal-of-more": (
        microsoft("MultiHeadAttention", ["q", "k", "k"], num_heads=_N, unidirectional=1),
        {"q": _Q, "k": drawn(_B, _S + 2, _N * _H, seed=1)},
        {},
    ),
    "multi-causal-of-one": (
        microsoft("MultiHeadAttention", ["q", "k", "k"], num_heads=_N, unidirectional=1),
        {"q": _Q[:, :1], "k": drawn(_B, _S, _N * _H, seed=1)},
        {},
    ),
    "multi-of-heads": (
        microsoft("MultiHeadAttention", ["q", "k", "v"], num_heads=_N),
        {"q": _Q, "k": _HEADS[0], "v": _HEADS[1]},
        {},
    ),
    "grouped": _grouped(2),
    "grouped-packed": (
        microsoft(
            "GroupQueryAttention",
            ["q", "", "", "", "", "seqlens", "total", "cos", "sin"],
            ["y", "ky", "vy"],
            num_heads=4,
            kv_num_heads=2,
            do_rotary=1,
        ),
        {"q": drawn(_B, _S, 8 * 16)},
        _grouped(2)[2],
    ),
    "grouped-placed": _grouped(2, ("cos", "sin", "at"), do_rotary=1),
    "grouped-scores": _grouped(2, ("", "", "", "s")),
    "grouped-of-one": _grouped(1, scale=0.2),
    "grouped-softcap": _grouped(4, softcap=0.8),
    "grouped-window": _grouped(2, local_window_size=2),
    "grouped-rotary": _grouped(2, ("cos", "sin"), do_rotary=1),
    "grouped-rotary-interleaved": _grouped(2, ("cos", "sin"), do_rotary=1, rotary_interleaved=1),
    "rotary": _rotary(_Q, _PLACES),
    "rotary-interleaved": _rotary(_Q, _PLACES, interleaved=1),
    "rotary-from": _rotary(_Q, np.array([2])),
    "rotary-of-heads": _rotary(np.ascontiguousarray(_Q.reshape(_B, _S, _N, _H).transpose(0, 2, 1, 3)), _PLACES),
    "rotary-in-part": _rotary(drawn(_B, _S, 4 * 10), _PLACES, num_heads=4, rotary_embedding_dim=_H),
    "rotary-in-part-interleaved": _rotary(
        drawn(_B, 4, _S, 10), _PLACES, num_heads=4, rotary_embedding_dim=_H, interleaved=1
    ),
}  # fmt: skip


def _only_read(node: onnx.NodeProto, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in weights.items() if name in node.input}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", sorted(_CASES))
def test_attention(name: str, opset: int) -> None:
    node, inputs, weights = _CASES[name]
    for found, expected in both(small_model([node], inputs, _only_read(node, weights), opset), inputs):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["with-a-past", "masked-by-rows-and-causal", "grouped-rotary-interleaved"])
def test_attention_is_imported(name: str, run) -> None:
    node, inputs, weights = _CASES[name]
    model = small_model([node], inputs, _only_read(node, weights))
    expected = [b for _, b in both(model, inputs)]
    for found, wanted in zip(run(from_onnx(model), inputs, ours=True), expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


_GQA = "com.microsoft.GroupQueryAttention"
_REFUSED: dict[str, _Case] = {
    "com.microsoft.Attention without the attribute 'num_heads'": (
        microsoft("Attention", ["x", "w", "b"]), {"x": _X}, {"w": _W, "b": _BIAS}
    ),
    "com.microsoft.Attention with inputs or attributes that do not fit": (
        microsoft("Attention", ["x", "w", "b"], num_heads=_N, qkv_hidden_sizes=[24, 24]),
        {"x": _X},
        {"w": _W, "b": _BIAS},
    ),
    "com.microsoft.Attention with the attribute 'do_rotary'": _attention(do_rotary=1),
    r"com.microsoft.Attention with a mask of shape \(3,\)": _attention(("m", np.ones(3, np.int32))),
    "com.microsoft.MultiHeadAttention with queries, keys and values in one tensor": (
        microsoft("MultiHeadAttention", ["q"], num_heads=2), {"q": drawn(1, 3, 2, 3, 4)}, {}
    ),
    f"{_GQA} with a window of no tokens": _grouped(2, local_window_size=0),
    f"{_GQA} with the attribute 'smooth_softmax'": _grouped(2, smooth_softmax=1),
    f"{_GQA} with a number of tokens that may differ": (
        _grouped(2)[0], _grouped(2)[1] | {"total": np.int32(_S)}, {"seqlens": _SHORT["seqlens"]}
    ),
    f"{_GQA} with a cache of keys and values: export the model without a cache": (
        microsoft(
            "GroupQueryAttention",
            ["q", "k", "v", "pk", "pv", "seqlens", "total"],
            ["y", "ky", "vy"],
            num_heads=4,
            kv_num_heads=2,
        ),
        _grouped(2)[1] | {"pk": drawn(_B, 2, 3, 16), "pv": drawn(_B, 2, 3, 16)},
        _SHORT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("expected", sorted(_REFUSED))
def test_what_is_not_expanded_is_refused(expected: str) -> None:
    node, inputs, weights = _REFUSED[expected]
    text = message(lambda: from_onnx(small_model([node], inputs, _only_read(node, weights))))
    assert re.search(expected, text), text
