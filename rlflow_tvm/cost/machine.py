"""What times depend on beside the kernel: the target and the processor this runs on."""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib import import_module
from pathlib import Path

import tvm
from tvm.target import Target

from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels.target import STATIC_SHARED_BYTES, as_target
from rlflow_tvm.processors import usable_processors

_CPUINFO = Path("/proc/cpuinfo")
# Intel and AMD say "model name"; ARM kernels give numbers only, which name the core all the same.
_CPUINFO_FIELDS = ("model name", "CPU implementer", "CPU part", "cpu model", "uarch")
_CODE = (
    *("cl-opt", "fast-math", "fast-math-arcp", "fast-math-contract", "fast-math-ninf", "fast-math-nnan"),
    *("fast-math-nsz", "fast-math-reassoc", "mabi", "max_num_threads", "max_shared_memory_per_block"),
    *("max_threads_per_block", "mfloat-abi", "thread_warp_size", "vector-width"),
)
"""Attributes that few targets set, on which code depends too."""
_USUAL = {
    "max_num_threads": 1024,
    "max_shared_memory_per_block": STATIC_SHARED_BYTES,
    "max_threads_per_block": 1024,
    "thread_warp_size": 32,
}
"""What targets of GPUs have of them."""


def target_key(target: Target, rpc_key: str | None = None) -> str:
    """A stable string of what code depends on in `target` (kind, mcpu, mattr, cores, optimisation level and, where they
    are not as usual, others) and of the processor this runs on.

    The host's name is in it because two machines may compile for the same `mcpu` and yet run at other speeds. The name
    of other machines is the key under which a tracker lists them. Where the target does not say how many cores there
    are, those that are used here are in it: machines with the same processors have more or fewer of them.
    """
    attrs = target.attrs
    computes_here = target.kind.name == "llvm" and rpc_key is None
    # A feature list means the same in any order, so it is sorted.
    mattr = ",".join(sorted(str(feature) for feature in attrs.get("mattr") or ()))
    fields = {
        "kind": target.kind.name,
        "mcpu": str(attrs.get("mcpu", "")),
        "arch": str(attrs.get("arch", "")),
        "mattr": mattr,
        "mtriple": str(attrs.get("mtriple", "")),
        "num-cores": str(attrs.get("num-cores") or (usable_processors() if computes_here else "")),
        "opt-level": str(attrs.get("opt-level", "")),
        **{name: str(attrs[name]) for name in _CODE if attrs.get(name) and attrs[name] != _USUAL.get(name)},
        "device": str(device_of(target).device_name) if target.kind.name != "llvm" and rpc_key is None else "",
        "host": cpu_model() if rpc_key is None else f"rpc:{rpc_key}",
    }
    return ";".join(f"{name}={value}" for name, value in fields.items() if value)


def device_of(target: Target) -> tvm.runtime.Device:
    """The device of this machine that kernels for `target` run on."""
    return tvm.device("cpu" if target.kind.name == "llvm" else target.kind.name)


def check_device(target: Target) -> None:
    """CostError where this machine has no device for `target`, or nothing to compile its kernels with."""
    if not device_of(target).exist:
        raise CostError(
            f"kernels for {target.kind.name} cannot be timed here, as there is no such device: "
            "use a machine that has one, or target llvm"
        )
    if target.kind.name == "cuda":
        check_cuda_compiler()


def check_cuda_compiler() -> None:
    """CostError where TVM would not find what it compiles CUDA with: NVRTC, or nvcc if `TVM_CUDA_COMPILE_MODE` says so.

    TVM says so when it compiles; every kernel would be taken for one that cannot be built.
    """
    mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvrtc").lower()
    if mode not in ("nvcc", "nvrtc"):
        raise CostError(f"TVM_CUDA_COMPILE_MODE is {mode!r}: set it to nvrtc or nvcc")
    if mode == "nvcc":
        if shutil.which("nvcc") is None:
            raise CostError("there is no nvcc to compile CUDA kernels with: add its folder to PATH")
        return
    try:
        import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CostError(
            "there is no NVRTC to compile CUDA kernels with: pip install cuda-bindings, or have nvcc and set "
            "TVM_CUDA_COMPILE_MODE=nvcc"
        ) from error


def check_remote(target: Target | str | dict) -> None:
    """CostError where `target` does not say how many cores other machines have, as this one's number is not theirs, or
    where there is nothing to compile its kernels with, which is done here; UsageError where it is no target."""
    known = as_target(target)
    stated = target if isinstance(target, Target) else Target(target)
    cpu = stated if stated.kind.name == "llvm" else stated.host or known.host
    if not cpu.attrs.get("num-cores"):
        raise CostError(
            f'target {target} does not say how many cores the RPC machines have: give it "num-cores", '
            'as in {"kind": "llvm", "mcpu": "znver4", "num-cores": 8}'
        )
    if known.kind.name == "cuda":
        check_cuda_compiler()


def cpu_model() -> str:
    """The model name of the processor this runs on; without /proc/cpuinfo what `platform` knows of it."""
    if _CPUINFO.exists():
        seen: dict[str, str] = {}
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            seen.setdefault(name.strip(), value.strip())
        parts = [seen[field] for field in _CPUINFO_FIELDS if seen.get(field)]
        if parts:
            # "Intel(R) Xeon(R) Processor" is the name of several generations in virtual machines: add the numbers.
            numbers = [seen[field] for field in ("cpu family", "model", "stepping") if seen.get(field)]
            return re.sub(r"\s+", " ", " ".join([*parts, *([".".join(numbers)] if numbers else [])]))
    return platform.processor() or platform.machine()


def cores(target: Target) -> int:
    """Threads a kernel or model may use: the target's `num-cores`, else the processors usable here."""
    wanted = target.attrs.get("num-cores")
    return int(wanted) if wanted else usable_processors()
