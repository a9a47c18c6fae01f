"""A command of the package, as a user calls it, in a process of its own.

The process is the copy of one that has imported what takes long to import: TVM, with torch two and a half seconds,
which a command that is told of bad input needs for little else. (What ends a process is left out with that: Python's
`atexit`. Tests that kill a command or document one start it by hand.)
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow_tvm.cost import end_to_end

SLOW_TO_IMPORT = [
    *("rlflow_tvm", "onnx", "dgl", "rich.progress", "torch.utils.tensorboard", "typer"),
    "torch._dynamo",  # which torch imports with the first optimizer
    *("rlflow_tvm.agents.training", "rlflow_tvm.comparison", "rlflow_tvm.evaluation", "rlflow_tvm.exporting"),
    *("rlflow_tvm.ordering", "rlflow_tvm.passes.verify", "rlflow_tvm.reporting", "rlflow_tvm.superoptimize"),
    "rlflow_tvm.training",
]


def run_command(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], limit_secs: float
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments`; TimeoutExpired after so long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_TO_IMPORT)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        own = module, list(arguments), dict(environment), processors(), bursts(), out, err
        process = context.Process(target=_become, args=own)
        process.start()
        process.join(limit_secs)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([module, *arguments], limit_secs, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(
            [module, *arguments], process.exitcode, out.read_text(errors="replace"), err.read_text(errors="replace")
        )


def processors() -> set[int] | None:
    """Those that this process may use; None where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def bursts() -> tuple[float, int | None]:
    """How whole modules are run, as the tests have it: seconds, and rounds until the next process."""
    return end_to_end._BURST_SECS, end_to_end._ROUNDS_A_PROCESS


def _become(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    usable: set[int] | None,
    burst: tuple[float, int | None],
    out: Path,
    err: Path,
) -> None:
    end_to_end._BURST_SECS, end_to_end._ROUNDS_A_PROCESS = burst
    if usable is not None:  # those of the process that is copied may be others
        os.sched_setaffinity(0, usable)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
