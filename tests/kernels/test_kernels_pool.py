"""Pools against plain numpy ones: layouts, padding, ceil mode, what an average counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from rlflow_tvm.kernels import pipeline, schedule_kernel
from rlflow_tvm.kernels.llvm.conv_legalize import CONV_LEGALIZE
from rlflow_tvm.kernels.llvm.pool import Pool2d

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": 2})


@dataclass(frozen=True)
class Pool:
    """One pool over (N, C, H, W) in blocks of `block` channels (0: plain)."""

    operator: str
    shape: tuple[int, int, int, int]
    block: int = 0
    attrs: dict = field(default_factory=dict)


def to_blocks(image: np.ndarray, block: int) -> np.ndarray:
    """NCHW to NCHW{block}c."""
    if not block:
        return image
    n, c, h, w = image.shape
    return np.ascontiguousarray(image.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2))


def spans(pool: Pool) -> list[list[tuple[np.ndarray, int]]]:
    """For each output row and each output column: the pixels its window holds, and how many an average counts."""
    attrs, result = pool.attrs, []
    for axis in (0, 1):
        extent = pool.shape[2 + axis]
        if pool.operator.startswith("adaptive"):
            count = attrs["output_size"][axis]
            edges = [(i * extent // count, -(-(i + 1) * extent // count)) for i in range(count)]
            result.append([(np.arange(low, high), high - low) for low, high in edges])
            continue
        size, stride = attrs["pool_size"][axis], attrs["strides"][axis]
        dilation = attrs.get("dilation", (1, 1))[axis]
        before, after = attrs["padding"][axis], attrs["padding"][axis + 2]
        room = extent + before + after - (size - 1) * dilation - 1
        count = (-(-room // stride) if attrs.get("ceil_mode") else room // stride) + 1
        if attrs.get("ceil_mode") and (count - 1) * stride >= extent + before:
            count -= 1  # no window starts in the padding behind the image
        windows = [np.arange(size) * dilation + i * stride - before for i in range(count)]
        inside = [w[(w >= 0) & (w < extent)] for w in windows]
        counted = [int((w < extent + after).sum()) for w in windows]
        include = attrs.get("count_include_pad", False)
        result.append([(i, c if include else len(i)) for i, c in zip(inside, counted, strict=True)])
    return result


def reference(pool: Pool, data: np.ndarray) -> np.ndarray:
    """The pool in numpy."""
    rows, columns = spans(pool)
    result = np.empty((*data.shape[:2], len(rows), len(columns)))
    for y, (row, row_count) in enumerate(rows):
        for x, (column, column_count) in enumerate(columns):
            window = data[:, :, row][:, :, :, column].astype("float64")
            if "max" in pool.operator:
                result[:, :, y, x] = window.max(axis=(2, 3), initial=-np.inf)
            else:
                result[:, :, y, x] = window.sum(axis=(2, 3)) / (row_count * column_count)
    return result


def build(pool: Pool) -> tvm.IRModule:
    """The scheduled module of the pool and a minimum."""
    n, c, h, w = pool.shape
    shape = (n, c // pool.block, h, w, pool.block) if pool.block else pool.shape
    layout = f"NCHW{pool.block}c" if pool.block else "NCHW"
    data = relax.Var("data", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            value = builder.emit(getattr(relax.op.nn, pool.operator)(data, layout=layout, **pool.attrs))
            output = builder.emit_output(relax.op.minimum(value, relax.const(1.0)))
        builder.emit_func_output(output)
    passes = [
        relax.transform.LegalizeOps(CONV_LEGALIZE),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    with TARGET:
        mod = tvm.transform.Sequential(passes)(builder.get())
    for gv, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod[gv] = schedule_kernel(func, TARGET)
    return mod


def check(pool: Pool, infinite: float = 0.0) -> None:
    """A rule takes the pool, and the compiled graph gives what numpy gives, with `infinite` as a share of -inf."""
    mod = build(pool)
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    # means of whole plain images are sums like others
    assert {str(f.attrs["rlflow.schedule_rule"]) for f in functions} <= {"pool2d", "reduction"}
    rng = np.random.default_rng(3)
    data = rng.standard_normal(pool.shape, dtype="float32")
    data[rng.random(pool.shape) < infinite] = -np.inf
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(to_blocks(data, pool.block))).numpy()
    expected = to_blocks(np.minimum(reference(pool, data), 1), pool.block)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


PADDED = dict(pool_size=(3, 3), strides=(2, 2), padding=(1, 1, 1, 1))
BARE = dict(pool_size=(3, 3), strides=(2, 2), padding=(0, 0, 0, 0))
ASYMMETRIC = dict(pool_size=(2, 3), strides=(1, 2), padding=(0, 1, 1, 0))
DILATED = dict(pool_size=(2, 3), strides=(1, 1), padding=(1, 1, 1, 1), dilation=(2, 2))


@pytest.mark.parametrize("block", [0, 8, 16])
@pytest.mark.parametrize("size", [(13, 17), (6, 109), (1, 7)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_max_pool(block: int, size: tuple[int, int], ceil_mode: bool) -> None:
    for attrs in (PADDED, BARE, ASYMMETRIC, DILATED):
        if size[0] + attrs["padding"][0] + attrs["padding"][2] >= 3:
            check(Pool("max_pool2d", (1, 32, *size), block, attrs | {"ceil_mode": ceil_mode}))


@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize("attrs", [PADDED, BARE, dict(pool_size=(12, 14), strides=(1, 1), padding=(0, 0, 0, 0))])
def test_max_pool_of_infinities(block: int, attrs: dict) -> None:
    for share in (0.8, 1.0):
        check(Pool("max_pool2d", (1, 16, 12, 14), block, attrs), infinite=share)


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_avg_pool(block: int, ceil_mode: bool, count_include_pad: bool) -> None:
    for attrs in (PADDED, BARE, ASYMMETRIC):
        options = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        check(Pool("avg_pool2d", (2, 16, 12, 14), block, attrs | options))


@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize("output_size", [(1, 1), (3, 5), (13, 7), (4, 1)])
def test_adaptive_avg_pool(block: int, output_size: tuple[int, int]) -> None:
    check(Pool("adaptive_avg_pool2d", (2, 24, 13, 7), block, {"output_size": output_size}))


def test_global_pool_of_odd_channels() -> None:
    check(Pool("adaptive_avg_pool2d", (1, 13, 5, 5), 0, {"output_size": (1, 1)}))


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_averages_of_integers(dtype: str) -> None:
    """Rounded to zero, as TVM's are."""
    x = np.arange(64, dtype=dtype).reshape(1, 1, 8, 8)
    param = relax.Var("x", relax.TensorType(x.shape, dtype))
    pools = (
        (lambda x: relax.op.nn.avg_pool2d(x, (2, 2), strides=(2, 2)), x.reshape(4, 2, 4, 2).sum((1, 3)) // 4),
        (lambda x: relax.op.nn.adaptive_avg_pool2d(x, (1, 3)), np.array([[29, 31, 34]])),
    )
    for build, wanted in pools[: 1 if dtype == "uint8" else 2]:  # a sum of bytes overflows, as in TVM
        builder = relax.BlockBuilder()
        with builder.function("main", [param]):
            with builder.dataflow():
                output = builder.emit_output(build(param))
            builder.emit_func_output(output)
        executable = tvm.compile(builder.finalize(), TARGET, relax_pipeline=pipeline(TARGET))
        result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_array_equal(result[0, 0], wanted)


def test_integers_of_64_bits() -> None:
    """Pools of them, and averages that become such: nothing is narrowed, and no loop divided at the edges."""
    whole = np.random.default_rng(0).integers(-9, 10, (2, 3, 13, 13))
    image = relax.Var("image", relax.TensorType(whole.shape, "float32"))
    integers = relax.Var("integers", relax.TensorType(whole.shape, "int64"))
    attrs = {"pool_size": (2, 5), "strides": (2, 2), "padding": (1, 2, 1, 3), "dilation": (1, 2)}
    builder = relax.BlockBuilder()
    with builder.function("main", [image, integers]):
        with builder.dataflow():
            average = builder.emit(relax.op.nn.avg_pool2d(image, (3, 3), (2, 2), (1, 1, 1, 1)))
            greatest = builder.emit(relax.op.add(relax.op.nn.max_pool2d(integers, **attrs), relax.const(1, "int64")))
            output = builder.emit_output(relax.Tuple([builder.emit(relax.op.astype(average, "int64")), greatest]))
        builder.emit_func_output(output)
    executable = tvm.compile(builder.finalize(), TARGET, relax_pipeline=pipeline(TARGET))
    arguments = (tvm.runtime.tensor(whole.astype(dtype)) for dtype in ("float32", "int64"))
    average, greatest = relax.VirtualMachine(executable, tvm.cpu())["main"](*arguments)
    averages = Pool("avg_pool2d", whole.shape, attrs=PADDED)
    np.testing.assert_array_equal(average.numpy(), np.trunc(reference(averages, whole)))
    np.testing.assert_array_equal(greatest.numpy(), reference(Pool("max_pool2d", whole.shape, attrs=attrs), whole) + 1)


def test_rule_leaves_other_functions_alone() -> None:
    data = relax.Var("data", relax.TensorType((1, 8, 9, 9), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.sum(data, axis=[2, 3]))
        builder.emit_func_output(output)
    mod = relax.transform.LegalizeOps()(builder.get())
    functions = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert functions
    assert all(Pool2d().apply(f, TARGET, False) is None for f in functions)
