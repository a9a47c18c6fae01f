"""Converters of single ONNX operators that take the place of TVM's: Relax operators where TVM's importer gives loops
(`Clip`, `CumSum`, `Einsum`, `Pad`, `Tile`), a stack that is then reduced (`Sum`, `Max`, `Min`, `Mean`) or a computation
of shapes (`Compress`, `Gather`) or of remainders (`Cast`), and where it gives what cannot be built (`Cosh`, `Equal`,
`Pow`, `Sinh`, `Split`), has another type (`Elu`, `OneHot`, `Selu`) or does not read all attributes (`IsInf`); and those
of operators that it does not know (`LpNormalization`, `ReverseSequence`, `recurrent.py`).

Each takes the block builder, the inputs (None where one is left out), the attributes and the operator set, and returns
the expression, or None where TVM's own converter has to do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from rlflow_tvm.frontend.einsum import convert_einsum
from rlflow_tvm.frontend.halves import HALVES
from rlflow_tvm.frontend.hyperbolic import cosh, sinh
from rlflow_tvm.frontend.norms import NORMS
from rlflow_tvm.frontend.recurrent import RECURRENT
from rlflow_tvm.frontend.reductions import REDUCTIONS
from rlflow_tvm.frontend.resize import check_resize
from rlflow_tvm.frontend.writer import dtype_of


def _pairwise(op: Callable, bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    return functools.reduce(lambda a, b: bb.normalize(op(a, b)), inputs)


def _mean(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    total = _pairwise(relax.op.add, bb, inputs, attrs, opset)
    return relax.op.divide(total, relax.const(len(inputs), total.ty.dtype))


def _clip(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    bounds = [b.value.numpy().item() if isinstance(b, tvm.ir.GenericConst) else b for b in (inputs[1], inputs[2])]
    return _between(bb, inputs[0], bounds)


def _between(bb: relax.BlockBuilder, result: relax.Expr, bounds: list) -> relax.Expr:
    """`result` between two bounds: expressions, numbers, or None."""
    dtype = result.ty.dtype
    for op, bound in zip((relax.op.maximum, relax.op.minimum), bounds, strict=True):
        if isinstance(bound, relax.Expr):
            result = bb.normalize(op(result, bound))
            continue
        if bound is None or np.isnan(bound) or bound == (-np.inf if op is relax.op.maximum else np.inf):
            continue
        if op is relax.op.maximum and bound == 0 and str(dtype) == "float32":
            result = bb.normalize(relax.op.nn.relu(result))
        else:
            result = bb.normalize(op(result, relax.const(bound, dtype)))
    return result


_SLOPE = ("alpha", 0.2), ("beta", 0.5)


def _hard_sigmoid(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    slope, shift = (relax.const(attrs.get(name, usual), dtype_of(inputs[0])) for name, usual in _SLOPE)
    scaled = bb.normalize(relax.op.multiply(inputs[0], slope))
    return _between(bb, bb.normalize(relax.op.add(scaled, shift)), [0.0, 1.0])


def _hard_swish(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    return relax.op.multiply(inputs[0], _hard_sigmoid(bb, inputs, {"alpha": 1 / 6, "beta": 0.5}, opset))


def _compress(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of a condition that is known: what it leaves is, too."""
    data, condition = inputs[0], inputs[1]
    axis = attrs.get("axis")
    if not isinstance(condition, tvm.ir.GenericConst):
        return None
    if axis is None:
        data = bb.normalize(relax.op.reshape(data, [-1]))
    return relax.op.take(data, relax.const(np.flatnonzero(condition.value.numpy())), int(axis or 0))


_PAD_MODES = {b"constant": "constant", b"edge": "replicate", b"reflect": "reflect"}


def _pad(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    mode, shape = attrs.get("mode", b"constant"), [int(extent) for extent in inputs[0].ty.shape.values]
    given = [inputs[1], inputs[2], inputs[3]]
    if mode == b"wrap" and isinstance(given[0], tvm.ir.GenericConst) and (given[0].value.numpy() < 0).any():
        raise ValueError("mode 'wrap' with negative pads pads with other elements in TVM than in ONNX Runtime")
    if mode not in _PAD_MODES or not all(g is None or isinstance(g, tvm.ir.GenericConst) for g in given):
        return None
    pads = given[0].value.numpy().tolist()
    value = 0.0 if given[1] is None else given[1].value.numpy().item()
    if isinstance(value, int) and int(float(value)) != value:
        raise ValueError(f"it pads with {value}, which TVM keeps as float64: export the model with another value")
    axes = list(range(len(shape))) if given[2] is None else [int(a) % len(shape) for a in given[2].value.numpy()]
    width = [[0, 0] for _ in shape]
    for i, axis in enumerate(axes):
        width[axis] = [pads[i], pads[i + len(axes)]]
    cut = [[max(-pad, 0) for pad in ends] for ends in width]
    if any(pad < 0 for pad in pads) and (
        mode != b"constant" or any(sum(c) >= n for c, n in zip(cut, shape, strict=True))
    ):
        return None  # to the other modes what is cut off may be what is padded with
    if mode == b"reflect" and any(max(ends) >= n for n, ends in zip(shape, width, strict=True)):
        raise ValueError(f"mode 'reflect' pads {shape} by {pads}: less than an axis is long is supported")
    data = inputs[0]
    for axis, (begin, end) in enumerate(cut):
        if begin or end:
            data = bb.normalize(relax.op.strided_slice(data, [axis], [begin], [shape[axis] - end]))
    more = [max(pad, 0) for ends in width for pad in ends]
    return relax.op.nn.pad(data, more, _PAD_MODES[mode], pad_value=value) if any(more) else data


def _cumsum(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    if not attrs.get("reverse", 0) or not isinstance(inputs[1], tvm.ir.GenericConst):
        return None
    axis = int(inputs[1].value.numpy().item()) % len(inputs[0].ty.shape)
    turned = bb.normalize(relax.op.flip(inputs[0], axis))
    summed = bb.normalize(relax.op.cumsum(turned, axis, exclusive=bool(attrs.get("exclusive", 0))))
    return relax.op.flip(summed, axis)


def _pow(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    base, exponent = inputs[0], inputs[1]
    dtype = dtype_of(base)  # ONNX lets the exponent be of another type; the result has the base's
    known = exponent.value.numpy() if isinstance(exponent, tvm.ir.GenericConst) else None
    whole = np.dtype(dtype).kind in "iu"  # TVM raises floats only
    powers = range(1, 65) if whole else (2, 3)  # of floats those in which rules know variances and the GELU
    if known is not None and known.size == 1 and known.ndim <= len(base.ty.shape) and known.item() in powers:
        return _product(bb, base, int(known.item()))
    if whole:
        raised = relax.op.power(relax.op.astype(base, "float64"), _cast(exponent, "float64"))
        return relax.op.astype(bb.normalize(raised), dtype)
    return None if dtype_of(exponent) == dtype else relax.op.power(base, _cast(exponent, dtype))


def _product(bb: relax.BlockBuilder, base: relax.Expr, exponent: int) -> relax.Expr:
    """`base` to a positive whole power, by squaring: exact, and with the overflow that integers have."""
    result: relax.Expr | None = None
    while True:
        if exponent % 2:
            result = base if result is None else bb.normalize(relax.op.multiply(result, base))
        exponent //= 2
        if not exponent:
            assert result is not None
            return result
        base = bb.normalize(relax.op.multiply(base, base))


def _cast(expr: relax.Expr, dtype: str) -> relax.Expr:
    if isinstance(expr, tvm.ir.GenericConst):
        return relax.const(expr.value.numpy().astype(dtype), dtype)
    return relax.op.astype(expr, dtype)


def _to_int32(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of floats, as the processor does it: for those that int32 does not hold, of which ONNX says nothing, TVM's
    importer takes remainders in int64, which takes longer than the convolution before it."""
    x = inputs[0]
    if attrs.get("to") != onnx.TensorProto.INT32 or isinstance(x, relax.ShapeExpr | tvm.ir.GenericConst):
        return None
    if tvm.ir.is_prim_expr(x) or not dtype_of(x).startswith("float"):
        return None
    return relax.op.astype(x, "int32")


def _quantize(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of halves to 16 bits, which halves do not hold, by way of float32."""
    x, scale, zero = (*inputs, None)[:3]
    if zero is None or dtype_of(x) not in ("float16", "bfloat16") or not dtype_of(zero).endswith("int16"):
        return None
    wide = [bb.normalize(_cast(each, "float32")) for each in (x, scale)]
    return onnx_frontend.QuantizeLinear.get_converter(opset)(bb, [*wide, zero], attrs, [{}, {}])


def _equal(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of booleans, which LLVM would compare as floats."""
    if any(isinstance(x, relax.ShapeExpr) or dtype_of(x) != "bool" for x in inputs[:2]):
        return None
    return relax.op.logical_not(bb.normalize(relax.op.logical_xor(inputs[0], inputs[1])))


def _is_inf(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Of one sign only, or of none."""
    x, signs = inputs[0], (attrs.get("detect_positive", 1), attrs.get("detect_negative", 1))
    if all(signs):
        return None
    either = bb.normalize(relax.op.isinf(x))
    if not any(signs):
        return relax.op.logical_and(either, relax.op.logical_not(either))
    side = relax.op.greater if signs[0] else relax.op.less
    return relax.op.logical_and(either, side(x, relax.const(0, dtype_of(x))))


def _prelu(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    data, slope = ([int(extent) for extent in x.ty.shape.values] for x in (inputs[0], inputs[1]))
    if len(slope) > len(data) or any(s not in (1, d) for s, d in zip(slope[::-1], data[::-1], strict=False)):
        raise ValueError(f"its slope of shape {slope} cannot be broadcast to {data}")
    return None


def _elu(
    alpha: float, gamma: float, bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int
) -> relax.Expr | None:
    """gamma * (relu(x) - alpha * relu(1 - exp(x))), which TVM's importer writes with numbers in float32."""
    x, dtype = inputs[0], dtype_of(inputs[0])
    if dtype == "float32":
        return None
    alpha, gamma = attrs.get("alpha", alpha), attrs.get("gamma", gamma)
    below = relax.op.nn.relu(relax.op.subtract(relax.const(1.0, dtype), relax.op.exp(x)))
    found = relax.op.subtract(relax.op.nn.relu(x), relax.op.multiply(relax.const(alpha, dtype), below))
    return found if gamma == 1 else relax.op.multiply(relax.const(gamma, dtype), found)


def _one_hot(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    indices, depth, values = inputs[0], inputs[1], inputs[2]
    if not all(isinstance(x, tvm.ir.GenericConst) for x in (depth, values)):
        return None
    if dtype_of(indices) not in ("int32", "int64"):  # floats are cut off, and 8 bits may not hold the depth
        indices = bb.normalize(relax.op.astype(indices, "int64"))
    extent, dtype = int(depth.value.numpy().item()), dtype_of(values)  # TVM takes the numbers for float64 or int64
    off, on = (tvm.tirx.const(value, dtype) for value in values.value.numpy().tolist())
    wrapped = relax.op.add(indices, relax.const(extent, dtype_of(indices)))
    negative = relax.op.less(indices, relax.const(0, dtype_of(indices)))
    axis = attrs.get("axis", -1) % (len(indices.ty.shape) + 1)  # TVM's kernel counts none but the last from the end
    return relax.op.one_hot(relax.op.where(negative, wrapped, indices), on, off, extent, axis)


def _tile(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    if not isinstance(inputs[1], tvm.ir.GenericConst):
        return None
    return relax.op.tile(inputs[0], [int(count) for count in inputs[1].value.numpy()])


def _split(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """With empty parts, of which TVM's kernels can make none: the others are split."""
    data, given = inputs[0], inputs[1]
    sizes = list(attrs.get("split") or ()) if given is None else given.value.numpy().reshape(-1).tolist()
    if all(sizes):
        return None
    shape = [int(extent) for extent in data.ty.shape.values]
    axis = attrs.get("axis", 0) % len(shape)
    bounds = np.cumsum([size for size in sizes if size])[:-1].tolist()
    parts = iter([data])
    if bounds:
        whole = bb.emit(relax.op.split(data, bounds, axis))
        parts = iter([relax.TupleGetItem(whole, i) for i in range(len(bounds) + 1)])
    empty = bb.emit(relax.op.zeros([*shape[:axis], 0, *shape[axis + 1 :]], dtype_of(data)))
    return relax.Tuple([next(parts) if size else empty for size in sizes])


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
    half = opset >= 16 and attrs.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel"
    scale = attrs.get("spatial_scale", 1.0)
    if half and scale != 1.0:  # TVM moves the boxes by half a pixel before it scales them, ONNX afterwards
        moved = relax.op.add(inputs[1], relax.const(0.5 - 0.5 / scale, dtype_of(inputs[1])))
        inputs[1] = bb.normalize(moved)
    return None


def _thresholded_relu(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    data, dtype = inputs[0], dtype_of(inputs[0])
    above = bb.normalize(relax.op.greater(data, relax.const(attrs.get("alpha", 1.0), dtype)))
    return relax.op.where(above, data, relax.const(0.0, dtype))


def _dynamic_quantize(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """TVM's, whose scale of nothing but zeros is 0, by which it divides; ONNX Runtime's is 1."""
    data, zero = inputs[0], relax.const(0.0, "float32")
    most = bb.normalize(relax.op.maximum(zero, bb.normalize(relax.op.max(data))))
    least = bb.normalize(relax.op.minimum(zero, bb.normalize(relax.op.min(data))))
    extent = bb.normalize(relax.op.divide(bb.normalize(relax.op.subtract(most, least)), relax.const(255.0, "float32")))
    any_ = bb.normalize(relax.op.greater(extent, zero))
    scale = bb.normalize(relax.op.where(any_, extent, relax.const(1.0, "float32")))
    point = bb.normalize(relax.op.subtract(zero, bb.normalize(relax.op.divide(least, scale))))
    rounded = bb.normalize(relax.op.round(bb.normalize(relax.op.clip(point, 0, 255))))
    point = bb.normalize(relax.op.astype(rounded, "uint8"))
    quantized = bb.normalize(relax.op.quantize(data, scale, point, axis=0, out_dtype="uint8"))
    return relax.Tuple([quantized, scale, point])


def _reverse_sequence(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    return relax.op.reverse_sequence(inputs[0], inputs[1], attrs.get("time_axis", 0), attrs.get("batch_axis", 1))


def _top_k(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """In any order where none is asked for, which TVM's importer refuses."""
    if attrs.get("sorted", 1) or not isinstance(inputs[1], tvm.ir.GenericConst):
        return None
    count, largest = int(inputs[1].value.numpy().item()), bool(attrs.get("largest", 1))
    return relax.op.topk(inputs[0], count, attrs.get("axis", -1), ret_type="both", largest=largest, dtype="int64")


def _scatter_elements(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """Fewer elements than the data has along another axis than `axis`: TVM's kernel counts their places as if they were
    as many. By the coordinates of each instead."""
    data, indices, updates = inputs
    shape, extents = ([int(extent) for extent in x.ty.shape.values] for x in (indices, data))
    axis, dtype = attrs.get("axis", 0) % len(extents), dtype_of(indices)
    if all(shape[i] == extent for i, extent in enumerate(extents) if i != axis) or not np.prod(shape):
        return None
    wrapped = relax.op.add(indices, relax.const(extents[axis], dtype))
    places = relax.op.where(relax.op.less(indices, relax.const(0, dtype)), wrapped, indices)
    grid = np.moveaxis(np.indices(shape), 0, -1).reshape(-1, len(shape))
    own = relax.const(np.broadcast_to(np.arange(len(shape)) == axis, grid.shape))
    along = relax.op.reshape(places, (len(grid), 1))
    target = relax.op.where(own, along, relax.const(grid.astype(dtype), dtype))
    how = attrs.get("reduction", b"none").decode()
    return relax.op.scatter_nd(
        data, bb.normalize(target), relax.op.reshape(updates, (len(grid),)), "update" if how == "none" else how
    )


CONVERTERS: dict[str, Callable[[relax.BlockBuilder, list, Mapping, int], relax.Expr | None]] = {
    **REDUCTIONS,
    **HALVES,
    **NORMS,
    **RECURRENT,
    "Cast": _to_int32,
    "Clip": _clip,
    "Compress": _compress,
    "Cosh": cosh,
    "CumSum": _cumsum,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "Einsum": convert_einsum,
    "Elu": functools.partial(_elu, 1.0, 1.0),
    "Equal": _equal,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "IsInf": _is_inf,
    "Max": functools.partial(_pairwise, relax.op.maximum),
    "Mean": _mean,
    "Min": functools.partial(_pairwise, relax.op.minimum),
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "Pow": _pow,
    "Resize": check_resize,
    "ReverseSequence": _reverse_sequence,
    "RoiAlign": _roi_align,
    "QuantizeLinear": _quantize,
    "ScatterElements": _scatter_elements,
    "Selu": functools.partial(_elu, 1.67326319217681884765625, 1.05070102214813232421875),
    "Sinh": sinh,
    "Split": _split,
    "Sum": functools.partial(_pairwise, relax.op.add),
    "ThresholdedRelu": _thresholded_relu,
    "Tile": _tile,
    "TopK": _top_k,
}
