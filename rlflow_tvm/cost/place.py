"""Where kernels are timed: here, or in a session on another machine (`session.py`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm.support import cc
from tvm.target import Target

from rlflow_tvm.cost.machine import device_of
from rlflow_tvm.errors import CostError


class Place(Protocol):
    """A machine that runs what was built for it. `device`: what the target names; `processor`: its CPU."""

    device: tvm.runtime.Device
    processor: tvm.runtime.Device

    def load(self, executable: tvm.runtime.Executable) -> tvm.runtime.Module:
        """What `tvm.compile` made, loaded there."""


class Here:
    """This process."""

    def __init__(self, target: Target) -> None:
        self.device = device_of(target)
        self.processor = tvm.cpu()

    def load(self, executable: tvm.runtime.Executable) -> tvm.runtime.Module:
        """As in `Place`."""
        return executable.jit()


class LinkError(CostError):
    """What was built for another machine cannot be linked on this one."""


_COMMAND = "Command line:"  # behind what the compiler said, in TVM's errors


def linked(executable: tvm.runtime.Executable, **options: Any) -> bytes:
    """What `tvm.compile` made as a shared library, linked with the compiler that TVM finds, or CXX names; `options` as
    `export_library` has them. LinkError where that fails."""
    compiler = cc.get_cc()
    if compiler is None:
        raise LinkError("kernels cannot be linked for servers: install a C++ compiler (g++), or name one in CXX")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "library.so"
            executable.export_library(str(path), **options)
            return path.read_bytes()
    except (RuntimeError, OSError) as error:
        told = [line for line in str(error).splitlines() if line.strip() and not line.startswith(_COMMAND)]
        last = told[-1].strip() if told else type(error).__name__
        raise LinkError(
            f"kernels cannot be linked for servers ({last}): check the disk and the C++ compiler {compiler}, or name "
            "another in CXX"
        ) from error


def processor_of(target: Target) -> Target:
    """The target of the processor that launches kernels for `target`: itself, or a GPU's host."""
    return target if target.kind.name == "llvm" else target.host
