"""Shared by the tests of the GPU's kernels: graphs run on the CPU as the GPU would compute them, limits, and nvcc."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from rlflow_tvm.cost.metrics import kernel_buffers, tensor_bytes
from rlflow_tvm.frontend import from_onnx, zoo
from rlflow_tvm.kernels import RULE_ATTR, Lowering, as_target, default_target, schedule_kernel
from rlflow_tvm.kernels.cuda.tensor_core import TensorCore
from rlflow_tvm.kernels.pipeline import bind_weights, finalize
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.verify import flatten

ARCHS = ("sm_80", "sm_90")
TARGETS = {arch: as_target({"kind": "cuda", "arch": arch}) for arch in ARCHS}
TARGET = TARGETS["sm_80"]
HOST = default_target()

MOST_THREADS = 1024
STATIC_SHARED_BYTES = 48 * 1024
DYNAMIC_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}

_USES_DYNAMIC = "tirx.use_dyn_shared_memory"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

How = Callable[[tirx.PrimFunc], tirx.PrimFunc]


@functools.cache
def model(name: str, dtype: str = "float32") -> tvm.IRModule:
    """A model of the zoo, cast to `dtype`; not to be changed."""
    return from_onnx(zoo.path(name)) if dtype == "float32" else to_half(model(name), dtype)


def unscheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The definition of what a kernel computes."""
    return func


def serialised(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel scheduled for the GPU with its threads one after the other, without tensor cores.

    Each thread makes all of its block's copies to shared memory anew, so that the program computes what the threads
    compute together, as long as the schedule's data flow is right.
    """
    return _serial(_scheduled(func))


def times_written(func: tirx.PrimFunc) -> np.ndarray:
    """How often all threads together write each element of the output of a product scheduled for the GPU.

    `serialised` does not see what is written twice, if the right value happens to be the last.
    """

    def count(store: tirx.BufferStore) -> tvm.ir.Stmt:
        if not any(map(store.buffer.same_as, func.params)):
            return store  # for nothing, but TVM wants every buffer used
        written = store.buffer[tuple(store.indices)]
        return tirx.BufferStore(store.buffer, written + tirx.const(1, written.ty.dtype), store.indices)

    counting = tvm_ffi.structural_map(_scheduled(func), (tirx.BufferStore, count))
    executable = tvm.compile(tvm.IRModule({"main": _serial(counting).with_attr("global_symbol", "main")}), HOST)
    arrays = [tvm.runtime.tensor(np.zeros(*buffer)) for buffer in kernel_buffers(func)]
    executable.jit()["main"](*arrays)
    return arrays[-1].numpy()


def _scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """As `schedule_kernel` does it for the GPU, without intrinsics."""
    scheduled = schedule_kernel(func, TARGET)
    if scheduled.attrs[RULE_ATTR] == "tensor_core":
        plain = TensorCore(tensorize=False).apply(func, TARGET, False)
        assert isinstance(plain, s_tir.Schedule)
        scheduled = plain.mod["main"]
    return scheduled


def _serial(scheduled: tirx.PrimFunc) -> tirx.PrimFunc:
    def serial(loop: tirx.For) -> tirx.For:
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return tvm_ffi.structural_map(scheduled, (tirx.For, serial))


def run_on_host(mod: tvm.IRModule, inputs: Sequence[np.ndarray], how: How) -> list[np.ndarray]:
    """The outputs of `mod` lowered for the GPU, each kernel changed by `how` and then compiled for the CPU as it is."""
    lowered = bind_weights(Lowering(TARGET).lower(mod))
    functions = {
        name: how(func).with_attr("tirx.is_scheduled", True) if isinstance(func, tirx.PrimFunc) else func
        for name, func in lowered.functions_items()
    }
    executable = tvm.compile(finalize(tvm.IRModule(functions), HOST), HOST, relax_pipeline=None)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(array) for array in inputs))
    return [tensor.numpy() for tensor in flatten(result)]


def threads(func: tirx.PrimFunc) -> int:
    """The most threads that a thread block of any launch of a scheduled kernel has."""
    extents: dict[str, int] = {}

    def note(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            tag = str(loop.thread_binding.thread_tag)
            extents[tag] = max(extents.get(tag, 1), int(loop.extent))

    tvm_ffi.structural_walk(func.body, (tirx.For, note))
    product = 1
    for tag, extent in extents.items():
        product *= extent if tag.startswith("threadIdx") else 1
    return product


def starts(func: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    """Whether a launch of a scheduled kernel gets the shared memory that it needs.

    CUDA gives 48 KB to a block, and more only if asked; TVM asks for as much as the dynamic part has, where that alone
    is 48 KB or more.
    """
    static, dynamic = 0, 0

    def note_call(call: tvm.ir.Call) -> None:
        nonlocal dynamic
        if _is_launch(call) and _USES_DYNAMIC in call.attrs.launch_params:
            dynamic = int(call.args[-1])

    def note_buffer(made: tirx.AllocBuffer) -> None:
        nonlocal static
        if made.buffer.scope() == "shared":
            static += tensor_bytes([int(extent) for extent in made.buffer.shape], str(made.buffer.dtype))

    for each in _lowered(func, target):
        tvm_ffi.structural_walk(each.body, [(tvm.ir.Call, note_call), (tirx.AllocBuffer, note_buffer)])
    return dynamic >= STATIC_SHARED_BYTES or static + dynamic <= STATIC_SHARED_BYTES


def launches_in_loops(func: tirx.PrimFunc, target: tvm.target.Target) -> int:
    """How many of a scheduled kernel's launches lie in loops of the host."""
    found: list[bool] = []

    def note_loop(loop: tirx.For) -> None:
        tvm_ffi.structural_walk(loop.body, (tvm.ir.Call, lambda call: found.append(_is_launch(call))))

    for each in _lowered(func, target):
        tvm_ffi.structural_walk(each.body, (tirx.For, note_loop))
    return sum(found)


def _lowered(func: tirx.PrimFunc, target: tvm.target.Target) -> list[tirx.PrimFunc]:
    """Host and device code of a scheduled kernel."""
    bound = tirx.transform.BindTarget(target)(tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}))
    return list(s_tir.pipeline.default_s_tir_pipeline()[0](bound).functions.values())


def _is_launch(call: tvm.ir.Call) -> bool:
    return getattr(call.op, "name", "") == "tirx.call_ffi_kernel"


def cuda_source(funcs: Sequence[tirx.PrimFunc], target: tvm.target.Target) -> str:
    """The CUDA source of scheduled kernels, all in one file."""
    mod = tvm.IRModule({f"kernel{i}": func.with_attr("global_symbol", f"kernel{i}") for i, func in enumerate(funcs)})
    return device_source(tvm.compile(mod, target).mod)


def device_source(host: tvm.runtime.Module) -> str:
    """The CUDA source that a compiled module carries."""
    pending, sources = [host], []
    while pending:
        module = pending.pop()
        pending.extend(module.imports)
        if module.kind == "cuda":
            sources.append(module.inspect_source())
    (source,) = sources
    return source


def compile_with_nvcc(source: str, arch: str, folder: Path) -> str:
    """Compile to a cubin; ptxas' report of each kernel."""
    file = folder / "kernels.cu"
    file.write_text(source)
    command = ["nvcc", "-w", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-o", str(file.with_suffix(".cubin")), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    assert file.with_suffix(".cubin").stat().st_size > 0
    return done.stderr


def static_shared_bytes(report: str) -> list[int]:
    """What each kernel takes of static shared memory, by ptxas' report."""
    return [int(found) for found in re.findall(r"(\d+) bytes smem", report)]
