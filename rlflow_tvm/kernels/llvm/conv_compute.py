"""Tensor expressions of the convolutions: what is computed, in the axes that the schedule rule wants.

A convolution is computed into a *packed* tensor of `v` output channels a vector, whatever the layouts of its arguments
are: only the last step (`unpack`) knows the layout of the output. Weights are packed in the order in which the
reduction reads them; packing reads weights alone, so the pipeline evaluates it once, at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import SupportsInt

from tvm import te, tirx

CONV_ATTR = "rlflow.conv2d"  # on the block of a dense or grouped convolution: packed vectors of one group
UNEVEN_ATTR = "rlflow.conv2d_uneven"  # beside CONV_ATTR: groups leave lanes empty, so output and packed tiles differ
OUT_AXES_ATTR = "rlflow.conv2d_out_axes"  # beside CONV_ATTR: how many axes the output has, in its own layout
DEPTHWISE_ATTR = "rlflow.depthwise_conv2d"  # on the block of a depthwise convolution
PAD_ATTR = "rlflow.pad"  # on a zero-padding block
APART_ATTR = "rlflow.columns_apart"  # beside PAD_ATTR: its columns are in parts, an axis in front of the last
_MANY_CHANNELS = 8  # fewer plain input channels than this make too short an inner loop
MAX_LANES = 16  # output channels computed together; a multiple of every float32 vector width in use


def pair(values: Iterable[SupportsInt]) -> tuple[int, int]:
    """Two numbers, for height and width."""
    height, width = (int(value) for value in values)
    return height, width


def four_sides(values: Iterable[SupportsInt]) -> tuple[int, int, int, int]:
    """Four numbers: top, left, bottom, right."""
    top, left, bottom, right = (int(value) for value in values)
    return top, left, bottom, right


@dataclass(frozen=True)
class ConvShape:
    """Sizes of one convolution. `data_block`, `kernel_block` and `out_block` are 0 for an unblocked layout."""

    batch: int
    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]  # top, left, bottom, right
    dilation: tuple[int, int]
    groups: int
    data_block: int
    kernel_block: int
    out_block: int
    dtype: str

    @property
    def out_size(self) -> tuple[int, int]:
        """Output height and width."""
        top, left, bottom, right = self.padding
        sizes = (self.height + top + bottom, self.width + left + right)
        spans = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return (
            (sizes[0] - spans[0]) // self.strides[0] + 1,
            (sizes[1] - spans[1]) // self.strides[1] + 1,
        )

    @property
    def is_depthwise(self) -> bool:
        """One input and one output channel a group, in matching blocks."""
        return (
            self.groups > 1
            and self.groups == self.in_channels == self.out_channels
            and self.data_block == self.out_block == self.kernel_block
        )

    @property
    def is_pointwise(self) -> bool:
        """A matrix product over all pixels: height and width can be one axis."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.padding)

    @property
    def merged(self) -> int:
        """How many small groups are computed as one, with zeros for the weights between them, to fill a vector.

        An infinity or NaN among the inputs of one group, times such a zero, is NaN in the outputs of all: inputs are
        taken to be finite. A test for each product would cost more than the merging saves.
        """
        merged = 1
        while self.groups % (2 * merged) == 0 and 2 * merged * self.out_channels // self.groups <= MAX_LANES:
            merged *= 2
        return merged

    @property
    def computed_groups(self) -> int:
        """The groups after merging; all that follows is of these."""
        return self.groups // self.merged

    @property
    def group_out(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.computed_groups

    @property
    def group_in(self) -> int:
        """Input channels of one group."""
        return self.in_channels // self.computed_groups

    @property
    def lanes(self) -> int:
        """Output channels in one packed vector: the power of two that holds a group, at most `MAX_LANES`."""
        lanes = 1
        while lanes < min(self.group_out, MAX_LANES):
            lanes *= 2
        return lanes

    @property
    def group_vectors(self) -> int:
        """Packed vectors of one group; the last may be partly empty."""
        return -(-self.group_out // self.lanes)

    @property
    def is_ragged(self) -> bool:
        """Whether the last vector of a group has empty lanes."""
        return self.group_vectors * self.lanes != self.group_out

    @property
    def inner_in(self) -> int:
        """Extent of the innermost reduction axis: the input block where the groups allow it, or all plain channels.

        1 for a few plain channels, as a first layer has: then the window is the inner loop.
        """
        if self.data_block:
            return self.data_block if self.group_in % self.data_block == 0 else 1
        return self.group_in if self.group_in >= _MANY_CHANNELS else 1


def pad_spatial(data: te.Tensor, padding: tuple[int, int, int, int], value: float) -> te.Tensor:
    """`data` (N, C, H, W[, c]) with height and width padded by (top, left, bottom, right); itself without padding."""
    if not any(padding):
        return data
    top, left, bottom, right = padding
    height, width = int(data.shape[2]), int(data.shape[3])
    shape = [data.shape[0], data.shape[1], height + top + bottom, width + left + right, *data.shape[4:]]

    def pixel(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var, *b: tirx.Var) -> tirx.Expr:
        # Sides without padding need no test; each test saved is one fewer in the inner loop.
        tests = [y >= top] if top else []
        tests += [y < height + top] if bottom else []
        tests += [x >= left] if left else []
        tests += [x < width + left] if right else []
        return tirx.if_then_else(tirx.all(*tests), data(n, c, y - top, x - left, *b), tirx.const(value, data.dtype))

    return te.compute(shape, pixel, name="pad", attrs={PAD_ATTR: 1})


def columns_apart(data: te.Tensor, padding: tuple[int, int, int, int], stride: int) -> te.Tensor:
    """`data` (N, C, H, W) padded by zeros to (N, C, H, stride, W / stride): every so many columns lie side by side, as
    windows want them that move by so many: of vectors that gather their elements LLVM makes single loads."""
    top, left, bottom, right = padding
    height, width = int(data.shape[2]), int(data.shape[3])
    columns = -(-(width + left + right) // stride)

    def pixel(n: tirx.Var, c: tirx.Var, y: tirx.Var, part: tirx.Var, x: tirx.Var) -> tirx.Expr:
        column = x * stride + part
        tests = [y >= top] if top else []
        tests += [y < height + top] if bottom else []
        tests += [column >= left] if left else []
        tests += [column < width + left] if columns * stride > width + left else []
        value = data(n, c, y - top, column - left)
        return tirx.if_then_else(tirx.all(*tests), value, tirx.const(0, data.dtype)) if tests else value

    shape = (data.shape[0], data.shape[1], height + top + bottom, stride, columns)
    return te.compute(shape, pixel, name="pad", attrs={PAD_ATTR: 1, APART_ATTR: 1})


def pack_weights(kernel: te.Tensor, shape: ConvShape) -> te.Tensor:
    """Weights in the order (vector, input block, KH, KW, channel in the block, lane), zero in the empty lanes."""
    lanes, vectors, inner = shape.lanes, shape.group_vectors, shape.inner_in

    def weight(o: tirx.Var, io: tirx.Var, kh: tirx.Var, kw: tirx.Var, ii: tirx.Var, lane: tirx.Var) -> tirx.Expr:
        in_group = (o % vectors) * lanes + lane
        channel = (o // vectors) * shape.group_out + in_group
        source = io * inner + ii
        own_in = shape.group_in // shape.merged  # input channels of a group before merging
        block = shape.kernel_block
        index = (source % own_in, kh, kw) if shape.merged > 1 else (source, kh, kw)
        value = kernel(channel // block, *index, channel % block) if block else kernel(channel, *index)
        tests = [in_group < shape.group_out] if shape.is_ragged else []
        if shape.merged > 1:
            tests.append(in_group // (shape.group_out // shape.merged) == source // own_in)
        return tirx.if_then_else(tirx.all(*tests), value, tirx.const(0, kernel.dtype)) if tests else value

    dims = (shape.computed_groups * vectors, shape.group_in // inner, *shape.kernel, inner, lanes)
    return te.compute(dims, weight, name="pack_weights")


def convolution(data: te.Tensor, packed: te.Tensor, shape: ConvShape) -> te.Tensor:
    """Convolution of `data` with `pack_weights`' result, in the output layout of `shape`."""
    padded = pad_spatial(data, shape.padding, 0.0)
    lanes, vectors, inner = shape.lanes, shape.group_vectors, shape.inner_in
    (stride_h, stride_w), (dilation_h, dilation_w) = shape.strides, shape.dilation
    out_h, out_w = shape.out_size
    io = te.reduce_axis((0, shape.group_in // inner), "io")
    kh = te.reduce_axis((0, shape.kernel[0]), "kh")
    kw = te.reduce_axis((0, shape.kernel[1]), "kw")
    ii = te.reduce_axis((0, inner), "ii")

    def pixel(n: tirx.Var, o: tirx.Var, y: tirx.Expr, x: tirx.Expr) -> tirx.Expr:
        row, column = y * stride_h + kh * dilation_h, x * stride_w + kw * dilation_w
        first = (o // vectors) * (shape.group_in // inner) if shape.computed_groups > 1 else 0
        if inner == shape.data_block:
            return padded(n, first + io, row, column, ii)
        channel = (first + io) * inner + ii
        if not shape.data_block:
            return padded(n, channel, row, column)
        return padded(n, channel // shape.data_block, row, column, channel % shape.data_block)

    def term(n: tirx.Var, o: tirx.Var, y: tirx.Expr, x: tirx.Expr, lane: tirx.Var) -> tirx.Expr:
        product = pixel(n, o, y, x).astype(shape.dtype) * packed(o, io, kh, kw, ii, lane).astype(shape.dtype)
        return te.sum(product, axis=[io, kh, kw, ii])

    outer = (shape.batch, shape.computed_groups * vectors)
    attrs = {CONV_ATTR: vectors, OUT_AXES_ATTR: 5 if shape.out_block else 4}
    if shape.computed_groups > 1 and shape.is_ragged:
        attrs[UNEVEN_ATTR] = 1
    if shape.is_pointwise:
        result = te.compute(
            (*outer, out_h * out_w, lanes),
            lambda n, o, p, lane: term(n, o, p // out_w, p % out_w, lane),
            name="conv2d",
            attrs=attrs,
        )
        return _unpack(lambda n, o, y, x, lane: result(n, o, y * out_w + x, lane), shape)
    result = te.compute((*outer, out_h, out_w, lanes), term, name="conv2d", attrs=attrs)
    if shape.out_block == lanes and not shape.is_ragged:
        return result
    return _unpack(result, shape)


def _unpack(packed: Callable[..., tirx.Expr], shape: ConvShape) -> te.Tensor:
    """The packed (N, vector, H, W, lane) result in the output layout."""
    lanes, vectors, block = shape.lanes, shape.group_vectors, shape.out_block

    def split(channel: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        if shape.computed_groups == 1 or not shape.is_ragged:
            return channel // lanes, channel % lanes
        in_group = channel % shape.group_out
        return (channel // shape.group_out) * vectors + in_group // lanes, in_group % lanes

    if not block:

        def plain(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var) -> tirx.Expr:
            vector, lane = split(c)
            return packed(n, vector, y, x, lane)

        return te.compute((shape.batch, shape.out_channels, *shape.out_size), plain, name="unpack")

    def blocked(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var, b: tirx.Var) -> tirx.Expr:
        vector, lane = (c, b) if block == lanes and not shape.is_ragged else split(c * block + b)
        return packed(n, vector, y, x, lane)

    dims = (shape.batch, shape.out_channels // block, *shape.out_size, block)
    return te.compute(dims, blocked, name="unpack")


def depthwise(data: te.Tensor, kernel: te.Tensor, shape: ConvShape) -> te.Tensor:
    """Depthwise convolution in the layout of `data`, kernel (C[/c], 1, KH, KW[, c])."""
    (stride_h, stride_w), (dilation_h, dilation_w) = shape.strides, shape.dilation
    top, left, bottom, right = shape.padding
    # The edge costs the vectors of a channel block one test; those along a row need the padding made first.
    apart = not shape.data_block and stride_w > 1 and shape.kernel[1] > 1
    source = data if shape.data_block else pad_spatial(data, shape.padding, 0.0)
    source = columns_apart(data, shape.padding, stride_w) if apart else source
    kh = te.reduce_axis((0, shape.kernel[0]), "kh")
    kw = te.reduce_axis((0, shape.kernel[1]), "kw")

    def pixel(n: tirx.Var, c: tirx.Var, y: tirx.Expr, x: tirx.Expr, *b: tirx.Var) -> tirx.Expr:
        if not shape.data_block or not any(shape.padding):
            return source(n, c, y, x, *b)
        tests = [y >= top] if top else []
        tests += [y < shape.height + top] if bottom else []
        tests += [x >= left] if left else []
        tests += [x < shape.width + left] if right else []
        return tirx.if_then_else(tirx.all(*tests), source(n, c, y - top, x - left, *b), tirx.const(0, data.dtype))

    def term(n: tirx.Var, c: tirx.Var, y: tirx.Var, x: tirx.Var, *b: tirx.Var) -> tirx.Expr:
        row, reach = y * stride_h + kh * dilation_h, kw * dilation_w
        if apart:
            value = source(n, c, row, tirx.floormod(reach, stride_w), x + tirx.floordiv(reach, stride_w))
        else:
            value = pixel(n, c, row, x * stride_w + reach, *b)
        return te.sum(value.astype(shape.dtype) * kernel(c, 0, kh, kw, *b).astype(shape.dtype), axis=[kh, kw])

    block = (shape.data_block,) if shape.data_block else ()
    dims = (shape.batch, shape.out_channels // (shape.data_block or 1), *shape.out_size, *block)
    return te.compute(dims, term, name="depthwise_conv2d", attrs={DEPTHWISE_ATTR: 1})
