"""The schedule that pools and depthwise convolutions share: a window slides over each channel by itself."""

from __future__ import annotations

import math

from tvm import IRModule, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

_CHAINS = 8  # independent sums that hide the latency of an addition
_ROW = 64  # longest row, in floats, that is computed as one vector
_PIXELS = 8  # pixels of a blocked tile


def narrowed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with 32-bit indices, where its buffers allow that.

    TVM's `LoopPartition` looks a marked loop up by its variable, which the lowering of 64-bit indices replaces before.
    """
    types = [param.ty for param in func.params]
    if any(ty.dtype == "int64" or math.prod(int(d) for d in ty.shape) >= 2**31 for ty in types):
        return func
    return tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]


def fold_epilogue(sch: s_tir.Schedule, block: SBlockRV) -> SBlockRV:
    """Inlines what follows `block` into the last block that still has one element an output element, and returns it.

    Without any such block, a copy out of the accumulators is made. The result of `block` moves to local scope.
    """
    chain: list[SBlockRV] = []
    current = block
    while True:
        consumers = sch.get_consumers(current)
        if len(consumers) != 1 or len(sch.get_producers(consumers[0])) != 1 or not is_injective(sch, consumers[0]):
            break
        current = consumers[0]
        chain.append(current)
    if not chain:
        return sch.cache_write(block, 0, "local")
    for inner in chain[:-1]:
        sch.compute_inline(inner)
    sch.set_scope(block, 0, "local")
    return chain[-1]


def is_injective(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Every axis is parallel, and the block writes the element its axes name."""
    stmt = sch.get(block)
    if len(stmt.writes) != 1 or any(i.iter_type != tirx.IterVar.DataPar for i in stmt.iter_vars):
        return False
    region = stmt.writes[0].region
    return len(region) == len(stmt.iter_vars) and all(
        r.min.same_as(i.var) for r, i in zip(region, stmt.iter_vars, strict=True)
    )


def marked_blocks(sch: s_tir.Schedule, attribute: str) -> list[SBlockRV]:
    """The blocks of the function that carry an attribute."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [block for block in blocks if attribute in sch.get(block).annotations]


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """The constant extent of a loop."""
    return int(sch.get(loop).extent)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


def split_loops(sch: s_tir.Schedule, block: SBlockRV) -> tuple[list[LoopRV], list[LoopRV]]:
    """The loops of `block`'s own axes, the innermost ones: spatial, reduction."""
    axes = sch.get(block).iter_vars
    loops = sch.get_loops(block)[-len(axes) :]
    kinds = list(zip(loops, axes, strict=True))
    spatial = [loop for loop, axis in kinds if axis.iter_type == tirx.IterVar.DataPar]
    return spatial, [loop for loop, axis in kinds if axis.iter_type == tirx.IterVar.CommReduce]


def accumulate(sch: s_tir.Schedule, block: SBlockRV, channel_inside: bool = False) -> None:
    """Under a tile: the reduction outside, the tile unrolled, the innermost axis in vectors.

    The order of the unrolled axes is that of the instructions: with `channel_inside`, the vectors of the channels stay
    in registers while one pixel after the other is read; otherwise the pixels stay.
    """
    spatial, reduction = split_loops(sch, block)
    if channel_inside:
        batch, channel, *pixels, lane = spatial
        spatial = [batch, *pixels, channel, lane]
    sch.reorder(*reduction, *spatial)
    if extent(sch, reduction[-1]) == 1:
        # LLVM would unroll a loop of a few turns, keep what its turns have in common, and run out of registers.
        reduction = [sch.fuse(*reduction)]
    *tile, lane = spatial
    for loop in tile:
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.decompose_reduction(block, reduction[0])  # the copy that sets the start values keeps the kinds of the loops


def schedule_window(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Schedules the reduction `block` over windows of (N, C, H, W[, c]) and all that follows it."""
    out = fold_epilogue(sch, block)
    batch, channel, row, column, *lane = sch.get_loops(out)
    width = extent(sch, column)
    if lane:
        column, inner = sch.split(column, [None, largest_divisor(width, _PIXELS) if width % _PIXELS else _PIXELS])
        sch.parallel(sch.fuse(batch, channel, row))
        sch.compute_at(block, column, preserve_unit_loops=True)
        accumulate(sch, block)
        sch.unroll(inner)
        sch.vectorize(lane[0])
        return
    if width * extent(sch, row) == 1:  # a global pool: sums of single floats
        channel, inner = sch.split(channel, [None, largest_divisor(extent(sch, channel), _CHAINS)])
        sch.reorder(batch, channel, row, column, inner)
        sch.parallel(sch.fuse(batch, channel))
        sch.compute_at(block, column, preserve_unit_loops=True)
        spatial, reduction = split_loops(sch, block)
        sch.reorder(*reduction, *spatial)
        for loop in spatial:
            sch.unroll(loop)
        sch.decompose_reduction(block, reduction[0])
        sch.unroll(inner)
        return
    size = width if width <= _ROW else largest_divisor(width, _ROW)
    column, inner = sch.split(column, [None, size if size >= _CHAINS or size == width else 2 * _CHAINS])
    if width % extent(sch, inner):
        sch.annotate(column, "pragma_loop_partition_hint", True)
    sch.parallel(sch.fuse(batch, channel, row))
    sch.compute_at(block, column, preserve_unit_loops=True)
    accumulate(sch, block)
    sch.vectorize(inner)


def schedule_pad(sch: s_tir.Schedule, pad: SBlockRV) -> None:
    """A padding block of (N, C, H, W[, c]): rows in parallel, the channel block in vectors."""
    batch, channel, row, _, *lane = sch.get_loops(pad)
    sch.parallel(sch.fuse(batch, channel, row))
    if lane:
        sch.vectorize(lane[0])
