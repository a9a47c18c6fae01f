"""The schedule that pools and depthwise convolutions share: a window slides over each channel by itself."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import extent
from ..target import num_cores, vector_lanes
from .conv_compute import MAX_LANES, PAD_ATTR
from .conv_loops import (
    FEW_TAPS,
    accumulate,
    divide_at_edges,
    fold_epilogue,
    in_threads,
    marked_blocks,
    pad_under,
    schedule_pad,
    split_loops,
    steps,
)

_CHAINS = 8  # independent sums that hide the latency of an addition
_ROW = 64  # longest row, in floats, that is computed as one vector
_PIXELS = 8  # pixels of a blocked tile
_PLANES = 4  # planes for each core, at least, where they are what the cores divide
_SMALL_PLANE = 256  # pixels: with AVX-512 up to 1.8 times as fast padded one by one, with AVX2 slower or as fast


def schedule_window(sch: s_tir.Schedule, block: SBlockRV, target: Target) -> None:
    """Schedules the reduction `block` over windows of (N, C, H, W[, c]) and all that follows it."""
    work = steps(sch, block)
    out = fold_epilogue(sch, block, target, len(sch.get(block).writes[0].region))
    batch, channel, row, column, *lane = sch.get_loops(out)
    width = extent(sch, column)
    if lane:
        column, inner = sch.split(column, [None, largest_divisor(width, _PIXELS) if width % _PIXELS else _PIXELS])
        in_threads(sch, sch.fuse(batch, channel, row), target, work, FEW_TAPS)
        divide_at_edges(sch, column)  # only tiles at the edge test for it
        sch.compute_at(block, column, preserve_unit_loops=True)
        accumulate(sch, block)
        sch.unroll(inner)
        sch.vectorize(lane[0])
        return
    pads = marked_blocks(sch, PAD_ATTR)
    if width * extent(sch, row) == 1:  # one window: single floats
        channel, inner = sch.split(channel, [None, largest_divisor(extent(sch, channel), _CHAINS)])
        sch.reorder(batch, channel, row, column, inner)
        in_threads(sch, sch.fuse(batch, channel), target, work, FEW_TAPS)
        sch.compute_at(block, column, preserve_unit_loops=True)
        spatial, reduction = split_loops(sch, block)
        sch.reorder(*reduction, *spatial)
        for loop in spatial:
            sch.unroll(loop)
        sch.decompose_reduction(block, reduction[0])
        sch.unroll(inner)
        for pad in pads:
            schedule_pad(sch, pad, target)
        return
    size = width if width <= _ROW else largest_divisor(width, _ROW)
    column, inner = sch.split(column, [None, size if size >= _CHAINS or size == width else 2 * _CHAINS])
    if width % extent(sch, inner):
        divide_at_edges(sch, column)
    small = vector_lanes(target) == MAX_LANES and width * extent(sch, row) <= _SMALL_PLANE
    if len(pads) == 1 and small and extent(sch, batch) * extent(sch, channel) >= _PLANES * num_cores(target):
        plane = sch.fuse(batch, channel)
        in_threads(sch, plane, target, work, FEW_TAPS)
        sch.compute_at(block, column, preserve_unit_loops=True)
        pad_under(sch, pads[0], plane)  # which stays near, and is no pass of its own over short rows
    else:
        in_threads(sch, sch.fuse(batch, channel, row), target, work, FEW_TAPS)
        sch.compute_at(block, column, preserve_unit_loops=True)
        for pad in pads:
            schedule_pad(sch, pad, target)
    accumulate(sch, block)
    sch.vectorize(inner)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)
