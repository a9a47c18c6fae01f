"""Convolutions of plain images into a few channels: the implementation with pixels in the lanes, and when it is chosen;
depthwise ones whose columns are taken apart; pools over a whole image."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from conv_checks import Conv, arrays, graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import needs_instructions_of
from tvm import relax

from rlflow_tvm.kernels import Choices, Lowering, default_target, explain, pipeline, schedule_kernel
from rlflow_tvm.kernels.choice import Choice, Chooser, heuristic_choice
from rlflow_tvm.kernels.llvm.conv_tile import most_sums
from rlflow_tvm.kernels.llvm.window_pixels import _vectors, conv_shape, is_window_pixels

TARGET = default_target()
ONE_CORE = tvm.target.Target({"kind": "llvm", "mcpu": TARGET.attrs["mcpu"], "num-cores": 1})
HASWELL = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
SKYLAKE = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 3})
SSE = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
TARGETS = {"here": TARGET, "one": ONE_CORE, "haswell": HASWELL, "skylake": SKYLAKE, "sse": SSE}

SAME = (1, 1, 1, 1)
CASES = {
    "whole vectors": Conv((5, 3), (6, 64), padding=SAME),
    "a tail": Conv((4, 3), (9, 37), padding=SAME),
    "less than a vector": Conv((4, 8), (5, 7), padding=SAME),
    "one channel, long rows": Conv((3, 1), (4, 300), (5, 5), padding=(2, 2, 2, 2)),
    "a large window": Conv((6, 3), (17, 70), (9, 9), padding=(4, 4, 4, 4)),
    "without padding": Conv((8, 2), (8, 33), batch=2),
    "rows left out": Conv((4, 5), (10, 20), (3, 2), strides=(2, 1), padding=(0, 1, 2, 0)),
    "dilated": Conv((3, 4), (20, 50), dilation=(2, 3), padding=(2, 3, 2, 3)),
    "a column": Conv((3, 2), (30, 40), (3, 1), padding=(1, 0, 1, 0)),
    "a sound": Conv((16, 2), (1, 3001), (1, 5), padding=(0, 2, 0, 2)),
    "bare": Conv((3, 2), (5, 20), padding=SAME, epilogue=""),
    "all that follows": Conv((3, 2), (5, 20), padding=SAME, epilogue="bias active-residual silu"),
    "stretched": Conv((3, 2), (1, 20), padding=SAME, epilogue="bias stretched-residual"),
}


def window_pixels(choice: Choice) -> str:
    """The implementation tested here, wherever it takes the call."""
    names = [option.name for option in choice.options]
    return "window_pixels" if "window_pixels" in names else names[0]


def run(conv: Conv, target: tvm.target.Target, chooser: Chooser) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """What the compiled graph gives, what it must give, and the rules that scheduled it."""
    needs_instructions_of(target)
    arguments, expected = arrays(conv)
    mod = graph(conv, arguments)
    kernels = Lowering(target, chooser).kernels(mod)
    rules = [str(schedule_kernel(kernel.func, target).attrs["rlflow.schedule_rule"]) for kernel in kernels]
    main = mod["main"]
    bound = main.bind_params({main.params[-1]: tvm.runtime.tensor(arguments.pop("kernel"))})
    how = pipeline(target, Choices(chooser))
    executable = tvm.compile(tvm.IRModule({tvm.ir.GlobalVar("main"): bound}), target, relax_pipeline=how)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arguments.values())).numpy(), expected, rules


def check(conv: Conv, target: tvm.target.Target, chooser: Chooser = window_pixels) -> list[str]:
    """The rules that scheduled what gives the convolution, up to rounding of the sums."""
    result, expected, rules = run(conv, target, chooser)
    assert result.shape == expected.shape
    reduced = conv.channels[0] // conv.groups * conv.kernel[0] * conv.kernel[1]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * reduced**0.5)
    return rules


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("conv", CASES.values(), ids=CASES)
def test_pixels_in_the_lanes(conv: Conv, target: tvm.target.Target) -> None:
    assert "conv2d_window_pixels" in check(conv, target)


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    """Any that the implementation takes, small enough to compile and run in a moment."""
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(2, 4)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(*[st.integers(0, 3)] * 4))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return Conv(
        channels=(draw(st.integers(1, 5)), draw(st.integers(1, 8))),
        size=(
            draw(st.integers(max(1, spans[0] - padding[0] - padding[2]), 9)),
            draw(st.integers(max(1, spans[1] - padding[1] - padding[3]), 90)),
        ),
        kernel=kernel,
        batch=draw(st.integers(1, 2)),
        strides=(draw(st.integers(1, 3)), 1),
        padding=padding,
        dilation=dilation,
        epilogue=draw(st.sampled_from(("", "bias relu", "bias residual"))),
    )


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions())
def test_any_convolution(conv: Conv) -> None:
    assert "conv2d_window_pixels" in check(conv, TARGET)


def call_of(data: tuple[int, ...], weight: tuple[int, ...], dtype: str = "float32", **attrs: object) -> relax.Call:
    x, w = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in (("x", data), ("w", weight)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        call = builder.normalize(relax.op.nn.conv2d(x, w, **attrs))
        builder.emit_func_output(builder.emit(call))
    return call


def test_other_calls_are_not_taken() -> None:
    def taken(*shapes: tuple[int, ...], **attrs: object) -> bool:
        return is_window_pixels(call_of(*shapes, **attrs), True, TARGET)

    assert taken((1, 8, 7, 7), (4, 8, 3, 3))
    assert taken((1, 8, 7, 7), (4, 8, 3, 3), padding=1, strides=(2, 1))
    assert not taken((1, 8, 7, 7), (4, 8, 1, 1))
    assert not taken((1, 8, 7, 7), (9, 8, 3, 3))
    assert not taken((1, 8, 7, 7), (4, 8, 3, 3), strides=2)
    assert not taken((1, 8, 7, 7), (4, 4, 3, 3), groups=2)
    assert not taken((1, 8, 7, 7), (4, 8, 3, 3), dtype="float64")
    assert not taken((1, 1, 7, 7, 16), (1, 16, 3, 3, 16), data_layout="NCHW16c", kernel_layout="OIHW16o")
    assert not is_window_pixels(call_of((1, 8, 7, 7), (4, 8, 3, 3)), False, TARGET)


@pytest.mark.parametrize("target", [HASWELL, SKYLAKE, SSE], ids=["haswell", "skylake", "sse"])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_tile_fits_the_registers(channels: int, target: tvm.target.Target) -> None:
    shape = conv_shape(call_of((1, 8, 50, 500), (channels, 8, 3, 3)))
    assert shape is not None
    vectors = _vectors(shape, target)
    assert vectors == 1 or channels <= most_sums(target)[vectors]


@pytest.mark.parametrize("target", [HASWELL, SKYLAKE], ids=["haswell", "skylake"])
def test_it_is_chosen_for_few_channels(target: tvm.target.Target) -> None:
    """Which the direct convolution computes as a whole vector of them, or half of one."""

    def chosen(weight: tuple[int, ...], **attrs: object) -> str:
        seen: list[str] = []

        def choose(choice: Choice) -> str:
            seen.append(heuristic_choice(choice))
            return seen[-1]

        call = call_of((1, weight[1], 128, 128), weight, **attrs)
        builder = relax.BlockBuilder()
        params = list(call.args)
        with builder.function("main", params, attrs={"num_input": 1}):
            with builder.dataflow():
                output = builder.emit_output(call)
            builder.emit_func_output(output)
        Lowering(target, choose).kernels(builder.get())
        return seen[0]

    assert chosen((3, 64, 7, 7), padding=3) == "window_pixels"
    assert chosen((1, 64, 3, 3), padding=1) == "window_pixels"
    assert chosen((64, 64, 3, 3), padding=1) != "window_pixels"


DEPTHWISE = {
    "strided": Conv((6, 6), (11, 13), groups=6, strides=(2, 2), padding=SAME),
    "strided, large": Conv((3, 3), (40, 150), groups=3, strides=(2, 2), padding=SAME),
    "strided, even": Conv((9, 9), (16, 30), groups=9, strides=(2, 2)),
    "by three": Conv((8, 8), (20, 31), (5, 5), groups=8, strides=(3, 3), padding=(2, 2, 2, 2)),
    "columns alone": Conv((8, 8), (9, 22), (3, 4), groups=8, strides=(1, 2), padding=(1, 0, 1, 3)),
    "dilated": Conv((8, 8), (17, 24), groups=8, strides=(2, 2), dilation=(2, 3), padding=(2, 3, 2, 3)),
    "a window of one column": Conv((8, 8), (9, 9), (3, 1), groups=8, strides=(2, 2), padding=(1, 0, 1, 0)),
    "more is followed": Conv(
        (16, 16), (14, 14), groups=16, strides=(2, 2), padding=SAME, epilogue="bias residual silu"
    ),
    "small planes": Conv((64, 64), (7, 7), groups=64, padding=SAME),
    "few small planes": Conv((2, 2), (7, 7), groups=2, padding=SAME, epilogue="bias silu"),
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("conv", DEPTHWISE.values(), ids=DEPTHWISE)
def test_depthwise(conv: Conv, target: tvm.target.Target) -> None:
    assert check(conv, target) == ["conv2d"]


@pytest.mark.parametrize("epilogue", ["bias relu", "bias silu"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_short_reduction_and_what_follows_it(target: tvm.target.Target, epilogue: str) -> None:
    """Which is computed in vectors where it is more than next to nothing."""
    first = Conv((3, 16), (33, 45), strides=(2, 2), padding=SAME, epilogue=epilogue)
    assert check(first, target) == ["conv2d"]


@pytest.mark.parametrize("shape", [(1, 24, 19, 23), (2, 7, 5, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_pool_over_the_whole_image_is_a_sum_of_it(shape: tuple[int, ...], adaptive: bool) -> None:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            pool = relax.op.nn.adaptive_avg_pool2d(x, (1, 1)) if adaptive else relax.op.nn.avg_pool2d(x, shape[2:])
            output = builder.emit_output(pool)
        builder.emit_func_output(output)
    mod = builder.get()
    if max(shape[2:]) > 1:
        assert [kernel.rule for kernel in explain(mod, TARGET)] == ["reduction"]
    data = np.random.default_rng(0).standard_normal(shape, dtype="float32")
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data)).numpy()
    np.testing.assert_allclose(found, data.mean((2, 3), keepdims=True), rtol=1e-5, atol=1e-6)
