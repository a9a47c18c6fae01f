"""What ONNX Runtime's optimizer makes of several standard operators, written as these again.

Formulas: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md, and its kernels for the CPU where
that says less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlflow_tvm.frontend.expansion import Expansion

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
"""Their parameters, in the order of `activation_params`."""


def _activated(e: Expansion, x: str, kind: str, parameters: Mapping[str, Any]) -> str:
    if not kind:
        return x
    if kind == "HardSwish":  # the standard has it from opset 14 on
        return e.add("Mul", x, e.add("HardSigmoid", x, alpha=1 / 6, beta=0.5))
    if kind not in _ACTIVATIONS:
        e.refuse(f"with the activation {kind!r}")
    return e.add(kind, x, **parameters)


def _fused_conv(e: Expansion) -> None:
    """activation(convolution(X, W) + B + Z), the activation's numbers in a list, least and greatest of a `Clip`."""
    x, weight, bias, addend = e.required(0), e.required(1), e.input(2), e.input(3)
    kind, numbers = e.attribute("activation", ""), list(e.attribute("activation_params", ()))
    found = e.add("Conv", x, weight, *([bias] if bias else []), **e.passed(*_CONV))
    if addend:
        found = e.add("Add", found, addend)
    if kind == "Clip":
        if len(numbers) != 2:
            e.refuse(f"with {len(numbers)} numbers for its Clip", "the model is damaged, optimise it again")
        found = e.add("Clip", found, *(e.tensor(number, e.dtype(x)) for number in numbers))
    else:
        names = _ACTIVATIONS.get(kind, ())
        if len(numbers) > len(names):
            e.refuse(f"with {len(numbers)} numbers for its {kind or 'missing activation'}")
        found = _activated(e, found, kind, dict(zip(names, numbers, strict=False)))
    e.give(0, found)


def _fused_gemm(e: Expansion) -> None:
    """activation(alpha A B + beta C)"""
    given = [e.required(0), e.required(1), *([e.input(2)] if e.input(2) else [])]
    kind = e.attribute("activation", "")
    numbers = e.passed(*(f"activation_{name}" for name in _ACTIVATIONS.get(kind, ())))
    product = e.add("Gemm", *given, **e.passed("alpha", "beta", "transA", "transB"))
    e.give(0, _activated(e, product, kind, {name.removeprefix("activation_"): v for name, v in numbers.items()}))


def _fused_matmul(e: Expansion) -> None:
    """alpha A B, each with its last two axes exchanged, or with its first axis moved behind the other batch axes."""
    operands = []
    for place, called in enumerate("AB"):
        x = e.required(place)
        axes = list(range(len(e.shape(x))))
        if e.attribute(f"transBatch{called}", 0):
            if len(axes) < 3:
                e.refuse(
                    f"with the attribute 'transBatch{called}' for a matrix", "the model is damaged, optimise it again"
                )
            axes = [*axes[1:-1], axes[0], axes[-1]]
        if e.attribute(f"trans{called}", 0) and len(axes) > 1:
            axes[-2:] = axes[:-3:-1]
        operands.append(x if axes == sorted(axes) else e.add("Transpose", x, perm=axes))
    alpha = e.attribute("alpha", 1.0)
    product = e.add("MatMul", *operands)
    e.give(0, product if alpha == 1 else e.add("Mul", product, e.tensor(alpha, e.dtype(e.required(0)))))


def gelu(e: Expansion, x: str, dtype: np.dtype) -> str:
    """x (1 + erf(x / sqrt 2)) / 2"""
    if e.graph.opset >= 20:
        return e.add("Gelu", x)
    error = e.add("Erf", e.add("Div", x, e.tensor(math.sqrt(2), dtype)))
    halved = e.add("Mul", x, e.tensor(0.5, dtype))
    return e.add("Mul", halved, e.add("Add", error, e.tensor(1, dtype)))


def _gelu(e: Expansion) -> None:
    e.give(0, gelu(e, e.required(0), e.dtype(e.required(0))))


def _bias_gelu(e: Expansion) -> None:
    """The bias is of the last axis, and may be either operand."""
    e.give(0, gelu(e, e.add("Add", e.required(0), e.required(1)), e.dtype(e.required(0))))


def _fast_gelu(e: Expansion) -> None:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 of the sum with the bias."""
    x, dtype = e.required(0), e.dtype(e.required(0))
    if e.input(1):
        x = e.add("Add", x, e.input(1))
    if e.graph.opset >= 20:
        e.give(0, e.add("Gelu", x, approximate="tanh"))
        return
    cube = e.add("Mul", e.add("Mul", e.add("Mul", x, x), x), e.tensor(0.044715, dtype))
    inner = e.add("Mul", e.add("Add", x, cube), e.tensor(math.sqrt(2 / math.pi), dtype))
    halved = e.add("Mul", x, e.tensor(0.5, dtype))
    e.give(0, e.add("Mul", halved, e.add("Add", e.add("Tanh", inner), e.tensor(1, dtype))))


def _quick_gelu(e: Expansion) -> None:
    """x sigmoid(alpha x)"""
    x = e.required(0)
    scaled = e.add("Mul", x, e.tensor(e.attribute("alpha", 1.702), e.dtype(x)))
    e.give(0, e.add("Mul", x, e.add("Sigmoid", scaled)))


def _bias_split_gelu(e: Expansion) -> None:
    """a GELU(b) of the halves of X + bias along the last axis."""
    x = e.required(0)
    half = e.shape(x)[-1] // 2
    left, right = e.split(e.add("Add", x, e.required(1)), -1, [half, half])
    e.give(0, e.add("Mul", left, gelu(e, right, e.dtype(x))))


def _bias_add(e: Expansion) -> None:
    """X + bias + skip"""
    e.give(0, e.add("Add", e.add("Add", e.required(0), e.required(1)), e.required(2)))


def _nhwc_conv(e: Expansion) -> None:
    """A convolution whose channels are the last axis, of X, of each filter and of the result."""
    x, weight, bias = e.required(0), e.required(1), e.input(2)
    if len(e.shape(x)) != 4:
        e.refuse(f"of {len(e.shape(x))} dimensions")
    image, filters = (e.add("Transpose", name, perm=[0, 3, 1, 2]) for name in (x, weight))
    found = e.add("Conv", image, filters, *([bias] if bias else []), **e.passed(*_CONV))
    e.give(0, e.add("Transpose", found, perm=[0, 2, 3, 1]))


def layer_norm(e: Expansion, x: str, axes: Sequence[int], dtype: np.dtype, scale: str, shift: str) -> str:
    """(x - mean) / sqrt(variance + epsilon) scale + shift over `axes`, which are the last ones, counted from the end;
    `shift` may be empty. `epsilon` is the node's attribute, 1e-5 where it is left out but in those that skip. Halves
    are normed in float32."""
    epsilon = _epsilon(e)
    if e.graph.opset >= 17:
        return e.add("LayerNormalization", x, scale, *([shift] if shift else []), axis=axes[0], epsilon=epsilon)
    wide = _widened(e, x, dtype)
    centred = e.add("Sub", wide, e.mean(wide, axes))
    scaled = e.add("Mul", _over_root(e, centred, axes, dtype), scale)
    return e.add("Add", scaled, shift) if shift else scaled


def rms_norm(e: Expansion, x: str, axes: Sequence[int], dtype: np.dtype, scale: str) -> str:
    """x / sqrt(mean of x^2 + epsilon) scale, as `layer_norm`, in the type of the scale."""
    return e.add("Mul", _over_root(e, _widened(e, x, dtype), axes, e.dtype(scale)), scale)


def _widened(e: Expansion, x: str, dtype: np.dtype) -> str:
    return e.cast(x, np.float32) if dtype.itemsize < 4 else x


def _over_root(e: Expansion, x: str, axes: Sequence[int], dtype: np.dtype) -> str:
    """x / sqrt(mean of x^2 + epsilon), as `dtype`."""
    wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    power = e.add("Add", e.mean(e.add("Mul", x, x), axes), e.tensor(_epsilon(e), wide))
    found = e.add("Div", x, e.add("Sqrt", power))
    return found if wide == dtype else e.cast(found, dtype)


def _epsilon(e: Expansion) -> float:
    skips = e.node.op_type.startswith(("Skip", "Embed", "QEmbed"))
    return float(e.attribute("epsilon", 1e-12 if skips else 1e-5))


def _last_axes(e: Expansion, x: str) -> list[int]:
    rank = len(e.shape(x))
    first = e.attribute("axis", -1) % rank
    return list(range(first - rank, 0))


def _layer_normalization(e: Expansion) -> None:
    """The standard's operator, that ONNX Runtime writes into models of operator sets that do not have it yet."""
    x, scale, shift = e.required(0), e.required(1), e.input(2)
    _check_stash_type(e)
    e.give(0, layer_norm(e, x, _last_axes(e, x), e.dtype(x), scale, shift))


def _group_normalization(e: Expansion) -> None:
    """That of opset 18, with a scale and a shift for each group: groups are the channels of an instance norm."""
    x, scale, shift = e.required(0), e.required(1), e.required(2)
    shape = e.shape(x)
    groups = e.reshape(x, [shape[0], e.needed("num_groups"), -1])
    normed = e.add("InstanceNormalization", groups, scale, shift, epsilon=_epsilon(e))
    e.give(0, e.reshape(normed, shape))


def _simplified_layer_normalization(e: Expansion) -> None:
    x = e.required(0)
    _check_stash_type(e)
    e.give(0, rms_norm(e, x, _last_axes(e, x), e.dtype(x), e.required(1)))


def _check_stash_type(e: Expansion) -> None:
    if e.attribute("stash_type", 1) != 1:
        e.refuse("with another 'stash_type' than float32", "export the model with opset 17 or newer")


def _skip_norm(e: Expansion) -> None:
    """Norm of input + skip + bias, which is the fourth output; the skip may lack the batch axis."""
    x, skip, scale = e.required(0), e.required(1), e.required(2)
    simplified = e.node.op_type == "SkipSimplifiedLayerNormalization"
    shift, bias = ("", e.input(3)) if simplified else (e.input(3), e.input(4))
    total = e.add("Add", x, skip)
    if bias:
        total = e.add("Add", total, bias)
    dtype = e.dtype(x)
    normed = rms_norm(e, total, [-1], dtype, scale) if simplified else layer_norm(e, total, [-1], dtype, scale, shift)
    e.give(0, normed)
    if e.wants(3):
        e.give(3, total)


def _embed_layer_normalization(e: Expansion) -> None:
    tables = [e.required(2), e.required(3), e.input(4), e.required(5), e.input(6)]
    embedding(e, tables, e.input(8), e.dtype(tables[0]))


def embedding(e: Expansion, tables: Sequence[str], positions: str, dtype: np.dtype) -> None:
    """Give the norm of the sum of a token's embedding, of its position's and of its segment's; the number of tokens
    that are not masked; and that sum. `tables`: of words, positions and segments, scale and shift."""
    tokens, segments, mask = e.required(0), e.input(1), e.input(7)
    words, places, kinds, scale, shift = tables
    batch, length = e.shape(tokens)
    placed = e.add("Gather", places, positions, axis=0) if positions else e.slice(places, 0, 0, length)
    total = e.add("Add", e.add("Gather", words, tokens, axis=0), placed)
    if segments:
        total = e.add("Add", total, e.add("Gather", kinds, segments, axis=0))
    e.give(0, layer_norm(e, total, [-1], dtype, scale, shift))
    if e.attribute("mask_index_type", 0) not in (0, 1):
        e.refuse("with another 'mask_index_type' than 0 and 1")
    if e.wants(1):
        e.give(1, _unmasked(e, mask, batch))
    if e.wants(2):
        e.give(2, total)


def _unmasked(e: Expansion, mask: str, batch: int) -> str:
    """How many elements of each row are 1, int32; 0 without a mask."""
    if not mask:
        return e.add("Identity", e.tensor(np.zeros(batch), np.int32))
    ones = e.cast(e.add("Equal", mask, e.tensor(1, e.dtype(mask))), np.int32)
    return e.sum(ones, [1], keepdims=False)


FUSIONS: dict[str, Callable[[Expansion], None]] = {
    "BiasAdd": _bias_add,
    "BiasGelu": _bias_gelu,
    "BiasSplitGelu": _bias_split_gelu,
    "EmbedLayerNormalization": _embed_layer_normalization,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "GroupNormalization": _group_normalization,
    "LayerNormalization": _layer_normalization,
    "NhwcConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "TransposeMatMul": _fused_matmul,
}
"""Operators of com.microsoft."""
