"""What the machine can do at best, measured: multiply-adds a second and bytes a second, and a kernel's share of it."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, te, tirx

from rlflow_tvm.cost.metrics import kernel_bytes, kernel_flops
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Kernel, num_cores, vector_lanes

_ACCUMULATORS = 12  # vectors of sums: enough to hide the latency of an addition, few enough for 16 registers
_DEPTH = 256  # multiply-adds of an accumulator in one pass over operands that stay in the first cache
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
    """Measure `target`'s rates, now and here. CostError when a kernel cannot be measured."""
    funcs = {"multiply-adds": _multiply_adds(target), "copy": _copy(target)}
    kernels = [Kernel(func, f"roofline-{name}", name, 1) for name, func in funcs.items()]
    with KernelTimer(target) as timer:
        measured = timer.measure(kernels)
    secs = []
    for kernel, measurement in zip(kernels, measured, strict=True):
        if measurement.run_secs is None:
            raise CostError(f"cannot measure the machine's rate of {kernel.name}: {measurement.error}")
        secs.append(measurement.run_secs)
    arithmetic, copy = secs
    flops = 2 * num_cores(target) * _PASSES * _DEPTH * _ACCUMULATORS * vector_lanes(target)
    return Roofline(flops / arithmetic, kernel_bytes(kernels[1].func) / copy)


def _multiply_adds(target: tvm.target.Target) -> tirx.PrimFunc:
    """sums[core, i, lane] = sum over passes and k of scale[k, i] * vector[lane]: only the scalars are read anew."""
    lanes, cores = vector_lanes(target), num_cores(target)
    scale = te.placeholder((_DEPTH, _ACCUMULATORS), "float32", name="scale")
    vector = te.placeholder((lanes,), "float32", name="vector")
    turn, k = te.reduce_axis((0, _PASSES), "turn"), te.reduce_axis((0, _DEPTH), "k")
    sums = te.compute(
        (cores, _ACCUMULATORS, lanes),
        lambda _core, i, lane: te.sum(scale[k, i] * vector[lane], axis=[turn, k]),
        name="sums",
    )
    sch = s_tir.Schedule(te.create_prim_func([scale, vector, sums]))
    block = sch.get_sblock("sums")
    core, accumulator, lane, turn_loop, k_loop = sch.get_loops(block)
    sch.reorder(core, turn_loop, k_loop, accumulator, lane)
    sch.parallel(core)
    sch.unroll(accumulator)
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
