"""How many channels and vectors of pixels one register tile of a pixel convolution holds, and what that costs.

The pixels of a tile lie apart in the image: a row of a few vectors for each input channel, in another page often, and
across cache lines. Where many tiles of channels read them they are copied first, side by side.

The model counts cycles of one core. A step of the reduction multiplies a column of weights with a row of pixels: it
takes as long as its products, its loads, the latency of a sum, or the pixels' way from the second cache, whichever is
longest. To that comes what is read and written beyond the second cache. Its constants were fitted to pointwise
convolutions of SqueezeNet, ResNet-50 and Inception-v3 on an x86 server core with AVX-512.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tvm.target import Target

from ..target import num_cores, vector_lanes
from .conv_tile import ConvCost, most_sums

LATENCY = 4.0  # cycles until a sum may be added to again
LOOP = 1.0  # cycles of the loop itself, per step
ACROSS = 1.5  # loads for a vector of which about half lie across two cache lines
_TILE = 40.0  # cycles to begin and end a tile
_LINE = 16  # floats in a cache line
_SHORT_RUNS = 2.0  # how much longer a byte of the data takes that is read in runs of one line
_OUT_OF_ORDER = 2.0  # how much longer a byte of the output takes that is written in short runs, row after row
_LONG_RUN = 6 * _LINE  # floats
_PAGE = 4096
_PAGES = 64  # that a core finds at once: as many entries has the first level of its table of addresses
_FAR_PAGE = 3.5  # cycles of a step more where each is in another page, of more than these
_ACROSS_STEP = 3.5  # cycles of a step more where vectors lie across two lines
_COPY = 5.0  # cycles to copy a vector of pixels
_GATHER = 3.0  # how much longer that takes where pixels are left out
_MANY_PIXELS = 12  # vectors of pixels a core should have at least
_MAX_ROWS = 16
_MAX_VECTORS = 6
_MAX_GROUPS = 2  # of tiles of channels, for each core
_FEW_CHANNELS = 8  # below this, rows need not divide the channels: the last tile would be most of them


@dataclass(frozen=True)
class PixelTile:
    """`rows` output channels by `vectors` vectors of pixels.

    `channels_outside`: the tiles of one row of channels are computed one after the other, so that the output is written
    in its order and the data re-read from the second cache; otherwise those of one column of pixels, for data that does
    not fit there. `groups`: in so many groups are the tiles of channels divided, each of which copies the column's
    pixels and computes its tiles one after the other; 0 where the pixels are read as they lie.
    """

    rows: int
    vectors: int
    channels_outside: bool
    cycles: float
    groups: int = 0


@dataclass(frozen=True)
class PixelProduct:
    """`batch` products of (channels, depth) weights by (depth, pixels) data, float32.

    `strided`: the pixels are some of an image's.
    """

    batch: int
    channels: int
    depth: int
    pixels: int
    strided: bool = False

    def tile(self, target: Target) -> PixelTile:
        """The tile with the fewest cycles on all cores of `target`."""
        lanes, cores, most = vector_lanes(target), num_cores(target), most_sums(target)
        outside = self._channels_outside(lanes, cores)
        tiles = []
        for rows, vectors in itertools.product(
            range(1, min(self.channels, _MAX_ROWS) + 1),
            range(1, min(-(-self.pixels // lanes), _MAX_VECTORS) + 1),
        ):
            whole = self.channels % rows == 0 or self.channels < _FEW_CHANNELS or rows == _FEW_CHANNELS
            if rows > most[vectors] or not whole:
                continue
            if not self.strided:
                tiles.append(PixelTile(rows, vectors, outside, self._cycles(rows, vectors, outside, lanes, cores)))
            for groups in range(1, _MAX_GROUPS * cores + 1):
                if -(-self.channels // rows) % groups == 0:
                    cycles = self._copied_cycles(rows, vectors, groups, lanes, cores)
                    tiles.append(PixelTile(rows, vectors, False, cycles, groups))
        return min(tiles, key=lambda tile: tile.cycles)

    def _channels_outside(self, lanes: int, cores: int) -> bool:
        """Whether the cores divide the channels, and each reads the whole image; see `PixelTile`.

        Measured inside SqueezeNet, where the previous kernel has left half of the image in either core's cache: a layer
        of more inputs than outputs is faster where each core reads only its part, if there are pixels enough to divide.
        """
        if self._image() > max(ConvCost.SECOND_CACHE, self._weights()):
            return False
        return self.channels >= self.depth or self.pixels < _MANY_PIXELS * cores * lanes

    def _cycles(self, rows: int, vectors: int, outside: bool, lanes: int, cores: int) -> float:
        width = vectors * lanes
        near = self.depth * (self.pixels if outside else width) * 4 <= ConvCost.FIRST_CACHE
        whole, tail = divmod(self.pixels, width)
        each = _TILE
        column = whole * (self.depth * self._step(rows, width, lanes, near) + each)
        if tail:
            column += self.depth * self._step(rows, tail, lanes, near) + each
        blocks = self.batch * -(-self.channels // rows)
        columns = whole + (tail > 0)
        turns = -(-blocks * columns // cores)  # threads get equal numbers of tiles
        return column / columns * turns + self._traffic(blocks, columns, width, outside, cores)

    def _copied_cycles(self, rows: int, vectors: int, groups: int, lanes: int, cores: int) -> float:
        """As `_cycles`, with the pixels of a column copied for each of `groups` groups of tiles."""
        whole, tail = divmod(self.pixels, vectors * lanes)
        columns = whole + (tail > 0)
        turns = -(-self.batch * groups * columns // cores)
        tails = turns // columns if tail else 0  # of the core that has the fewest
        full, last = (self._column(rows, count, groups, lanes) for count in (vectors, -(-tail // lanes)))
        # a copy has many loads under way at once, however short the runs
        traffic = self._traffic(self.batch * -(-self.channels // rows), columns, _LONG_RUN, False, cores)
        return (turns - tails) * full + tails * last + traffic

    def _column(self, rows: int, vectors: int, groups: int, lanes: int) -> float:
        """Cycles to copy a column of `vectors` vectors and to multiply it with a group of tiles."""
        copy = _COPY * (_GATHER if self.strided else 1.0) * self.depth * vectors
        near = 4 * self.depth * (vectors * lanes + rows) <= ConvCost.FIRST_CACHE
        lines = 0 if near else -(-vectors * lanes // _LINE)
        step = max(rows * vectors / 2, (rows + vectors) / 2, LATENCY, lines * ConvCost.SECOND_LINE) + LOOP
        return copy + -(-self.channels // rows) // groups * (self.depth * step + _TILE)

    def _step(self, rows: int, pixels: int, lanes: int, near: bool) -> float:
        whole, tail = divmod(pixels, lanes)
        vectors = whole + (tail > 0)
        across = self.pixels % lanes > 0  # then rows begin anywhere in a line
        loads = rows + whole * (ACROSS if across else 1.0) + (3.0 if tail > 1 else tail)
        lines = 0 if near else -(-vectors * lanes // _LINE) + across
        pages = min(1.0, 4 * self.pixels / _PAGE)  # that each step begins
        apart = _FAR_PAGE * pages if pages * self.depth > _PAGES else 0.0
        busy = max(rows * vectors / 2, loads / 2, LATENCY, lines * ConvCost.SECOND_LINE)
        return busy + LOOP + apart + (_ACROSS_STEP if across else 0.0)

    def _traffic(self, blocks: int, columns: int, run: int, outside: bool, cores: int) -> float:
        """Cycles of a core for what comes from beyond the second cache and goes there, the data in runs of so many
        floats."""
        runs = 1 + _SHORT_RUNS * _LINE / run
        image, output = self.batch * self._image() * runs, self.batch * self.channels * self.pixels * 4
        if outside:
            readers = min(cores, blocks // self.batch)
            passes = 1.0 if self._image() <= ConvCost.SECOND_CACHE else blocks / self.batch / readers
            weights = self._weights() * (1 if self._weights() <= ConvCost.SECOND_CACHE else self.batch)
            return ConvCost.FAR_BYTE * (image * passes * (1 + readers) / 2 + weights + output) / cores
        passes = 1.0 if self._weights() <= ConvCost.SECOND_CACHE else self.batch * columns / cores
        return ConvCost.FAR_BYTE * (self._weights() * passes + (image + _OUT_OF_ORDER * output) / cores)

    def _image(self) -> int:
        """Bytes of one image."""
        return 4 * self.depth * self.pixels

    def _weights(self) -> int:
        """Bytes of the weights."""
        return 4 * self.channels * self.depth
