"""How a Winograd convolution is divided: tiles, panels of weights, parallel tasks; and what a division costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from tvm.target import Target

from ..target import num_cores, vector_lanes
from .conv_compute import ConvShape
from .conv_tile import most_sums
from .winograd_transform import TAPS

_MAX_VECTORS = 4
_FLOAT_BYTES = 4

# Measured on two x86 cores with AVX-512; cycles of one core.
_TRANSFORM = {2: 200.0, 4: 450.0}  # of a tile of one vector of channels, in or out, with its copy from or to the tensor
_LOADS = 1.4  # that start in a cycle
_LATENCY = 4.0  # until a sum may be added to again
_STEP = 1.0  # more for each channel and each vector of weights
_NEAR = 1 << 20  # bytes of a task's own buffers that leave room for the weights beside them
_PRIVATE = 1600 << 10  # bytes of weights and such buffers that stay there from chunk to chunk
_FAR_BYTES = 4.0  # a cycle, where they are read again from behind the private caches
_FIRST_BYTES = 4.0  # a cycle, the first time each core reads its own, and what another core has written
_SHARED_BYTES = 8.0  # a cycle, the first time all cores read the same weights
_AGAIN_BYTES = 32.0  # a cycle, weights that one chunk after the other reads
_REGION = 40_000.0  # one more parallel region


@dataclass(frozen=True)
class Plan:
    """Sizes, all of them numbers.

    An image is covered by `tile_rows` x `tile_columns` tiles of `size` x `size` outputs. The products of `chunk` rows
    of tiles (of all images, one after the other) and one panel of `panel` output channels belong together; `height`
    tiles are computed at once, in registers. With `ahead` the whole input is transformed first, and each pair of chunk
    and panel is a parallel task; else each chunk is one, which transforms its own input and runs over the panels.
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


def make_plan(shape: ConvShape, size: int, target: Target) -> Plan:
    """The division with the fewest cycles."""
    lanes, cores = vector_lanes(target), num_cores(target)
    plans = _plans(shape, size, lanes, target)
    return min(plans, key=lambda plan: plan_cycles(shape, plan, lanes, cores))


def _plans(shape: ConvShape, size: int, lanes: int, target: Target) -> Iterator[Plan]:
    height, width = shape.out_size
    tile_rows, tile_columns = -(-height // size), -(-width // size)
    rows = shape.batch * tile_rows
    sums = most_sums(target)
    for vectors in range(1, min(_MAX_VECTORS, -(-shape.out_channels // lanes)) + 1):
        most = sums[vectors]
        for chunk in (count for count in range(1, rows + 1) if rows % count == 0):
            tiles = chunk * tile_columns
            even = -(-tiles // -(-tiles // most))
            for register_tiles in {even, min(most, tiles)}:
                for ahead in (0, 1):
                    yield Plan(
                        size, shape.padding[0], shape.padding[1], tile_rows, tile_columns, vectors * lanes, chunk,
                        register_tiles, ahead,
                    )  # fmt: skip


def plan_cycles(shape: ConvShape, plan: Plan, lanes: int, cores: int) -> float:
    """Cycles of the core that has most to do, by a simple model.

    Multiply-adds at two vectors a cycle; so many cycles a tile for the transforms; the bytes of the weights, which
    another layer has driven out of the caches; and those of buffers that one core writes for another, or that are too
    large to stay near.
    """
    vectors, panels = plan.panel // lanes, -(-shape.out_channels // plan.panel)
    rows = shape.batch * plan.tile_rows
    chunks, tiles = rows // plan.chunk, plan.chunk * plan.tile_columns
    in_lanes = min(lanes, shape.data_block or lanes)
    blocks = -(-shape.in_channels // in_lanes)
    whole, rest = divmod(tiles, plan.height)
    steps = whole * _step(plan.height, vectors) + _step(rest, vectors)
    product = plan.points**2 * shape.in_channels * steps
    transform = _TRANSFORM[plan.size]
    task = product + tiles * vectors * transform
    weights = float(_FLOAT_BYTES * plan.points**2 * shape.in_channels * panels * plan.panel)
    inputs = _FLOAT_BYTES * plan.points**2 * tiles * blocks * in_lanes
    products = _FLOAT_BYTES * plan.points**2 * tiles * plan.panel
    if plan.ahead:
        turns = -(-chunks * panels // cores)
        total = turns * task + -(-rows * blocks // cores) * plan.tile_columns * transform + _REGION
        total += inputs * chunks / cores / _FIRST_BYTES + weights / min(cores, panels) / _FIRST_BYTES
        near, passes = products, -(-chunks // cores)
    else:
        turns = passes = -(-chunks // cores)
        total = turns * (panels * task + tiles * blocks * transform) + weights / _SHARED_BYTES
        near = products + inputs
    if weights + near > _PRIVATE:
        total += (passes - 1) * weights / _AGAIN_BYTES
    return total + (turns * near / _FAR_BYTES if near > _NEAR else 0.0)


def _step(tiles: int, vectors: int) -> float:
    """Cycles of one input channel for `tiles` tiles by `vectors` vectors of outputs, the sums in registers."""
    if not tiles:
        return 0.0
    return max(tiles * vectors / 2, (tiles + vectors) / _LOADS, _LATENCY) + _STEP * vectors
