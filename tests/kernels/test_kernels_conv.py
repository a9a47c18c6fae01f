"""Convolutions against a plain numpy one: layouts, strides, padding, dilation, groups, epilogues."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from conv_checks import Conv, arrays, graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script import tirx as T

from rlflow_tvm.kernels.llvm.conv import Conv2d
from rlflow_tvm.kernels.llvm.conv_legalize import CONV_LEGALIZE
from rlflow_tvm.kernels.llvm.conv_tile import Tile, accumulator_registers, choose_tile
from rlflow_tvm.kernels.target import vector_registers

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": 2})


def lower(mod: tvm.IRModule, target: tvm.target.Target = TARGET) -> tvm.IRModule:
    """Legalised, weight-only work lifted out, fused, scheduled."""
    passes = [
        relax.transform.LegalizeOps(CONV_LEGALIZE),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.LiftTransformParams(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        tvm.s_tir.dlight.ApplyDefaultSchedule(Conv2d()),
    ]
    with target:
        return tvm.transform.Sequential(passes)(mod)


def scheduled(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    """The functions that a rule has scheduled."""
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return [f for f in functions if f.attrs.get("tirx.is_scheduled")]


def run(conv: Conv, target: tvm.target.Target = TARGET) -> tuple[np.ndarray, np.ndarray]:
    """(what the compiled graph gives, what it must give); fails if no rule took the convolution."""
    arguments, expected = arrays(conv)
    mod = lower(graph(conv, arguments), target)
    assert len(scheduled(mod)) == 1
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    *inputs, kernel = (tvm.runtime.tensor(a) for a in arguments.values())
    weights = machine["main_transform_params"]([kernel])
    return machine["main"](*inputs, *weights).numpy(), expected


def check(conv: Conv) -> None:
    """The compiled graph gives the convolution, up to rounding of the sums."""
    result, expected = run(conv)
    assert result.shape == expected.shape
    reduced = conv.channels[0] // conv.groups * conv.kernel[0] * conv.kernel[1]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * reduced**0.5)


BLOCKED = (16, 16, 16)
CASES = {
    "blocked": Conv((32, 32), (9, 11), padding=(1, 1, 1, 1), blocks=BLOCKED),
    "blocked residual": Conv((32, 48), (5, 7), epilogue="bias residual relu", blocks=BLOCKED),
    "blocked bare": Conv((16, 16), (5, 7), epilogue="", blocks=BLOCKED),
    "silu reads twice": Conv((16, 32), (7, 7), (1, 1), epilogue="bias silu", blocks=BLOCKED),
    "odd width, tail": Conv((16, 16), (3, 59), (1, 3), padding=(0, 1, 0, 1), blocks=BLOCKED),
    "pointwise": Conv((32, 64), (13, 13), (1, 1), blocks=BLOCKED),
    "pointwise bare": Conv((32, 32), (13, 13), (1, 1), epilogue="", blocks=BLOCKED),
    "pointwise tail": Conv((16, 48), (11, 5), (1, 1), batch=2, blocks=BLOCKED),
    "pointwise stride": Conv((16, 32), (7, 8), (1, 1), strides=(2, 2), blocks=BLOCKED),
    "first layer": Conv((3, 32), (23, 23), (7, 7), strides=(2, 2), padding=(3, 3, 3, 3), blocks=(0, 16, 16)),
    "first layer, block 8": Conv((3, 24), (15, 15), strides=(2, 2), blocks=(0, 8, 8)),
    "blocks of 8": Conv((16, 32), (7, 9), padding=(1, 1, 1, 1), blocks=(8, 8, 8)),
    "blocks of 8, half vector": Conv((16, 40), (7, 9), (1, 1), blocks=(16, 8, 8)),
    "blocks of 8, half vector, 3x3": Conv((16, 40), (7, 9), blocks=(16, 8, 8)),
    "blocks differ": Conv((24, 32), (7, 9), blocks=(8, 16, 16)),
    "blocks of 4": Conv((8, 12), (7, 9), blocks=(4, 4, 4)),
    "asymmetric": Conv((16, 16), (9, 9), (2, 3), strides=(1, 2), padding=(0, 1, 2, 3), blocks=BLOCKED),
    "dilated": Conv((16, 16), (9, 11), dilation=(2, 3), padding=(2, 3, 2, 3), blocks=BLOCKED),
    "groups": Conv((64, 64), (7, 7), groups=2, padding=(1, 1, 1, 1), blocks=BLOCKED),
    "small groups": Conv((32, 32), (7, 7), groups=8, padding=(1, 1, 1, 1), blocks=BLOCKED),
    "uneven groups": Conv((32, 48), (7, 7), groups=2, padding=(1, 1, 1, 1), blocks=(16, 8, 8)),
    "depthwise": Conv((32, 32), (11, 13), groups=32, padding=(1, 1, 1, 1), blocks=BLOCKED),
    "plain": Conv((17, 23), (7, 9), padding=(1, 1, 1, 1), epilogue="bias residual relu"),
    "plain pointwise": Conv((17, 100), (13, 13), (1, 1)),
    "stretched": Conv((16, 32), (1, 1), padding=(1, 1, 1, 1), epilogue="bias relu stretched-residual"),
    "stretched pointwise": Conv((6, 24), (1, 1), (1, 1), epilogue="bias silu stretched-residual"),
    "stretched to the right": Conv((6, 24), (5, 1), (1, 1), batch=2, epilogue="bias relu stretched-residual"),
    "stretched blocks": Conv((16, 32), (1, 1), (1, 1), blocks=BLOCKED, epilogue="bias silu stretched-residual"),
    "stretched depthwise": Conv((8, 8), (1, 1), padding=(1, 1, 1, 1), groups=8, epilogue="bias stretched-residual"),
    "plain first layer": Conv((3, 32), (23, 23), (5, 5), strides=(2, 2), padding=(2, 2, 2, 2)),
    "plain groups": Conv((12, 24), (7, 7), groups=3, padding=(1, 1, 1, 1)),
    "plain uneven groups": Conv((6, 36), (7, 7), (1, 1), groups=2),
    "plain depthwise": Conv((6, 6), (11, 13), groups=6, strides=(2, 2), padding=(1, 1, 1, 1)),
    "plain depthwise, long row": Conv((2, 2), (3, 131), groups=2, padding=(1, 1, 1, 1)),
    "channel multiplier": Conv((4, 12), (7, 7), groups=4),
    "one of everything": Conv((1, 1), (1, 1), (1, 1), epilogue="bias"),
}


@pytest.mark.parametrize("conv", CASES.values(), ids=CASES.keys())
def test_case(conv: Conv) -> None:
    check(conv)


sizes = st.integers(1, 20)


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """Any convolution small enough to compile and run in a moment."""
    block = draw(st.sampled_from((0, 8, 16)))
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    unit = max(block, 1) * groups
    in_plain = draw(st.booleans()) and groups == 1
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(*[st.integers(0, 2)] * 4))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    height = draw(st.integers(max(1, spans[0] - padding[0] - padding[2]), 12))
    width = draw(st.integers(max(1, spans[1] - padding[1] - padding[3]), 40))
    return Conv(
        channels=(
            draw(st.integers(1, 5)) if in_plain else unit * draw(st.integers(1, 3)),
            unit * draw(st.integers(1, 3)),
        ),
        size=(height, width),
        kernel=kernel,
        batch=draw(st.integers(1, 2)),
        strides=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        padding=padding,
        dilation=dilation,
        groups=groups,
        blocks=(0 if in_plain else block, block, block),
        epilogue=draw(st.sampled_from(("", "bias relu", "bias residual"))),
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions())
def test_any_convolution(conv: Conv) -> None:
    check(conv)


@pytest.mark.parametrize("mcpu", ["haswell", "skylake-avx512"])
@pytest.mark.parametrize("name", ["blocked", "pointwise tail", "plain", "first layer"])
def test_other_vector_widths_are_scheduled(mcpu: str, name: str) -> None:
    conv = CASES[name]
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 4})
    mod = lower(graph(conv, arrays(conv)[0]), target)
    assert len(scheduled(mod)) == 1
    tvm.compile(mod, target)


def lower_epilogue(epilogue: Callable[[relax.BlockBuilder, relax.Var, relax.Var], relax.Expr]) -> tvm.IRModule:
    """A pointwise convolution of `data` (1, 1, 8, 8, 16) and what `epilogue` makes of it and `side`."""
    data = relax.Var("data", relax.TensorType((1, 1, 8, 8, 16), "float32"))
    side = relax.Var("side", relax.TensorType((1, 1, 8, 8, 16), "float32"))
    kernel = relax.Var("kernel", relax.TensorType((1, 16, 1, 1, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data, side, kernel], attrs={"num_input": 2}):
        with builder.dataflow():
            layouts = dict(data_layout="NCHW16c", kernel_layout="OIHW16o", out_layout="NCHW16c")
            value = builder.emit(relax.op.nn.conv2d(data, kernel, **layouts))
            output = builder.emit_output(epilogue(builder, value, side))
        builder.emit_func_output(output)
    return lower(builder.get())


def run_epilogue(mod: tvm.IRModule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(result, the convolution alone, `side`)."""
    rng = np.random.default_rng(11)
    data, side, kernel = (
        rng.standard_normal(shape, dtype="float32") for shape in ((1, 1, 8, 8, 16),) * 2 + ((1, 16, 1, 1, 16),)
    )
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    weights = machine["main_transform_params"]([tvm.runtime.tensor(kernel)])
    result = machine["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(side), *weights).numpy()
    return result, np.einsum("nihwc,oclmk->nohwk", data, kernel), side


def test_epilogue_with_a_second_producer() -> None:
    """conv + sigmoid(side) * side: the other branch is computed where it is added."""

    def epilogue(builder: relax.BlockBuilder, value: relax.Var, side: relax.Var) -> relax.Expr:
        gate = builder.emit(relax.op.sigmoid(side))
        return relax.op.add(value, builder.emit(relax.op.multiply(gate, side)))

    mod = lower_epilogue(epilogue)
    assert len(scheduled(mod)) == 1
    result, conv, side = run_epilogue(mod)
    np.testing.assert_allclose(result, conv + side / (1 + np.exp(-side)), rtol=1e-4, atol=1e-4)


def test_unfoldable_epilogue_is_a_nest_of_its_own() -> None:
    """A transposition fused behind the convolution does not stop the rule."""

    @T.prim_func(private=True, s_tir=True)
    def transposed(
        x: T.Buffer((1, 1, 4, 4, 16), "float32"),
        w: T.Buffer((1, 1, 1, 1, 16, 16), "float32"),
        out: T.Buffer((1, 4, 4, 16), "float32"),
    ):
        packed = T.sblock_alloc_buffer((1, 1, 16, 16))
        for n, o, p, b, i in T.grid(1, 1, 16, 16, 16):
            with T.sblock("conv"):
                vn, vo, vp, vb, vi = T.axis.remap("SSSSR", [n, o, p, b, i])
                T.sblock_attr({"rlflow.conv2d": 1, "rlflow.conv2d_out_axes": 4})
                with T.init():
                    packed[vn, vo, vp, vb] = T.float32(0)
                packed[vn, vo, vp, vb] = packed[vn, vo, vp, vb] + x[vn, 0, vp // 4, vp % 4, vi] * w[vo, 0, 0, 0, vi, vb]
        for n, h, w_, c in T.grid(1, 4, 4, 16):
            with T.sblock("transpose"):
                vn, vh, vw, vc = T.axis.remap("SSSS", [n, h, w_, c])
                out[vn, vw, vh, vc] = packed[vn, 0, vh * 4 + vw, vc]

    schedule = Conv2d().apply(transposed, TARGET, False)
    assert schedule is not None
    run = tvm.compile(tvm.IRModule({"main": schedule.mod["main"].with_attr("global_symbol", "main")}), TARGET)
    rng = np.random.default_rng(5)
    data, kernel = (
        rng.standard_normal((1, 1, 4, 4, 16), "float32"),
        rng.standard_normal((1, 1, 1, 1, 16, 16), "float32"),
    )
    result = tvm.runtime.tensor(np.zeros((1, 4, 4, 16), "float32"))
    run["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(kernel), result)
    expected = np.einsum("hwi,ib->whb", data[0, 0], kernel[0, 0, 0, 0])[None]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_weights_are_packed_once() -> None:
    """The packing is lifted out of the graph, so `main` makes one call."""
    conv = CASES["blocked"]
    mod = lower(graph(conv, arrays(conv)[0]))
    calls = [b.value for b in mod["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert [c.op.name for c in calls] == ["relax.call_tir"]


def test_rule_leaves_other_functions_alone() -> None:
    conv = CASES["plain"]
    with TARGET:
        mod = relax.transform.LegalizeOps()(graph(conv, arrays(conv)[0]))
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert functions
    assert all(Conv2d().apply(f, TARGET, False) is None for f in functions)


def test_unknown_layout_is_legalised_by_tvm() -> None:
    data = relax.Var("data", relax.TensorType((1, 5, 5, 3), "float32"))
    kernel = relax.Var("kernel", relax.TensorType((3, 3, 3, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data, kernel]):
        with builder.dataflow():
            value = builder.emit(relax.op.nn.conv2d(data, kernel, data_layout="NHWC", kernel_layout="HWIO"))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    mod = builder.get()
    legalised = relax.transform.LegalizeOps(CONV_LEGALIZE)(mod)
    assert any(isinstance(f, tirx.PrimFunc) for f in legalised.functions.values())
    tvm.ir.assert_structural_equal(legalised, relax.transform.LegalizeOps()(mod))


@pytest.mark.parametrize(("pixels", "vectors"), [(13, 12), (49, 32), (1, 1), (729, 2), (55, 4), (7, 63)])
@pytest.mark.parametrize(("each", "mcpu"), [(1, "znver4"), (2, "haswell"), (4, "haswell"), (4, "znver4")])
def test_tile_fits_the_registers(pixels: int, vectors: int, each: int, mcpu: str) -> None:
    """The sums with a row of weights and a pixel; of one pixel, the weights are read where they are multiplied."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1})
    tile = choose_tile(pixels, vectors, each, target)
    row = tile.vectors * each
    assert tile.pixels * row <= accumulator_registers(target)
    assert tile.pixels == 1 or tile.pixels * row + row + 1 <= vector_registers(target)
    assert vectors % tile.vectors == 0
    assert tile.pixels <= pixels


def test_tile_divides_where_it_can() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 1})
    assert choose_tile(13, 12, 1, target) == Tile(13, 2)
    assert choose_tile(7, 32, 1, target) == Tile(7, 2)
