"""The schedule rule of convolutions: a register tile of pixels by channel vectors, the reduction around it."""

from __future__ import annotations

import math

from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import extent
from ..target import vector_lanes
from .conv_compute import CONV_ATTR, DEPTHWISE_ATTR, OUT_AXES_ATTR, PAD_ATTR, UNEVEN_ATTR
from .conv_loops import (
    FEW_PRODUCTS,
    accumulate,
    divide_at_edges,
    fold_epilogue,
    in_threads,
    marked_blocks,
    merge_axes,
    narrowed,
    schedule_pad,
    steps,
)
from .conv_tile import choose_tile
from .pool_window import schedule_window
from .reduction import is_costly

# Writing a plain image out of registers takes a statement for each element of the tile, and LLVM a third of a second
# for those: only a short reduction gains by it, before an epilogue that is next to nothing, as it is computed float by
# float. After others the tile goes through memory, channel by channel, in vectors of pixels.
_FEW_STEPS = 256


class Conv2d(CPUScheduleRule):
    """Schedules the functions that hold a convolution of `conv_compute`, with its epilogue.

    The convolution is known by the attribute its block carries. Its result stays in registers; the last element-wise
    block after it writes the output tile. Zero padding is a loop nest of its own, but under small depthwise planes.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where `func` holds no convolution of this form."""
        if not isinstance(func, tirx.PrimFunc) or not self.is_target_available(target):
            return None
        sch = s_tir.Schedule(narrowed(func))
        dense, windows = marked_blocks(sch, CONV_ATTR), marked_blocks(sch, DEPTHWISE_ATTR)
        if len(dense) + len(windows) != 1:
            return None
        if not dense:
            schedule_window(sch, windows[0], target)
            return sch
        sch = schedule_dense(sch, dense[0], target)
        for pad in marked_blocks(sch, PAD_ATTR):
            schedule_pad(sch, pad, target)
        return sch


def schedule_dense(sch: s_tir.Schedule, conv: SBlockRV, target: Target) -> s_tir.Schedule:
    """Schedules a convolution that is no depthwise one; the schedule returned may be a new one."""
    # Groups whose last vector has empty lanes: no tile of the output is a tile of packed vectors.
    marks = sch.get(conv).annotations
    out = fold_epilogue(sch, conv, target, int(marks[OUT_AXES_ATTR]), apart=UNEVEN_ATTR in marks)
    packed, result = ([int(d) for d in sch.get(b).writes[0].source.shape] for b in (conv, out))
    if len(packed) == 4 and packed != result:  # pointwise, (N, vector, H*W, lane), and no mere copy follows
        sch = merge_axes(sch, out, 2, 4)  # height and width
        (conv,) = marked_blocks(sch, CONV_ATTR)
        (out,) = sch.get_consumers(conv)
    schedule_tile(sch, conv, out, target)
    return sch


def schedule_tile(sch: s_tir.Schedule, conv: SBlockRV, out: SBlockRV, target: Target) -> None:
    """Tiles `out`, computes `conv` under each tile, and keeps the tile in registers.

    `out` has the axes (N, C, H, W[, c]), with H and W as one axis where the result of `conv` has them so.
    """
    images, packed, *rows, width, vector = (int(d) for d in sch.get(conv).writes[0].source.shape)
    batch, channel, *outer, column = sch.get_loops(out)[: 3 + len(rows)]
    lane = sch.get_loops(out)[3 + len(rows) :]
    block = extent(sch, lane[0]) if lane else 1
    vectors = int(sch.get(conv).annotations[CONV_ATTR])
    lanes = vector_lanes(target)
    tile = choose_tile(
        width,
        vectors,
        registers_each=-(-vector // lanes) * max(1, block // vector),
        target=target,
        rows=math.prod([images, packed // vectors, *rows]),
        chunked=not rows,
    )
    channel, channel_inner = sch.split(channel, [None, max(1, tile.vectors * vector // block)])
    if tile.chunks > 1:
        chunk, column = sch.split(column, [tile.chunks, None])
        outer = [*outer, chunk]
    length = extent(sch, column)
    column, column_inner = sch.split(column, [None, tile.pixels])
    sch.reorder(batch, channel, *outer, column, channel_inner, column_inner, *lane)
    in_threads(sch, sch.fuse(batch, channel, *outer), target, steps(sch, conv), FEW_PRODUCTS)
    if length % tile.pixels:
        divide_at_edges(sch, column)
    sch.compute_at(conv, column, preserve_unit_loops=True)
    accumulate(sch, conv, channel_inside=tile.vectors <= tile.pixels)
    if lane or (_steps(sch, conv) <= _FEW_STEPS and not is_costly(sch, out)):
        sch.unroll(channel_inner)
        sch.unroll(column_inner)
        for loop in lane:
            sch.vectorize(loop)
    else:
        sch.vectorize(column_inner)


def _steps(sch: s_tir.Schedule, conv: SBlockRV) -> int:
    """Products in one element of the result."""
    axes = sch.get(conv).iter_vars
    return math.prod(int(axis.dom.extent) for axis in axes if axis.iter_type == tirx.IterVar.CommReduce)
