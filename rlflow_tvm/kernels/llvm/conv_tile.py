"""How many pixels and channel vectors one register tile of a convolution holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tvm.target import Target

from ..target import num_cores, vector_lanes, vector_registers

# Measured on x86 cores with AVX-512: products and loads that start in one cycle, cycles until a product is there.
_PRODUCTS = 2.0
_LOADS = 1.4
_LATENCY = 4
_STREAM = 0.5  # cycles more for each vector of weights, which comes from a farther cache than the pixels
_TAIL = 1.08  # a tail is a second copy of the loop nest, in which LLVM spills now and then
_CHUNKS = 64  # parts of a row for each core, at most
_OVERHEAD = 1.0  # cycles of the loop itself, per step of the reduction


@dataclass(frozen=True)
class Tile:
    """`pixels` output pixels by `vectors` packed channel vectors, in `chunks` equal parts of the pixels.

    `cycles`: what a step of the reduction takes over all tiles of a core.
    """

    pixels: int
    vectors: int
    chunks: int = 1
    cycles: float = field(default=0.0, compare=False)


class ConvCost:
    """What the estimates of all convolutions assume of the caches, in bytes and in cycles of a core."""

    FIRST_CACHE = 40 << 10
    SECOND_CACHE = 3 << 19
    SECOND_LINE = 2.2  # cycles for a line from the second cache
    FAR_BYTE = 0.1  # cycles for a byte from beyond it, or to there, in long runs


def accumulator_registers(target: Target) -> int:
    """Vector registers left for accumulators: four hold what is multiplied, and two more products where SSE makes them
    in the place of a factor."""
    registers, lanes = vector_registers(target), vector_lanes(target)
    return registers - (6 if (registers, lanes) == (16, 4) else 4)


def most_rows(vectors: int, registers: int) -> int:
    """Rows of sums, `vectors` wide, that `registers` hold beside a row of one factor and one element of the other: with
    one less, as for 7 x 4 in 32 registers, LLVM spills in each step, and a product takes up to 2.4 times as long."""
    return max(1, (registers - 1) // vectors - 1)


def most_sums(target: Target) -> list[int]:
    """The same of `target` by the number of vectors, of no more sums than `accumulator_registers`. For all numbers that
    a tile may have, as asking LLVM of the processor takes longer than the choice among tiles."""
    budget, registers = accumulator_registers(target), vector_registers(target)
    return [0, *(max(1, min(budget // vectors, most_rows(vectors, registers))) for vectors in range(1, budget + 1))]


def _cycles(pixels: int, registers: int) -> float:
    """Cycles of one reduction step of a tile: `pixels` broadcasts, `registers` weight loads, their products."""
    if not pixels:
        return 0.0
    products = pixels * registers
    loads = (pixels + registers) / _LOADS
    return max(products / _PRODUCTS, loads, _LATENCY) + _STREAM * registers + _OVERHEAD


def choose_tile(
    pixels: int, vectors: int, registers_each: int, target: Target, *, rows: int = 1, chunked: bool = False
) -> Tile:
    """The tile with which the cores of `target` need the fewest cycles for `rows` rows of `pixels` x `vectors`.

    `registers_each` is how many registers a packed vector takes; a tile has no more than there are (`most_sums`).
    Vectors are split evenly; the pixels may leave a tail, which costs as a smaller tile does. `chunked` allows the
    pixels of a row to be divided between cores, in parts without tails.
    """
    best, best_cost = Tile(1, 1), float("inf")
    most, cores = most_sums(target), num_cores(target)
    counts = [v for v in range(1, vectors + 1) if vectors % v == 0 and (v == 1 or v * registers_each < len(most))]
    chunks = [c for c in range(1, min(pixels, _CHUNKS * cores) + 1) if pixels % c == 0] if chunked else [1]
    for count, parts in itertools.product(counts, chunks):
        registers = count * registers_each
        length = pixels // parts
        turns = -(-rows * parts * (vectors // count) // cores)
        for size in range(1, min(length, most[registers] if registers < len(most) else 1) + 1):
            whole, tail = divmod(length, size)
            if tail and parts > 1:
                continue  # the tile's bounds would be those of the row, not of its part
            cost = turns * (whole * _cycles(size, registers) + _cycles(tail, registers))
            if tail:
                cost *= _TAIL
            if cost < best_cost:
                best, best_cost = Tile(size, count, parts, cost), cost
    return best
