"""How a Winograd convolution is divided: its tiles, the panels of its weights, the parts that run in parallel."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from .conv_compute import ConvShape
from .matmul_tile import choose_tile
from .winograd_transform import TAPS


@dataclass(frozen=True)
class Plan:
    """Sizes, all of them numbers.

    An image is covered by `tile_rows` x `tile_columns` tiles of `size` x `size` outputs. The products of `chunk` rows
    of tiles (of all images, one after the other) and one panel of `panel` output channels are one parallel task;
    `height` tiles are computed together, in registers. `ahead`: the input is transformed before the first product, in
    parallel tasks of its own, and not chunk by chunk.
    """

    size: int
    top: int
    left: int
    tile_rows: int
    tile_columns: int
    panel: int
    chunk: int
    height: int
    ahead: int

    @property
    def points(self) -> int:
        """Inputs of one tile along an axis."""
        return self.size + TAPS - 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields in their order, to be kept in an attribute."""
        return astuple(self)


def make_plan(shape: ConvShape, size: int, lanes: int) -> Plan:
    """The division for vectors of `lanes` floats."""
    height, width = shape.out_size
    tile_rows, tile_columns = -(-height // size), -(-width // size)
    rows = shape.batch * tile_rows
    chunk = choose_chunk(rows, tile_columns)
    register_rows, vectors = choose_tile(chunk * tile_columns, shape.out_channels, lanes)
    return Plan(
        size, shape.padding[0], shape.padding[1], tile_rows, tile_columns, vectors * lanes, chunk, register_rows, 1
    )


def choose_chunk(rows: int, columns: int) -> int:
    """Rows of tiles in a chunk: the fewest, dividing `rows`, that hold `_CHUNK_TILES` tiles; else all."""
    return next((n for n in range(1, rows) if rows % n == 0 and n * columns >= _CHUNK_TILES), rows)


_CHUNK_TILES = 24


def transformed_flops(shape: ConvShape, plan: Plan) -> int:
    """Floating-point operations of the products."""
    tiles = shape.batch * plan.tile_rows * plan.tile_columns
    return 2 * tiles * plan.points**2 * shape.in_channels * math.ceil(shape.out_channels / plan.panel) * plan.panel
