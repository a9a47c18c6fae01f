"""Three-dimensional convolutions and pools: computed as numpy does, in two dimensions, with what follows fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cuda_checks import How, run_on_host, serialised, unscheduled
from kernel_checks import TARGET, assert_close, graph, random_arrays, run
from numpy.lib.stride_tricks import sliding_window_view
from tvm import relax

from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.kernels import extract_kernels
from rlflow_tvm.volumes import VolumeLifter

nn = relax.op.nn
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Conv:
    """(batch, input channels, depth, height, width), output channels, window, and attributes; `padding`: near sides,
    then far ones. `behind`: the output padding of a transposed one, None for a plain one."""

    data: tuple[int, ...]
    outputs: int
    window: Triple
    strides: Triple = (1, 1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    behind: Triple | None = None

    @property
    def weight(self) -> tuple[int, ...]:
        channels = (self.outputs, self.data[1]) if self.behind is None else (self.data[1], self.outputs)
        return channels[0], channels[1] // self.groups, *self.window

    def call(self, data: relax.Expr, weight: relax.Expr) -> relax.Call:
        if self.behind is None:
            return nn.conv3d(data, weight, self.strides, self.padding, self.dilation, self.groups)
        return nn.conv3d_transpose(data, weight, self.strides, self.padding, self.behind, self.dilation, self.groups)

    def __call__(self, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """In float64."""
        data, weight = data.astype("float64"), weight.astype("float64")
        kernels = weight.reshape(self.groups, -1, *self.weight[1:])
        return self._plain(data, kernels) if self.behind is None else self._transposed(data, kernels)

    def _plain(self, data: np.ndarray, kernels: np.ndarray) -> np.ndarray:
        sides = list(zip(self.padding[:3], self.padding[3:], strict=True))
        padded = np.pad(data, ((0, 0), (0, 0), *sides))
        spans = [(size - 1) * step + 1 for size, step in zip(self.window, self.dilation, strict=True)]
        steps = [slice(None, None, each) for each in (*self.strides, *self.dilation)]
        seen = sliding_window_view(padded, spans, axis=(2, 3, 4))[(..., *steps)]
        seen = seen.reshape(data.shape[0], self.groups, -1, *seen.shape[2:])
        result = np.einsum("ngcxyzijk,gocijk->ngoxyz", seen, kernels)
        return result.reshape(data.shape[0], self.outputs, *result.shape[3:])

    def _transposed(self, data: np.ndarray, kernels: np.ndarray) -> np.ndarray:
        """Each input voxel adds its window to the output."""
        extents, near, far = data.shape[2:], self.padding[:3], self.padding[3:]
        spans = [
            (extent - 1) * stride + (size - 1) * dilation + 1 + behind
            for extent, stride, size, dilation, behind in zip(
                extents, self.strides, self.window, self.dilation, self.behind, strict=True
            )
        ]
        result = np.zeros((data.shape[0], self.groups, self.outputs // self.groups, *spans))
        grouped = data.reshape(data.shape[0], self.groups, -1, *extents)
        for offset in np.ndindex(*self.window):
            begins = [o * d for o, d in zip(offset, self.dilation, strict=True)]
            where = [
                slice(begin, begin + (extent - 1) * stride + 1, stride)
                for begin, extent, stride in zip(begins, extents, self.strides, strict=True)
            ]
            result[(..., *where)] += np.einsum("ngi...,gio->ngo...", grouped, kernels[(..., *offset)])
        result = result.reshape(data.shape[0], self.outputs, *spans)
        return result[(..., *(slice(a, span - b) for a, span, b in zip(near, spans, far, strict=True)))]


CASES = {
    "ResNet3D": Conv((1, 16, 6, 9, 8), 24, (3, 3, 3), padding=(1, 1, 1, 1, 1, 1)),
    "stem": Conv((1, 3, 8, 12, 13), 16, (3, 7, 7), (1, 2, 2), (1, 3, 3, 1, 3, 3)),
    "strided": Conv((2, 8, 7, 6, 6), 16, (3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1)),
    "of a frame": Conv((2, 8, 5, 6, 6), 16, (1, 3, 3), padding=(0, 1, 1, 0, 1, 1)),
    "every other frame": Conv((2, 8, 5, 6, 6), 16, (1, 1, 1), (2, 2, 2)),
    "from frame to frame": Conv((2, 8, 5, 6, 7), 16, (3, 1, 1), padding=(1, 0, 0, 1, 0, 0)),
    "a voxel": Conv((2, 12, 5, 4, 4), 8, (1, 1, 1)),
    "dilated, uneven": Conv((1, 6, 9, 8, 7), 4, (3, 2, 3), (2, 1, 1), (2, 0, 1, 1, 3, 0), (2, 2, 1)),
    "groups": Conv((2, 12, 4, 5, 5), 6, (3, 3, 3), padding=(1, 1, 1, 0, 1, 1), groups=3),
    "depthwise": Conv((1, 16, 5, 5, 5), 16, (3, 3, 3), padding=(1, 1, 1, 1, 1, 1), groups=16),
    "one channel": Conv((2, 1, 4, 5, 5), 3, (2, 2, 2)),
    "one frame": Conv((2, 4, 1, 5, 5), 3, (3, 3, 3), padding=(1, 1, 1, 1, 1, 1)),
    "one element": Conv((2, 1, 3, 4, 5), 1, (1, 1, 1)),  # a weight which is no parameter
    "U-Net, up": Conv((1, 12, 4, 5, 6), 8, (2, 2, 2), (2, 2, 2), behind=(0, 0, 0)),
    "GAN, up": Conv((2, 8, 3, 4, 4), 6, (4, 4, 4), (2, 2, 2), (1, 1, 1, 1, 1, 1), behind=(0, 0, 0)),
    "odd, up": Conv((1, 8, 3, 4, 5), 6, (3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1), behind=(1, 1, 1)),
    "uneven, up": Conv((1, 6, 4, 3, 5), 4, (5, 3, 2), (3, 1, 2), (2, 0, 1, 1, 1, 0), behind=(2, 0, 1)),
    "no stride, up": Conv((1, 6, 4, 5, 5), 4, (3, 3, 3), behind=(0, 0, 0)),
    "dilated, up": Conv((1, 4, 5, 5, 5), 4, (3, 3, 3), (1, 1, 1), (1, 0, 2, 2, 0, 1), (2, 1, 2), behind=(0, 0, 0)),
    "of a frame, up": Conv((2, 4, 3, 4, 4), 6, (1, 2, 2), (1, 2, 2), behind=(0, 0, 0)),
    "stride alone, up": Conv((2, 4, 3, 4, 4), 6, (1, 1, 1), (3, 2, 2), behind=(2, 0, 1)),
    "groups, up": Conv((2, 12, 3, 4, 4), 6, (3, 3, 3), (2, 2, 2), (1, 1, 1, 0, 1, 0), groups=3, behind=(0, 0, 0)),
}  # fmt: skip


def names(build: Callable[..., relax.Expr], shapes: list[tuple[int, ...]], weights: int = 0) -> list[str]:
    return [kernel.name for kernel in extract_kernels(graph(build, shapes, weights), TARGET)]


@pytest.mark.parametrize(("case", "weights"), [*((case, 1) for case in CASES), ("groups", 0), ("groups, up", 0)])
def test_convolutions(case: str, weights: int) -> None:
    conv = CASES[case]
    shapes = [conv.data, conv.weight]
    arrays = random_arrays(shapes)
    (result,) = run(graph(conv.call, shapes, weights), arrays, weights).values
    assert_close(result, conv(*arrays))
    found = names(conv.call, shapes, weights)
    assert any("conv2d" in name or "winograd" in name for name in found)
    assert not any("conv3d" in name for name in found)


def test_what_follows_is_fused() -> None:
    """Bias, activation, and operands of every rank, themselves volumes or not, up to the next convolution."""
    conv = CASES["strided"]
    batch, channels, *size = conv(*map(np.zeros, (conv.data, conv.weight))).shape
    following = Conv((batch, channels, *size), 4, (1, 1, 1))
    extra = [(1, channels, 1, 1, 1), (batch, channels, *size), (channels, 1, 1, 1), (1, 1, size[2]), (size[2],), ()]
    shapes = [conv.data, *extra, conv.weight, following.weight]

    def build(data: relax.Expr, *others: relax.Expr) -> relax.Expr:
        bias, residual, scale, line, row, number, weight, last = others
        value = nn.relu(relax.op.add(conv.call(data, weight), bias))
        value = relax.op.multiply(relax.op.add(value, residual), scale)
        value = relax.op.subtract(relax.op.subtract(line, value), relax.op.add(row, number))
        return following.call(relax.op.where(relax.op.less(value, number), relax.op.tanh(value), value), last)

    arrays = random_arrays(shapes)
    (result,) = run(graph(build, shapes, 2), arrays, 2).values
    data, bias, residual, scale, line, row, number, weight, last = (array.astype("float64") for array in arrays)
    value = line - (np.maximum(conv(data, weight) + bias, 0) + residual) * scale - (row + number)
    assert_close(result, following(np.where(value < number, np.tanh(value), value), last))
    found = names(build, shapes, 2)
    assert sum("conv2d" in name for name in found) == 2
    assert any(name.startswith("fused_conv2d_add_relu_add_multiply_subtract_add_subtract") for name in found)


def test_what_is_broadcast_otherwise_stays() -> None:
    """Operands that differ from frame to frame, but not from volume to volume, and so on; where volumes join."""
    conv = Conv((2, 3, 4, 5, 5), 4, (1, 1, 1))
    extra = [(1, 1, 4, 1, 1), (2, 1, 1, 1, 1), (4, 4, 1, 1), (4, 1, 5)]
    shapes = [conv.data, *extra, conv.weight]

    def build(data: relax.Expr, *others: relax.Expr) -> relax.Expr:
        *added, weight = others
        value = conv.call(data, weight)
        sums = [nn.relu(relax.op.add(value, other)) for other in added]
        joined = [relax.op.concat([value, sums[0]], axis) for axis in (0, 1, 2, -4)]
        return relax.Tuple([*sums, *joined, nn.softmax(value, axis=2), value])

    arrays = random_arrays(shapes)
    data, *added, weight = arrays
    value = conv(data, weight)
    sums = [np.maximum(value + other, 0) for other in added]
    joined = [np.concatenate([value, sums[0]], axis) for axis in (0, 1, 2, 1)]
    softmax = np.exp(value) / np.exp(value).sum(axis=2, keepdims=True)
    for result, wanted in zip(run(graph(build, shapes), arrays).values, [*sums, *joined, softmax, value], strict=True):
        assert_close(result, wanted)


def test_constants_of_one_element() -> None:
    """They stay in the function, where all others are parameters: computed with, concatenated, pooled."""
    conv = Conv((1, 1, 1, 4, 5), 1, (1, 1, 1))

    def build(data: relax.Expr) -> relax.Expr:
        one = relax.const(np.full((1, 1, 1, 1, 1), 2, "float32"))
        value = relax.op.add(relax.const(np.full((1, 1), 2, "float32")), relax.op.add(conv.call(data, one), one))
        voxel = relax.op.concat([nn.max_pool3d(one, 1), one, conv.call(one, one)], 1)
        return relax.Tuple([nn.relu(value), nn.relu(voxel)])

    (data,) = random_arrays([conv.data])
    line, voxel = run(graph(build, [conv.data]), [data]).values
    assert_close(line, np.maximum(2 * data.astype("float64") + 4, 0))
    assert_close(voxel, np.array([2, 2, 4]).reshape(1, 3, 1, 1, 1))


def test_weights_that_are_computed() -> None:
    """A weight may be what was lifted, and the data itself."""
    conv = Conv((2, 2, 3, 4, 5), 2, (1, 1, 1))
    shapes = [conv.data, conv.weight]

    def build(data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        lifted = nn.relu(conv.call(data, weight))
        return relax.Tuple([nn.conv3d(relax.op.add(lifted, data), lifted), nn.conv3d(lifted, lifted), lifted])

    arrays = random_arrays(shapes)
    lifted = np.maximum(conv(*arrays), 0)
    whole = Conv(conv.data, 2, conv.data[2:])
    expected = [whole(lifted + arrays[0], lifted), whole(lifted, lifted), lifted]
    for result, wanted in zip(run(graph(build, shapes), arrays).values, expected, strict=True):
        assert_close(result, wanted)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    ("size", "strides", "padding", "dilation"),
    [
        ((3, 3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1), (1, 1, 1)),
        ((1, 2, 2), (1, 2, 2), (0, 0, 0, 0, 0, 0), (1, 1, 1)),
        ((2, 1, 1), (2, 1, 1), (0, 0, 0, 1, 0, 0), (1, 1, 1)),
        ((3, 2, 3), (1, 3, 2), (1, 0, 1, 2, 1, 0), (2, 1, 2)),
    ],
)
def test_pools(size: Triple, strides: Triple, padding: tuple[int, ...], dilation: Triple, ceil_mode: bool) -> None:
    """As TVM's own pools of volumes."""
    attrs = {"strides": strides, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}

    def build(data: relax.Expr) -> relax.Expr:
        means = [nn.avg_pool3d(data, size, count_include_pad=counted, **attrs) for counted in (False, True)]
        return relax.Tuple([nn.relu(nn.max_pool3d(data, size, **attrs)), *means])

    (data,) = random_arrays([(2, 3, 8, 9, 7)])
    mod = graph(build, [data.shape])
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    expected = machine["main"](tvm.runtime.tensor(data))
    for result, wanted in zip(run(mod, [data]).values, expected, strict=True):
        assert_close(result, wanted.numpy())
    assert not any("pool3d" in name for name in names(build, [data.shape]))


def test_averages_of_integers() -> None:
    """Rounded to zero once: not within the frames, and then from frame to frame."""
    x = np.random.default_rng(0).integers(-9, 10, (1, 2, 4, 5, 6), "int32")
    param = relax.Var("x", relax.TensorType(x.shape, "int32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [param]):
        with builder.dataflow():
            output = builder.emit_output(nn.avg_pool3d(param, (2, 2, 3), (2, 1, 3)))
        builder.emit_func_output(output)
    mod = builder.finalize()
    seen = sliding_window_view(x, (2, 2, 3), axis=(2, 3, 4))[:, :, ::2, :, ::3]
    (result,) = run(mod, [x]).values
    np.testing.assert_array_equal(result, np.trunc(seen.sum((5, 6, 7)) / 12))


def test_what_stays_a_volume() -> None:
    """Other layouts, stride and dilation together in depth of a transposed one, and functions without such an operator,
    which come back as the same object."""

    def last(data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return nn.relu(nn.conv3d(data, weight, data_layout="NDHWC", kernel_layout="DHWIO"))

    flow = Dataflow.from_module(graph(last, [(1, 5, 6, 7, 4), (3, 3, 3, 4, 8)]))
    assert VolumeLifter()(flow) is flow
    both = Conv((1, 3, 4, 4, 4), 2, (3, 3, 3), (2, 1, 1), dilation=(2, 1, 1), behind=(0, 0, 0))
    shapes = [both.data, both.weight]
    flow = Dataflow.from_module(graph(both.call, shapes))
    assert VolumeLifter()(flow) is flow
    arrays = random_arrays(shapes)
    assert_close(run(graph(both.call, shapes), arrays).values[0], both(*arrays))


def test_equal_nodes_stay_the_same_objects() -> None:
    """What a search prices again and again is made once; from one convolution to the next nothing is moved back."""
    conv = Conv((1, 8, 4, 6, 6), 8, (1, 3, 3), padding=(0, 1, 1, 0, 1, 1))

    def build(data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return nn.softmax(conv.call(nn.relu(conv.call(data, weight)), weight))

    flow = Dataflow.from_module(graph(build, [conv.data, conv.weight], 1))
    lift = VolumeLifter()
    first, second = lift(flow), lift(flow)
    assert [node.op.removeprefix("relax.") for node in first.nodes] == [
        *("permute_dims", "reshape", "reshape", "nn.conv2d", "nn.relu", "reshape", "nn.conv2d"),
        *("reshape", "permute_dims", "nn.softmax"),
    ]
    assert all(a is b for a, b in zip(first.nodes, second.nodes, strict=True))


@pytest.mark.parametrize("how", [unscheduled, serialised])
@pytest.mark.parametrize("case", ["ResNet3D", "GAN, up"])
def test_on_a_gpu(case: str, how: How) -> None:
    conv = CASES[case]
    shapes = [conv.data, conv.weight]
    arrays = random_arrays(shapes)
    (result,) = run_on_host(graph(conv.call, shapes), arrays, how)
    assert_close(result, conv(*arrays))
