"""Transposed convolutions: computed as numpy does, by plain convolutions, in one and two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cuda_checks import How, run_on_host, serialised, unscheduled
from kernel_checks import TARGET, assert_close, graph, random_arrays, run
from tvm import relax

from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.kernels import extract_kernels
from rlflow_tvm.transposed import TransposedConvolutions

nn = relax.op.nn


@dataclass(frozen=True)
class Transposed:
    """(batch, input channels, *extents), output channels, window, and attributes, of one or two dimensions."""

    data: tuple[int, ...]
    outputs: int
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]  # near sides, then far ones
    output_padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def dimensions(self) -> int:
        return len(self.window)

    @property
    def weight(self) -> tuple[int, ...]:
        return self.data[1], self.outputs // self.groups, *self.window

    def call(self, data: relax.Expr, weight: relax.Expr) -> relax.Call:
        operator = nn.conv1d_transpose if self.dimensions == 1 else nn.conv2d_transpose
        behind, dilation = (each[: self.dimensions] for each in (self.output_padding, self.dilation))
        return operator(data, weight, self.strides, self.padding, behind, dilation, self.groups)

    def __call__(self, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """In float64: each input pixel adds its window to the output."""
        extents, near, far = self.data[2:], self.padding[: self.dimensions], self.padding[self.dimensions :]
        spans = [
            (extent - 1) * stride + (size - 1) * dilation + 1 + behind
            for extent, stride, size, dilation, behind in zip(
                extents, self.strides, self.window, self.dilation, self.output_padding, strict=False
            )
        ]
        result = np.zeros((self.data[0], self.groups, self.outputs // self.groups, *spans))
        grouped = data.astype("float64").reshape(self.data[0], self.groups, -1, *extents)
        kernels = weight.astype("float64").reshape(self.groups, -1, *self.weight[1:])
        for offset in np.ndindex(*self.window):
            term = np.einsum("ngi...,gio->ngo...", grouped, kernels[(..., *offset)])
            begins = [o * d for o, d in zip(offset, self.dilation, strict=False)]
            where = [
                slice(begin, begin + (extent - 1) * stride + 1, stride)
                for begin, extent, stride in zip(begins, extents, self.strides, strict=True)
            ]
            result[(..., *where)] += term
        result = result.reshape(self.data[0], self.outputs, *spans)
        kept = [slice(before, span - after) for before, span, after in zip(near, spans, far, strict=True)]
        return result[(..., *kept)]


CASES = {
    "U-Net": Transposed((1, 24, 7, 6), 12, (2, 2), (2, 2), (0, 0, 0, 0)),
    "DCGAN": Transposed((2, 8, 5, 5), 16, (4, 4), (2, 2), (1, 1, 1, 1)),
    "odd window": Transposed((1, 8, 6, 7), 8, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    "uneven": Transposed((1, 6, 5, 4), 4, (5, 3), (3, 1), (2, 0, 1, 1), (0, 0)),
    "stride alone": Transposed((1, 3, 4, 5), 5, (1, 1), (3, 2), (0, 0, 0, 0), (2, 1)),
    "no stride": Transposed((1, 8, 9, 9), 8, (3, 3), (1, 1), (1, 1, 1, 1)),
    "no stride, no padding": Transposed((1, 8, 4, 3), 8, (3, 5), (1, 1), (0, 0, 0, 0)),
    "more padding than window": Transposed((1, 4, 12, 11), 4, (3, 2), (1, 2), (4, 5, 3, 6)),
    "dilated": Transposed((1, 4, 8, 8), 4, (3, 3), (1, 1), (2, 3, 2, 0), (0, 0), (2, 3)),
    "one axis dilated": Transposed((1, 4, 8, 8), 4, (3, 3), (2, 1), (0, 0, 0, 0), (0, 0), (1, 2)),
    "groups": Transposed((2, 12, 4, 4), 6, (3, 3), (2, 2), (1, 1, 0, 0), (0, 0), (1, 1), 3),
    "depthwise": Transposed((1, 16, 5, 5), 16, (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), (1, 1), 16),
    "vocoder": Transposed((1, 32, 21), 16, (16,), (8,), (4, 4)),
    "row": Transposed((2, 4, 9), 6, (3,), (2,), (1, 0), (1,)),
    "one element": Transposed((2, 1, 4, 5), 1, (1, 1), (2, 3), (0, 0, 0, 0), (1, 0)),  # which is no parameter
    "one element, no stride": Transposed((2, 1, 4, 5), 1, (1, 1), (1, 1), (0, 0, 0, 0)),
    "one element, row": Transposed((2, 1, 9), 1, (1,), (2,), (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("case", "weights"), [*((case, 1) for case in CASES), ("DCGAN", 0), ("row", 0)])
def test_transposed_convolutions(case: str, weights: int) -> None:
    conv = CASES[case]
    shapes = [conv.data, conv.weight]
    mod, arrays = graph(conv.call, shapes, weights), random_arrays(shapes)
    (result,) = run(mod, arrays, weights).values
    assert_close(result, conv(*arrays))
    names = [kernel.name for kernel in extract_kernels(mod, TARGET)]
    assert any("conv2d" in name for name in names)
    assert not any("transpose" in name for name in names) or not weights, names


def test_what_follows_is_fused() -> None:
    """Bias and activation go with putting channels side by side; work on weights is none of `main`'s."""
    conv = CASES["DCGAN"]
    shapes = [conv.data, (1, conv.outputs, 1, 1), conv.weight]

    def build(data: relax.Expr, bias: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return nn.relu(relax.op.add(conv.call(data, weight), bias))

    mod, arrays = graph(build, shapes, 2), random_arrays(shapes)
    data, bias, weight = arrays
    assert_close(run(mod, arrays, 2).values[0], np.maximum(conv(data, weight) + bias, 0))
    assert [kernel.name for kernel in extract_kernels(mod, TARGET)] == ["conv2d", "fused_interleave_add_relu"]


def test_stride_and_dilation_together_stay() -> None:
    conv = Transposed((1, 4, 6, 6), 4, (3, 3), (2, 2), (0, 0, 0, 0), (0, 0), (2, 2))
    shapes = [conv.data, conv.weight]
    flow = Dataflow.from_module(graph(conv.call, shapes))
    assert TransposedConvolutions()(flow) is flow
    arrays = random_arrays(shapes)
    assert_close(run(graph(conv.call, shapes), arrays).values[0], conv(*arrays))


def test_equal_nodes_stay_the_same_objects() -> None:
    conv = CASES["U-Net"]
    flow = Dataflow.from_module(graph(conv.call, [conv.data, conv.weight], 1))
    plain = TransposedConvolutions()
    first, second = plain(flow), plain(flow)
    assert all(a is b for a, b in zip(first.nodes, second.nodes, strict=True))
    assert "relax.nn.conv2d_transpose" not in [node.op for node in first.nodes]


def test_a_prim_func_of_the_modules_own_keeps_its_name() -> None:
    """Two graphs with a PrimFunc called as ours would be, by the same object and after a graph without one."""
    conv = CASES["U-Net"]
    shapes = [conv.data, conv.weight]
    plain = TransposedConvolutions()
    without = plain(Dataflow.from_module(graph(conv.call, shapes)))
    (ours,) = without.prim_funcs
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            large = builder.emit(conv.call(*params))
            doubled = builder.call_te(lambda x: tvm.te.compute(x.shape, lambda *i: x(*i) * 2), large,
                                      primfunc_name_hint=ours.name_hint)  # fmt: skip
            output = builder.emit_output(doubled)
        builder.emit_func_output(output)
    mod = builder.finalize()
    mod["main"] = mod["main"].with_attr("num_input", 2)
    flow = plain(Dataflow.from_module(mod))
    assert len({global_var.name_hint for global_var in flow.prim_funcs}) == len(flow.prim_funcs) == 2
    arrays = random_arrays(shapes)
    assert_close(run(mod, arrays).values[0], 2 * conv(*arrays))


@pytest.mark.parametrize("how", [unscheduled, serialised])
@pytest.mark.parametrize("case", ["DCGAN", "vocoder"])
def test_on_a_gpu(case: str, how: How) -> None:
    conv = CASES[case]
    shapes = [conv.data, conv.weight]
    arrays = random_arrays(shapes)
    (result,) = run_on_host(graph(conv.call, shapes), arrays, how)
    assert_close(result, conv(*arrays))
