"""Hyperbolic functions by exponentials: LLVM has no such intrinsics, and TVM compiles them to nothing on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax

from rlflow_tvm.frontend.writer import dtype_of


def cosh(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """cosh(x) = (exp(x) + exp(-x)) / 2: LLVM has no such intrinsic."""
    return relax.op.add(*_halved_exponentials(bb, inputs[0]))


def sinh(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """sinh(x) = (exp(x) - exp(-x)) / 2, near 0, where that cancels, 2 t / (1 - t^2) with t = tanh(x / 2)."""
    x = inputs[0]
    one, two, half = (relax.const(value, dtype_of(x)) for value in (1.0, 2.0, 0.5))
    t = bb.normalize(relax.op.tanh(relax.op.multiply(x, half)))
    near = relax.op.divide(relax.op.multiply(two, t), relax.op.subtract(one, relax.op.multiply(t, t)))
    far = relax.op.multiply(relax.op.subtract(*_halved_exponentials(bb, x)), relax.op.sign(x))
    return relax.op.where(relax.op.less(relax.op.abs(x), one), near, far)


def _halved_exponentials(bb: relax.BlockBuilder, x: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """exp(|x|) / 2 and exp(-|x|) / 2, by the root of exp(|x|): that itself is infinite where its half is not."""
    half = relax.const(0.5, dtype_of(x))
    root = bb.normalize(relax.op.exp(bb.normalize(relax.op.multiply(bb.normalize(relax.op.abs(x)), half))))
    half_root = bb.normalize(relax.op.multiply(root, half))
    return (
        bb.normalize(relax.op.multiply(half_root, root)),
        bb.normalize(relax.op.divide(half, bb.normalize(relax.op.multiply(root, root)))),
    )
