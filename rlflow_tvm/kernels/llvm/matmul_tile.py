"""How a matrix product is divided: rows and column vectors of a register tile, blocks for the second-level cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .conv_tile import most_rows

_MAX_ROWS = 10  # rows a power of two apart share a set of the first cache, which has 8 to 12 ways
_MAX_VECTORS = 4  # a wider row of an unpacked matrix is many unaligned loads
_LATENCY = 4.0  # cycles until a sum may be added to again
_LOOP = 1.0  # cycles of the loop itself, per step of the reduction (unrolled)
_STREAM = 0.25  # cycles more for each vector of the right side, which comes from a farther cache than the rows
_FAR_LOAD = 2.0  # cycles between two vectors from that cache
_DEPTH_BLOCK = 1024  # steps of the reduction in a block
CHUNK = 64  # steps of the reduction between two bursts of prefetches; the sums go to the first cache and back
_LEFT_FLOATS = 1 << 18  # of a block of the left side: half of a second-level cache of 2 MiB


def choose_tile(height: int, width: int, lanes: int, registers: int) -> tuple[int, int]:
    """Rows and column vectors of a register tile: the pair with the fewest cycles for a `height` x `width` result.

    What the `registers`, vectors of `lanes` floats, hold beside the sums: see `most_rows`.

    Per step of the reduction a tile of r rows and v vectors takes r*v multiply-adds, v loads and r broadcasts, two of
    either kind a cycle, and no less than the latency of an addition. The last rows are a tile of their own.
    Packed or not, the vectors of the right side come from the second-level cache.
    """
    columns = -(-width // lanes)
    best, best_cost = (1, 1), float("inf")
    for vectors in range(1, min(columns, _MAX_VECTORS) + 1):
        for rows in range(1, min(height, _MAX_ROWS, most_rows(vectors, registers)) + 1):
            whole, rest = divmod(height, rows)
            cycles = whole * _cycles(rows, vectors) + (_cycles(rest, vectors) if rest else 0.0)
            cost = -(-columns // vectors) * cycles
            if cost < best_cost:
                best, best_cost = (rows, vectors), cost
    return best


def _cycles(rows: int, vectors: int) -> float:
    busy = max(rows * vectors / 2, (rows + vectors) / 2, vectors * _FAR_LOAD, _LATENCY)
    return busy + _LOOP + vectors * _STREAM


@dataclass(frozen=True)
class Blocks:
    """`rows` x `depth` of the left side stay in the second-level cache while `panels` panels of weights go by.

    `rows` is a multiple of the tile's rows or all of them. With one block of the depth, `panels` says nothing.
    """

    rows: int
    depth: int
    panels: int


def choose_blocks(height: int, depth: int, panels: int, tile_rows: int, cores: int) -> Blocks:
    """The blocks of a product with a left side of `height` x `depth` and `panels` packed panels.

    The depth is divided only where all cores then get the same number of panels, or nearly; into blocks of whole
    chunks, or the steps of a chunk that reaches beyond its block would each ask where that ends.
    """
    block = depth
    if min(height, 128) * depth > _LEFT_FLOATS:
        block = -(-depth // -(-depth // _DEPTH_BLOCK))
        block = min(depth, -(-block // CHUNK) * CHUNK)
    rows = height
    if height * block > _LEFT_FLOATS:
        count = -(-height * block // _LEFT_FLOATS)
        rows = min(height, math.ceil(math.ceil(height / count) / tile_rows) * tile_rows)
    if block == depth:
        return Blocks(rows, depth, panels)
    tasks = -(-height // rows)
    ideal = tasks * panels / cores
    for groups in range(1, panels + 1):
        size = panels // groups
        if panels % groups == 0 and -(-tasks * groups // cores) * size <= 1.1 * ideal:
            return Blocks(rows, block, size)
    return Blocks(rows, depth, panels)
