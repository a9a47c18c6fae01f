"""Shared by the kernel tests: build a small graph, compile it with our pipeline, compare with numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.target.codegen import llvm_cpu_has_features

from rlflow_tvm.kernels import default_target, extract_kernels, pipeline, schedule_kernel

TARGET = default_target()


def needs_instructions_of(target: tvm.target.Target) -> None:
    """Skip the test on a machine without AVX-512 whose kernels for `target` have it, and are to be run."""
    if llvm_cpu_has_features("avx512f", target) and not llvm_cpu_has_features("avx512f", TARGET):
        pytest.skip("this machine has no AVX-512")


@dataclass(frozen=True)
class Outcome:
    """What a graph computed for a target."""

    values: list[np.ndarray]
    mod: tvm.IRModule
    target: tvm.target.Target

    @cached_property
    def rules(self) -> list[str]:
        """The schedule rules that its kernels take, in the order of launch; few ask, and scheduling takes its time."""
        scheduled = [schedule_kernel(kernel.func, self.target) for kernel in extract_kernels(self.mod, self.target)]
        return [str(func.attrs["rlflow.schedule_rule"]) for func in scheduled]


def predicates(func: tirx.PrimFunc) -> list[str]:
    """The predicates of the blocks of `func` that are not simply true."""
    found: list[str] = []

    def note(realize: s_tir.SBlockRealize) -> None:
        if not isinstance(realize.predicate, tirx.IntImm):
            found.append(str(realize.predicate))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, note))
    return found


def allocated(func: tirx.PrimFunc) -> dict[str, int]:
    """Bytes of the buffers that `func` (scheduled) allocates, as small as TVM makes them: of each name the largest."""
    passes = [
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
    ]
    module = tvm.transform.Sequential(passes)(tvm.IRModule({"main": func}))
    sizes: dict[str, int] = {}

    def note(block: s_tir.SBlock) -> None:
        for buffer in block.alloc_buffers:
            size = math.prod(map(int, buffer.shape)) * tvm.DataType(str(buffer.dtype)).itemsize
            sizes[str(buffer.name)] = max(size, sizes.get(str(buffer.name), 0))

    tvm_ffi.structural_walk(module["main"].body, (s_tir.SBlock, note))
    return sizes


def module_of(build: Callable[..., relax.Expr], params: Sequence[relax.Var]) -> tvm.IRModule:
    """`main(*params) = build(*params)`."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(build(*params))
        builder.emit_func_output(output)
    return builder.finalize()


def graph(build: Callable[..., relax.Expr], shapes: Sequence[tuple[int, ...]], weights: int = 0) -> tvm.IRModule:
    """`main(x0, x1, ...) = build(x0, x1, ...)`, float32; the last `weights` parameters count as weights."""
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    mod = module_of(build, params)
    mod["main"] = mod["main"].with_attr("num_input", len(shapes) - weights)
    return mod


def random_arrays(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """Standard normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def run(
    mod: tvm.IRModule, arrays: Sequence[np.ndarray], weights: int = 0, target: tvm.target.Target = TARGET
) -> Outcome:
    """Compile with our pipeline, the last `weights` arrays bound as constants, and run on the others."""
    func = mod["main"]
    inputs = len(arrays) - weights
    built = mod
    if weights:
        bound = dict(zip(func.params[inputs:], (tvm.runtime.tensor(a) for a in arrays[inputs:]), strict=True))
        built = tvm.IRModule({tvm.ir.GlobalVar("main"): func.bind_params(bound)})
    executable = tvm.compile(built, target, relax_pipeline=pipeline(target))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(a) for a in arrays[:inputs]))
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return Outcome([r.numpy() for r in results], mod, target)


def check(
    build: Callable[..., relax.Expr],
    expected: Callable[..., np.ndarray | Sequence[np.ndarray]],
    shapes: Sequence[tuple[int, ...]],
    weights: int = 0,
    tolerance: float = 2e-6,
) -> Outcome:
    """`build` through our pipeline equals `expected` on the same arrays, to `tolerance` of the output's range."""
    arrays = random_arrays(shapes)
    outcome = run(graph(build, shapes, weights), arrays, weights)
    wanted = expected(*arrays)
    for got, want in zip(outcome.values, [wanted] if isinstance(wanted, np.ndarray) else wanted, strict=True):
        assert got.shape == want.shape
        scale = max(float(np.abs(want).max()), 1e-3)
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance)
    return outcome


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    """Equal to a few roundings of float32, of the largest value."""
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-6 * max(1.0, float(np.abs(expected).max())))
