"""Whole models timed against each other, each in its own process and in turns, so that a slow spell hits all alike."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tvm
from tvm.support import cc

from rlflow_tvm.cost.machine import cores, usable_cores
from rlflow_tvm.cost.metrics import static_shape
from rlflow_tvm.cost.operands import plain_array
from rlflow_tvm.cost.runner import read_arrays, write_arrays
from rlflow_tvm.cost.worker_process import WorkerCrashError, WorkerProcess, WorkerTimeoutError
from rlflow_tvm.errors import CostError
from rlflow_tvm.ir import num_inputs
from rlflow_tvm.kernels import BY_SHAPE, Choices, pipeline

_RUNNER = "rlflow_tvm.cost.runner"
_BURST_SECS = 0.3
_MIN_CALLS = 2
_MAX_CALLS = 5000
_SLOW_SECS = 1.0  # a call this long is a burst by itself: waking threads and filling caches no longer shows in it


@dataclass(frozen=True)
class Candidate:
    """A model on file: "tvm" (shared library of `export_library`), "onnx" (run by ONNX Runtime) or "torch".

    The last is a program of `torch.export.save`, compiled by `torch.compile` with its weights as constants.
    """

    kind: Literal["tvm", "onnx", "torch"]
    path: str | os.PathLike[str]
    inputs: tuple[np.ndarray, ...] | None = None
    """Of its own, where they are not those of all candidates."""


@dataclass(frozen=True)
class EndToEnd:
    """Seconds of the calls of one model, by round, and what it computed.

    `rounds[r]` are the timed calls of round r; `outputs` the model's output arrays in order (tuples flattened).
    """

    rounds: tuple[tuple[float, ...], ...]
    outputs: tuple[np.ndarray, ...]

    @property
    def samples(self) -> tuple[float, ...]:
        """All timed calls."""
        return tuple(secs for calls in self.rounds for secs in calls)

    @property
    def run_secs(self) -> float:
        """Median over all calls."""
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile over all calls, seconds."""
        low, high = np.percentile(self.samples, [25, 75])
        return float(low), float(high)

    @property
    def round_secs(self) -> tuple[float, ...]:
        """Median of each round; compare candidates round by round, as a round saw the same machine."""
        return tuple(float(np.median(calls)) for calls in self.rounds)


def export_library(
    mod: tvm.IRModule, target: tvm.target.Target, path: str | os.PathLike[str], relax_pipeline: Any = None
) -> Candidate:
    """Compile `mod` (bound form) into the shared library `path`, by default with `rlflow_tvm.kernels.pipeline`.

    CostError when it cannot be linked (TVM calls the machine's C++ compiler).
    """
    _check_linker(path)  # before the work
    return link_library(tvm.compile(mod, target, relax_pipeline=relax_pipeline or pipeline(target)), path)


def link_library(executable: tvm.runtime.Executable, path: str | os.PathLike[str]) -> Candidate:
    """Write what `tvm.compile` made into the shared library `path`. CostError when it cannot be linked."""
    _check_linker(path)
    try:
        executable.export_library(str(path))
    except (RuntimeError, OSError) as error:
        last = str(error).strip().splitlines()[-1]
        raise CostError(f"cannot link {path} ({last}): check the C++ compiler {cc.get_cc()} and the disk") from error
    with open(path, "rb") as library:
        os.fsync(library.fileno())  # else hundreds of megabytes are being stored while the model is timed
    return Candidate("tvm", path)


def _check_linker(path: str | os.PathLike[str]) -> None:
    if cc.get_cc() is None:
        raise CostError(f"cannot link {path}: install a C++ compiler (g++ or clang++), or name one in CXX")


def measure_module(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    inputs: Sequence[np.ndarray] | None = None,
    rounds: int = 5,
    choices: Choices = BY_SHAPE,
) -> EndToEnd:
    """Compile `mod` (bound form) with our pipeline, time it as a whole. Errors as in `measure_interleaved`.

    `inputs`: normal floats and zeros if not given. Give the `choices` of the `CostModel` whose costs it is to be held
    against.
    """
    with tempfile.TemporaryDirectory() as folder:
        candidate = export_library(mod, target, Path(folder) / "model.so", pipeline(target, choices))
        given = _plain_inputs(mod) if inputs is None else inputs
        return measure_interleaved({"model": candidate}, given, rounds, threads=cores(target))["model"]


def _plain_inputs(mod: tvm.IRModule) -> list[np.ndarray]:
    main = mod["main"]
    drawn = []
    for param in main.params[: num_inputs(main)]:
        drawn.append(plain_array(static_shape(param.ty.shape, f"input {param.name}"), str(param.ty.dtype)))
    return drawn


def measure_interleaved(
    candidates: Mapping[str, Candidate],
    inputs: Sequence[np.ndarray],
    rounds: int = 10,
    *,
    threads: int | None = None,
    timeout_secs: float = 120.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, EndToEnd]:
    """Time `candidates` in turns (A B C A B C ...), `rounds` bursts of calls each, all on the same `inputs`.

    `inputs` in the order of the models' parameters. `threads`: worker threads of each candidate (default: usable
    processors). Each lives in a process of its own and sleeps while it is not its turn. A burst lasts about 0.3 s, at
    least two calls, and its first calls, which wake threads and fill caches, are not timed; a model that takes longer
    than a second is called once a burst.
    `on_progress(done, total)` counts bursts. CostError naming the candidate that fails, takes longer than
    `timeout_secs` for a request, or needs ONNX Runtime where that is not installed.
    """
    with Runners(threads, timeout_secs) as runners:
        return runners.measure(candidates, inputs, rounds, on_progress)


class Runners:
    """The processes of `measure_interleaved`, one for each candidate's name, kept for further comparisons.

    Arguments as there. A context manager that ends them.
    """

    def __init__(self, threads: int | None = None, timeout_secs: float = 120.0) -> None:
        self._threads = threads or usable_cores()
        self._timeout_secs = timeout_secs
        self._runners: dict[str, _Runner] = {}

    def measure(
        self,
        candidates: Mapping[str, Candidate],
        inputs: Sequence[np.ndarray],
        rounds: int = 10,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, EndToEnd]:
        """As `measure_interleaved`."""
        if rounds < 1:
            raise CostError(f"{rounds} rounds measure nothing: give at least 1")
        if any(c.kind == "onnx" for c in candidates.values()) and find_spec("onnxruntime") is None:
            raise CostError("ONNX Runtime is not installed: pip install onnxruntime, or compare against TVM only")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_arrays(folder / "inputs.npz", list(inputs))
            runners = {}
            for index, (name, candidate) in enumerate(candidates.items()):
                if name not in self._runners:
                    self._runners[name] = _Runner(name, self._threads, self._timeout_secs)
                runners[name] = self._runners[name]
                given = folder / "inputs.npz"
                if candidate.inputs is not None:
                    given = folder / f"inputs{index}.npz"
                    write_arrays(given, list(candidate.inputs))
                runners[name].load(candidate, given, folder / f"outputs{index}.npz")
            times: dict[str, list[tuple[float, ...]]] = {name: [] for name in candidates}
            for turn in range(rounds):
                for place, (name, runner) in enumerate(runners.items()):
                    times[name].append(runner.burst())
                    if on_progress is not None:
                        on_progress(turn * len(runners) + place + 1, rounds * len(runners))
            return {name: EndToEnd(tuple(times[name]), runner.outputs()) for name, runner in runners.items()}

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()


class _Runner:
    """The parent's side of one candidate."""

    def __init__(self, name: str, threads: int, timeout_secs: float) -> None:
        self._name = name
        self._timeout_secs = timeout_secs
        self._threads = threads
        self._process = WorkerProcess(_RUNNER, threads)
        self._outputs: Path | None = None
        self._calls = _MIN_CALLS
        self._wake = True

    def load(self, candidate: Candidate, inputs: Path, outputs: Path) -> None:
        self._outputs = outputs
        path = os.path.abspath(candidate.path)
        loaded = self._ask(
            {
                "op": "load",
                "kind": candidate.kind,
                "path": path,
                "inputs": str(inputs),
                "outputs": str(outputs),
                "threads": self._threads,
            }
        )
        self._wake = loaded["first_secs"] <= _SLOW_SECS or candidate.kind == "torch"  # which compiles in its first call
        if not self._wake:
            self._calls = 1
            return
        once = min(self._ask({"op": "burst", "calls": 1, "wake": True})["samples"])
        self._calls = min(max(int(_BURST_SECS / once), _MIN_CALLS), _MAX_CALLS)

    def burst(self) -> tuple[float, ...]:
        return tuple(self._ask({"op": "burst", "calls": self._calls, "wake": self._wake})["samples"])

    def outputs(self) -> tuple[np.ndarray, ...]:
        assert self._outputs is not None
        return tuple(read_arrays(self._outputs))

    def close(self) -> None:
        self._process.kill()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._process.call(request, self._timeout_secs)
        except (WorkerCrashError, WorkerTimeoutError) as error:
            raise CostError(f"candidate {self._name} cannot be timed ({error}): check it on its own") from error
        if "error" in answer:
            raise CostError(f"candidate {self._name} cannot be timed ({answer['error']}): check its file and inputs")
        return answer
