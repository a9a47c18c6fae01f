"""Shared by the tests of the GPU's kernels: graphs run on the CPU as the GPU would compute them, and nvcc."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx

from rlflow_tvm.kernels import as_target

ARCHS = ("sm_80", "sm_90")
TARGETS = {arch: as_target({"kind": "cuda", "arch": arch}) for arch in ARCHS}
NVCC = shutil.which("nvcc")

MOST_THREADS = 1024
STATIC_SHARED_BYTES = 48 * 1024
DYNAMIC_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
_PIPELINE_ANNOTATIONS = ("software_pipeline", "double_buffer", "tirx.manifest")


def serialised(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A scheduled kernel with its threads one after the other, every buffer in plain memory.

    Each copy to shared memory is then made by each thread anew, so that the program computes what the block's
    threads compute together, as long as the schedule's data flow is right.
    """

    def serial(loop: tirx.For) -> tirx.For:
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return tvm_ffi.structural_map(func, (tirx.For, serial))


def cuda_source(funcs: Sequence[tirx.PrimFunc], target: tvm.target.Target) -> str:
    """The CUDA source of scheduled kernels, all in one file."""
    mod = tvm.IRModule({f"kernel{i}": func.with_attr("global_symbol", f"kernel{i}") for i, func in enumerate(funcs)})
    pending, sources = [tvm.compile(mod, target).mod], []
    while pending:
        module = pending.pop()
        pending.extend(module.imports)
        if module.kind == "cuda":
            sources.append(module.inspect_source())
    (source,) = sources
    return source
