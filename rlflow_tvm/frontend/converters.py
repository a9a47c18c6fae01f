"""Converters of single ONNX operators that take the place of TVM's: Relax operators where TVM's importer gives loops
(`Clip`, `Pad`), a stack that is then reduced (`Sum`, `Max`, `Min`, `Mean`) or a computation of shapes (`Gather`).

Each takes the block builder, the inputs (None where one is left out), the attributes and the operator set, and returns
the expression, or None where TVM's own converter has to do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax


def _pairwise(op: Callable, bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    return functools.reduce(lambda a, b: bb.normalize(op(a, b)), inputs)


def _mean(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    total = _pairwise(relax.op.add, bb, inputs, attrs, opset)
    return relax.op.divide(total, relax.const(len(inputs), total.ty.dtype))


def _clip(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    if opset < 11:
        bounds = [attrs.get("min"), attrs.get("max")]
    else:
        given = [inputs[1], inputs[2]]
        if any(b is not None and not isinstance(b, tvm.ir.GenericConst) for b in given):
            return None
        bounds = [None if b is None else b.value.numpy().item() for b in given]
    result = inputs[0]
    dtype = result.ty.dtype
    for op, bound in zip((relax.op.maximum, relax.op.minimum), bounds, strict=True):
        if bound is None or np.isnan(bound) or np.isinf(bound):
            continue
        if op is relax.op.maximum and bound == 0 and str(dtype) == "float32":
            result = bb.normalize(relax.op.nn.relu(result))
        else:
            result = bb.normalize(op(result, relax.const(bound, dtype)))
    return result


def _pad(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    if attrs.get("mode", b"constant") != b"constant":
        return None
    rank = len(inputs[0].ty.shape)
    if opset < 11:
        pads, value, axes = list(attrs["pads"]), attrs.get("value", 0.0), list(range(rank))
    else:
        given = [inputs[1], inputs[2], inputs[3]]
        if not all(g is None or isinstance(g, tvm.ir.GenericConst) for g in given):
            return None
        pads = given[0].value.numpy().tolist()
        value = 0.0 if given[1] is None else given[1].value.numpy().item()
        axes = list(range(rank)) if given[2] is None else [int(a) % rank for a in given[2].value.numpy()]
    if any(p < 0 for p in pads):
        return None
    width = [0] * (2 * rank)  # before and after, axis by axis
    for i, axis in enumerate(axes):
        width[2 * axis : 2 * axis + 2] = [pads[i], pads[i + len(axes)]]
    if not any(width):
        return inputs[0]
    return relax.op.nn.pad(inputs[0], width, pad_value=value)


def _pow(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    base, exponent = inputs[0], inputs[1]
    if not isinstance(exponent, tvm.ir.GenericConst) or exponent.ty.dtype == base.ty.dtype:
        return None
    dtype = str(base.ty.dtype.dtype)  # ONNX lets the exponent be of another type; the result has the base's
    return relax.op.power(base, relax.const(exponent.value.numpy().astype(dtype), dtype))


def _gather(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    data, indices = inputs[0], inputs[1]
    if any(isinstance(x, relax.ShapeExpr) for x in (data, indices)):
        return None
    # ONNX counts negative indices from the end; so does the mode "wrap", and no index can leave the table.
    return relax.op.take(data, indices, attrs.get("axis", 0) % len(data.ty.shape), mode="wrap")


def _gather_nd(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    data, indices = inputs[0], inputs[1]
    if attrs.get("batch_dims", 0) or not isinstance(indices, tvm.ir.GenericConst):
        return None
    shape = [int(extent) for extent in data.ty.shape.values]
    array = indices.value.numpy()
    depth = array.shape[-1]
    array = np.where(array < 0, array + np.array(shape[:depth]), array)
    flat = np.ravel_multi_index(tuple(np.moveaxis(array, -1, 0).reshape(depth, -1)), shape[:depth])
    if np.array_equal(flat, np.arange(int(np.prod(shape[:depth])))):  # all elements, in their order
        return relax.op.reshape(data, [*array.shape[:-1], *shape[depth:]])
    return relax.op.gather_nd(data, relax.const(array, indices.ty.dtype))


def _roi_align(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    if attrs.get("mode", b"avg") == b"max":
        raise ValueError("mode 'max' gives other numbers in TVM than ONNX defines, only 'avg' is supported")
    return None


CONVERTERS: dict[str, Callable[[relax.BlockBuilder, list, Mapping, int], relax.Expr | None]] = {
    "Clip": _clip,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Max": functools.partial(_pairwise, relax.op.maximum),
    "Mean": _mean,
    "Min": functools.partial(_pairwise, relax.op.minimum),
    "Pad": _pad,
    "Pow": _pow,
    "RoiAlign": _roi_align,
    "Sum": functools.partial(_pairwise, relax.op.add),
}
