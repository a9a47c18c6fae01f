"""The GPU's kernels, as far as they can be tested without a GPU: what they compute, limits, and compiling by nvcc."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi
from cuda_checks import (
    ARCHS,
    MOST_THREADS,
    STATIC_SHARED_BYTES,
    TARGET,
    TARGETS,
    How,
    compile_with_nvcc,
    cuda_source,
    device_source,
    launches_in_loops,
    model,
    needs_nvcc,
    run_on_host,
    serialised,
    starts,
    static_shared_bytes,
    threads,
    times_written,
    unscheduled,
)
from kernel_checks import graph, random_arrays
from tvm import relax, tirx

from rlflow_tvm.cost import KernelTimer, machine, measure_roofline
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import CostError, KernelError, UsageError
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.kernels import RULE_ATTR, Lowering, as_target, extract_kernels, pipeline, schedule_kernel, vector_lanes
from rlflow_tvm.kernels.cuda import tensor_core
from rlflow_tvm.kernels.cuda.layout import channels_last
from rlflow_tvm.kernels.cuda.products import Tile
from rlflow_tvm.kernels.pipeline import CUDA_GRAPH
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.passes import GraphState, default_rules

op = relax.op

TINY = ("demo", "squeezenet-tiny", "bert-tiny")
HALF_TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def test_target() -> None:
    target = as_target({"kind": "cuda", "arch": "sm_90"})
    assert (target.kind.name, str(target.attrs["arch"]), target.host.kind.name) == ("cuda", "sm_90", "llvm")
    kept = as_target({"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mcpu": "haswell"}})
    assert str(kept.host.attrs["mcpu"]) == "haswell"
    assert vector_lanes(target) == 1


@pytest.mark.skipif(tvm.cuda().exist, reason="there is a GPU")
@pytest.mark.parametrize("target", ["cuda", {"kind": "cuda"}])
def test_architecture_is_needed_without_a_gpu(target: object) -> None:
    with pytest.raises(UsageError, match="sm_90"):
        as_target(target)


@pytest.mark.skipif(tvm.cuda().exist, reason="there is a GPU")
def test_timing_needs_a_gpu() -> None:
    with pytest.raises(CostError, match="no such device"):
        KernelTimer(TARGET)
    with pytest.raises(CostError, match="bench_gpu"):
        measure_roofline(TARGET)


@pytest.mark.parametrize(("mode", "told"), [("nvcc", "add its folder to PATH"), ("nvrtc", "cuda-bindings")])
def test_timing_needs_a_compiler(mode: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", mode)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setattr(machine, "device_of", lambda _target: SimpleNamespace(exist=True, device_name="a GPU"))
    with pytest.raises(CostError, match=told):
        KernelTimer(TARGET)


def test_no_blocked_layouts() -> None:
    state = GraphState.from_module(model("demo"), default_rules(vector_lanes(TARGET)))
    layout = {rule.name for rule in state.ruleset.rules if rule.family == "layout"}
    assert layout
    assert not [name for name in layout if state.sites.get(name)]


@pytest.mark.parametrize("name", TINY)
def test_what_is_computed(name: str) -> None:
    mod = model(name)
    inputs = random_inputs(mod, 0)
    expected = onnxruntime_outputs(zoo.path(name), inputs)
    for how in (unscheduled, serialised):
        assert range_error(run_on_host(mod, list(inputs.values()), how), expected) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", [*TINY, "light_shufflenet"])
def test_products_write_each_result_once(name: str, dtype: str) -> None:
    kernels = [kernel.func for kernel in extract_kernels(model(name, dtype), TARGET)]
    products = [f for f in kernels if str(schedule_kernel(f, TARGET).attrs[RULE_ATTR]) in ("matmul", "tensor_core")]
    assert products
    for func in products:
        assert (times_written(func) == 1).all(), func.script()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    shapes = [(40, 96), (96, 50), (50,)]

    def dense(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.nn.softmax(op.nn.relu(op.add(op.matmul(x, w), b)))

    arrays = random_arrays(shapes)
    mod = to_half(graph(dense, shapes), dtype)
    kernels = extract_kernels(mod, TARGET)
    assert "tensor_core" in {str(schedule_kernel(kernel.func, TARGET).attrs[RULE_ATTR]) for kernel in kernels}
    logits = np.maximum(arrays[0] @ arrays[1] + arrays[2], 0)
    expected = np.exp(logits - logits.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)
    assert range_error(run_on_host(mod, arrays, serialised), [expected]) < HALF_TOLERANCE[dtype] * 10


@pytest.mark.parametrize("depth", [32, 256])
@pytest.mark.parametrize("tile", tensor_core.WARPS, ids=lambda tile: f"{tile.rows}x{tile.columns}")
def test_every_tile_starts(tile: Tile, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "choose_tile", lambda *_: tile)
    mod = to_half(graph(op.matmul, [(300, depth), (depth, 300)]), "float16")
    for target in TARGETS.values():
        scheduled = [schedule_kernel(kernel.func, target) for kernel in extract_kernels(mod, target)]
        (product,) = (func for func in scheduled if func.attrs[RULE_ATTR] == "tensor_core")
        assert starts(product, target)


def test_half_precision_has_a_name() -> None:
    with pytest.raises(KernelError, match="bfloat16"):
        to_half(graph(op.exp, [(3, 5)]), "float8")


CONVOLUTIONS = {
    "padded": ((1, 5, 9, 8), (7, 5, 3, 3), {"padding": (1, 1, 1, 1)}, "matmul"),
    "uneven padding": ((2, 4, 7, 6), (6, 4, 2, 3), {"padding": (0, 1, 2, 0)}, "matmul"),
    "strided and dilated": ((1, 8, 15, 14), (16, 8, 3, 3), {"strides": (2, 1), "dilation": (2, 3)}, "matmul"),
    "pointwise": ((1, 24, 6, 5), (40, 24, 1, 1), {}, "matmul"),
    "whole image": ((1, 12, 5, 5), (33, 12, 5, 5), {}, None),
    "grouped": ((1, 12, 8, 8), (18, 4, 3, 3), {"groups": 3, "padding": (1, 1, 1, 1)}, "matmul"),
    "depthwise": ((1, 10, 9, 9), (10, 1, 3, 3), {"groups": 10, "strides": (2, 2)}, "window"),
    "two a channel": ((1, 6, 7, 7), (12, 1, 3, 3), {"groups": 6, "padding": (1, 1, 1, 1)}, "window"),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    data, kernel, attributes, rule = CONVOLUTIONS[case]

    def layer(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.nn.conv2d(x, w, **attributes), b))

    shapes = [data, kernel, (1, kernel[0], 1, 1)]
    mod, arrays = graph(layer, shapes, weights=2), random_arrays(shapes)
    rules = [str(schedule_kernel(k.func, TARGET).attrs[RULE_ATTR]) for k in extract_kernels(mod, TARGET)]
    assert rule is None or rule in rules
    assert "fallback" not in rules
    every = graph(layer, shapes)
    reference = relax.VirtualMachine(tvm.compile(every, "llvm"), tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    for how in (unscheduled, serialised):
        assert range_error(run_on_host(every, arrays, how), [reference.numpy()]) < 1e-5


POOLS = {
    "max": lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), padding=(1, 1, 1, 1)),
    "max, ceiled": lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), ceil_mode=True),
    "average": lambda x: op.nn.avg_pool2d(x, (3, 3), (1, 1), padding=(1, 1, 1, 1), count_include_pad=False),
    "adaptive": lambda x: op.nn.adaptive_avg_pool2d(x, (3, 4)),
    "mean": lambda x: op.mean(x, [2, 3], keepdims=True),
    "mean of all": lambda x: op.subtract(x, op.mean(x)),
    "root of the mean of all": lambda x: op.divide(x, op.sqrt(op.mean(op.abs(x)))),
    "long sum": lambda x: op.sum(x, [1, 2, 3]),
    "softmax": lambda x: op.nn.softmax(x, 1),
    "largest": lambda x: op.argmax(x, 1),
}


@pytest.mark.parametrize("case", POOLS)
def test_reductions(case: str) -> None:
    shapes = [(2, 6, 11, 10)]
    mod, arrays = graph(POOLS[case], shapes), random_arrays(shapes)
    reference = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(arrays[0]))
    for how in (unscheduled, serialised):
        assert range_error(run_on_host(mod, arrays, how), [reference.numpy()]) < 1e-5


BEHIND_CONVOLUTIONS = {
    "squeezed": lambda y: op.squeeze(y, [-1]),
    "permuted": lambda y: op.permute_dims(y, [0, -1, -2, 1]),
    "with a number": lambda y: op.add(y, relax.prim_value(tirx.FloatImm("float32", 0.5))),
    "stacked": lambda y: op.stack([y, y], 0),
}


@pytest.mark.parametrize("case", BEHIND_CONVOLUTIONS)
def test_what_the_change_of_layouts_does_not_know(case: str) -> None:
    """TVM's `ConvertLayout` fails on it, or ends the process."""
    shapes = [(1, 16, 8, 1), (16, 16, 1, 1)]
    mod, arrays = graph(lambda x, w: BEHIND_CONVOLUTIONS[case](op.nn.conv2d(x, w)), shapes), random_arrays(shapes)
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    reference = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](*arguments)
    assert range_error(run_on_host(mod, arrays, serialised), [reference.numpy()]) < 1e-5


def test_half_convolutions_in_other_layouts_are_summed_in_float32() -> None:
    shapes = [(1, 1, 1, 4096), (1, 1, 4096, 16)]
    build = partial(op.nn.conv2d, data_layout="NHWC", kernel_layout="HWIO")
    mod = to_half(graph(build, shapes), "float16")
    (found,) = run_on_host(mod, [np.ones(shape, "float32") for shape in shapes], serialised)
    assert (found == 4096).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_grid_is_larger_than_a_device_launches(dtype: str) -> None:
    mod = graph(op.matmul, [(70000, 32, 32)] * 2)
    kernels = extract_kernels(mod if dtype == "float32" else to_half(mod, dtype), TARGET)
    (kernel,) = (kernel for kernel in kernels if "matmul" in kernel.name)
    grid: dict[str, int] = {}

    def note(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            grid[str(loop.thread_binding.thread_tag)] = int(loop.extent)

    tvm_ffi.structural_walk(schedule_kernel(kernel.func, TARGET).body, (tirx.For, note))
    assert grid["blockIdx.x"] > 1
    assert max(grid.get("blockIdx.y", 1), grid.get("blockIdx.z", 1)) < 2**16


@pytest.mark.parametrize("arch", ARCHS)
def test_executable_holds_cuda(arch: str) -> None:
    target = TARGETS[arch]
    executable = tvm.compile(model("demo"), target, relax_pipeline=pipeline(target))
    source = device_source(executable.mod)
    assert "__global__" in source
    assert "pack" not in source  # of weights: none of the CPU's


@pytest.mark.parametrize(("config", "captured"), [({}, True), ({CUDA_GRAPH: True}, True), ({CUDA_GRAPH: False}, False)])
def test_launches_are_a_cuda_graph(config: dict[str, bool], captured: bool) -> None:
    with tvm.transform.PassContext(config=config):
        mod = pipeline(TARGET)(model("demo"))
    assert ("vm.builtin.cuda_graph.run_or_capture" in mod["main"].script()) == captured


def test_no_cuda_graph_on_the_host() -> None:
    """TVM's own pipelines would make one, which no processor can run."""
    with tvm.transform.PassContext(config={CUDA_GRAPH: True}):
        mod = pipeline("llvm")(model("demo"))
    assert "cuda_graph" not in mod["main"].script()


def test_weight_only_work_stays_on_the_host() -> None:
    lowered = Lowering(TARGET).lower(model("demo"))
    assert lowered.weight_only is not None
    assert "permute_dims" not in channels_last(lowered.mod).script()


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
def test_nvcc(arch: str, tmp_path: Path) -> None:
    target = TARGETS[arch]
    models = [model("demo", "float32"), model("bert-tiny", "float16"), model("bert-tiny", "bfloat16")]
    scheduled = [schedule_kernel(kernel.func, target) for mod in models for kernel in extract_kernels(mod, target)]
    assert max(threads(func) for func in scheduled) <= MOST_THREADS
    report = compile_with_nvcc(cuda_source(scheduled, target), arch, tmp_path)
    assert max(static_shared_bytes(report)) <= STATIC_SHARED_BYTES


WHOLE = {
    "max": (op.max, np.max), "variance": (op.variance, np.var), "argmax": (lambda x: op.argmax(x, axis=0), np.argmax),
}  # fmt: skip


@pytest.mark.parametrize("how", [unscheduled, serialised])
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_tensor_is_reduced_by_few_launches(name: str, how: How) -> None:
    """dlight's rule for two reductions gives each element a launch, where nothing else is left of the axes."""
    build, expected = WHOLE[name]
    mod, (x,) = graph(build, [(7000,)]), random_arrays([(7000,)])
    for kernel in extract_kernels(mod, TARGET):
        scheduled = schedule_kernel(kernel.func, TARGET)
        assert not launches_in_loops(scheduled, TARGET), scheduled.attrs[RULE_ATTR]
    (result,) = run_on_host(mod, [x], how)
    np.testing.assert_allclose(result, expected(x), rtol=1e-4)


def test_nothing_is_not_launched() -> None:
    for build, shapes in ((op.nn.relu, [(0, 4)]), (op.matmul, [(0, 8), (8, 5)])):
        (kernel,) = extract_kernels(graph(build, shapes), TARGET)
        with pytest.raises(KernelError, match="has a loop of no turns"):
            schedule_kernel(kernel.func, TARGET)
