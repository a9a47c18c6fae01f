"""The schedule of a product with packed weights: blocks for the caches around the register tile."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..loops import extent, own_loops
from ..target import num_cores, vector_lanes, vector_registers
from .conv_loops import FEW_PRODUCTS, in_threads, steps
from .matmul_prefetch import PREFETCH_ATTR, Prefetch
from .matmul_tile import CHUNK, choose_blocks, choose_tile

_UNROLL = 4
_MOST_LINES = 32  # prefetched at a time


def schedule_packed(sch: s_tir.Schedule, block: SBlockRV, out: SBlockRV, target: Target) -> None:
    """Schedule `block`, axes (row, panel, column, depth), and the block `out` that reads its result, of the axes
    (row, column) or a copy of it.

    From the outside: tasks in parallel; blocks of the depth; panels; tiles of rows; chunks of the depth; the tile.
    With an undivided depth every tile is a task, and `out` is computed under it.
    """
    height, panels, width, depth = (int(axis.dom.extent) for axis in sch.get(block).iter_vars)
    lanes, cores = vector_lanes(target), num_cores(target)
    vectors = width // lanes
    rows, _ = choose_tile(height, panels * width, lanes, vector_registers(target))
    blocks = choose_blocks(height, depth, panels, rows, cores)
    row, *panels_of_copy, column = sch.get_loops(out)
    # where one panel is enough, the split gives a unit loop
    panel, vector, lane = sch.split(column, [None, vectors, lanes])
    if panels_of_copy:
        panel = sch.fuse(*panels_of_copy, panel)
    row_block, tile, tile_row = sch.split(row, [None, -(-blocks.rows // rows), rows])
    divided = blocks.depth < depth
    if divided:
        group, panel = sch.split(panel, [None, blocks.panels])
        sch.reorder(row_block, group, panel, tile, tile_row, vector, lane)
        task = sch.fuse(row_block, group)
    else:
        sch.reorder(row_block, panel, tile, tile_row, vector, lane)
        task = sch.fuse(row_block, panel, tile)
    in_threads(sch, task, target, steps(sch, block), FEW_PRODUCTS)
    sch.unroll(tile_row)
    sch.unroll(vector)
    sch.vectorize(lane)
    sch.compute_at(block, task, preserve_unit_loops=True)
    tiles = -(-blocks.rows // rows)
    row, panel, column, reduced = own_loops(sch, block)
    around, unrolled = [], [row, panel]
    if divided:
        depth_block, reduced = sch.split(reduced, [None, blocks.depth])
        tile, row = sch.split(row, [None, rows])
        around, unrolled = [depth_block, panel, tile], [row]
    chunk, turn, step = _split_depth(sch, reduced, blocks.depth)
    vector, lane = sch.split(column, [vectors, lanes])
    inner = [step, *unrolled, vector]
    sch.reorder(*around, chunk, turn, *inner, lane)
    for loop in inner:
        sch.unroll(loop)
    sch.vectorize(lane)
    if tiles > 1:
        chunks = extent(sch, chunk)
        lines = -(-blocks.depth * width // 16 // (tiles * chunks))
        prefetch = Prefetch(
            min(lines, _MOST_LINES), chunks, blocks.depth, rows, blocks.rows, blocks.panels if divided else 0
        )
        sch.annotate(chunk, PREFETCH_ATTR, prefetch.fields())
    sch.decompose_reduction(block, around[0] if around else chunk)


def _split_depth(sch: s_tir.Schedule, reduced: LoopRV, depth: int) -> tuple[LoopRV, LoopRV, LoopRV]:
    """The reduced loop as chunks, turns and steps."""
    unroll = _UNROLL if depth >= 2 * _UNROLL else 1
    chunk = min(CHUNK, -(-depth // unroll) * unroll)
    chunks, turn, step = sch.split(reduced, [None, chunk // unroll, unroll])
    return chunks, turn, step
