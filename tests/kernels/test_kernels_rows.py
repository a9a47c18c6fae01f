"""One-dimensional convolutions and pools: computed as numpy does, in two dimensions, with what follows fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cuda_checks import TARGET as CUDA
from cuda_checks import How, run_on_host, serialised, unscheduled
from kernel_checks import TARGET, assert_close, graph, random_arrays, run
from numpy.lib.stride_tricks import sliding_window_view
from tvm import relax

from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.kernels import RULE_ATTR, extract_kernels, schedule_kernel
from rlflow_tvm.rows import RowLifter

nn = relax.op.nn


@dataclass(frozen=True)
class Conv:
    """(batch, input channels, width), output channels, window, and attributes."""

    data: tuple[int, int, int]
    outputs: int
    window: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: int = 1
    groups: int = 1

    @property
    def weight(self) -> tuple[int, int, int]:
        return self.outputs, self.data[1] // self.groups, self.window

    def call(self, data: relax.Expr, weight: relax.Expr) -> relax.Call:
        attrs = {"strides": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        return nn.conv1d(data, weight, **attrs)

    def __call__(self, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """In float64."""
        padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), self.padding))
        span = (self.window - 1) * self.dilation + 1
        seen = sliding_window_view(padded, span, axis=2)[:, :, :: self.stride, :: self.dilation]
        batch, channels, width, window = seen.shape
        grouped = seen.reshape(batch, self.groups, channels // self.groups, width, window)
        kernels = weight.astype("float64").reshape(self.groups, -1, *weight.shape[1:])
        return np.einsum("ngcxk,gock->ngox", grouped, kernels).reshape(batch, self.outputs, width)


CONVS = [
    Conv((1, 40, 50), 64, 5, stride=2, padding=(2, 2)),
    Conv((2, 16, 33), 24, 3, padding=(4, 4), dilation=4),
    Conv((1, 16, 30), 16, 3, padding=(2, 0)),  # causal
    Conv((1, 32, 47), 17, 1),
    Conv((3, 1, 64), 8, 16, stride=8),
    Conv((1, 12, 21), 12, 3, padding=(1, 1), groups=12),
    Conv((1, 12, 21), 24, 5, padding=(0, 3), groups=3),
    Conv((1, 3, 1), 5, 1),
    Conv((1, 8, 7), 4, 7),
    Conv((2, 1, 9), 1, 1),  # a weight of one element, which is no parameter
]


def names(build: Callable[..., relax.Expr], shapes: list[tuple[int, ...]], weights: int = 0) -> list[str]:
    return [kernel.name for kernel in extract_kernels(graph(build, shapes, weights), TARGET)]


@pytest.mark.parametrize(("conv", "weights"), [*((conv, 1) for conv in CONVS), (CONVS[0], 0), (CONVS[5], 0)], ids=str)
def test_convolutions(conv: Conv, weights: int) -> None:
    shapes = [conv.data, conv.weight]
    arrays = random_arrays(shapes)
    (result,) = run(graph(conv.call, shapes, weights), arrays, weights).values
    assert_close(result, conv(*arrays))


def test_what_follows_is_fused() -> None:
    """Bias, activation, and operands of every rank, themselves rows or not."""
    conv = CONVS[1]
    batch, channels, width = conv.data[0], conv.outputs, conv.data[2]
    extra = [(1, channels, 1), (batch, channels, width), (channels, 1), (width,), ()]
    shapes = [conv.data, *extra, conv.weight]

    def build(data: relax.Expr, *others: relax.Expr) -> relax.Expr:
        bias, residual, scale, line, number, weight = others
        value = nn.relu(relax.op.add(conv.call(data, weight), bias))
        value = relax.op.multiply(relax.op.add(value, residual), scale)
        value = relax.op.subtract(relax.op.subtract(line, value), number)
        return relax.op.clip(relax.op.where(relax.op.less(value, number), relax.op.tanh(value), value), -2, 3)

    arrays = random_arrays(shapes)
    (result,) = run(graph(build, shapes, 1), arrays, 1).values
    data, bias, residual, scale, line, number, weight = (array.astype("float64") for array in arrays)
    value = line - (np.maximum(conv(data, weight) + bias, 0) + residual) * scale - number
    assert_close(result, np.clip(np.where(value < number, np.tanh(value), value), -2, 3))
    found = names(build, shapes, 1)
    assert len(found) == 1
    assert found[0].startswith("fused_conv2d_add_relu_add_multiply_subtract_subtract")


def test_two_share_an_input_and_join() -> None:
    """Rows that are read as rows as well, concatenated along channels and along the row, and returned."""
    wide, narrow = Conv((1, 8, 20), 8, 3, padding=(1, 1)), Conv((1, 8, 20), 8, 1)
    shapes = [wide.data, wide.weight, narrow.weight]

    def build(data: relax.Expr, first: relax.Expr, second: relax.Expr) -> relax.Expr:
        a, b = relax.op.sigmoid(wide.call(data, first)), narrow.call(data, second)
        lines = [relax.op.concat([a, b], axis) for axis in (1, 2, -1)]
        return relax.Tuple([*lines, nn.softmax(a, axis=2), relax.op.concat([a, data], 0), b])

    arrays = random_arrays(shapes)
    mod = graph(build, shapes)
    a, b = 1 / (1 + np.exp(-wide(arrays[0], arrays[1]))), narrow(arrays[0], arrays[2])
    joined = [np.concatenate([a, b], axis) for axis in (1, 2, 2)]
    softmax = np.exp(a) / np.exp(a).sum(axis=2, keepdims=True)
    expected = [*joined, softmax, np.concatenate([a, arrays[0]], 0), b]
    for result, wanted in zip(run(mod, arrays).values, expected, strict=True):
        assert_close(result, wanted)


def test_constants_of_one_element() -> None:
    """They stay in the function, where all others are parameters: of every rank, concatenated and computed with."""
    conv = Conv((1, 1, 9), 1, 1)

    def build(data: relax.Expr) -> relax.Expr:
        constants = [relax.const(np.full(shape, 2, "float32")) for shape in ((1, 1, 1), (1, 1), (1,), ())]
        value = conv.call(data, constants[0])
        for constant in constants:
            value = relax.op.add(constant, value)
        lines = relax.op.concat([value, constants[0]], 2)
        return relax.op.concat([nn.max_pool1d(constants[0], 1), nn.relu(relax.op.concat([value, lines], -1))], 2)

    (data,) = random_arrays([conv.data])
    value = 2 * data.astype("float64") + 8
    two = np.full((1, 1, 1), 2)
    (result,) = run(graph(build, [conv.data]), [data]).values
    assert_close(result, np.concatenate([two, np.maximum(np.concatenate([value, value, two], 2), 0)], 2))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation"), [(3, 2, (1, 1), 1), (2, 2, (0, 1), 1), (3, 1, (2, 2), 2)]
)
def test_pools(size: int, stride: int, padding: tuple[int, int], dilation: int, ceil_mode: bool) -> None:
    """As TVM's own pools of rows."""
    attrs = {"strides": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}

    def build(data: relax.Expr) -> relax.Expr:
        means = [nn.avg_pool1d(data, size, count_include_pad=counted, **attrs) for counted in (False, True)]
        return relax.Tuple([nn.relu(nn.max_pool1d(data, size, **attrs)), *means])

    (data,) = random_arrays([(2, 5, 14)])
    mod = graph(build, [data.shape])
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    expected = machine["main"](tvm.runtime.tensor(data))
    for result, wanted in zip(run(mod, [data]).values, expected, strict=True):
        assert_close(result, wanted.numpy())


def test_what_stays_a_row() -> None:
    """Other layouts, and functions without such an operator, which come back as the same object."""

    def last(data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return nn.relu(nn.conv1d(data, weight, data_layout="NWC", kernel_layout="WIO"))

    flow = Dataflow.from_module(graph(last, [(1, 20, 4), (3, 4, 8)]))
    assert RowLifter()(flow) is flow
    data, weight = random_arrays([(1, 20, 4), (3, 4, 8)])
    (result,) = run(graph(last, [data.shape, weight.shape]), [data, weight]).values
    expected = Conv((1, 4, 20), 8, 3)(data.transpose(0, 2, 1), weight.transpose(2, 1, 0)).transpose(0, 2, 1)
    assert_close(result, np.maximum(expected, 0))


def test_equal_nodes_stay_the_same_objects() -> None:
    """What a search prices again and again is made once."""
    conv = CONVS[0]
    flow = Dataflow.from_module(graph(lambda x, w: nn.softmax(nn.relu(conv.call(x, w))), [conv.data, conv.weight], 1))
    lift = RowLifter()
    first, second = lift(flow), lift(flow)
    assert [node.op for node in first.nodes] == [
        *("relax.reshape", "relax.reshape", "relax.nn.conv2d", "relax.nn.relu", "relax.reshape", "relax.nn.softmax"),
    ]
    assert all(a is b for a, b in zip(first.nodes, second.nodes, strict=True))


@pytest.mark.parametrize("how", [unscheduled, serialised])
def test_on_a_gpu(how: How) -> None:
    """Products of channels-last images there, as those of two dimensions are."""
    conv = Conv((1, 32, 64), 32, 3, padding=(1, 1))
    shapes = [conv.data, conv.weight]
    mod, arrays = graph(lambda x, w: nn.relu(conv.call(x, w)), shapes), random_arrays(shapes)
    rules = [str(schedule_kernel(kernel.func, CUDA).attrs[RULE_ATTR]) for kernel in extract_kernels(mod, CUDA)]
    assert "matmul" in rules
    (result,) = run_on_host(mod, arrays, how)
    assert_close(result, np.maximum(conv(*arrays), 0))
