"""Converters of reductions: `noop_with_empty_axes` as the standard means it, booleans, and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import tvm
from tvm import relax

from rlflow_tvm.frontend.writer import dtype_of

Converter = Callable[[relax.BlockBuilder, list, Mapping, int], relax.Expr | None]


def _axes(inputs: list, attrs: Mapping) -> list[int]:
    """The axes to reduce, from the attribute or the second input; none where neither names any."""
    given = inputs[1] if len(inputs) > 1 else None
    if given is None:
        return [int(axis) for axis in attrs.get("axes", ())]
    if not isinstance(given, tvm.ir.GenericConst):
        raise ValueError("its axes are computed at run time, only constant ones are supported")
    return [int(axis) for axis in given.value.numpy().ravel()]


def _noop(elementwise: Callable[[relax.Expr], relax.Expr]) -> Converter:
    """Where nothing is to be reduced, what the operator does to each element is left: TVM forgets that too."""

    def convert(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
        if not attrs.get("noop_with_empty_axes", 0) or _axes(inputs, attrs):
            return None
        attrs.get("keepdims")  # which says nothing then, and would be told as not read
        return elementwise(inputs[0])

    return convert


def _extremum(op: Callable[..., relax.Expr]) -> Converter:
    """Of booleans by way of integers: TVM knows no least and greatest boolean."""

    def convert(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
        if str(inputs[0].ty.dtype.dtype) != "bool":
            return None
        axes = _axes(inputs, attrs)
        keepdims = bool(attrs.get("keepdims", 1))
        if attrs.get("noop_with_empty_axes", 0) and not axes:
            return inputs[0]
        found = op(relax.op.astype(inputs[0], "int8"), axes or None, keepdims)
        return relax.op.astype(found, "bool")

    return convert


def _mean(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of integers, of which TVM's kernel gives int64 whatever they are: the sum over their number, towards zero."""
    x, axes = inputs[0], _axes(inputs, attrs)
    dtype = dtype_of(x)
    if not dtype.startswith(("int", "uint")) or (attrs.get("noop_with_empty_axes", 0) and not axes):
        return None
    shape = [int(extent) for extent in x.ty.shape.values]
    count = math.prod(shape[axis] for axis in axes or range(len(shape)))
    total = bb.normalize(relax.op.sum(x, axes or None, bool(attrs.get("keepdims", 1))))
    return relax.op.divide(total, relax.const(count, dtype))


def _log_sum_exp(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """log(sum(exp(x - m))) + m with m the maximum, or 0 where that is infinite: TVM's is NaN there."""
    axes = _axes(inputs, attrs)
    if attrs.get("noop_with_empty_axes", 0) and not axes:  # first: what is not asked for is told as not read
        return None
    x = inputs[0]
    most = bb.normalize(relax.op.max(x, axes or None, keepdims=True))
    shift = bb.normalize(relax.op.where(relax.op.isinf(most), relax.const(0, most.ty.dtype), most))
    total = relax.op.sum(relax.op.exp(relax.op.subtract(x, shift)), axes or None, keepdims=True)
    found = bb.normalize(relax.op.add(relax.op.log(total), shift))
    return found if attrs.get("keepdims", 1) else relax.op.squeeze(found, axes or None)


REDUCTIONS: dict[str, Converter] = {
    "ReduceL1": _noop(relax.op.abs),
    "ReduceL2": _noop(relax.op.abs),
    "ReduceLogSum": _noop(relax.op.log),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extremum(relax.op.max),
    "ReduceMean": _mean,
    "ReduceMin": _extremum(relax.op.min),
    "ReduceSumSquare": _noop(lambda x: relax.op.multiply(x, x)),
}
