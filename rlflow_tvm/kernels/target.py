"""What the kernels need to know of a target: vector width, cores, whether it is one we can schedule for."""

from __future__ import annotations

import os

from tvm.target import Target
from tvm.target.codegen import llvm_cpu_has_features, llvm_get_system_cpu

from rlflow_tvm.errors import UsageError

_FLOAT_BITS = 32


def default_target() -> Target:
    """The machine this runs on: `{"kind": "llvm", "mcpu": <host cpu>, "num-cores": <logical cpus usable here>}`."""
    return Target({"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": usable_processors()})


def as_target(target: Target | str | dict | None) -> Target:
    """`target` as a `tvm.target.Target` for the CPU.

    A bare "llvm" (or None) means this machine, its `mcpu` and cores. UsageError for a kind TVM does not know,
    the old command-line form, or a device we have no kernels for.
    """
    if target is None or target == "llvm":
        return default_target()
    found = target if isinstance(target, Target) else None
    if found is None:
        try:
            found = Target(target)
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"target {target!r} cannot be read ({reason}): "
                'give "llvm" or a dictionary such as {"kind": "llvm", "mcpu": "znver4", "num-cores": 8}'
            ) from error
    if found.kind.name != "llvm":
        raise UsageError(f"target kind {found.kind.name!r} has no schedule rules here: use a target of kind 'llvm'")
    return found


def vector_lanes(target: Target) -> int:
    """How many float32 fit a vector register of `target`: 16 with AVX-512, 8 with AVX, else 4 (SSE, NEON).

    Asked of LLVM by feature: `llvm_get_vector_width` answers 512 for every x86 processor.
    """
    for feature, bits in (("avx512f", 512), ("avx", 256)):
        if llvm_cpu_has_features(feature, target):
            return bits // _FLOAT_BITS
    return 128 // _FLOAT_BITS


def num_cores(target: Target) -> int:
    """Threads that a kernel may use: the target's `num-cores`, else the logical processors usable here."""
    cores = target.attrs.get("num-cores")
    return int(cores) if cores else usable_processors()


def usable_processors() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux: honours taskset and container limits
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
