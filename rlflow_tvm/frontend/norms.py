"""Converters of normalisations: TVM's takes as many axes as the scale has, ONNX broadcasts scale and bias to all that
it normalises; and what TVM's kernels cannot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.frontend.reductions import Converter
from rlflow_tvm.frontend.writer import dtype_of


def _layer_norm(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """TVM's; in float64, of which that has no kernel, (x - mean) / sqrt(variance + epsilon) * scale + bias."""
    axes = _broadcast_to_normalised(bb, inputs, attrs, ("scale", "bias"))
    data, scale, bias = inputs[0], inputs[1], inputs[2]
    if dtype_of(data) != "float64":
        return None
    centred = bb.normalize(relax.op.subtract(data, relax.op.mean(data, axes, keepdims=True)))
    scaled = relax.op.multiply(_over_root(bb, centred, axes, attrs), scale)
    found = bb.normalize(scaled if bias is None else relax.op.add(scaled, bias))
    unread = relax.const(0, "float32")
    return relax.Tuple([found, unread, unread])


def _rms_norm(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """x / sqrt(mean(x^2) + epsilon) * scale over all axes, which TVM's kernel cannot; over others by TVM."""
    axes = _broadcast_to_normalised(bb, inputs, attrs, ("scale",))
    data, scale = inputs[0], inputs[1]
    if axes[0]:
        return None
    dtype = dtype_of(data)
    stash = "float32" if attrs.get("stash_type", 1) == 1 else dtype
    normed = _over_root(bb, relax.op.astype(data, stash), axes, attrs)
    return relax.op.multiply(relax.op.astype(normed, dtype), scale)


def _mean_variance(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """(x - mean) / (deviation + 1e-9), as ONNX defines it, halves in float32; TVM's, without that number and with the
    variance as a difference of squares, gives NaN where all elements are one."""
    dtype = dtype_of(inputs[0])
    axes = [int(axis) for axis in attrs.get("axes", (0, 2, 3))]
    x = relax.op.astype(inputs[0], "float32") if dtype in ("bfloat16", "float16") else inputs[0]
    x = bb.normalize(x)
    centred = bb.normalize(relax.op.subtract(x, relax.op.mean(x, axes, keepdims=True)))
    deviation = relax.op.sqrt(relax.op.mean(relax.op.multiply(centred, centred), axes, keepdims=True))
    normed = relax.op.divide(centred, relax.op.add(deviation, relax.const(1e-9, dtype_of(x))))
    return relax.op.astype(bb.normalize(normed), dtype)


def _lp_norm(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """x / (sum |x|^p)^(1/p), halves in float32, and 0 where that sum is."""
    dtype, axes = dtype_of(inputs[0]), [int(attrs.get("axis", -1))]
    x = bb.normalize(relax.op.astype(inputs[0], "float32") if dtype in ("bfloat16", "float16") else inputs[0])
    if attrs.get("p", 2) == 1:
        norm = relax.op.sum(relax.op.abs(x), axes, keepdims=True)
    else:
        norm = relax.op.sqrt(relax.op.sum(relax.op.multiply(x, x), axes, keepdims=True))
    norm = bb.normalize(norm)
    zero, one = (relax.const(value, dtype_of(x)) for value in (0, 1))
    divisor = relax.op.where(relax.op.equal(norm, zero), one, norm)
    return relax.op.astype(bb.normalize(relax.op.divide(x, divisor)), dtype)


def _over_root(bb: relax.BlockBuilder, data: relax.Expr, axes: list[int], attrs: Mapping) -> relax.Expr:
    """x / sqrt(mean(x^2) + epsilon)"""
    x = bb.normalize(data)
    mean = relax.op.mean(relax.op.multiply(x, x), axes, keepdims=True)
    root = relax.op.rsqrt(relax.op.add(mean, relax.const(attrs.get("epsilon", 1e-5), dtype_of(x))))
    return bb.normalize(relax.op.multiply(x, root))


def _broadcast_to_normalised(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, names: tuple[str, ...]) -> list[int]:
    """Bring the inputs behind the first, of these names, into the shape of what is normalised; its axes."""
    shape = [int(extent) for extent in inputs[0].ty.shape.values]
    first = attrs.get("axis", -1) % len(shape)
    normalized = shape[first:]
    for i, called in enumerate(names, 1):
        if inputs[i] is None:
            continue
        given = [int(extent) for extent in inputs[i].ty.shape.values]
        if len(given) > len(normalized) or any(
            g not in (1, n) for g, n in zip(given[::-1], normalized[::-1], strict=False)
        ):
            raise ValueError(f"its {called} of shape {given} cannot be broadcast to the normalised {normalized}")
        if given != normalized:
            inputs[i] = _broadcast(bb, inputs[i], normalized)
    return list(range(first, len(shape)))


def _broadcast(bb: relax.BlockBuilder, expr: relax.Expr, shape: list[int]) -> relax.Expr:
    if isinstance(expr, tvm.ir.GenericConst):
        return relax.const(np.broadcast_to(expr.value.numpy(), shape).copy(), dtype_of(expr))
    return bb.normalize(relax.op.broadcast_to(expr, shape))


NORMS: dict[str, Converter] = {
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "RMSNormalization": _rms_norm,
}
