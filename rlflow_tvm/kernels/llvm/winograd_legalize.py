"""Legalisation of `relax.nn.conv2d` as Winograd's convolution: weights transformed once, the rest one kernel.

What the kernel computes is stated in tensor expressions, as sums over the transforms' matrices; the schedule rule
writes it as the straight lines of `winograd_transform`.

Inputs are taken to be finite: an infinity or NaN is one in all outputs of its tile, not in those alone whose windows
hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import tvm
from tvm import relax, s_tir, te, tirx
from tvm.target import Target

from .conv_compute import ConvShape
from .conv_legalize import conv_shape
from .emit import Emitter
from .winograd_plan import Plan, make_plan
from .winograd_transform import TAPS, matrix, plane, transform_data, transform_product, transform_taps

WINOGRAD_ATTR = "rlflow.winograd"  # on the block that gives the output: the numbers of its plan
_OUT_ELEMENTWISE_FUSIBLE = 4  # TVM's OpPatternKind: element-wise operators behind it go into its kernel
_OPAQUE = 8


def make_winograd(size: int, target: Target) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The legalisation of a convolution with a 3x3 window, stride 1, as F(size x size, 3 x 3)."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        shape = conv_shape(call)
        assert shape is not None  # the implementation takes no other
        plan = make_plan(shape, size, target)
        data, kernel = call.args
        transform, extents = taps_kernel(shape, plan)
        callee = bb.add_func(transform, "transform_taps")
        taps = bb.emit(relax.call_tir(callee, [kernel], relax.TensorType(extents, "float32")))
        attrs = {"op_pattern": _OUT_ELEMENTWISE_FUSIBLE}
        compute = partial(winograd, shape=shape, plan=plan)
        return bb.call_te(compute, data, taps, primfunc_name_hint="winograd", primfunc_attrs=attrs)

    return legalize


def takes_winograd(call: relax.Call, shape: ConvShape) -> bool:
    """Whether the convolution, of this shape, can be computed so; its weights must be known at compile time besides."""
    dtypes = {str(arg.ty.dtype) for arg in call.args} | {str(call.ty.dtype), shape.dtype}
    blocks = (shape.data_block, shape.kernel_block, shape.out_block)
    return (
        shape.kernel == (TAPS, TAPS)
        and shape.strides == shape.dilation == (1, 1)
        and shape.groups == 1
        and dtypes == {"float32"}
        and all(block & (block - 1) == 0 for block in blocks)
        and min(shape.batch, shape.in_channels, shape.out_channels, *shape.out_size) > 0
    )


def taps_kernel(shape: ConvShape, plan: Plan) -> tuple[tirx.PrimFunc, tuple[int, ...]]:
    """The kernel that transforms the weights, and the extents of its result: (panel, point, channel, in the panel).

    That is the order in which the product reads it; the last panel is filled up with zeros.
    """
    block, panels = shape.kernel_block, -(-shape.out_channels // plan.panel)
    dims = [shape.out_channels, shape.in_channels, TAPS, TAPS]
    if block:
        dims = [shape.out_channels // block, *dims[1:], block]
    extents = (panels, plan.points**2, shape.in_channels, plan.panel)
    kernel, taps = (tirx.decl_buffer(list(d), "float32", name) for d, name in ((dims, "kernel"), (extents, "taps")))
    emit = Emitter()
    with (
        emit.loop(panels, "panel", tirx.ForKind.PARALLEL) as panel,
        emit.loop(shape.in_channels, "channel") as channel,
        emit.loop(plan.panel, "lane") as lane,
    ):
        out = emit.bind(panel * plan.panel + lane, "out")
        inside = True if shape.out_channels % plan.panel == 0 else out < shape.out_channels
        with emit.when(inside):
            window = [
                [
                    emit.load(kernel, (out // block, channel, y, x, out % block) if block else (out, channel, y, x), 1)
                    for x in range(TAPS)
                ]
                for y in range(TAPS)
            ]
            transformed = plane(window, lambda line: transform_taps(line, plan.size, emit.bind), emit.bind)
            for i, row in enumerate(transformed):
                for j, value in enumerate(row):
                    emit.store(taps, (panel, i * plan.points + j, channel, lane), value, 1)
        if inside is not True:
            with emit.when(out >= shape.out_channels), emit.loop(plan.points**2, "point") as point:
                emit.store(taps, (panel, point, channel, lane), tirx.const(0.0, "float32"), 1)
    func = tirx.PrimFunc([kernel, taps], root_block(emit.statement(), []))
    return func.with_attrs({"op_pattern": _OPAQUE, "tirx.is_scheduled": True, "tirx.noalias": True}), extents


def root_block(body: tirx.Stmt, buffers: list[tirx.Buffer]) -> tirx.Stmt:
    """A function's body that allocates `buffers`."""
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    return s_tir.SBlockRealize([], True, block)


def winograd(data: te.Tensor, taps: te.Tensor, shape: ConvShape, plan: Plan) -> te.Tensor:
    """The convolution of `data` with the result of `taps_kernel`, in the output layout of `shape`."""
    size, points, columns = plan.size, plan.points, plan.tile_columns
    per_image = plan.tile_rows * columns
    tiles = shape.batch * per_image
    panels = int(taps.shape[0])
    to_data = _entries(matrix(transform_data, points))
    to_output = _entries(matrix(transform_product, points))
    y, x = (te.reduce_axis((0, points), name) for name in "yx")

    def pixel(image: tirx.Expr, channel: tirx.Var, row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        block = shape.data_block
        index = (channel // block, row, column, channel % block) if block else (channel, row, column)
        inside = tirx.all(row >= 0, row < shape.height, column >= 0, column < shape.width)
        return tirx.if_then_else(inside, data(image, *index), tirx.const(0.0, "float32"))

    def transformed(point: tirx.Var, tile: tirx.Var, channel: tirx.Var) -> tirx.Expr:
        row = tile % per_image // columns * size + y - plan.top
        column = tile % columns * size + x - plan.left
        factor = to_data(point // points, y) * to_data(point % points, x)
        return te.sum(pixel(tile // per_image, channel, row, column) * factor, axis=[y, x])

    inputs = te.compute((points**2, tiles, shape.in_channels), transformed, name="winograd_data")
    channel = te.reduce_axis((0, shape.in_channels), "channel")
    products = te.compute(
        (points**2, tiles, panels, plan.panel),
        lambda point, tile, panel, lane: te.sum(
            inputs(point, tile, channel) * taps(panel, point, channel, lane), axis=channel
        ),
        name="winograd_product",
    )
    i, j = (te.reduce_axis((0, points), name) for name in "ij")

    def output(n: tirx.Var, c: tirx.Var, row: tirx.Var, column: tirx.Var, *lane: tirx.Var) -> tirx.Expr:
        out = c * shape.out_block + lane[0] if lane else c
        tile = n * per_image + row // size * columns + column // size
        factor = to_output(row % size, i) * to_output(column % size, j)
        return te.sum(products(i * points + j, tile, out // plan.panel, out % plan.panel) * factor, axis=[i, j])

    block = (shape.out_block,) if shape.out_block else ()
    dims = (shape.batch, shape.out_channels // (shape.out_block or 1), *shape.out_size, *block)
    return te.compute(dims, output, name="winograd", attrs={WINOGRAD_ATTR: list(plan.numbers)})


def _entries(table: np.ndarray) -> Callable[[tvm.ir.Expr, tvm.ir.Expr], tvm.ir.Expr]:
    """A matrix as an expression of row and column."""

    def entry(row: tvm.ir.Expr, column: tvm.ir.Expr) -> tvm.ir.Expr:
        value: tvm.ir.Expr = tirx.const(0.0, "float32")
        for (i, j), number in np.ndenumerate(table):
            if number:
                value = tirx.Select(tirx.all(row == i, column == j), tirx.const(float(number), "float32"), value)
        return value

    return entry
