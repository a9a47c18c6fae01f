"""The loop nest of a Winograd convolution: transform of the input, products, transform of the result.

Transforms run over vectors of channels, a tile at a time, without a loop. Rows of the input are first copied into a
zero-padded buffer that stays in the first-level cache, where plain layouts are turned so that channels are innermost;
rows of the output leave by the same way, the element-wise operators behind the convolution being applied to them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx

from .emit import Emitter, Index, splat, transpose
from .winograd_plan import Plan
from .winograd_transform import plane, transform_data, transform_product

Finish = Callable[[Sequence[Index], tvm.ir.Expr], tirx.Stmt]
"""Given the place of an output and its value: the statement that applies the epilogue and stores it."""


@dataclass(frozen=True)
class Nest:
    """One convolution: its plan, its operands, the shape and layout (block; 0: plain) of its output.

    `threads`: whether its tasks are divided between the cores.
    """

    plan: Plan
    data: tirx.Buffer
    taps: tirx.Buffer
    out_shape: tuple[int, ...]
    lanes: int
    threads: bool

    def emit(self, emit: Emitter, finish: Finish) -> None:
        """The whole nest."""
        plan, points = self.plan, self.plan.points
        kind = tirx.ForKind.PARALLEL if self.threads else tirx.ForKind.SERIAL
        chunks = self.images * plan.tile_rows // plan.chunk
        panels = int(self.taps.shape[0])
        tiles = plan.chunk * plan.tile_columns
        shape = [chunks if plan.ahead else 1, points**2, self.in_blocks, tiles, self.in_lanes]
        inputs = emit.allocate("inputs", shape)
        if plan.ahead:
            tasks = self.images * plan.tile_rows * self.in_blocks
            with emit.loop(tasks, "task", kind) as task:
                row = emit.bind(task // self.in_blocks, "row")
                self._transform_row(emit, inputs, row // plan.chunk, row, task % self.in_blocks)
            with emit.loop(chunks * panels, "task", kind) as task:
                chunk, panel = emit.bind(task // panels, "chunk"), emit.bind(task % panels, "panel")
                self._compute(emit, inputs, chunk, chunk, panel, finish)
            return
        with emit.loop(chunks, "chunk", kind) as chunk:
            with emit.loop(plan.chunk, "r") as r, emit.loop(self.in_blocks, "block") as block:
                self._transform_row(emit, inputs, 0, chunk * plan.chunk + r, block)
            with emit.loop(panels, "panel") as panel:
                self._compute(emit, inputs, 0, chunk, panel, finish)

    @property
    def images(self) -> int:
        """The batch."""
        return int(self.data.shape[0])

    @property
    def block(self) -> int:
        """Channels of a block of the input; 0 for a plain layout."""
        return int(self.data.shape[4]) if len(self.data.shape) == 5 else 0

    @property
    def channels(self) -> int:
        """Input channels."""
        return int(self.taps.shape[2])

    @property
    def in_lanes(self) -> int:
        """Input channels in one vector."""
        return min(self.lanes, self.block or self.lanes)

    @property
    def in_blocks(self) -> int:
        """Vectors of input channels; the last may be partly unused."""
        return -(-self.channels // self.in_lanes)

    def _transform_row(self, emit: Emitter, inputs: tirx.Buffer, slot: Index, row: Index, block: Index) -> None:
        """Transform one row of tiles of one vector of channels; `row` counts over all images."""
        plan, lanes = self.plan, self.in_lanes
        image, first = emit.bind(row // plan.tile_rows), emit.bind(row % plan.tile_rows * plan.size - plan.top)
        width = plan.tile_columns * plan.size + plan.points - plan.size
        padded = emit.allocate("padded", [plan.points, width, lanes])
        height = int(self.data.shape[2])
        with emit.loop(plan.points, "line") as line:
            y = emit.bind(first + line, "y")
            inside = tirx.all(y >= 0, y < height)
            with emit.when(inside):
                self._copy_line(emit, padded, line, image, y, block)
            with emit.when(tirx.Not(inside)):
                self._clear(emit, padded, line, 0, width)
        place = emit.bind(row % plan.chunk * plan.tile_columns, "place")
        with emit.loop(plan.tile_columns, "tile") as tile:
            window = [
                [emit.load(padded, (i, tile * plan.size + j, 0), lanes) for j in range(plan.points)]
                for i in range(plan.points)
            ]
            transformed = plane(window, lambda line: transform_data(line, emit.bind), emit.bind)
            for i, values in enumerate(transformed):
                for j, value in enumerate(values):
                    emit.store(inputs, (slot, i * plan.points + j, block, place + tile, 0), value, lanes)

    def _copy_line(self, emit: Emitter, padded: tirx.Buffer, line: Index, image: Index, y: Index, block: Index) -> None:
        """One line of the input, channels innermost, with zeros before and behind it."""
        lanes, left, width = self.in_lanes, self.plan.left, int(self.data.shape[3])
        self._clear(emit, padded, line, 0, left)
        channel = block * lanes
        if self.block:
            with emit.loop(width, "x") as x:
                source = (image, channel // self.block, y, x, channel % self.block)
                emit.store(padded, (line, x + left, 0), emit.load(self.data, source, lanes), lanes)
        else:
            self._turn_line(emit, padded, line, image, y, channel)
        self._clear(emit, padded, line, left + width, int(padded.shape[1]))

    def _turn_line(
        self, emit: Emitter, padded: tirx.Buffer, line: Index, image: Index, y: Index, channel: Index
    ) -> None:
        """The same out of a plain layout. Lanes without a channel repeat the last one: no product reads them."""
        lanes, left, width = self.in_lanes, self.plan.left, int(self.data.shape[3])
        ragged = self.channels % lanes
        sources = [tirx.min(channel + k, self.channels - 1) if ragged else channel + k for k in range(lanes)]
        pixels = min(lanes, 1 << (width.bit_length() - 1))
        if pixels == 1:
            for k, source in enumerate(sources):
                emit.store(padded, (line, left, k), emit.load(self.data, (image, source, y, 0), 1), 1)
            return
        with emit.loop(-(-width // pixels), "part") as part:
            # the last part may reach back over the one before it
            x = emit.bind(tirx.min(part * pixels, width - pixels), "x") if width % pixels else part * pixels
            vectors = [emit.load(self.data, (image, source, y, x), pixels) for source in sources]
            for k, vector in enumerate(transpose(emit, vectors, pixels)):
                emit.store(padded, (line, x + left + k, 0), vector, lanes)

    def _clear(self, emit: Emitter, padded: tirx.Buffer, line: Index, start: int, stop: int) -> None:
        if stop > start:
            with emit.loop(stop - start, "x") as x:
                emit.store(padded, (line, start + x, 0), splat(0.0, self.in_lanes), self.in_lanes)

    def _compute(
        self, emit: Emitter, inputs: tirx.Buffer, slot: Index, chunk: Index, panel: Index, finish: Finish
    ) -> None:
        """One task: the products of a chunk and a panel, and the outputs made of them."""
        plan, points = self.plan, self.plan.points
        tiles = plan.chunk * plan.tile_columns
        products = emit.allocate("products", [points**2, tiles, plan.panel])
        whole, rest = divmod(tiles, plan.height)
        with emit.loop(points**2, "point") as point:
            if whole:
                with emit.loop(whole, "part") as part:
                    self._multiply(emit, inputs, products, (slot, panel, point), part * plan.height, plan.height)
            if rest:
                self._multiply(emit, inputs, products, (slot, panel, point), whole * plan.height, rest)
        rows = emit.allocate(
            "rows", [plan.size, -(-plan.tile_columns * plan.size // self.lanes) * self.lanes, self.lanes]
        )
        with emit.loop(plan.chunk, "r") as r, emit.loop(plan.panel // self.lanes, "vector") as vector:
            with emit.loop(plan.tile_columns, "tile") as tile:
                index = (r * plan.tile_columns + tile, vector * self.lanes)
                square = [
                    [emit.load(products, (i * points + j, *index), self.lanes) for j in range(points)]
                    for i in range(points)
                ]
                result = plane(square, lambda line: transform_product(line, emit.bind), emit.bind)
                for i, values in enumerate(result):
                    for j, value in enumerate(values):
                        emit.store(rows, (i, tile * plan.size + j, 0), value, self.lanes)
            row = emit.bind(chunk * plan.chunk + r, "row")
            self._write(emit, rows, row, emit.bind(panel * plan.panel + vector * self.lanes, "out"), finish)

    def _multiply(
        self,
        emit: Emitter,
        inputs: tirx.Buffer,
        products: tirx.Buffer,
        where: tuple[Index, Index, Index],
        first: Index,
        height: int,
    ) -> None:
        """The sums of `height` tiles from `first` on and one panel, at one point, kept in registers."""
        slot, panel, point = where
        lanes, vectors = self.lanes, self.plan.panel // self.lanes
        sums = emit.allocate("sums", [height * vectors, lanes])
        for i in range(height * vectors):
            emit.store(sums, (i, 0), splat(0.0, lanes), lanes)

        def accumulate(block: Index, lane: Index) -> None:
            channel = block * self.in_lanes + lane
            weights = [emit.load(self.taps, (panel, point, channel, v * lanes), lanes) for v in range(vectors)]
            for i in range(height):
                value = emit.bind(splat(tirx.BufferLoad(inputs, [slot, point, block, first + i, lane]), lanes))
                for v, weight in enumerate(weights):
                    place = i * vectors + v
                    held = tirx.BufferLoad(sums, [place, tirx.Ramp(0, 1, lanes)])
                    emit.store(sums, (place, 0), held + value * weight, lanes)

        whole, rest = divmod(self.channels, self.in_lanes)
        if whole:
            with emit.loop(whole, "block") as block, emit.loop(self.in_lanes, "lane") as lane:
                accumulate(block, lane)
        if rest:
            with emit.loop(rest, "lane") as lane:
                accumulate(whole, lane)
        for i in range(height):
            for v in range(vectors):
                value = tirx.BufferLoad(sums, [i * vectors + v, tirx.Ramp(0, 1, lanes)])
                emit.store(products, (point, first + i, v * lanes), value, lanes)

    def _write(self, emit: Emitter, rows: tirx.Buffer, row: Index, out: Index, finish: Finish) -> None:
        """The lines of one row of tiles, for one vector of output channels from `out` on, to where they belong."""
        plan, lanes = self.plan, self.lanes
        height, width, *block = self.out_shape[2:]
        image, first = emit.bind(row // plan.tile_rows), emit.bind(row % plan.tile_rows * plan.size)
        channels = self.out_shape[1] * (block[0] if block else 1)
        with emit.loop(plan.size, "line") as line:
            y = emit.bind(first + line, "y")
            with emit.when(True if height % plan.size == 0 else y < height):
                if not block:
                    self._write_plain(emit, rows, line, (image, out, y), finish)
                    return
                part = min(lanes, block[0])
                for start in range(0, lanes, part):
                    channel = out + start
                    inside = True if channels % plan.panel == 0 else channel < channels
                    with (
                        emit.when(inside),
                        emit.loop(width, "x") as x,
                        emit.loop(part, "lane", tirx.ForKind.VECTORIZED) as lane,
                    ):
                        value = tirx.BufferLoad(rows, [line, x, lane + start])
                        index = (image, channel // block[0], y, x, channel % block[0] + lane)
                        emit.add(finish(index, value))

    def _write_plain(
        self, emit: Emitter, rows: tirx.Buffer, line: Index, where: tuple[Index, Index, Index], finish: Finish
    ) -> None:
        lanes = self.lanes
        width, (image, out, y) = self.out_shape[3], where
        parts = -(-width // lanes)
        turned = emit.allocate("turned", [lanes, parts * lanes])
        with emit.loop(parts, "part") as part:
            vectors = [emit.load(rows, (line, part * lanes + k, 0), lanes) for k in range(lanes)]
            for k, vector in enumerate(transpose(emit, vectors, lanes)):
                emit.store(turned, (k, part * lanes), vector, lanes)
        whole, rest = divmod(width, lanes)
        with emit.loop(lanes, "channel") as k:
            inside = True if self.out_shape[1] % self.plan.panel == 0 else out + k < self.out_shape[1]
            with emit.when(inside):
                for parts, length in ((whole, lanes), (1, rest)):
                    if not parts or not length:
                        continue
                    with (
                        emit.loop(parts, "part") as part,
                        emit.loop(length, "lane", tirx.ForKind.VECTORIZED) as lane,
                    ):
                        x = (part if length == lanes else whole) * lanes + lane
                        emit.add(finish((image, out + k, y, x), tirx.BufferLoad(turned, [k, x])))
