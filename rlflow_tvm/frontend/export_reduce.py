"""Relax's products, reductions, norms and orders in ONNX."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from rlflow_tvm.frontend.export_elementwise import Exporter
from rlflow_tvm.frontend.writer import Writer, axes_of, dtype_of, shape_of

_NARROW = frozenset({"int8", "uint8", "int16", "uint16"})  # MatMul has none of them; sums of int32 wrap round alike
_RMS_NORM_OPSET = 23


def _matmul(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """In the type of the result, as TVM sums."""
    return _in_type(w, call, args, partial(w.node, "MatMul"))


def _einsum(w: Writer, call: relax.Call, args: list[Any]) -> str:
    subscripts = str(call.attrs.subscripts)
    return _in_type(w, call, args[0], partial(w.node, "Einsum", equation=subscripts))


def _in_type(w: Writer, call: relax.Call, args: Any, product: Any) -> str:
    dtype = dtype_of(call)
    inner = "int32" if dtype in _NARROW else dtype
    given = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else call.args
    cast = [x if dtype_of(arg) == inner else w.cast(x, inner) for x, arg in zip(args, given, strict=True)]
    result = product(*cast)
    return result if inner == dtype else w.cast(result, dtype)


def _reduce(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    rank = len(shape_of(call.args[0]))
    return _reduced(w, op, args[0], axes_of(call.attrs.axis, rank), bool(call.attrs.keepdims), rank)


def _reduced(w: Writer, op: str, x: str, axes: list[int], keepdims: bool, rank: int) -> str:
    if not axes and rank:  # to ONNX that would be all of them
        return w.node("Identity", x)
    return w.node(op, x, w.ints(axes) if axes else "", keepdims=int(keepdims))


def _variance(w: Writer, call: relax.Call, args: list[Any]) -> str:
    rank = len(shape_of(call.args[0]))
    axes = axes_of(call.attrs.axis, rank)
    centred, _ = _centred(w, args[0], axes)
    return _reduced(w, "ReduceMean", w.node("Mul", centred, centred), axes, bool(call.attrs.keepdims), rank)


def _std(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Sqrt", _variance(w, call, args))


def _centred(w: Writer, x: str, axes: list[int]) -> tuple[str, str]:
    """x - mean(x), and the mean."""
    mean = w.node("ReduceMean", x, w.ints(axes), keepdims=1)
    return w.node("Sub", x, mean), mean


def _extremum_at(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    x, axis, keepdims = args[0], call.attrs.axis, int(call.attrs.keepdims)
    if axis is None:
        found = w.node(op, w.reshape(x, [-1]), axis=0, keepdims=0)
        found = w.reshape(found, shape_of(call))
    else:
        found = w.node(op, x, axis=int(axis), keepdims=keepdims)
    return found if dtype_of(call) == "int64" else w.cast(found, dtype_of(call))


def _cumsum(w: Writer, call: relax.Call, args: list[Any]) -> str:
    x, axis = args[0], call.attrs.axis
    if axis is None:
        x, axis = w.reshape(x, [-1]), 0
    if dtype_of(call) != dtype_of(call.args[0]):
        x = w.cast(x, dtype_of(call))
    place = w.constant(np.array(int(axis) % len(shape_of(call)), np.int64))
    return w.node("CumSum", x, place, exclusive=int(call.attrs.exclusive or 0))


def _softmax(op: str, w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node(op, args[0], axis=int(call.attrs.axis))


def _layer_norm(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """`center` and `scale` are not looked at: TVM shifts and scales in any case."""
    x, gamma, beta = args
    rank = len(shape_of(call))
    axes = axes_of(call.attrs.axes, rank)
    if axes == list(range(axes[0], rank)) and dtype_of(call) != "float64":  # which ONNX would compute in float32
        return w.node("LayerNormalization", x, gamma, beta, axis=axes[0], epsilon=float(call.attrs.epsilon))
    centred, _ = _centred(w, x, axes)
    normed = _over_root(w, centred, _mean_square(w, centred, axes), call)
    along = [extent if axis in axes else 1 for axis, extent in enumerate(shape_of(call))]
    return w.node("Add", w.node("Mul", normed, w.reshape(gamma, along)), w.reshape(beta, along))


def _rms_norm(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)"""
    x, weight = args
    rank, wide = len(shape_of(call)), dtype_of(call) != "float16"
    axes = axes_of(call.attrs.axes, rank)
    if w.opset >= _RMS_NORM_OPSET and axes == list(range(axes[0], rank)) and dtype_of(call) != "float64":
        return w.node("RMSNormalization", x, weight, axis=axes[0], epsilon=float(call.attrs.epsilon))
    along = [extent if axis in axes else 1 for axis, extent in enumerate(shape_of(call))]
    if wide:
        normed = _over_root(w, x, _mean_square(w, x, axes), call)
    else:  # squares leave the range of halves
        single = w.cast(x, "float32")
        normed = w.cast(_over_root(w, single, _mean_square(w, single, axes), call, "float32"), "float16")
    return w.node("Mul", normed, w.reshape(weight, along))


def _mean_square(w: Writer, x: str, axes: list[int]) -> str:
    return w.node("ReduceMean", w.node("Mul", x, x), w.ints(axes), keepdims=1)


def _over_root(w: Writer, x: str, square: str, call: relax.Call, dtype: str | None = None) -> str:
    epsilon = w.number(float(call.attrs.epsilon), dtype or dtype_of(call))
    return w.node("Div", x, w.node("Sqrt", w.node("Add", square, epsilon)))


def _spatial_axes(w: Writer, call: relax.Call) -> int:
    """The rank of a tensor that is normed over all axes behind its channels, axis 1."""
    rank = len(shape_of(call))
    given = axes_of(call.attrs.axes, rank)
    if axes_of(call.attrs.channel_axis, rank) != [1] or given != list(range(2, rank)):
        raise w.refusal("it does not norm all axes behind its channels, axis 1: bring it into that layout first")
    return rank


def _group_norm(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """Each group normed as one channel, then scaled and shifted by channel: at opset 18 ONNX does that by group. (TVM
    looks at neither `center` nor `scale`.)"""
    x, gamma, beta = args
    rank, extents, groups = _spatial_axes(w, call), shape_of(call), int(call.attrs.num_groups)
    dtype = np.dtype(dtype_of(call))
    ones, zeros = w.constant(np.ones(groups, dtype)), w.constant(np.zeros(groups, dtype))
    apart = w.reshape(x, [extents[0], groups, -1])
    normed = w.node("InstanceNormalization", apart, ones, zeros, epsilon=float(call.attrs.epsilon))
    along = [extents[1], *[1] * (rank - 2)]
    scaled = w.node("Mul", w.reshape(normed, extents), w.reshape(gamma, along))
    return w.node("Add", scaled, w.reshape(beta, along))


def _instance_norm(w: Writer, call: relax.Call, args: list[Any]) -> str:
    _spatial_axes(w, call)
    return w.node("InstanceNormalization", *args, epsilon=float(call.attrs.epsilon))


def _batch_norm(w: Writer, call: relax.Call, args: list[Any]) -> tuple[str, str, str]:
    """In inference: the other two results are the mean and the variance that came in."""
    if call.attrs.training:
        raise w.refusal("it is in training mode: run relax.transform.DecomposeOpsForTraining, or take the mode back")
    x, gamma, beta, mean, variance = args
    extents = shape_of(call.args[0])
    (axis,) = axes_of(call.attrs.axis, len(extents))
    along = [extent if i == axis else 1 for i, extent in enumerate(extents)]
    if axis == 1:
        number, dtype = extents[1], np.dtype(dtype_of(call.args[0]))
        gamma = gamma if call.attrs.scale else w.constant(np.ones(number, dtype))
        beta = beta if call.attrs.center else w.constant(np.zeros(number, dtype))
        epsilon = float(call.attrs.epsilon)
        return w.node("BatchNormalization", x, gamma, beta, mean, variance, epsilon=epsilon), mean, variance
    centred = w.node("Sub", x, w.reshape(mean, along))
    result = _over_root(w, centred, w.reshape(variance, along), call, dtype_of(call.args[0]))
    result = w.node("Mul", result, w.reshape(gamma, along)) if call.attrs.scale else result
    return (w.node("Add", result, w.reshape(beta, along)) if call.attrs.center else result), mean, variance


def _topk(w: Writer, call: relax.Call, args: list[Any]) -> Any:
    k, axis = int(call.attrs.k), int(call.attrs.axis)
    number = w.ints([k if k >= 1 else shape_of(call.args[0])[axis]])  # of less than one all
    attrs = {"axis": axis, "largest": int(call.attrs.largest)}
    values, places = w.node_of("TopK", [args[0], number], 2, **attrs)
    places = places if str(call.attrs.dtype) == "int64" else w.cast(places, str(call.attrs.dtype))
    return {"both": (values, places), "values": values, "indices": places}[str(call.attrs.ret_type)]


def _sorted(place: int, w: Writer, call: relax.Call, args: list[Any]) -> str:
    (axis,) = axes_of(call.attrs.axis, len(shape_of(call)))
    number = w.ints([shape_of(call)[axis]])
    attrs = {"axis": axis, "largest": int(call.attrs.descending)}
    found = w.node_of("TopK", [args[0], number], 2, **attrs)[place]
    return w.cast(found, dtype_of(call)) if place and dtype_of(call) != "int64" else found


ACROSS: dict[str, Exporter] = {
    "argmax": partial(_extremum_at, "ArgMax"),
    "argmin": partial(_extremum_at, "ArgMin"),
    "argsort": partial(_sorted, 1),
    "cumsum": _cumsum,
    "einsum": _einsum,
    "matmul": _matmul,
    "max": partial(_reduce, "ReduceMax"),
    "mean": partial(_reduce, "ReduceMean"),
    "min": partial(_reduce, "ReduceMin"),
    "nn.batch_norm": _batch_norm,
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "nn.layer_norm": _layer_norm,
    "nn.log_softmax": partial(_softmax, "LogSoftmax"),
    "nn.rms_norm": _rms_norm,
    "nn.softmax": partial(_softmax, "Softmax"),
    "prod": partial(_reduce, "ReduceProd"),
    "sort": partial(_sorted, 0),
    "std": _std,
    "sum": partial(_reduce, "ReduceSum"),
    "topk": _topk,
    "variance": _variance,
}
