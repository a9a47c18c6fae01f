"""What the direct convolution costs, in cycles summed over the cores."""

from __future__ import annotations

from math import prod

from tvm.target import Target

from ..target import num_cores, vector_lanes
from .conv_compute import ConvShape
from .conv_tile import ConvCost, Tile, choose_tile

_SHARE = 0.85  # of the peak, as measured for convolutions of ResNet, Inception and VGG
_WEIGHT_BYTES = 6.0  # of weights a cycle: they come while the products before them are computed
_STORE = 1.0  # cycles to write one float of a plain output, which takes apart a vector of channels
_TILE = 100.0  # cycles to begin and end a tile
_SHORT_RUNS = 3.5  # how much longer a byte takes that is read in runs of a few pixels, from beyond the second cache


def window_cycles(shape: ConvShape, target: Target) -> float:
    """Multiply-adds, of whole vectors, however few channels they have, at the share of two a cycle that is reached, and
    the weights' bytes."""
    weights = shape.out_channels * shape.in_channels // shape.groups * prod(shape.kernel)
    vectors = shape.computed_groups * shape.group_vectors * -(-shape.lanes // vector_lanes(target))
    products = shape.batch * prod(shape.out_size) * shape.group_in * prod(shape.kernel) * vectors / 2
    return products / _SHARE + 4 * weights / _WEIGHT_BYTES


def plain_pointwise_cycles(shape: ConvShape, target: Target) -> float:
    """The direct convolution of a plain image by a 1x1 window into a plain image."""
    cores, tile = num_cores(target), _tile(shape, target)
    pixels = prod(shape.out_size)
    blocks = -(-shape.group_vectors // tile.vectors)
    tiles = shape.batch * blocks * -(-pixels // tile.pixels)
    data = 4 * shape.batch * shape.in_channels * shape.height * shape.width
    weights = 4 * shape.in_channels * shape.out_channels
    readers = min(cores, blocks)  # the cores divide the channels first; the second to read finds some of it near
    far = ConvCost.FAR_BYTE * (_SHORT_RUNS * data * (1 + readers) / 2 + weights / 2)
    stores = _STORE * shape.batch * shape.out_channels * pixels
    return cores * tile.cycles * shape.in_channels + tiles * _TILE + stores + far


def _tile(shape: ConvShape, target: Target) -> Tile:
    """The tile that the schedule rule takes."""
    height, width = shape.out_size
    rows, pixels = (1, height * width) if shape.is_pointwise else (height, width)
    return choose_tile(
        pixels,
        shape.group_vectors,
        registers_each=-(-shape.lanes // vector_lanes(target)),
        target=target,
        rows=shape.batch * rows,
        chunked=shape.is_pointwise,
    )
