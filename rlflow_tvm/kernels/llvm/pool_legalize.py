"""Legalisation of the 2-D pools in "NCHW" and "NCHW{c}c".

TVM's own pools copy the whole input into a padded buffer first; here the window's edge is tested where it is read, and
the number of pixels of an average is computed once a row and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from tvm import relax, te, tirx, topi

from .conv_compute import four_sides, pair

POOL_ATTR = "rlflow.pool2d"  # on the reduction block of a pool
ROWS_ATTR = "rlflow.pool2d_rows"  # on the block before it that has reduced the columns of each window


@dataclass(frozen=True)
class Window:
    """Where a pool looks: sizes (height, width), padding (top, left, bottom, right)."""

    size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]


def _max_pool(data: te.Tensor, window: Window, out_size: tuple[int, int]) -> te.Tensor:
    if not str(data.dtype).startswith(("float", "bfloat")):
        return _reduce(data, window, out_size, te.max, tirx.min_value(data.dtype), "max_pool2d")
    lowest = tirx.const(-inf, data.dtype)  # TVM's maximum begins at the least finite number
    reducer = te.comm_reducer(lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(-inf, dtype), name="max")
    return _reduce(data, window, out_size, reducer, lowest, "max_pool2d")


def _avg_pool(data: te.Tensor, window: Window, out_size: tuple[int, int], include_pad: bool) -> te.Tensor:
    sizes = (int(data.shape[2]), int(data.shape[3]))
    if len(data.shape) == 4 and window == Window(sizes, window.strides, (0, 0, 0, 0), (1, 1)) and out_size == (1, 1):
        total = topi.sum(data, axis=[2, 3], keepdims=True)  # for the rule of such sums, which knows vectors
    else:
        total = _reduce(data, window, out_size, te.sum, tirx.const(0, data.dtype), "pool_sum")

    def pixels(index: tirx.Var, axis: int) -> tirx.Expr:
        """How many pixels the window covers at `index`: those of the padded image, or of the image alone."""
        extent, before, after = int(data.shape[2 + axis]), window.padding[axis], window.padding[axis + 2]
        size, stride, dilation = window.size[axis], window.strides[axis], window.dilation[axis]
        low, high = (-before, extent + after) if include_pad else (0, extent)
        # Windows number `begin` to `end` - 1 lie inside whole; the test is the one that the loops are divided by.
        begin = max(0, -(-(before + low) // stride))
        end = max(begin, min((high - 1 + before - (size - 1) * dilation) // stride + 1, out_size[axis]))
        if begin == 0 and end == out_size[axis]:
            return tirx.const(size, "int64")
        # first + k * dilation in [low, high) for k in [0, size)
        first = index * stride - before
        skipped = tirx.max(0, tirx.floordiv(low - first + dilation - 1, dilation))
        counted = tirx.min(size, tirx.floordiv(high - first + dilation - 1, dilation)) - skipped
        inside = [index >= begin] * (begin > 0) + [index < end] * (end < out_size[axis])
        return tirx.if_then_else(tirx.all(*inside), tirx.const(size, "int64"), tirx.max(counted, 1))

    return te.compute(
        total.shape,
        # `/` is for floats alone
        lambda *i: tirx.div(total(*i), (pixels(i[2], 0) * pixels(i[3], 1)).astype(data.dtype)),
        name="pool_average",
    )


def _adaptive_avg_pool(data: te.Tensor, out_size: tuple[int, int]) -> te.Tensor:
    """Average over the rows floor(y*H/h) to ceil((y+1)*H/h), and columns alike."""
    sizes = (int(data.shape[2]), int(data.shape[3]))
    if all(size % out == 0 for size, out in zip(sizes, out_size, strict=True)):
        size = (sizes[0] // out_size[0], sizes[1] // out_size[1])
        return _avg_pool(data, Window(size, size, (0, 0, 0, 0), (1, 1)), out_size, include_pad=True)

    def bounds(index: tirx.Var, axis: int) -> tuple[tirx.Expr, tirx.Expr]:
        start = tirx.floordiv(index * sizes[axis], out_size[axis])
        return start, tirx.floordiv((index + 1) * sizes[axis] + out_size[axis] - 1, out_size[axis]) - start

    # The widest window: every one is as wide as that in the loop, and masked to its own width.
    widest = tuple(
        max(-(-(i + 1) * size // out) - i * size // out for i in range(out))
        for size, out in zip(sizes, out_size, strict=True)
    )
    kh, kw = (te.reduce_axis((0, k), name) for k, name in zip(widest, ("kh", "kw"), strict=True))

    def term(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var, *b: tirx.Var) -> tirx.Expr:
        (row, rows), (column, columns) = bounds(y, 0), bounds(x, 1)
        inside = tirx.all(kh < rows, kw < columns)
        value = tirx.if_then_else(inside, data(n, c, row + kh, column + kw, *b), tirx.const(0, data.dtype))
        return te.sum(value, axis=[kh, kw])

    total = te.compute(_out_shape(data, out_size), term, name="pool_sum", attrs={POOL_ATTR: 1})
    return te.compute(
        total.shape,
        lambda *i: tirx.div(total(*i), (bounds(i[2], 0)[1] * bounds(i[3], 1)[1]).astype(data.dtype)),
        name="pool_average",
    )


def _out_shape(data: te.Tensor, out_size: tuple[int, int]) -> list[tirx.Expr]:
    return [data.shape[0], data.shape[1], *out_size, *data.shape[4:]]


def _reduce(
    data: te.Tensor,
    window: Window,
    out_size: tuple[int, int],
    reducer: Callable[..., tirx.Expr],
    outside: tirx.Expr,
    name: str,
) -> te.Tensor:
    """The reduction of each window, `outside` standing for the pixels beyond the image.

    In an unblocked image first along the columns of the window, then along its rows: the first reads whole rows, which
    makes vectors, and leaves a fraction of the work to the second, which does not where the stride is not 1.
    """
    if len(data.shape) > 4 or out_size == (1, 1):
        kh, kw = (te.reduce_axis((0, k), axis) for k, axis in zip(window.size, ("kh", "kw"), strict=True))

        def pixel(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var, *b: tirx.Var) -> tirx.Expr:
            (row, in_rows), (column, in_columns) = (
                _position(data, window, out_size, axis, index, tap) for axis, index, tap in ((0, y, kh), (1, x, kw))
            )
            value = _inside(in_rows + in_columns, data(n, c, row, column, *b), outside)
            return reducer(value, axis=[kh, kw])

        return te.compute(_out_shape(data, out_size), pixel, name=name, attrs={POOL_ATTR: 1})
    kh, kw = (te.reduce_axis((0, k), axis) for k, axis in zip(window.size, ("kh", "kw"), strict=True))

    def row_pixel(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
        row, tests = _position(data, window, out_size, 0, y, kh)
        return reducer(_inside(tests, data(n, c, row, x), outside), axis=[kh])

    shape = (data.shape[0], data.shape[1], out_size[0], data.shape[3])
    rows = te.compute(shape, row_pixel, name=f"{name}_rows", attrs={ROWS_ATTR: 1})

    def column_pixel(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
        column, tests = _position(data, window, out_size, 1, x, kw)
        return reducer(_inside(tests, rows(n, c, y, column), outside), axis=[kw])

    return te.compute(_out_shape(data, out_size), column_pixel, name=name, attrs={POOL_ATTR: 1})


def _position(
    data: te.Tensor, window: Window, out_size: tuple[int, int], axis: int, index: tirx.Var, tap: tirx.IterVar
) -> tuple[tirx.Expr, list[tirx.Expr]]:
    """Where along `axis` a tap of the window of output `index` reads, and what holds if that is in the image."""
    stride, dilation, before = window.strides[axis], window.dilation[axis], window.padding[axis]
    extent = int(data.shape[2 + axis])
    at = index * stride + tap * dilation - before
    tests = [at >= 0] if before else []
    if (out_size[axis] - 1) * stride + (window.size[axis] - 1) * dilation - before >= extent:
        tests.append(at < extent)
    return at, tests


def _inside(tests: list[tirx.Expr], value: tirx.Expr, outside: tirx.Expr) -> tirx.Expr:
    return tirx.if_then_else(tirx.all(*tests), value, outside) if tests else value


def _pool_call(call: relax.Call) -> tuple[Window, tuple[int, int]] | None:
    """Window and output size of a pool, or None where its layout or shape is not handled here."""
    attrs = call.attrs
    shapes = (call.args[0].ty.shape, call.ty.shape)
    if not _is_handled(attrs.layout, attrs.out_layout, shapes):
        return None
    window = Window(
        size=pair(attrs.pool_size),
        strides=pair(attrs.strides),
        padding=four_sides(attrs.padding),
        dilation=pair(attrs.dilation),
    )
    return window, pair(shapes[1].values[2:4])


def _is_handled(layout: str, out_layout: str, shapes: tuple[relax.Expr, ...]) -> bool:
    return (
        re.fullmatch(r"NCHW(\d+c)?", layout) is not None
        and (out_layout or layout) == layout
        and all(isinstance(s, relax.ShapeExpr) and all(isinstance(d, tirx.IntImm) for d in s.values) for s in shapes)
    )


def _default(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's own legalisation."""
    return call.op.get_attr("FLegalize")(bb, call)


def legalize_max_pool2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.max_pool2d` as a call of a PrimFunc."""
    handled = _pool_call(call)
    if handled is None:
        return _default(bb, call)
    window, out_size = handled
    pool = partial(_max_pool, window=window, out_size=out_size)
    return bb.call_te(pool, call.args[0], primfunc_name_hint="max_pool2d")


def legalize_avg_pool2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.avg_pool2d` as a call of a PrimFunc; a window over the edge counts as PyTorch counts it."""
    handled = _pool_call(call)
    if handled is None:
        return _default(bb, call)
    window, out_size = handled
    include_pad = bool(call.attrs.count_include_pad)
    pool = partial(_avg_pool, window=window, out_size=out_size, include_pad=include_pad)
    return bb.call_te(pool, call.args[0], primfunc_name_hint="avg_pool2d")


def legalize_adaptive_avg_pool2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.adaptive_avg_pool2d` as a call of a PrimFunc."""
    shapes = (call.args[0].ty.shape, call.ty.shape)
    if not _is_handled(call.attrs.layout, call.attrs.out_layout, shapes):
        return _default(bb, call)
    out_size = pair(shapes[1].values[2:4])
    return bb.call_te(
        partial(_adaptive_avg_pool, out_size=out_size), call.args[0], primfunc_name_hint="adaptive_avg_pool2d"
    )


POOL_LEGALIZE: dict[str, Callable[[relax.BlockBuilder, relax.Call], relax.Expr]] = {
    "relax.nn.max_pool2d": legalize_max_pool2d,
    "relax.nn.avg_pool2d": legalize_avg_pool2d,
    "relax.nn.adaptive_avg_pool2d": legalize_adaptive_avg_pool2d,
}
