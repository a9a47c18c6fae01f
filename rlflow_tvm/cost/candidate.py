"""What is timed as a whole: a model on file, and what it took to make it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import tvm
from tvm.support import cc

from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import pipeline

_BUILTIN = "vm.builtin."


@dataclass(frozen=True)
class Candidate:
    """A model on file: "tvm" (shared library of `export_library`), "onnx" (run by ONNX Runtime) or "torch".

    The last is a program of `torch.export.save`, compiled by `torch.compile` with its weights as constants.
    """

    kind: Literal["tvm", "onnx", "torch"]
    path: str | os.PathLike[str]
    inputs: tuple[np.ndarray, ...] | None = None
    """Of its own, where they are not those of all candidates."""
    kernels: int | None = None
    """How many kernels a run launches; None where that is not known."""
    compile_secs: float | None = None
    """What `tvm.compile` took."""
    link_secs: float | None = None
    """What linking the library took."""


def export_library(
    mod: tvm.IRModule, target: tvm.target.Target, path: str | os.PathLike[str], relax_pipeline: Any = None
) -> Candidate:
    """Compile `mod` (bound form) into the shared library `path`, by default with `rlflow_tvm.kernels.pipeline`.

    CostError when it cannot be linked (TVM calls the machine's C++ compiler).
    """
    check_linker(path)  # before the work
    started = time.monotonic()
    executable = tvm.compile(mod, target, relax_pipeline=relax_pipeline or pipeline(target))
    compile_secs = time.monotonic() - started
    return replace(link_library(executable, path), compile_secs=compile_secs)


def link_library(executable: tvm.runtime.Executable, path: str | os.PathLike[str]) -> Candidate:
    """Write what `tvm.compile` made into the shared library `path`. CostError when it cannot be linked."""
    check_linker(path)
    started = time.monotonic()
    try:
        executable.export_library(str(path))
        link_secs = time.monotonic() - started
        with open(path, "rb") as library:
            os.fsync(library.fileno())  # else hundreds of megabytes are being stored while the model is timed
    except (RuntimeError, OSError) as error:
        last = str(error).strip().splitlines()[-1]
        raise CostError(f"cannot link {path} ({last}): check the C++ compiler {cc.get_cc()} and the disk") from error
    return Candidate("tvm", path, kernels=_launches(executable), link_secs=link_secs)


def check_linker(path: str | os.PathLike[str]) -> None:
    """CostError where there is nothing to link the shared library `path` with."""
    if cc.get_cc() is None:
        raise CostError(f"cannot link {path}: install a C++ compiler (g++ or clang++), or name one in CXX")


def _launches(executable: tvm.runtime.Executable) -> int:
    """The calls in the virtual machine's code but those of the machine's own functions, which compute nothing."""
    called = [line.split()[1] for line in executable.as_text().splitlines() if line.lstrip().startswith("call ")]
    return sum(not name.startswith(_BUILTIN) for name in called)
