"""Meanings of convolutions, pools and resizes, in every layout that terms have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from rlflow_tvm.passes.ops import has_empty_window
from rlflow_tvm.passes.proof.domains import Domain, Plane, Tensor, Unfit, check_room, each, shape_of
from rlflow_tvm.passes.proof.interpolation import Taps, taps

_BLOCKED = re.compile(r"(NCHW|OIHW)(\d+)[co]")


def split_channels(x: Plane, block: int, axis: int = 1) -> Plane:
    """(N, C, H, W) -> (N, C / block, H, W, block), or the like for kernels along `axis` 0."""
    extents = x.shape
    if x.ndim != 4 or block < 1 or extents[axis] % block:
        raise Unfit(f"axis {axis} of {extents} is not blocked by {block}")
    parts = (*extents[:axis], extents[axis] // block, block, *extents[axis + 1 :])
    return np.moveaxis(x.reshape(parts), axis + 1, -1)


def join_channels(x: Plane, axis: int = 1) -> Plane:
    """The inverse of `split_channels`."""
    if x.ndim != 5:
        raise Unfit(f"{x.shape} is no blocked layout")
    moved = np.moveaxis(x, -1, axis + 1)
    extents = moved.shape
    return moved.reshape((*extents[:axis], extents[axis] * extents[axis + 1], *extents[axis + 2 :]))


def _block(layout: str, x: Tensor | None = None) -> int:
    """The block of a layout, 0 for a plain one; with `x`, `Unfit` unless `x` can be of that layout."""
    found = _BLOCKED.fullmatch(layout)
    if found is None and layout not in ("NCHW", "OIHW"):
        raise Unfit(f"no layout {layout!r}")
    block = int(found[2]) if found else 0
    if x is not None and (len(shape_of(x)) != (5 if block else 4) or (block and shape_of(x)[-1] != block)):
        raise Unfit(f"{shape_of(x)} is not of the layout {layout}")
    return block


def _plain(x: Tensor, layout: str, axis: int = 1) -> Tensor:
    return each(lambda plane: join_channels(plane, axis), x) if _block(layout, x) else x


def _laid_out(x: Tensor, layout: str) -> Tensor:
    block = _block(layout)
    return each(lambda plane: split_channels(plane, block), x) if block else x


def _steps(extent: int, kernel: int, stride: int, dilation: int, before: int, after: int, ceil: bool = False) -> int:
    """How many windows there are along an axis."""
    room = extent + before + after - dilation * (kernel - 1) - 1
    if room < 0 or min(kernel, stride, dilation) < 1 or min(before, after) < 0:
        raise Unfit(f"no window of {kernel} in {extent}")
    return (room + (stride - 1 if ceil else 0)) // stride + 1


def conv2d(domain: Domain, operands: list[Tensor], k: Mapping[str, Any]) -> Tensor:
    x, w = _plain(operands[0], k["data_layout"]), _plain(operands[1], k["kernel_layout"], 0)
    (batch, channels, height, width), (outputs, inputs, rows, columns) = shape_of(x), shape_of(w)
    groups, (top, left, bottom, right) = k["groups"], k["padding"]
    if groups < 1 or channels != inputs * groups or outputs % groups or x[0].dtype != w[0].dtype:
        raise Unfit(f"a kernel of {shape_of(w)} does not fit {shape_of(x)} in {groups} groups")
    (down, right_by), (spread, spread_by) = k["strides"], k["dilation"]
    high = _steps(height, rows, down, spread, top, bottom)
    wide = _steps(width, columns, right_by, spread_by, left, right)
    check_room(batch, outputs, inputs, high, wide, rows, columns)
    check_room(batch, channels, height + top + bottom, width + left + right)
    if k["out_dtype"] not in (None, "", "void"):
        x, w = domain.cast(x, k["out_dtype"]), domain.cast(w, k["out_dtype"])
    i = np.arange(high)[:, None] * down + np.arange(rows) * spread
    j = np.arange(wide)[:, None] * right_by + np.arange(columns) * spread_by

    def windows(plane: Plane) -> Plane:  # (batch, groups, 1, inputs, high, rows, wide, columns)
        padded = np.pad(plane, ((0, 0), (0, 0), (top, bottom), (left, right)))
        taken = padded[:, :, i][:, :, :, :, j]
        return taken.reshape(batch, groups, 1, inputs, *taken.shape[2:])

    def kernels(plane: Plane) -> Plane:
        return plane.reshape(1, groups, outputs // groups, inputs, 1, rows, 1, columns)

    y = domain.total(domain.multiply(each(windows, x), each(kernels, w)), (3, 5, 7))
    return _laid_out(each(lambda plane: plane.reshape(batch, outputs, high, wide), y), k["out_layout"])


Reduced = Callable[[Tensor, int], Tensor]
"""A pool's window, (N, C, rows, columns) without padding, and how many elements it has with it -> (N, C)."""


def _pool(domain: Domain, x: Tensor, k: Mapping[str, Any], reduced: Reduced) -> Tensor:
    plain = _plain(x, k["layout"])
    _, _, height, width = shape_of(plain)
    top, left, bottom, right = k["padding"]
    places: list[list[list[int]]] = []
    counts: list[list[int]] = []
    for extent, kernel, stride, dilation, before, after in zip(
        (height, width), k["pool_size"], k["strides"], k["dilation"], (top, left), (bottom, right), strict=True
    ):
        count = _steps(extent, kernel, stride, dilation, before, after, k["ceil_mode"])
        check_room(count, kernel)
        if has_empty_window(extent, count, kernel, stride, dilation, (before, after)):
            raise Unfit("a window lies in the padding")
        windows = [[n * stride - before + i * dilation for i in range(kernel)] for n in range(count)]
        places.append([[s for s in window if 0 <= s < extent] for window in windows])
        counts.append([sum(s < extent + after for s in window) for window in windows])  # ceil_mode reaches beyond
    sizes = iter([rows * columns for rows, columns in product(*counts)])
    return _laid_out(
        _gathered(plain, places[0], places[1], lambda window: reduced(window, next(sizes))), k["out_layout"]
    )


def _gathered(
    x: Tensor, rows: list[list[int]], columns: list[list[int]], reduced: Callable[[Tensor], Tensor]
) -> Tensor:
    """(N, C, len(rows), len(columns)): `reduced` of the window at each of rows and columns, in order."""

    def window(i: list[int], j: list[int]) -> Tensor:
        return each(lambda plane: plane[:, :, i][:, :, :, j], x)

    parts = [reduced(window(i, j)) for i, j in product(rows, columns)]
    return each(lambda *planes: np.stack(planes, -1).reshape(*planes[0].shape, len(rows), len(columns)), *parts)


def _mean(domain: Domain, window: Tensor, count: int) -> Tensor:
    total = domain.total(window, (2, 3))
    return domain.divide(total, domain.constant(Fraction(count), total))


def avg_pool2d(domain: Domain, operands: list[Tensor], k: Mapping[str, Any]) -> Tensor:
    def reduced(window: Tensor, size: int) -> Tensor:
        *_, rows, columns = shape_of(window)
        return _mean(domain, window, size if k["count_include_pad"] else rows * columns)

    return _pool(domain, operands[0], k, reduced)


def extreme(
    of_two: Callable[[Domain, Tensor, Tensor], Tensor], domain: Domain, x: Tensor, axes: tuple[int, ...]
) -> Tensor:
    """The maximum or minimum (`of_two`) over `axes`, which are dropped."""
    rank = len(shape_of(x))
    moved = each(lambda plane: np.moveaxis(plane, axes, range(rank - len(axes), rank)), x)
    flat = each(lambda plane: plane.reshape(*plane.shape[: rank - len(axes)], -1), moved)
    items = [each(lambda plane, i=i: np.asarray(plane[..., i], plane.dtype), flat) for i in range(shape_of(flat)[-1])]  # type: ignore[misc]
    return reduce(lambda a, b: of_two(domain, a, b), items)


def _maximum(domain: Domain, a: Tensor, b: Tensor) -> Tensor:
    return domain.maximum(a, b)


def max_pool2d(domain: Domain, operands: list[Tensor], k: Mapping[str, Any]) -> Tensor:
    return _pool(domain, operands[0], k, lambda window, _: extreme(_maximum, domain, window, (2, 3)))


def adaptive_avg_pool2d(domain: Domain, operands: list[Tensor], k: Mapping[str, Any]) -> Tensor:
    plain = _plain(operands[0], k["layout"])

    def parts(extent: int, count: int) -> list[list[int]]:
        return [list(range(i * extent // count, -(-(i + 1) * extent // count))) for i in range(count)]

    if any(count < 1 for count in k["output_size"]):
        raise Unfit(f"no image is of the size {k['output_size']}")
    check_room(*shape_of(plain)[:2], *k["output_size"])
    rows, columns = (parts(e, n) for e, n in zip(shape_of(plain)[2:], k["output_size"], strict=True))

    def reduced(window: Tensor) -> Tensor:
        *_, high, wide = shape_of(window)
        return _mean(domain, window, high * wide)

    return _laid_out(_gathered(plain, rows, columns, reduced), k["out_layout"])


def resize2d(domain: Domain, operands: list[Tensor], k: Mapping[str, Any]) -> Tensor:
    (x,) = operands
    _block(k["layout"], x)
    batch, channels, _, _, *block = shape_of(x)
    check_room(batch, channels, *k["size"], *block)
    for axis, count in zip((2, 3), k["size"], strict=True):  # blocks or not, these are the image's
        x = _interpolated(domain, x, axis, taps(shape_of(x)[axis], count, k))
    return x


def _interpolated(domain: Domain, x: Tensor, axis: int, found: list[Taps]) -> Tensor:
    """`x` with other elements along `axis`: weighted sums of its own."""
    along = [1] * len(shape_of(x))
    along[axis] = -1
    parts = []
    for tap in zip(*found, strict=True):  # the first one of each element, the second one, ...
        places = [place for place, _ in tap]
        weights = each(lambda *planes: np.stack(planes).reshape(along), *(domain.constant(w, x) for _, w in tap))
        parts.append(domain.multiply(each(lambda plane, at=places: plane.take(at, axis), x), weights))  # type: ignore[misc]
    return reduce(domain.add, parts)
