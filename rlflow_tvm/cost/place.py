"""Where kernels are timed: here, or in a session on another machine (`session.py`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm.target import Target

from rlflow_tvm.cost.machine import device_of


class Place(Protocol):
    """A machine that runs what was built for it. `device`: what the target names; `processor`: its CPU."""

    device: tvm.runtime.Device
    processor: tvm.runtime.Device

    def load(self, executable: tvm.runtime.Executable, **link: Any) -> tvm.runtime.Module:
        """What `tvm.compile` made, linked (`link`: as `export_library` takes it) and loaded there."""


class Here:
    """This process."""

    def __init__(self, target: Target) -> None:
        self.device = device_of(target)
        self.processor = tvm.cpu()

    def load(self, executable: tvm.runtime.Executable, **link: Any) -> tvm.runtime.Module:
        """As in `Place`; linked only where `link` asks for something."""
        if not link:
            return executable.jit()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "library.so"
            executable.export_library(str(path), **link)
            return tvm.runtime.load_module(str(path))


def processor_of(target: Target) -> Target:
    """The target of the processor that launches kernels for `target`: itself, or a GPU's host."""
    return target if target.kind.name == "llvm" else target.host
