"""Pointwise convolutions of plain images: the implementation with pixels in the lanes, and the choice between both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from kernel_checks import allocated, assert_close, graph, needs_instructions_of, random_arrays
from tvm import relax

from rlflow_tvm.kernels import Choices, Lowering, default_target, pipeline, schedule_kernel, vector_lanes
from rlflow_tvm.kernels.choice import Choice
from rlflow_tvm.kernels.llvm.conv_tile import accumulator_registers
from rlflow_tvm.kernels.llvm.implementations import IMPLEMENTATIONS
from rlflow_tvm.kernels.llvm.pixel_tile import PixelProduct, PixelTile

TARGET = default_target()
ONE_CORE = tvm.target.Target({"kind": "llvm", "mcpu": TARGET.attrs["mcpu"], "num-cores": 1})
HASWELL = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
SKYLAKE = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 3})

# (batch, input channels, output channels, height, width)
SHAPES = [
    (1, 128, 16, 55, 55),
    (1, 16, 64, 13, 11),
    (2, 12, 24, 7, 7),
    (1, 5, 23, 9, 13),
    (2, 1, 1, 1, 1),
    (1, 1, 17, 1, 1),
    (1, 33, 3, 1, 50),
    (3, 7, 40, 17, 1),
    (1, 300, 8, 4, 4),
    (1, 8, 1, 5, 5),
]


def pixels(choice: Choice) -> str:
    """The implementation tested here, wherever it takes the call."""
    return "pixels" if any(option.name == "pixels" for option in choice.options) else choice.options[0].name


def compute(
    build: Callable[..., relax.Expr], shapes: list[tuple[int, ...]], target: tvm.target.Target
) -> tuple[np.ndarray, list[np.ndarray], list[str]]:
    """What `build` gives with the pixel implementation, its arguments (the second a weight), the schedule rules."""
    needs_instructions_of(target)
    data, weight, *rest = random_arrays(shapes)

    def reordered(data: relax.Expr, *others: relax.Expr) -> relax.Expr:
        return build(data, others[-1], *others[:-1])

    mod = graph(reordered, [shapes[0], *shapes[2:], shapes[1]], weights=1)
    kernels = Lowering(target, pixels).kernels(mod)
    rules = [str(schedule_kernel(kernel.func, target).attrs["rlflow.schedule_rule"]) for kernel in kernels]
    main = mod["main"]
    bound = main.bind_params({main.params[-1]: tvm.runtime.tensor(weight)})
    executable = tvm.compile(
        tvm.IRModule({tvm.ir.GlobalVar("main"): bound}), target, relax_pipeline=pipeline(target, Choices(pixels))
    )
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in (data, *rest))).numpy()
    return result, [data, weight, *rest], rules


def product(data: np.ndarray, weight: np.ndarray, strides: tuple[int, int] = (1, 1)) -> np.ndarray:
    """The pointwise convolution in numpy, in float64."""
    used = data[:, :, :: strides[0], :: strides[1]].astype("float64")
    return np.einsum("ncyx,oc->noyx", used, weight[:, :, 0, 0].astype("float64"))


@pytest.mark.parametrize("target", [TARGET, ONE_CORE, HASWELL, SKYLAKE], ids=["here", "one", "haswell", "skylake"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_pixels_in_the_lanes(shape: tuple[int, ...], target: tvm.target.Target) -> None:
    batch, inputs, outputs, height, width = shape
    shapes = [(batch, inputs, height, width), (outputs, inputs, 1, 1), (1, outputs, 1, 1)]
    result, (data, weight, bias), rules = compute(
        lambda x, w, b: relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w), b)), shapes, target
    )
    assert rules == ["conv2d_pixels"]
    assert_close(result, np.maximum(product(data, weight) + bias, 0))


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize(("groups", "target"), [(1, ONE_CORE), (1, TARGET), (2, TARGET), (3, TARGET)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_pixels_copied_first(
    shape: tuple[int, ...],
    groups: int,
    target: tvm.target.Target,
    strides: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, inputs, outputs, height, width = shape
    rows = next(r for r in range(min(8, outputs), 0, -1) if -(-outputs // r) % groups == 0 or r == 1)
    if -(-outputs // rows) % groups:
        pytest.skip("fewer channels than groups")
    tile = PixelTile(rows, 3, False, 0.0, groups)
    monkeypatch.setattr("rlflow_tvm.kernels.llvm.pixel_conv.pixel_tile", lambda *_: tile)
    shapes = [(batch, inputs, height, width), (outputs, inputs, 1, 1), (1, outputs, 1, 1)]
    result, (data, weight, bias), rules = compute(
        lambda x, w, b: relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w, strides=strides), b)), shapes, target
    )
    assert rules == ["conv2d_pixels"]
    assert_close(result, np.maximum(product(data, weight, strides) + bias, 0))


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("mcpu", ["haswell", "skylake-avx512"])
@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("size", [(12, 16), (13, 17)], ids=str)
def test_a_tile_and_its_pixels_fit_the_caches(
    size: tuple[int, int], groups: int, mcpu: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column of pixels is copied at a time, and the sums are those of one tile, whether or not tiles fill the
    image."""
    tile = PixelTile(4, 3, False, 0.0, groups)
    monkeypatch.setattr("rlflow_tvm.kernels.llvm.pixel_conv.pixel_tile", lambda *_: tile)
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": cores})
    mod = graph(lambda x, w: relax.op.nn.relu(relax.op.nn.conv2d(x, w)), [(1, 64, *size), (32, 64, 1, 1)], weights=1)
    (kernel,) = (each for each in Lowering(target, pixels).kernels(mod) if "conv2d" in each.name)
    width = 3 * vector_lanes(target)
    sizes = allocated(schedule_kernel(kernel.func, target))
    assert sizes == {"conv2d": 4 * 4 * width} | ({"columns": 4 * 64 * width} if groups else {})


@pytest.mark.parametrize(("size", "strides"), [((8, 8), (2, 2)), ((7, 9), (2, 1)), ((5, 31), (3, 2)), ((1, 1), (2, 2))])
def test_strides(size: tuple[int, int], strides: tuple[int, int]) -> None:
    shapes = [(2, 6, *size), (12, 6, 1, 1)]
    result, (data, weight), rules = compute(lambda x, w: relax.op.nn.conv2d(x, w, strides=strides), shapes, TARGET)
    assert rules == ["conv2d_pixels"]
    assert_close(result, product(data, weight, strides))


def test_residual_is_added_in_the_kernel() -> None:
    shapes = [(1, 32, 14, 14), (48, 32, 1, 1), (1, 48, 14, 14)]
    result, (data, weight, residual), rules = compute(
        lambda x, w, r: relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w), r)), shapes, TARGET
    )
    assert rules == ["conv2d_pixels"]
    assert_close(result, np.maximum(product(data, weight) + residual, 0))


def test_what_defines_variables_may_be_read_twice() -> None:
    """Element-wise functions are written with variables of their own (`vector_math`), here into two places."""
    shapes = [(1, 12, 7, 7), (16, 12, 1, 1), (1, 16, 1, 1)]

    def build(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        y = relax.op.sigmoid(relax.op.add(relax.op.nn.conv2d(x, w), b))
        return relax.op.multiply(y, relax.op.nn.relu(relax.op.add(y, b)))

    result, (data, weight, bias), rules = compute(build, shapes, TARGET)
    assert rules == ["conv2d_pixels"]
    gate = 1 / (1 + np.exp(-(product(data, weight) + bias)))
    assert_close(result, gate * np.maximum(gate + bias, 0))


def test_what_is_read_may_be_computed_first() -> None:
    """relu before the convolution is fused to it, and no part of it."""
    shapes = [(1, 32, 9, 9), (16, 32, 1, 1)]
    result, (data, weight), rules = compute(lambda x, w: relax.op.nn.conv2d(relax.op.nn.relu(x), w), shapes, TARGET)
    assert "conv2d_pixels" in rules
    assert_close(result, product(np.maximum(data, 0), weight))


def test_what_is_read_behind_may_be_computed_first() -> None:
    """A gate of its own comes before the convolution in the kernel, and goes into its epilogue."""
    shapes = [(1, 12, 7, 7), (16, 12, 1, 1), (1, 16, 7, 7)]

    def build(x: relax.Expr, w: relax.Expr, gate: relax.Expr) -> relax.Expr:
        return relax.op.multiply(relax.op.sigmoid(gate), relax.op.nn.conv2d(x, w))

    result, (data, weight, gate), rules = compute(build, shapes, TARGET)
    assert rules == ["conv2d_pixels"]
    assert_close(result, product(data, weight) / (1 + np.exp(-gate)))


@pytest.mark.parametrize("residual", [(1, 2, 16, 7, 7), (3, 2, 16, 7, 7), (3, 1, 1, 1, 1, 1)], ids=str)
def test_what_follows_may_have_more_axes(residual: tuple[int, ...]) -> None:
    shapes = [(2, 12, 7, 7), (16, 12, 1, 1), residual]
    result, (data, weight, other), rules = compute(
        lambda x, w, y: relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w), y)), shapes, TARGET
    )
    assert rules[0] == "conv2d_pixels"
    assert_close(result, np.maximum(product(data, weight) + other, 0))


@pytest.mark.parametrize("images", [3, 8])
def test_what_follows_may_be_of_more_images(images: int) -> None:
    shapes = [(1, 24, 13, 11), (40, 24, 1, 1), (images, 40, 13, 11)]
    result, (data, weight, other), rules = compute(
        lambda x, w, y: relax.op.add(relax.op.nn.conv2d(x, w), y), shapes, TARGET
    )
    assert rules == ["conv2d_pixels"]
    assert_close(result, product(data, weight) + other)


def test_other_calls_are_not_taken() -> None:
    (pixels_option,) = (option for option in IMPLEMENTATIONS["relax.nn.conv2d"] if option.name == "pixels")

    def taken(data: tuple[int, ...], weight: tuple[int, ...], **attrs: object) -> bool:
        x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", data), ("w", weight)))
        builder = relax.BlockBuilder()
        with builder.function("main", [x, w]):
            call = builder.normalize(relax.op.nn.conv2d(x, w, **attrs))
            builder.emit_func_output(builder.emit(call))
        return pixels_option.takes(call, True, TARGET)

    assert taken((1, 8, 7, 7), (4, 8, 1, 1))
    assert not taken((1, 8, 7, 7), (4, 8, 3, 3))
    assert not taken((1, 8, 7, 7), (4, 8, 1, 1), padding=1)
    assert not taken((1, 8, 7, 7), (4, 4, 1, 1), groups=2)
    assert not taken((1, 1, 7, 7, 16), (1, 16, 1, 1, 16), data_layout="NCHW16c", kernel_layout="OIHW16o")


@pytest.mark.parametrize("mcpu", ["x86-64", "haswell", "skylake-avx512"])
@pytest.mark.parametrize("product", [(1, 16, 128, 3025), (2, 1000, 512, 169), (1, 1, 1, 1), (1, 23, 5, 49)])
def test_tile_fits_the_registers(product: tuple[int, int, int, int], mcpu: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    tile = PixelProduct(*product).tile(target)
    assert tile.rows * tile.vectors <= accumulator_registers(target)
    assert tile.rows <= max(8, product[1])
