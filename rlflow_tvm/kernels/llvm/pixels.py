"""The schedule rules of convolutions with pixels in the lanes: a register tile of channels by vectors of pixels."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import extent, own_loops, vectorise
from ..target import num_cores, vector_lanes
from .conv_compute import PAD_ATTR
from .conv_loops import (
    FEW_PRODUCTS,
    RESULT_ATTR,
    fold_epilogue,
    in_threads,
    marked_blocks,
    merge_axes,
    narrowed,
    schedule_pad,
    steps,
)
from .elementwise import schedule_map
from .pixel_conv import PIXELS_ATTR
from .window_pixels import WINDOW_PIXELS_ATTR

_AXES = 4  # of the result: image, channel, row, column
_TASKS_EACH = 4  # rows that a core should have at least, where rows are what the cores divide


class PixelConv(CPUScheduleRule):
    """Schedules the functions that hold a convolution of `pixel_conv`, with what is fused to it."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where `func` holds no convolution of this form."""
        sch = s_tir.Schedule(func)
        products = marked_blocks(sch, PIXELS_ATTR)
        if len(products) != 1:
            return None
        before = _maps_before(sch, products[0])
        sch, out = _folded(sch, target)
        sch = merge_axes(sch, out, 2, 4)  # height and width
        (conv,) = marked_blocks(sch, PIXELS_ATTR)
        (out,) = sch.get_consumers(conv)
        schedule_tile(sch, conv, out, target)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            if sch.get(block).name_hint in before:
                schedule_map(sch, block, target)
        return sch


def _folded(sch: s_tir.Schedule, target: Target) -> tuple[s_tir.Schedule, SBlockRV]:
    """What follows the products inlined into the block that writes the output, or where it cannot be the image that
    they are, and loop nests of its own behind that."""
    attempt = sch.copy()
    (conv,) = marked_blocks(attempt, PIXELS_ATTR)
    out = fold_epilogue(attempt, conv, target, _AXES)
    tiled, written = (list(attempt.get(block).writes[0].source.shape) for block in (conv, out))
    if written != tiled:  # or it is a copy of the tiles
        return attempt, out
    (conv,) = marked_blocks(sch, PIXELS_ATTR)
    (image,) = sch.get_consumers(conv)
    sch.annotate(image, RESULT_ATTR, 1)
    return sch, fold_epilogue(sch, conv, target, _AXES)


def _maps_before(sch: s_tir.Schedule, conv: SBlockRV) -> list[str]:
    """The names of the blocks before `conv` that are no part of the convolution. What its epilogue reads of them is
    inlined there."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    position = next(i for i, block in enumerate(blocks) if sch.get(block).same_as(sch.get(conv)))
    return [sch.get(b).name_hint for b in blocks[:position] if PAD_ATTR not in sch.get(b).annotations]


def schedule_tile(sch: s_tir.Schedule, conv: SBlockRV, out: SBlockRV, target: Target) -> None:
    """Tiles `out` (N, C, pixels), computes `conv` (N, tile, row, pixels) under each tile, keeps it in registers."""
    lanes = vector_lanes(target)
    _, _, rows, _ = (int(d) for d in sch.get(conv).writes[0].source.shape)
    vectors, outside, groups = (int(value) for value in sch.get(conv).annotations[PIXELS_ATTR])
    batch, channel, pixel = own_loops(sch, out)
    pixel, vector, lane = sch.split(pixel, [None, vectors, lanes])
    if groups:
        group, channel, row = sch.split(channel, [groups, None, rows])
        sch.reorder(batch, group, pixel, channel, row, vector, lane)
        task, tile = sch.fuse(batch, group, pixel), channel
    else:
        channel, row = sch.split(channel, [None, rows])
        order = (channel, pixel) if outside else (pixel, channel)
        sch.reorder(batch, *order, row, vector, lane)
        task = tile = sch.fuse(batch, *order)
    in_threads(sch, task, target, steps(sch, conv), FEW_PRODUCTS)
    sch.unroll(row)
    sch.unroll(vector)
    sch.vectorize(lane)
    sch.compute_at(conv, tile, preserve_unit_loops=True)
    if groups:
        (columns,) = marked_blocks(sch, PAD_ATTR)
        sch.compute_at(columns, task, preserve_unit_loops=True)
        vectorise(sch, sch.get_loops(columns)[-1], lanes, unroll=True)
    batch, block, row, pixel, depth = own_loops(sch, conv)
    vector, lane = sch.split(pixel, [vectors, lanes])
    sch.reorder(depth, batch, block, row, vector, lane)
    for loop in (batch, block, row, vector):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.decompose_reduction(conv, depth)


class WindowPixelConv(CPUScheduleRule):
    """Schedules the functions that hold a convolution of `window_pixels`, with what is fused to it."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where `func` holds no convolution of this form."""
        if not isinstance(func, tirx.PrimFunc):
            return None
        sch = s_tir.Schedule(narrowed(func))
        products = marked_blocks(sch, WINDOW_PIXELS_ATTR)
        if len(products) != 1:
            return None
        (conv,) = products
        vectors = int(sch.get(conv).annotations[WINDOW_PIXELS_ATTR])
        work, lanes = steps(sch, conv), vector_lanes(target)
        out = fold_epilogue(sch, conv, target, _AXES)
        batch, channel, row, pixel = own_loops(sch, out)
        pixel, vector, lane = sch.split(pixel, [None, vectors, lanes])
        sch.reorder(batch, row, pixel, channel, vector, lane)
        if extent(sch, batch) * extent(sch, row) < _TASKS_EACH * num_cores(target):  # as of a sound, which is one row
            task = pixel = sch.fuse(batch, row, pixel)
        else:
            task = sch.fuse(batch, row)
        in_threads(sch, task, target, work, FEW_PRODUCTS)
        sch.unroll(channel)
        sch.unroll(vector)
        sch.vectorize(lane)
        sch.compute_at(conv, pixel, preserve_unit_loops=True)
        batch, channel, row, pixel, *depth = own_loops(sch, conv)
        vector, lane = sch.split(pixel, [vectors, lanes])
        sch.reorder(*depth, batch, channel, row, vector, lane)
        for loop in (batch, channel, row, vector):
            sch.unroll(loop)
        sch.vectorize(lane)
        sch.decompose_reduction(conv, depth[0])
        for pad in marked_blocks(sch, PAD_ATTR):
            schedule_pad(sch, pad, target)
        return sch
