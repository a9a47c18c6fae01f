"""What the kernels need to know of a target: vector width, cores, whether it is one we can schedule for."""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from pathlib import Path

import tvm
from tvm.target import Target
from tvm.target.codegen import (
    llvm_cpu_has_features,
    llvm_get_cpu_archlist,
    llvm_get_system_cpu,
    llvm_get_system_triple,
    llvm_get_targets,
)

from rlflow_tvm.errors import UsageError
from rlflow_tvm.processors import usable_processors

log = logging.getLogger("rlflow_tvm")

KINDS = ("llvm", "cuda")
"""The kinds of targets that there are schedule rules for."""

STATIC_SHARED_BYTES = 48 * 1024
"""What every CUDA device gives a thread block without being asked for more."""

_FLOAT_BITS = 32
_ALIAS = re.compile(r"i[4-9]86|amd64|arm64|(arm|thumb)v\d.*|ppc(64)?(le)?")
"""Names of machines in triples beside those that LLVM lists."""
_SAME = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}
"""Names of the same kind of machine."""
_INSTRUCTIONS = (
    *("sse4.1", "sse4.2", "avx", "f16c", "avx2", "fma", "bmi", "bmi2", "movbe", "lzcnt", "popcnt"),
    *("avxvnni", "avxifma", "avxneconvert", "avxvnniint8", "avxvnniint16", "gfni"),
    *("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi", "avx512vbmi2"),
    *("avx512vnni", "avx512bitalg", "avx512vpopcntdq", "avx512bf16", "avx512fp16", "amx-tile", "avx10.1", "avx10.2"),
    *("neon", "dotprod", "fullfp16", "bf16", "i8mm", "lse", "sve", "sve2", "sme"),
)
"""Of which a processor may have those that came first alone; code with one that it lacks ends the process."""


_CPUINFO = Path("/proc/cpuinfo")
_FLAGS = {name: name for name in ("avx", "f16c", "avx2", "fma", "bmi2")} | {
    f"avx512{name}": f"avx512{'_' * apart}{name}"
    for names, apart in (
        (("f", "cd", "bw", "dq", "vl", "ifma", "vbmi"), False),
        (("vbmi2", "vnni", "bitalg", "vpopcntdq", "bf16", "fp16"), True),
    )
    for name in names
}
"""Instructions by LLVM's names, and what Linux calls them."""


def default_target() -> Target:
    """The machine this runs on: `{"kind": "llvm", "mcpu": <host cpu>, "num-cores": <logical cpus usable here>}`, with
    `mattr` where the processor has not all that its name stands for."""
    cpu, cores = llvm_get_system_cpu(), usable_processors()
    missing = _missing(cpu)
    return Target({"kind": "llvm", "mcpu": cpu, "num-cores": cores} | ({"mattr": missing} if missing else {}))


@cache
def _missing(cpu: str) -> list[str]:
    """Instructions of the processor that the system does not tell of, as `mattr` has them: a virtual machine may hide
    them, and code with them then ends the process."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    told = next((line.split() for line in lines if line.startswith("flags")), None)
    if told is None:  # no x86, or no Linux
        return []
    whole = Target({"kind": "llvm", "mcpu": cpu})
    return [f"-{name}" for name, flag in _FLAGS.items() if flag not in told and llvm_cpu_has_features(name, whole)]


def as_target(target: Target | str | dict | None) -> Target:
    """`target` as a `tvm.target.Target` of kind "llvm" or "cuda".

    A bare "llvm" (the name, a target with no attribute of its own, or None) means this machine, its `mcpu` and cores,
    where TVM means any processor of its kind: here that is {"kind": "llvm", "mcpu": "generic"}. The `mcpu` "native" is
    this machine's too; of a target that says no more than its cores the log is told that it is for any processor.
    "cuda", or a dictionary of that kind without "arch", is the GPU here. A GPU's target is given this machine as its
    host where it has none.
    UsageError for a kind TVM does not know, the old command-line form, a kind we have no kernels for, a machine or
    a processor that LLVM does not know, less than one core, or "cuda" with neither "arch" nor a GPU.
    """
    if target is None or target == "llvm":
        return default_target()
    if target == "cuda":
        target = {"kind": "cuda"}
    if isinstance(target, dict) and target.get("kind") == "cuda":
        if "arch" not in target:
            target = {**target, "arch": _device_arch()}
        target = {"max_shared_memory_per_block": STATIC_SHARED_BYTES, **target}
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
    if found.kind.name not in KINDS:
        raise UsageError(
            f"target kind {found.kind.name!r} has no schedule rules here: use a target of kind {' or '.join(KINDS)}"
        )
    if str(found) == str(Target("llvm")):  # `==` asks whether they are one object
        return default_target()
    if found.kind.name == "llvm":
        found = _of_this_processor(found)
    for compiled in (found, found.host):
        if compiled is not None and compiled.kind.name == "llvm":
            _check_cpu(compiled)
    if found.kind.name == "cuda" and found.host is None:
        found = Target(found, default_target())
    return found


def _of_this_processor(target: Target) -> Target:
    """`target` with this machine's processor by name where it is "native", of which TVM would make any of its kind, and
    say so in its own log alone. Without the vectors that make up most of its speed: the log is told where a target that
    says no more than its cores is compiled for any."""
    fields, bare = json.loads(str(target)), json.loads(str(Target("llvm")))
    if fields.get("mcpu") != "native":
        if all(fields[name] == bare.get(name) for name in fields if name != "num-cores"):
            _tell_of_any_processor(str(target))
        return target
    if fields.get("mtriple", bare["mtriple"]) != bare["mtriple"]:
        raise UsageError(f"target {target}: native is this machine's processor: name that of {fields['mtriple']}")
    here = {name: value for name, value in json.loads(str(default_target())).items() if name in ("mcpu", "mattr")}
    own = {name: value for name, value in fields.items() if name not in ("mcpu", "mtriple")}
    # those of the user's last, which win; what this machine hides stays left out
    added = [*here.get("mattr", []), *own.get("mattr", [])]
    return Target({
        **here, "num-cores": usable_processors(), **own, "mcpu": here["mcpu"], **({"mattr": added} if added else {}),
    })  # fmt: skip


@cache
def _tell_of_any_processor(target: str) -> None:
    """Once for each target: it is asked for again and again."""
    log.warning(
        'target %s names no processor: code is made for any of its kind, without wider vectors: add "mcpu": "native" '
        "for this machine's, or another one's name",
        target,
    )


def current_target() -> Target:
    """The target that TVM is compiling for (`with target:`, and within `tvm.compile`), as `as_target` has it; outside
    of any this machine."""
    return as_target(Target.current(allow_none=True))


def _check_cpu(target: Target) -> None:
    cores, cpu, triple = (target.attrs.get(name) for name in ("num-cores", "mcpu", "mtriple"))
    if cores is not None and int(cores) < 1:
        raise UsageError(f"target {target}: num-cores is {int(cores)}, give the number of threads to use, at least 1")
    machine = str(triple or "").partition("-")[0]
    if machine and machine not in llvm_get_targets() and not _ALIAS.fullmatch(machine):  # LLVM crashes where asked more
        raise UsageError(
            f"target {target}: LLVM knows no machine {machine!r} (of mtriple): give one of "
            f"{', '.join(llvm_get_targets())}, as in x86_64-linux-gnu"
        )
    if cpu and cpu != "generic" and cpu not in list(llvm_get_cpu_archlist(target)):
        raise UsageError(
            f"target {target}: LLVM knows no processor {str(cpu)!r}: give another mcpu (clang --print-supported-cpus "
            f"lists them), or none; this machine's is {llvm_get_system_cpu()!r}"
        )


def _device_arch() -> str:
    """The architecture of this machine's GPU, for example "sm_90"; UsageError without one."""
    device = tvm.cuda()
    if not device.exist:
        raise UsageError(
            'there is no GPU here to take the architecture from: name it, as in {"kind": "cuda", "arch": "sm_90"}'
        )
    return "sm_" + device.compute_version.replace(".", "")


def is_of_this_machine(target: Target) -> bool:
    """Whether code for the CPU `target` may run here: its triple names the same kind of machine, or none, and this
    one has the vector instructions of the target's processor."""
    machine = str(target.attrs.get("mtriple") or "").partition("-")[0]
    ours = llvm_get_system_triple().partition("-")[0]
    if machine and _SAME.get(machine, machine) != _SAME.get(ours, ours):
        return False
    here = default_target()
    return all(llvm_cpu_has_features(i, here) for i in _INSTRUCTIONS if llvm_cpu_has_features(i, target))


def vector_lanes(target: Target) -> int:
    """How many float32 fit a vector register of `target`: 16 with AVX-512, 8 with AVX, else 4 (SSE, NEON); 1 on a GPU.

    Layouts blocked by one lane are none: no rule of the layout family applies where this is 1. A GPU's threads compute
    scalars, and its convolutions want the channels last instead, which lowering sees to.
    Asked of LLVM by feature: `llvm_get_vector_width` answers 512 for every x86 processor.
    """
    if target.kind.name == "cuda":
        return 1
    for feature, bits in (("avx512f", 512), ("avx", 256)):
        if llvm_cpu_has_features(feature, target):
            return bits // _FLOAT_BITS
    return 128 // _FLOAT_BITS


def vector_registers(target: Target) -> int:
    """How many vector registers `target` has: 16 on x86 without AVX-512 and on 32-bit ARM, else 32."""
    if llvm_cpu_has_features("x87", target):
        return 32 if llvm_cpu_has_features("avx512f", target) else 16
    is_arm = "arm_cpu" in target.keys
    return 16 if is_arm and not target.features.is_aarch64 else 32


def num_cores(target: Target) -> int:
    """Threads that a kernel may use: the target's `num-cores`, else the logical processors usable here."""
    cores = target.attrs.get("num-cores")
    return int(cores) if cores else usable_processors()
