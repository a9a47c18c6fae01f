"""Winograd convolutions against float64: extents, paddings, layouts, vector widths, epilogues, rounding."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import tvm
from conv_checks import Conv, arrays, graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from rlflow_tvm.kernels import Choices, Lowering, default_target, pipeline, schedule_kernel, vector_lanes
from rlflow_tvm.kernels.choice import Choice
from rlflow_tvm.kernels.llvm import winograd_legalize
from rlflow_tvm.kernels.llvm.conv_compute import ConvShape
from rlflow_tvm.kernels.llvm.implementations import IMPLEMENTATIONS
from rlflow_tvm.kernels.llvm.winograd_plan import make_plan
from rlflow_tvm.kernels.llvm.winograd_transform import (
    matrix,
    plane,
    transform_data,
    transform_product,
    transform_taps,
)

TARGET = default_target()
HASWELL = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
SKYLAKE = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2})
SIZES = (2, 4)
ONE = (1, 1, 1, 1)
ERROR = {2: 3e-6, 4: 8e-6}  # of the output's range


def pick(name, choice: Choice) -> str:
    assert name in [option.name for option in choice.options]
    return name


def error(conv: Conv, size: int, target: tvm.target.Target = TARGET) -> float:
    """The greatest difference from float64, as a part of the output's range."""
    arguments, expected = arrays(conv)
    mod = graph(conv, arguments)
    func = mod["main"]
    bound = func.bind_params({func.params[-1]: tvm.runtime.tensor(arguments.pop("kernel"))})
    choose = partial(pick, f"winograd{size}")
    executable = tvm.compile(tvm.IRModule({"main": bound}), target, relax_pipeline=pipeline(target, Choices(choose)))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(value) for value in arguments.values())).numpy()
    assert result.shape == expected.shape
    return float(np.abs(result - expected).max() / max(np.abs(expected).max(), 1e-3))


def kernels(conv: Conv, size: int):
    arguments, _ = arrays(conv)
    return Lowering(TARGET, partial(pick, f"winograd{size}")).kernels(graph(conv, arguments))


CASES = {
    "even": Conv((16, 32), (16, 16), padding=ONE),
    "odd": Conv((16, 48), (13, 11), padding=ONE),
    "one pixel": Conv((8, 16), (1, 1), padding=ONE),
    "one output": Conv((5, 16), (3, 3)),
    "one column": Conv((16, 16), (9, 1), padding=ONE),
    "one channel in": Conv((1, 16), (8, 8), padding=ONE),
    "one channel out": Conv((16, 1), (8, 8), padding=ONE),
    "ragged channels": Conv((19, 21), (7, 18), padding=ONE),
    "one side": Conv((16, 16), (10, 12), padding=(0, 2, 1, 0)),
    "wide padding": Conv((16, 16), (5, 6), padding=(3, 4, 5, 2)),
    "no padding": Conv((20, 40), (19, 35)),
    "batch": Conv((16, 40), (14, 14), batch=3, padding=ONE),
    "residual": Conv((24, 24), (15, 15), padding=ONE, epilogue="bias residual relu"),
    "silu": Conv((16, 16), (9, 9), batch=2, padding=ONE, epilogue="bias silu"),
    "stretched": Conv((6, 24), (1, 1), padding=ONE, epilogue="bias relu stretched-residual"),
    "stretched to the right": Conv((6, 24), (5, 1), batch=2, padding=ONE, epilogue="bias silu stretched-residual"),
    "stretched over images": Conv((6, 16), (5, 4), padding=ONE, epilogue="bias stretched-residual relu"),
    "stretched, bare": Conv((6, 16), (1, 1), padding=ONE, epilogue="stretched-residual"),
    "stretched blocks": Conv((16, 32), (1, 1), padding=ONE, blocks=(16, 16, 16), epilogue="bias stretched-residual"),
    "bare": Conv((16, 16), (9, 9), padding=ONE, epilogue=""),
    "blocks of 16": Conv((32, 48), (13, 13), padding=ONE, blocks=(16, 16, 16), epilogue="bias residual relu"),
    "blocks of 8": Conv((24, 40), (13, 13), padding=ONE, blocks=(8, 8, 8)),
    "blocks of 4": Conv((12, 20), (6, 6), padding=ONE, blocks=(4, 4, 4)),
    "blocks in": Conv((32, 20), (12, 12), padding=ONE, blocks=(16, 0, 0)),
    "blocks out": Conv((20, 32), (12, 12), padding=(0, 1, 2, 0), blocks=(0, 0, 16), batch=2),
    "blocks of 32": Conv((32, 64), (9, 9), padding=ONE, blocks=(32, 16, 32), epilogue=""),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, size):
    assert error(CASES[name], size) < ERROR[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["odd", "ragged channels", "no padding", "blocks of 16", "blocks of 8", "blocks of 4"])
def test_equals_float64_with_avx2(name, size):
    assert error(CASES[name], size, HASWELL) < ERROR[size]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("chunk", "height", "vectors"), [(1, 3, 2), (2, 5, 1), (6, 14, 2), (3, 7, 3)])
def test_every_division_gives_the_same(ahead, chunk, height, vectors, monkeypatch):
    def divided(shape, size, target):
        plan = make_plan(shape, size, target)
        return dataclasses.replace(plan, chunk=chunk, height=height, panel=vectors * vector_lanes(target), ahead=ahead)

    monkeypatch.setattr(winograd_legalize, "make_plan", divided)
    assert error(Conv((18, 52), (12, 17), batch=2, padding=ONE), 4) < ERROR[4]


extent = st.integers(1, 20)
pad = st.integers(0, 3)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)), image=st.tuples(extent, extent),
    padding=st.tuples(pad, pad, pad, pad), batch=st.integers(1, 3), size=st.sampled_from(SIZES),
    narrow=st.booleans(),
    epilogue=st.sampled_from(["", "bias relu", "bias residual relu", "bias active-residual relu", "bias silu"]),
)  # fmt: skip
def test_any_extents(channels, image, padding, batch, size, narrow, epilogue):
    top, left, bottom, right = padding
    if image[0] + top + bottom < 3 or image[1] + left + right < 3:
        image = (image[0] + 3, image[1] + 3)
    conv = Conv(channels, image, batch=batch, padding=padding, epilogue=epilogue)
    assert error(conv, size, HASWELL if narrow else TARGET) < ERROR[size]


@pytest.mark.parametrize(("size", "bound"), [(2, 3e-6), (4, 8e-6)])
@pytest.mark.parametrize("channels", [64, 512])
def test_rounding_error_is_small(size, bound, channels):
    assert error(Conv((channels, 64), (16, 16), padding=ONE, epilogue=""), size) < bound


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", [(0, 0, 0), (16, 16, 16)])
def test_epilogue_is_in_the_kernel_and_weights_are_transformed_early(size, blocks):
    conv = Conv((32, 32), (12, 12), padding=ONE, epilogue="bias residual relu", blocks=blocks)
    (kernel,) = kernels(conv, size)
    assert kernel.name == "fused_winograd_add_add_relu"
    assert schedule_kernel(kernel.func, TARGET).attrs["rlflow.schedule_rule"] == "winograd"
    lowered = Lowering(TARGET, partial(pick, f"winograd{size}")).lower(graph(conv, arrays(conv)[0]))
    assert lowered.weight_only is not None
    assert len(lowered.derived) == 1


@pytest.mark.parametrize("size", SIZES)
def test_what_a_residual_passes_before_is_in_the_epilogue(size):
    conv = Conv((32, 32), (12, 12), padding=ONE, epilogue="bias active-residual relu")
    (kernel,) = kernels(conv, size)
    assert schedule_kernel(kernel.func, TARGET).attrs["rlflow.schedule_rule"] == "winograd"
    assert error(conv, size) < ERROR[size]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_larger_than_the_convolution_is_no_epilogue(size):
    """The gate of a squeeze-and-excitation is stretched over the image that it scales."""
    conv = CASES["stretched"]
    (kernel,) = kernels(conv, size)
    assert kernel.name == "fused_winograd_add_relu_add"
    assert schedule_kernel(kernel.func, TARGET).attrs["rlflow.schedule_rule"] == "winograd"


def test_operator_before_stays_outside():
    """An element-wise operator may be fused in front of the convolution: it gets a loop nest of its own."""
    x = relax.Var("x", relax.TensorType((1, 16, 10, 10), "float32"))
    w = relax.Var("w", relax.TensorType((16, 16, 3, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            before = builder.emit(relax.op.nn.relu(x))
            value = builder.emit(relax.op.nn.conv2d(before, w, padding=ONE))
            output = builder.emit_output(relax.op.add(value, x))
        builder.emit_func_output(output)
    rng = np.random.default_rng(3)
    data, weight = (rng.standard_normal(s).astype("float32") for s in ((1, 16, 10, 10), (16, 16, 3, 3)))
    mod = tvm.IRModule({"main": builder.get()["main"].bind_params({w: tvm.runtime.tensor(weight)})})

    def run(choose):
        executable = tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET, Choices(choose)))
        return relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()

    np.testing.assert_allclose(run(partial(pick, "winograd4")), run(partial(pick, "direct")), atol=2e-4)


def options(conv: Conv, weight: bool = True) -> list[str]:
    arguments = {key: value for key, value in arrays(conv)[0].items() if key in ("data", "kernel")}
    call = graph(dataclasses.replace(conv, epilogue=""), arguments)["main"].body.blocks[0].bindings[0].value
    return [o.name for o in IMPLEMENTATIONS["relax.nn.conv2d"] if o.takes(call, weight, TARGET)]


@pytest.mark.parametrize(
    ("conv", "weight"),
    [
        (Conv((8, 16), (9, 9), strides=(2, 2)), True), (Conv((8, 16), (9, 9), strides=(1, 2)), True),
        (Conv((8, 16), (9, 9), dilation=(2, 2)), True), (Conv((8, 16), (9, 9), kernel=(3, 1)), True),
        (Conv((8, 16), (9, 9), kernel=(5, 5)), True), (Conv((8, 16), (9, 9), groups=2), True),
        (Conv((8, 16), (9, 9)), False), (Conv((24, 24), (9, 9), blocks=(12, 12, 12)), True),
    ],
)  # fmt: skip
def test_other_convolutions_are_not_taken(conv, weight):
    assert options(conv, weight) == ["direct"]


def test_taken():
    assert options(Conv((8, 16), (9, 9))) == ["direct", "winograd2", "winograd4"]


@pytest.mark.parametrize("size", SIZES)
def test_transforms_make_a_convolution_of_integers(size):
    """A^T [(G g G^T) * (B^T d B)] A on small integers, exactly but for the fractions in G."""
    points = size + 2
    rng = np.random.default_rng(0)
    d, g = rng.integers(-4, 5, (points, points)).astype(float), rng.integers(-4, 5, (3, 3)).astype(float)
    taps = np.array(plane(g, lambda line: transform_taps(line, size), lambda v: v))
    data = np.array(plane(d, transform_data, lambda v: v))
    got = np.array(plane(taps * data, transform_product, lambda v: v))
    want = [[(d[y : y + 3, x : x + 3] * g).sum() for x in range(size)] for y in range(size)]
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_matrices():
    """A point's row of A^T is its powers; of B^T, the polynomial that is zero at the other points (Toom and Cook)."""
    points = [0, 5 / 8, -5 / 8, 3 / 2, -3 / 2]
    to_data, to_output = matrix(transform_data, 6), matrix(transform_product, 6)
    np.testing.assert_allclose(to_output[:, :5], np.vander(points, 4, increasing=True).T)
    assert to_output[:, 5].tolist() == [0, 0, 0, 1]
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        np.testing.assert_allclose(to_data[i], [*np.poly(others)[::-1], 0])
    np.testing.assert_allclose(to_data[5], np.poly(points)[::-1])


def _shape(channels: int, out: int, extent: int) -> ConvShape:
    return ConvShape(
        1, channels, extent, extent, out, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1, 0, 0, 0, "float32"
    )  # fmt: skip


def test_plan_fits_the_image():
    for channels, out, extent in ((64, 64, 56), (512, 512, 7), (3, 7, 1), (16, 16, 224)):
        for size in SIZES:
            plan = make_plan(_shape(channels, out, extent), size, SKYLAKE)
            assert plan.tile_rows * size >= extent > (plan.tile_rows - 1) * size
            assert plan.tile_rows % plan.chunk == 0
            assert plan.height * plan.panel // 16 <= 28
