"""What the machine can do at best, measured: multiply-adds a second and bytes a second, and a kernel's share of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax, s_tir, te, tirx

from rlflow_tvm.cost.candidate import Candidate, export_library
from rlflow_tvm.cost.metrics import kernel_bytes, kernel_flops
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Kernel, num_cores, vector_lanes
from rlflow_tvm.kernels.pipeline import finalize

_ROWS, _VECTORS = 6, 2  # of sums: enough to hide the latency of an addition, few enough for 16 registers
_DEPTH = 256  # multiply-adds of a sum in one pass over operands that stay in the first cache
_PASSES = 2000  # for each core
_COPIED_BYTES = 2**28  # larger than private caches; a last-level cache may hold it, as it may a model's activations


@dataclass(frozen=True)
class Roofline:
    """Best measured rates of the target with all its cores (Williams et al. 2009): FLOP/s (float32) and bytes/s."""

    flops_per_sec: float
    bytes_per_sec: float

    def least_secs(self, kernel: Kernel) -> float:
        """Seconds below which `kernel` cannot come: its operations or its bytes at the best rate."""
        return max(kernel_flops(kernel.func) / self.flops_per_sec, kernel_bytes(kernel.func) / self.bytes_per_sec)


def measure_roofline(target: tvm.target.Target) -> Roofline:
    """Measure `target`'s rates, now and here. CostError when a kernel cannot be measured, or for a GPU."""
    if target.kind.name != "llvm":
        raise CostError(f"the best rates of {target.kind.name} are not measured here: use scripts/bench_gpu.py")
    funcs = {"multiply-adds": peak_kernel(target), "copy": _copy(target)}
    kernels = [Kernel(func, f"roofline-{name}", name, 1) for name, func in funcs.items()]
    with KernelTimer(target) as timer:
        measured = timer.measure(kernels)
    secs = []
    for kernel, measurement in zip(kernels, measured, strict=True):
        if measurement.run_secs is None:
            raise CostError(f"cannot measure the machine's rate of {kernel.name}: {measurement.error}")
        secs.append(measurement.run_secs)
    arithmetic, copy = secs
    return Roofline(peak_flops(target) / arithmetic, kernel_bytes(kernels[1].func) / copy)


def peak_flops(target: tvm.target.Target) -> int:
    """Operations of one run of what `export_peak` makes."""
    return 2 * num_cores(target) * _PASSES * _DEPTH * _ROWS * _VECTORS * vector_lanes(target)


def export_peak(target: tvm.target.Target, path: str | os.PathLike[str]) -> Candidate:
    """The multiply-adds of `measure_roofline` as a candidate of `measure_interleaved`, to be timed beside others."""
    func = peak_kernel(target).without_attr("global_symbol")
    shapes = [tuple(int(extent) for extent in param.ty.shape) for param in func.params]
    operands = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes[:-1])]
    builder = relax.BlockBuilder()
    callee = builder.add_func(func, "multiply_adds")
    with builder.function("main", operands, attrs={"num_input": len(operands)}):
        with builder.dataflow():
            sums = relax.call_tir(callee, operands, relax.TensorType(shapes[-1], "float32"))
            output = builder.emit_output(sums)
        builder.emit_func_output(output)
    scheduled = tvm.transform.module_pass(lambda mod, _context: finalize(mod, target), opt_level=0)
    library = export_library(builder.finalize(), target, path, scheduled)
    return replace(library, inputs=tuple(np.ones(shape, "float32") for shape in shapes[:-1]))


def peak_kernel(target: tvm.target.Target) -> tirx.PrimFunc:
    """sums[core, i, v, lane] = sum over passes and k of scale[k, i] * vector[v, lane]: only scalars are read anew.

    Each is used twice, as in a register tile: were it not, LLVM would put the sum in its register, and where it unrolls
    the loop (Zen 3) run out of them."""
    lanes, cores = vector_lanes(target), num_cores(target)
    scale = te.placeholder((_DEPTH, _ROWS), "float32", name="scale")
    vector = te.placeholder((_VECTORS, lanes), "float32", name="vector")
    turn, k = te.reduce_axis((0, _PASSES), "turn"), te.reduce_axis((0, _DEPTH), "k")
    sums = te.compute(
        (cores, _ROWS, _VECTORS, lanes),
        lambda _core, i, v, lane: te.sum(scale[k, i] * vector[v, lane], axis=[turn, k]),
        name="sums",
    )
    sch = s_tir.Schedule(te.create_prim_func([scale, vector, sums]))
    block = sch.get_sblock("sums")
    core, row, column, lane, turn_loop, k_loop = sch.get_loops(block)
    sch.reorder(core, turn_loop, k_loop, row, column, lane)
    sch.parallel(core)
    sch.unroll(row)
    sch.unroll(column)
    sch.vectorize(lane)
    sch.decompose_reduction(block, turn_loop)
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)


def _copy(target: tvm.target.Target) -> tirx.PrimFunc:
    lanes, cores = vector_lanes(target), num_cores(target)
    rows = _COPIED_BYTES // 8 // (cores * lanes)  # half of the bytes are read, half written
    source = te.placeholder((cores, rows, lanes), "float32", name="source")
    sch = s_tir.Schedule(te.create_prim_func([source, te.compute(source.shape, lambda *i: source[i], name="copy")]))
    core, _, lane = sch.get_loops(sch.get_sblock("copy"))
    sch.parallel(core)
    sch.vectorize(lane)
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)
