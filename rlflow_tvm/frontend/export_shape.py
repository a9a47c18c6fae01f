"""Relax's operators that make and move elements, in ONNX: shapes, layouts, slices, gathers, scatters."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from rlflow_tvm.frontend.export_elementwise import Exporter
from rlflow_tvm.frontend.inputs import numpy_dtype
from rlflow_tvm.frontend.layouts import layouts_of, relayout
from rlflow_tvm.frontend.writer import Writer, axes_of, dtype_of, shape_of

_SCATTER = {"update": "none", "add": "add", "mul": "mul", "min": "min", "max": "max"}
_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def _reshape(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.reshape(args[0], shape_of(call))


def _permute(w: Writer, call: relax.Call, args: list[Any]) -> str:
    rank = len(shape_of(call))
    axes = call.attrs.axes
    order = list(range(rank))[::-1] if axes is None else axes_of(axes, rank)
    return w.node("Transpose", args[0], perm=order) if order else args[0]


def _expand_dims(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Unsqueeze", args[0], w.ints(axes_of(call.attrs.axis, len(shape_of(call)))))


def _squeeze(w: Writer, call: relax.Call, args: list[Any]) -> str:
    extents = shape_of(call.args[0])
    axes = axes_of(call.attrs.axis, len(extents))
    return w.node("Squeeze", args[0], w.ints(axis for axis in axes if extents[axis] == 1))


def _broadcast(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("Expand", args[0], w.ints(shape_of(call)))


def _concat(w: Writer, call: relax.Call, args: list[Any]) -> str:
    axis, parts = call.attrs.axis, args[0]
    if axis is None:
        return w.node("Concat", *(w.reshape(part, [-1]) for part in parts), axis=0)
    return w.node("Concat", *parts, axis=axes_of(axis, len(shape_of(call)))[0])


def _stack(w: Writer, call: relax.Call, args: list[Any]) -> str:
    (axis,) = axes_of(call.attrs.axis or 0, len(shape_of(call)))
    return w.node("Concat", *(w.node("Unsqueeze", part, w.ints([axis])) for part in args[0]), axis=axis)


def _split(w: Writer, call: relax.Call, args: list[Any]) -> tuple[str, ...]:
    (axis,) = axes_of(call.attrs.axis, len(shape_of(call.args[0])))
    sizes = [int(field.shape.values[axis]) for field in call.ty.fields]
    return w.node_of("Split", [args[0], w.ints(sizes)], len(sizes), axis=axis)


def _tile(w: Writer, call: relax.Call, args: list[Any]) -> str:
    extents, counts = shape_of(call.args[0]), [int(count) for count in call.attrs.repeats]
    rank = max(len(extents), len(counts))
    x = args[0] if rank == len(extents) else w.reshape(args[0], [*[1] * (rank - len(extents)), *extents])
    return w.node("Tile", x, w.ints([*[1] * (rank - len(counts)), *counts]))


def _repeat(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """Each element of an axis several times in a row."""
    extents, count = shape_of(call.args[0]), int(call.attrs.repeats)
    if call.attrs.axis is None:
        extents, axis = (int(np.prod(extents)),), 0
    else:
        (axis,) = axes_of(call.attrs.axis, len(extents))
    apart = w.reshape(args[0], [*extents[: axis + 1], 1, *extents[axis + 1 :]])
    return w.reshape(w.node("Tile", apart, w.ints([count if i == axis + 1 else 1 for i in range(len(extents) + 1)])),
                     shape_of(call))  # fmt: skip


def _flip(w: Writer, call: relax.Call, args: list[Any]) -> str:
    axes = axes_of(call.attrs.axis, len(shape_of(call)))
    return _sliced(w, args[0], axes, [-1] * len(axes), [-(2**62)] * len(axes), [-1] * len(axes))


def _sliced(w: Writer, x: str, axes: list[int], begin: list[int], end: list[int], strides: list[int]) -> str:
    return w.node("Slice", x, w.ints(begin), w.ints(end), w.ints(axes), w.ints(strides))


def _strided_slice(w: Writer, call: relax.Call, args: list[Any]) -> str:
    extents = shape_of(call.args[0])
    given = [[int(field) for field in arg.fields] for arg in call.args[1:]]
    axes, begin, end = axes_of(given[0], len(extents)), given[1], given[2]
    strides = given[3] if len(given) > 3 else [1] * len(axes)
    starts, stops = [], []
    for axis, *window in zip(axes, begin, end, strides, strict=True):
        start, stop, step = slice(*window).indices(extents[axis])
        if len(range(start, stop, step)) != shape_of(call)[axis]:
            raise w.refusal(f"axis {axis} of {extents} from {window[0]} to {window[1]} by {step} is out of bounds")
        starts.append(start)
        stops.append(stop if stop >= 0 else -(2**62))  # before the first element: -1 would be the last
    return _sliced(w, args[0], axes, starts, stops, strides)


def _take(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """Negative indices count from the end, as in the mode "wrap"; where others are out of bounds ONNX refuses them."""
    data, indices = args
    extents, axis, mode = shape_of(call.args[0]), call.attrs.axis, str(call.attrs.mode)
    axis = 0 if axis is None else int(axis) % len(extents)
    if mode == "clip":
        dtype = dtype_of(call.args[1])
        indices = w.node("Clip", indices, w.number(0, dtype), w.number(extents[axis] - 1, dtype))
    elif mode not in ("fast", "wrap"):
        raise w.refusal(f"take in the mode {mode!r}, of which ONNX knows nothing; clip, fast and wrap are exported")
    return w.node("Gather", data, indices, axis=axis)


def _gather_elements(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("GatherElements", *args, axis=int(call.attrs.axis))


def _gather_nd(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("GatherND", args[0], w.cast(args[1], "int64"), batch_dims=int(call.attrs.batch_dims))


def _reduction(w: Writer, call: relax.Call) -> str:
    given = str(call.attrs.reduction)
    if given not in _SCATTER:
        raise w.refusal(f"its reduction is {given!r}; there are {', '.join(_SCATTER)}")
    return _SCATTER[given]


def _scatter_elements(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("ScatterElements", *args, axis=int(call.attrs.axis), reduction=_reduction(w, call))


def _scatter_nd(w: Writer, call: relax.Call, args: list[Any]) -> str:
    return w.node("ScatterND", args[0], w.cast(args[1], "int64"), args[2], reduction=_reduction(w, call))


def _one_hot(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """Compared with all positions: unlike OneHot's, an index below 0 is none of them."""
    rank, dtype = len(shape_of(call)), dtype_of(call.args[0])
    (axis,) = axes_of(call.attrs.axis, rank)
    depth = int(call.attrs.depth)
    wide = np.iinfo(dtype).max < depth  # narrow integers do not hold all positions
    shape = [depth if i == axis else 1 for i in range(rank)]
    places = np.arange(depth).astype("int64" if wide else dtype).reshape(shape)
    index = w.cast(args[0], "int64") if wide else args[0]
    here = w.node("Equal", w.node("Unsqueeze", index, w.ints([axis])), w.constant(places))
    return w.node("Where", here, *(w.number(number.value, dtype_of(call)) for number in call.args[1:3]))


def _pad_value(w: Writer, call: relax.Call) -> float:
    value, dtype = float(call.attrs.pad_value), numpy_dtype(dtype_of(call))
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise w.refusal(f"its pad_value {value} is no number of {dtype}")
    return value


def _pad(w: Writer, call: relax.Call, args: list[Any]) -> str:
    mode, width = str(call.attrs.pad_mode), [int(number) for number in call.attrs.pad_width]
    if mode not in _PAD_MODES:
        raise w.refusal(f"its pad_mode is {mode!r}; there are {', '.join(_PAD_MODES)}")
    value = w.number(_pad_value(w, call), dtype_of(call)) if mode == "constant" else ""
    return w.node("Pad", args[0], w.ints([*width[::2], *width[1::2]]), value, mode=_PAD_MODES[mode])


def _layout_transform(w: Writer, call: relax.Call, args: list[Any]) -> str:
    extents = shape_of(call.args[0])
    layouts = layouts_of(call.attrs.index_map)
    if layouts is None or call.attrs.pad_value is not None:
        raise w.refusal(f"{call.attrs.index_map} is no change between a layout and its blocks")
    return relayout(w, args[0], extents, *layouts)


def _full(w: Writer, call: relax.Call, args: list[Any]) -> str:
    value = args[1]
    value = value if dtype_of(call.args[1]) == dtype_of(call) else w.cast(value, dtype_of(call))
    return w.node("Expand", value, w.ints(shape_of(call)))


def _filled(number: int) -> Exporter:
    def export(w: Writer, call: relax.Call, args: list[Any]) -> str:
        return w.node("Expand", w.number(number, dtype_of(call)), w.ints(shape_of(call)))

    return export


def _arange(w: Writer, call: relax.Call, args: list[Any]) -> str:
    start, stop, step = (bound.value for bound in call.args)
    return w.constant(np.arange(start, stop, step).astype(numpy_dtype(dtype_of(call))))


def _eye(w: Writer, call: relax.Call, args: list[Any]) -> str:
    rows, columns, shift = (int(number) for number in call.args[-3:])
    return w.constant(np.eye(rows, columns, shift).astype(numpy_dtype(dtype_of(call))))


def _eye_like(w: Writer, call: relax.Call, args: list[Any]) -> str:
    rows, columns = shape_of(call)
    return w.constant(np.eye(rows, columns, int(call.args[1])).astype(numpy_dtype(dtype_of(call))))


def _triangle(upper: int) -> Exporter:
    def export(w: Writer, call: relax.Call, args: list[Any]) -> str:
        return w.node("Trilu", args[0], w.constant(np.array(int(call.args[1]), np.int64)), upper=upper)

    return export


def _reverse_sequence(w: Writer, call: relax.Call, args: list[Any]) -> str:
    axes = {"time_axis": int(call.attrs.seq_axis), "batch_axis": int(call.attrs.batch_axis)}
    return w.node("ReverseSequence", args[0], w.cast(args[1], "int64"), **axes)


SHAPES: dict[str, Exporter] = {
    "arange": _arange,
    "broadcast_to": _broadcast,
    "concat": _concat,
    "expand_dims": _expand_dims,
    "eye": _eye,
    "eye_like": _eye_like,
    "flatten": _reshape,
    "flip": _flip,
    "full": _full,
    "full_like": _full,
    "gather_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "layout_transform": _layout_transform,
    "nn.batch_flatten": _reshape,
    "nn.pad": _pad,
    "one_hot": _one_hot,
    "ones": _filled(1),
    "ones_like": _filled(1),
    "permute_dims": _permute,
    "repeat": _repeat,
    "reshape": _reshape,
    "reverse_sequence": _reverse_sequence,
    "scatter_elements": _scatter_elements,
    "scatter_nd": _scatter_nd,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "strided_slice": _strided_slice,
    "take": _take,
    "tile": _tile,
    "tril": _triangle(0),
    "triu": _triangle(1),
    "zeros": _filled(0),
    "zeros_like": _filled(0),
}
