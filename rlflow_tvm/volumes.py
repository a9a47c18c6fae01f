"""Three-dimensional convolutions and pools as two-dimensional ones, over frames.

The frames of a volume (N, C, D, H, W) are images (N D, C, H, W). A convolution reads, for each frame of its output, as
many frames as its window is deep: put side by side as channels they are the data of a two-dimensional one, whose
weights are the same numbers in another order. A pool is one within the frames, then one from frame to frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Node, Template, all_bindings, bound
from rlflow_tvm.ir import known_shape
from rlflow_tvm.lifting import CONCAT, ELEMENTWISE, Lifter, is_plain

_CONVS = {"relax.nn.conv3d": "OIDHW", "relax.nn.conv3d_transpose": "IODHW"}
"""Operator -> the layout of its weights."""

_POOLS = {"relax.nn.max_pool3d": relax.op.nn.max_pool2d, "relax.nn.avg_pool3d": relax.op.nn.avg_pool2d}
_RANK = 5
_FRAMES_FIRST = [0, 2, 1, 3, 4]  # (N, C, D, H, W) to (N, D, C, H, W), and back
_Build = Callable[..., relax.Expr]


class VolumeLifter(Lifter):
    """Lifts volumes to frames. Of transposed convolutions that are both strided and dilated in depth none is taken, nor
    an average of integers, which is rounded once."""

    def begins(self, node: Node) -> bool:
        if not is_plain(node, _CONVS, _POOLS, "NCDHW"):
            return False
        attrs = node.value.attrs
        if node.op == "relax.nn.avg_pool3d":
            return str(node.var.ty.dtype).startswith(("float", "bfloat"))
        return node.op != "relax.nn.conv3d_transpose" or 1 in (int(attrs.strides[0]), int(attrs.dilation[0]))

    def goes_over(self, node: Node) -> bool:
        shape = known_shape(node.var.ty)
        if shape is None or len(shape) != _RANK:
            return False
        if node.op == CONCAT:
            return int(node.value.attrs.axis) % _RANK == 1
        return node.op in ELEMENTWISE and all(_goes_with(known_shape(var.ty), shape) for var in node.inputs)

    def reads_image(self, node: Node, var: relax.Var) -> bool:
        return node.op not in _CONVS or var not in node.inputs[-1:]  # a weight is read as it is

    def operand(self, node: Node, var: relax.Var, name: str) -> list[Node]:
        shape = _shape(var)
        if not self.reads_image(node, var):
            return []
        if len(shape) == _RANK:
            return _nodes(relax.DataflowVar(name, _frames_type(var.ty)), _frames, var)
        if len(shape) < 3:  # broadcast along a frame as along a volume
            return []
        *others, _, height, width = shape
        view = relax.DataflowVar(name, relax.TensorType([*others, height, width], str(var.ty.dtype)))
        return [bound(view, relax.op.reshape(var, view.ty.shape), view.ty)]

    def on_images(self, node: Node, value: relax.Expr, name: str) -> list[Node]:
        image = relax.DataflowVar(name, _frames_type(node.var.ty))
        if node.op == CONCAT:
            return [bound(image, relax.op.concat(list(map(_constant_as_frame, value.args[0].fields)), 1), image.ty)]
        if node.op in ELEMENTWISE:
            args = list(map(_constant_as_number, value.args))
            return [bound(image, relax.Call(value.op, args, value.attrs, value.ty_args), image.ty)]
        (batch, _, depth, *_), out = _shape(node.value.args[0]), _shape(node.var)
        return _nodes(image, _Window(node, batch, depth, out).build, *value.args)

    def back(self, var: relax.Var, image: relax.Var) -> list[Node]:
        batch, channels, depth, height, width = shape = _shape(var)

        def volume(emit: _Build, frames: relax.Expr) -> relax.Expr:
            if 1 in (channels, depth):  # the same bytes
                return relax.op.reshape(frames, shape)
            apart = emit(relax.op.reshape(frames, (batch, depth, channels, height, width)))
            return relax.op.permute_dims(apart, _FRAMES_FIRST)

        return _nodes(var, volume, image)


class _Window:
    """A convolution or a pool over the frames of `batch` volumes of `depth`; `out`: the shape of its result."""

    def __init__(self, node: Node, batch: int, depth: int, out: Sequence[int]) -> None:
        self.op, self.attrs, self.batch, self.depth, self.out = node.op, node.value.attrs, batch, depth, tuple(out)
        attrs = node.value.attrs
        (self.stride, *self.strides), (self.dilation, *self.dilations) = (
            list(map(int, each)) for each in (attrs.strides, attrs.dilation)
        )
        padding = list(map(int, attrs.padding))
        self.before, self.behind = padding[0], padding[3]
        self.padding = [*padding[1:3], *padding[4:]]

    def build(self, emit: _Build, data: relax.Expr, weight: relax.Expr | None = None) -> relax.Expr:
        """The frames of the result, of those of the data."""
        if len(_shape(data)) == _RANK:  # a constant, or what is the weight as well
            data = emit(_frames(emit, data))
        if weight is None:
            return self._pool(emit, data)
        return (self._conv if self.op == "relax.nn.conv3d" else self._transposed)(emit, data, weight)

    def _conv(self, emit: _Build, data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        groups, (outputs, channels, taps, *window) = int(self.attrs.groups), _shape(weight)
        begins = [tap * self.dilation for tap in range(taps)]
        data = self._side_by_side(emit, data, begins, self.before, self.behind, self.stride, groups)
        if taps > 1:
            weight = emit(relax.op.permute_dims(weight, _FRAMES_FIRST))
        weight = emit(relax.op.reshape(weight, (outputs, taps * channels, *window)))
        return relax.op.nn.conv2d(
            data, weight, self.strides, self.padding, self.dilations, groups, out_dtype=self.attrs.out_dtype or None
        )

    def _transposed(self, emit: _Build, data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        """With stride s in depth, output frame s q + r is made of the window's frames r, r + s, ... and of the data's
        q, q - 1, ...: one convolution with s times the channels computes those of all r."""
        groups, stride, (inputs, outputs, deep, *window) = int(self.attrs.groups), self.stride, _shape(weight)
        taps = -(-deep // stride)
        reach = (taps - 1) * self.dilation
        begins = [reach - tap * self.dilation for tap in range(taps)]
        data = self._side_by_side(emit, data, begins, reach, reach, 1, groups)
        if taps * stride > deep:
            weight = emit(relax.op.nn.pad(weight, [0] * 5 + [taps * stride - deep] + [0] * 4))
        split = emit(relax.op.reshape(weight, (groups, inputs // groups, outputs, taps, stride, *window)))
        sorted_by_tap = emit(relax.op.permute_dims(split, [0, 3, 1, 2, 4, 5, 6]))
        weight = emit(relax.op.reshape(sorted_by_tap, (taps * inputs, outputs * stride, *window)))
        behind = list(map(int, self.attrs.output_padding))[1:]
        result = relax.op.nn.conv2d_transpose(
            data, weight, self.strides, self.padding, behind, self.dilations, groups,
            out_dtype=self.attrs.out_dtype or None,
        )  # fmt: skip
        frames, (batch, channels, depth, *size) = self.depth + reach, self.out
        if stride > 1:
            apart = emit(relax.op.reshape(emit(result), (batch, frames, channels, stride, *size)))
            result = relax.op.permute_dims(apart, [0, 1, 3, 2, 4, 5])
        if self.before or frames * stride != depth:
            every = emit(relax.op.reshape(emit(result), (batch, frames * stride, channels, *size)))
            missing = self.before + depth - frames * stride  # behind the last frame that there is, by output padding
            if missing > 0:
                every = emit(relax.op.nn.pad(every, [0, 0, 0, missing] + [0] * 6))
            result = relax.op.strided_slice(every, [1], [self.before], [self.before + depth])
        elif stride == 1:
            return result
        return relax.op.reshape(emit(result), (batch * depth, channels, *size))

    def _side_by_side(
        self, emit: _Build, data: relax.Expr, begins: Sequence[int], before: int, behind: int, stride: int, groups: int
    ) -> relax.Expr:
        """Frames, as many zero ones `before` and `behind`, of which those from each of `begins` on become one's
        channels, group by group."""
        _, channels, *size = _shape(data)
        batch, depth, pixels = self.batch, before + self.depth + behind, size[0] * size[1]
        count = (depth - max(begins) - 1) // stride + 1
        if len(begins) == stride == 1 and not before and not behind:
            return data
        data = emit(relax.op.reshape(data, (batch, self.depth, groups, channels // groups * pixels)))
        if before or behind:
            data = emit(relax.op.nn.pad(data, [0, 0, before, behind, 0, 0, 0, 0]))
        ends = [begin + (count - 1) * stride + 1 for begin in begins]
        shifted = [
            emit(relax.op.strided_slice(data, [1], [begin], [end], [stride]))
            for begin, end in zip(begins, ends, strict=True)
        ]
        together = emit(relax.op.concat(shifted, 3)) if len(shifted) > 1 else shifted[0]
        return emit(relax.op.reshape(together, (batch * count, len(begins) * channels, *size)))

    def _pool(self, emit: _Build, data: relax.Expr) -> relax.Expr:
        """Least and greatest, sums and counts are those within the frames, then those from frame to frame."""
        attrs, pool, (batch, channels, depth, *size) = self.attrs, _POOLS[self.op], self.out
        kept = {"ceil_mode": bool(attrs.ceil_mode), "count_include_pad": bool(attrs.count_include_pad)}
        deep, *window = map(int, attrs.pool_size)
        result = pool(data, window, self.strides, self.padding, self.dilations, **kept)
        if deep == self.stride == 1 and not self.before and not self.behind:
            return result
        lines = emit(relax.op.reshape(emit(result), (batch, 1, self.depth, channels * size[0] * size[1])))
        padding = self.before, 0, self.behind, 0
        result = pool(lines, (deep, 1), (self.stride, 1), padding, (self.dilation, 1), **kept)
        return relax.op.reshape(emit(result), (batch * depth, channels, *size))


def _goes_with(shape: Sequence[int] | None, result: Sequence[int]) -> bool:
    """Whether an operand of this shape is broadcast to frames as it is to the volumes of the result."""
    if shape is None:
        return False
    if len(shape) < _RANK:
        return len(shape) < 3 or shape[-3] == 1
    own, whole = (shape[0], shape[2]), (result[0], result[2])
    return own in (whole, (1, 1))


def _frames(emit: _Build, volume: relax.Expr) -> relax.Expr:
    batch, channels, depth, *size = _shape(volume)
    if 1 not in (channels, depth):
        volume = emit(relax.op.permute_dims(volume, _FRAMES_FIRST))
    return relax.op.reshape(volume, (batch * depth, channels, *size))


def _frames_type(ty: relax.TensorType) -> relax.TensorType:
    shape = known_shape(ty)
    assert shape is not None
    batch, channels, depth, *size = shape
    return relax.TensorType([batch * depth, channels, *size], str(ty.dtype))


def _constant_as_frame(operand: relax.Expr) -> relax.Expr:
    """The operand; of a constant of one element (others are no part of a function, see `rlflow_tvm.ir`) the frame."""
    if not isinstance(operand, tvm.ir.GenericConst):
        return operand
    return relax.const(operand.value.numpy().reshape(1, 1, 1, 1), str(operand.ty.dtype))


def _constant_as_number(operand: relax.Expr) -> relax.Expr:
    """The operand; of a constant of one element its number, as it might have more axes than a frame."""
    if not isinstance(operand, tvm.ir.GenericConst):
        return operand
    return relax.const(operand.value.numpy().reshape(()), str(operand.ty.dtype))


def _nodes(result: relax.Var, build: _Build, *operands: relax.Expr) -> list[Node]:
    """The nodes of what `build(emit, *operands)` computes, which is bound to `result`."""
    params = [relax.Var(f"operand{i}", operand.ty) for i, operand in enumerate(operands)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(output)
    template = Template(tuple(params), tuple(all_bindings(builder.get()["main"])))
    return template.binding(result, operands)


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    shape = known_shape(expr.ty)
    assert shape is not None  # `begins` and `goes_over` have seen to that
    return shape
