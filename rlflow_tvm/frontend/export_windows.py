"""Relax's convolutions, pools and images in ONNX. Layouts that ONNX does not have are brought into its own and back."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import numpy as np
from tvm import relax

from rlflow_tvm.frontend.export_elementwise import Exporter
from rlflow_tvm.frontend.inputs import numpy_dtype
from rlflow_tvm.frontend.layouts import relayout, shape_in
from rlflow_tvm.frontend.resize import places_along
from rlflow_tvm.frontend.writer import Writer, dtype_of, shape_of

_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_AVERAGE_DILATED_OPSET = 19
_GRID_3D_OPSET = 20
_RESIZE = {"nearest_neighbor": "nearest", "linear": "linear", "cubic": "cubic"}
_ROUNDING = {"round": "round_prefer_floor", "": "floor"}  # of "round" see _picked
_ROUNDING |= {name: name for name in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")}
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def _convolution(transposed: bool, rank: int, w: Writer, call: relax.Call, args: list[Any]) -> str:
    attrs, dtype = call.attrs, dtype_of(call)
    if "float" not in dtype:
        raise w.refusal(f"it convolves {dtype_of(call.args[0])} into {dtype}, ONNX floats only: cast to float32 first")
    plain, kernels = f"NC{_SPATIAL[rank]}", f"{'IO' if transposed else 'OI'}{_SPATIAL[rank]}"
    x = relayout(w, args[0], shape_of(call.args[0]), str(attrs.data_layout), plain)
    kernel = relayout(w, args[1], shape_of(call.args[1]), str(attrs.kernel_layout), kernels)
    x, kernel = (
        name if dtype_of(arg) == dtype else w.cast(name, dtype)  # TVM multiplies and sums in the result's type
        for name, arg in zip((x, kernel), call.args, strict=True)
    )
    result = w.node(
        "ConvTranspose" if transposed else "Conv",
        x,
        kernel,
        kernel_shape=list(shape_in(shape_of(call.args[1]), str(attrs.kernel_layout), kernels)[2:]),
        strides=_numbers(attrs.strides),
        pads=_numbers(attrs.padding),
        dilations=_numbers(attrs.dilation),
        group=int(attrs.groups),
        output_padding=_numbers(attrs.output_padding) if transposed else None,
    )
    out_layout = str(attrs.out_layout) or str(attrs.data_layout)
    return relayout(w, result, shape_in(shape_of(call), out_layout, plain), plain, out_layout)


class _Window:
    """What a pool looks at, axis by axis."""

    def __init__(self, call: relax.Call, rank: int) -> None:
        attrs = call.attrs
        plain = f"NC{_SPATIAL[rank]}"
        self.size, self.strides = _numbers(attrs.pool_size), _numbers(attrs.strides)
        self.dilation, pads = _numbers(attrs.dilation), _numbers(attrs.padding)
        self.begin, self.end = pads[:rank], pads[rank:]
        self.extents = shape_in(shape_of(call.args[0]), str(attrs.layout), plain)
        self.out = shape_in(shape_of(call), str(attrs.out_layout) or str(attrs.layout), plain)
        # how far the last window reaches beyond the padding: ceil_mode says whether there is such a window
        self.beyond = [
            max(0, (out - 1) * stride + (size - 1) * step + 1 - extent - before - after)
            for out, stride, size, step, extent, before, after in zip(
                self.out[2:], self.strides, self.size, self.dilation, self.extents[2:], self.begin, self.end,
                strict=True,
            )
        ]  # fmt: skip

    @property
    def pads(self) -> list[int]:
        """Before and after each axis, so that all windows are inside."""
        return [*self.begin, *(after + more for after, more in zip(self.end, self.beyond, strict=True))]

    @property
    def narrow(self) -> bool:
        """Whether the padding is less than the window, as runtimes ask of a pool."""
        return all(pad < size for pad, size in zip(self.pads, [*self.size, *self.size], strict=True))

    def counts(self, padding: bool) -> np.ndarray:
        """How many elements of the image (with its `padding`, or without) each window holds; shape (1, 1, *out)."""
        counts = np.ones((1, 1), np.int64)
        for i, size in enumerate(self.size):
            starts = np.arange(self.out[2 + i]) * self.strides[i] - self.begin[i]
            taps = starts[:, None] + np.arange(size) * self.dilation[i]
            low, high = (-self.begin[i], self.extents[2 + i] + self.end[i]) if padding else (0, self.extents[2 + i])
            inside = ((taps >= low) & (taps < high)).sum(1)
            counts = counts[..., None] * inside
        return counts


def _padded(w: Writer, x: str, window: _Window, value: str) -> str:
    half = len(window.pads) // 2
    return w.node("Pad", x, w.ints([0, 0, *window.pads[:half], 0, 0, *window.pads[half:]]), value)


def _pooled(pool: Any, rank: int, w: Writer, call: relax.Call, args: list[Any]) -> str:
    plain = f"NC{_SPATIAL[rank]}"
    window = _Window(call, rank)
    x = relayout(w, args[0], shape_of(call.args[0]), str(call.attrs.layout), plain)
    out_layout = str(call.attrs.out_layout) or str(call.attrs.layout)
    return relayout(w, pool(w, call, x, window), window.out, plain, out_layout)


def _max_pool(w: Writer, call: relax.Call, x: str, window: _Window) -> str:
    dtype = numpy_dtype(dtype_of(call))
    pads: list[int] | None = window.pads
    if not window.narrow:
        lowest = np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf
        x, pads = _padded(w, x, window, w.number(lowest, dtype_of(call))), None
    return w.node("MaxPool", x, kernel_shape=window.size, strides=window.strides, dilations=window.dilation, pads=pads)


def _avg_pool(w: Writer, call: relax.Call, x: str, window: _Window) -> str:
    """Where windows hold unequal numbers of elements, and not those that ONNX counts, the sums are divided apart."""
    dtype, size = dtype_of(call), prod(window.size)
    padding = bool(call.attrs.count_include_pad)
    counts = np.maximum(window.counts(padding), 1)
    pads: list[int] | None = window.pads
    dilated = any(step != 1 for step in window.dilation)
    by_onnx = not padding and window.narrow and not dilated and window.counts(False).all()
    if not by_onnx and (not window.narrow or dilated):
        x, pads = _padded(w, x, window, w.number(0, dtype)), None
    shape = dict(kernel_shape=window.size, strides=window.strides)
    if dilated and w.opset < _AVERAGE_DILATED_OPSET:
        kernel = w.constant(np.full((window.extents[1], 1, *window.size), 1 / size, numpy_dtype(dtype)))
        result = w.node("Conv", x, kernel, group=window.extents[1], dilations=window.dilation, **shape)
    else:
        dilations = window.dilation if dilated else None
        include = None if by_onnx else 1
        result = w.node("AveragePool", x, pads=pads, dilations=dilations, count_include_pad=include, **shape)
    if by_onnx or (counts == size).all():
        return result
    return w.node("Mul", result, w.constant((size / counts).astype(numpy_dtype(dtype))))


def _adaptive_avg_pool(rank: int, w: Writer, call: relax.Call, args: list[Any]) -> str:
    """Along each axis the means of floor(i * n / out) to ceil((i + 1) * n / out), as products with a matrix."""
    plain = f"NC{_SPATIAL[rank]}"
    layout = str(call.attrs.layout)
    out_layout = str(call.attrs.out_layout) or layout
    x = relayout(w, args[0], shape_of(call.args[0]), layout, plain)
    extents, out = shape_in(shape_of(call.args[0]), layout, plain), shape_in(shape_of(call), out_layout, plain)
    if set(out[2:]) == {1}:
        x = w.node("GlobalAveragePool", x)
    else:
        for axis in range(2, len(out)):
            x = _means(w, x, axis, extents[axis], out[axis], len(out), dtype_of(call))
    return relayout(w, x, out, plain, out_layout)


def _means(w: Writer, x: str, axis: int, extent: int, out: int, rank: int, dtype: str) -> str:
    if extent == out:
        return x
    matrix = np.zeros((extent, out))
    for i in range(out):
        first, end = i * extent // out, -(-(i + 1) * extent // out)
        matrix[first:end, i] = 1 / (end - first)
    order = [*(a for a in range(rank) if a != axis), axis]
    turned = w.node("Transpose", x, perm=order)
    product = w.node("MatMul", turned, w.constant(matrix.astype(numpy_dtype(dtype))))
    return w.node("Transpose", product, perm=[order.index(a) for a in range(rank)])


def _resize(rank: int, w: Writer, call: relax.Call, args: list[Any]) -> str:
    attrs, plain = call.attrs, f"NC{_SPATIAL[rank]}"
    mode, rounding = str(attrs.method), str(attrs.rounding_method)
    coordinates, layout = str(attrs.coordinate_transformation_mode), str(attrs.layout)
    if mode not in _RESIZE or rounding not in _ROUNDING or coordinates not in _COORDINATES:
        raise w.refusal(f"method {mode!r}, coordinates {coordinates!r}, rounding {rounding!r} are not all ONNX's")
    x = relayout(w, args[0], shape_of(call.args[0]), layout, plain)
    extents, out = shape_in(shape_of(call.args[0]), layout, plain), shape_in(shape_of(call), layout, plain)
    rounding = "round" if not rounding and coordinates == "align_corners" else rounding
    nearest = mode == "nearest_neighbor"
    picked = _picked(extents[2:], out[2:], coordinates) if nearest and rounding == "round" else None
    if picked is not None:
        result = x
        for axis, places in enumerate(picked, 2):
            result = w.node("Gather", result, w.ints(places), axis=axis)
    else:
        result = w.node(
            "Resize", x, "", "", w.ints(out),
            mode=_RESIZE[mode],
            coordinate_transformation_mode=coordinates,
            nearest_mode=_ROUNDING[rounding] if nearest else None,
            cubic_coeff_a=float(attrs.cubic_alpha) if mode == "cubic" else None,
            exclude_outside=int(attrs.cubic_exclude) if mode == "cubic" else None,
        )  # fmt: skip
    result = result if dtype_of(call) == dtype_of(call.args[0]) else w.cast(result, dtype_of(call))
    return relayout(w, result, out, plain, layout)


def _picked(extents: tuple[int, ...], out: tuple[int, ...], coordinates: str) -> list[list[int]] | None:
    """The elements that are nearest along each axis, halves to the even one as TVM rounds: ONNX knows no such rounding.
    None where there are none, or round_prefer_floor takes the same (and the scale, by which runtimes find the places,
    is exact)."""
    axes = list(zip(extents, out, strict=True))
    places = [places_along(*axis, coordinates) for axis in axes]
    plain = all(
        not any(place.denominator == 2 for place in along)
        or (
            all(place.denominator != 2 or int(place) % 2 == 0 for place in along)
            and Fraction(float(np.float32(size / extent))) == Fraction(size, extent)
        )
        for (extent, size), along in zip(axes, places, strict=True)
    )
    if plain:
        return None
    return [
        [min(max(round(place), 0), extent - 1) for place in along]
        for extent, along in zip(extents, places, strict=True)
    ]


def _grid_sample(w: Writer, call: relax.Call, args: list[Any]) -> str:
    attrs, rank = call.attrs, len(shape_of(call))
    method = str(attrs.method)
    if str(attrs.layout) != f"NC{_SPATIAL[rank - 2]}" or (rank == 5 and w.opset < _GRID_3D_OPSET):
        raise w.refusal(f"its layout is {attrs.layout}: NCHW is exported, and NCDHW at opset {_GRID_3D_OPSET} or above")
    names = {"bilinear": "linear", "bicubic": "cubic"} if w.opset >= _GRID_3D_OPSET else {}
    grid = w.node("Transpose", args[1], perm=[0, *range(2, rank), 1])  # TVM has the coordinates where channels are
    return w.node(
        "GridSample", args[0], grid,
        mode=names.get(method, method), padding_mode=str(attrs.padding_mode), align_corners=int(attrs.align_corners),
    )  # fmt: skip


def _affine_grid(w: Writer, call: relax.Call, args: list[Any]) -> str:
    """The matrix times the places of an image, -1 to 1 at its corners or at its edges; (x, y[, z], 1) each."""
    sizes, dtype = shape_of(call)[2:], dtype_of(call)
    corners = bool(call.attrs.align_corners)
    ends = [(-1.0, 1.0) if corners else (1 / n - 1, 1 - 1 / n) for n in sizes]
    grids = np.meshgrid(*(np.linspace(*end, n) for end, n in zip(ends, sizes, strict=True)), indexing="ij")
    places = np.stack([*(grid.ravel() for grid in reversed(grids)), np.ones(prod(sizes))])
    return w.reshape(w.node("MatMul", args[0], w.constant(places.astype(numpy_dtype(dtype)))), shape_of(call))


def _roi_align(w: Writer, call: relax.Call, args: list[Any]) -> str:
    attrs = call.attrs
    if str(attrs.layout) != "NCHW" or str(attrs.mode) != "avg":
        raise w.refusal(f"its layout is {attrs.layout}, its mode {attrs.mode}: NCHW and avg are exported")
    image, box = w.node_of("Split", [args[1], w.ints([1, 4])], 2, axis=1)
    if attrs.aligned:  # TVM leaves it to the caller to move the box by half a pixel, ONNX moves it after scaling
        box = w.node("Add", box, w.number(0.5 / float(attrs.spatial_scale), dtype_of(call.args[1])))
    height, width = _numbers(attrs.pooled_size)
    return w.node(
        "RoiAlign", args[0], box, w.cast(w.reshape(image, [-1]), "int64"),
        output_height=height, output_width=width, spatial_scale=float(attrs.spatial_scale),
        sampling_ratio=max(int(attrs.sample_ratio), 0),
        coordinate_transformation_mode="half_pixel" if attrs.aligned else "output_half_pixel",
    )  # fmt: skip


def _roi_pool(w: Writer, call: relax.Call, args: list[Any]) -> str:
    if str(call.attrs.layout) != "NCHW":
        raise w.refusal(f"its layout is {call.attrs.layout}: NCHW is exported")
    scale = float(call.attrs.spatial_scale)
    return w.node("MaxRoiPool", *args, pooled_shape=_numbers(call.attrs.pooled_size), spatial_scale=scale)


WINDOWS: dict[str, Exporter] = {
    **{f"nn.conv{rank}d": partial(_convolution, False, rank) for rank in _SPATIAL},
    **{f"nn.conv{rank}d_transpose": partial(_convolution, True, rank) for rank in _SPATIAL},
    **{f"nn.max_pool{rank}d": partial(_pooled, _max_pool, rank) for rank in _SPATIAL},
    **{f"nn.avg_pool{rank}d": partial(_pooled, _avg_pool, rank) for rank in _SPATIAL},
    **{f"nn.adaptive_avg_pool{rank}d": partial(_adaptive_avg_pool, rank) for rank in _SPATIAL},
    "image.affine_grid": _affine_grid,
    "image.grid_sample": _grid_sample,
    "image.resize2d": partial(_resize, 2),
    "image.resize3d": partial(_resize, 3),
    "vision.roi_align": _roi_align,
    "vision.roi_pool": _roi_pool,
}
