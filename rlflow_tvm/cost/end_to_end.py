"""Whole models timed against each other, each in its own process and in turns, so that a slow spell hits all alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from rlflow_tvm.cost.candidate import Candidate, export_library
from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.metrics import static_shape
from rlflow_tvm.cost.operands import plain_array
from rlflow_tvm.cost.runner import read_arrays, write_arrays
from rlflow_tvm.cost.scratch import scratch_folder, scratch_written
from rlflow_tvm.cost.worker_process import WorkerCrashError, WorkerProcess, WorkerTimeoutError
from rlflow_tvm.errors import CostError
from rlflow_tvm.ir import num_inputs
from rlflow_tvm.kernels import BY_SHAPE, Choices, pipeline
from rlflow_tvm.processors import usable_processors

_RUNNER = "rlflow_tvm.cost.runner"
_BURST_SECS = 0.3
_MIN_CALLS = 2
_MAX_CALLS = 5000
_SLOW_SECS = 1.0  # a call this long is a burst by itself: waking threads and filling caches no longer shows in it
_COMPILE_SECS = 900.0  # that torch.compile may take for a large model
_ROUNDS_A_PROCESS: int | None = 2
"""One binary's time varies from process to process, seldom by a tenth, which no number of rounds in one would show."""


@dataclass(frozen=True)
class EndToEnd:
    """Seconds of the calls of one model, by round, what it computed, and what it took before it could.

    `rounds[r]` are the timed calls of round r; `outputs` the model's output arrays in order (tuples flattened).
    `load_secs`: until the model could be called (reading the file; ONNX Runtime's making of a session), the runtime
    being imported. `first_secs`: of the first call, in which torch.compile compiles. `peak_bytes`: the most memory that
    the process held in all of that and its rounds, over what it held, runtime imported and inputs read, before it
    loaded the model; None where the system does not tell.
    """

    rounds: tuple[tuple[float, ...], ...]
    outputs: tuple[np.ndarray, ...]
    load_secs: float = 0.0
    first_secs: float = 0.0
    peak_bytes: int | None = None

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


def measure_module(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    inputs: Sequence[np.ndarray] | None = None,
    rounds: int = 5,
    choices: Choices = BY_SHAPE,
    turn: AbstractContextManager[None] | None = None,
) -> EndToEnd:
    """Compile `mod` (bound form) with our pipeline, time it as a whole. Errors as in `measure_interleaved`.

    `inputs`: normal floats and zeros if not given. Give the `choices` of the `CostModel` whose costs it is to be held
    against. `turn` is entered while it is timed (`KernelTimer.in_turn`).
    """
    with scratch_folder() as folder:
        candidate = export_library(mod, target, Path(folder) / "model.so", pipeline(target, choices))
        given = _plain_inputs(mod) if inputs is None else inputs
        with turn or nullcontext():
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
    processors). Each lives in a process of its own, a new one for every other round, but for torch.compile, which would
    compile again; it sleeps while it is not its turn. A burst lasts about 0.3 s, at least two calls, and its first
    calls, which wake threads and fill caches, are not timed; a model that takes longer than a second is called once a
    burst.
    `on_progress(done, total)` counts bursts. CostError naming the candidate that fails, takes longer than
    `timeout_secs` for a request, or needs ONNX Runtime where that is not installed.
    """
    with Runners(threads, timeout_secs) as runners:
        return runners.measure(candidates, inputs, rounds, on_progress, rounds_a_process=_ROUNDS_A_PROCESS)


class Runners:
    """The processes of `measure_interleaved`, one for each candidate's name, kept for further comparisons.

    Arguments as there. A context manager that ends them. What torch.compile has compiled is kept as long as they are:
    an earlier program's files would make it look fast at that.
    """

    def __init__(self, threads: int | None = None, timeout_secs: float = 120.0) -> None:
        self._threads = threads or usable_processors()
        self._timeout_secs = timeout_secs
        self._runners: dict[str, _Runner] = {}
        self._compiled = scratch_folder(ignore_cleanup_errors=True)  # its helpers may write to the last

    def measure(
        self,
        candidates: Mapping[str, Candidate],
        inputs: Sequence[np.ndarray],
        rounds: int = 10,
        on_progress: Callable[[int, int], None] | None = None,
        rounds_a_process: int | None = None,
    ) -> dict[str, EndToEnd]:
        """As `measure_interleaved`; `rounds_a_process`: after so many rounds the models are loaded again, in new
        processes, but for torch.compile's, which would compile again."""
        if rounds < 1:
            raise CostError(f"{rounds} rounds measure nothing: give at least 1")
        if any(c.kind == "onnx" for c in candidates.values()) and find_spec("onnxruntime") is None:
            raise CostError("ONNX Runtime is not installed: pip install onnxruntime, or compare against TVM only")
        with scratch_folder() as name:
            folder = Path(name)
            with scratch_written():
                write_arrays(folder / "inputs.npz", list(inputs))
            runners = {}
            for index, (name, candidate) in enumerate(candidates.items()):
                if name not in self._runners:
                    self._runners[name] = _Runner(name, self._threads, self._timeout_secs, self._compiled.name)
                runners[name] = self._runners[name]
                given = folder / "inputs.npz"
                if candidate.inputs is not None:
                    given = folder / f"inputs{index}.npz"
                    with scratch_written():
                        write_arrays(given, list(candidate.inputs))
                runners[name].load(candidate, given, folder / f"outputs{index}.npz")
            times: dict[str, list[tuple[float, ...]]] = {name: [] for name in candidates}
            for turn in range(rounds):
                if rounds_a_process and turn and turn % rounds_a_process == 0:
                    for runner in runners.values():
                        runner.renew()
                for place, (name, runner) in enumerate(runners.items()):
                    times[name].append(runner.burst())
                    if on_progress is not None:
                        on_progress(turn * len(runners) + place + 1, rounds * len(runners))
            return {name: runner.result(times[name]) for name, runner in runners.items()}

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._compiled.cleanup()


class _Runner:
    """The parent's side of one candidate."""

    def __init__(self, name: str, threads: int, timeout_secs: float, compiled: str) -> None:
        self._name = name
        self._timeout_secs = timeout_secs
        self._threads = threads
        self._process = WorkerProcess(_RUNNER, threads, {"TORCHINDUCTOR_CACHE_DIR": compiled})
        self._outputs: Path | None = None
        self._request: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}
        self._peak_bytes: int | None = None
        self._calls = _MIN_CALLS
        self._wake = True

    def load(self, candidate: Candidate, inputs: Path, outputs: Path) -> None:
        self._outputs = outputs
        path = os.path.abspath(candidate.path)
        self._request = {
            "op": "load",
            "kind": candidate.kind,
            "path": path,
            "inputs": str(inputs),
            "outputs": str(outputs),
            "threads": self._threads,
        }
        self._peak_bytes = None
        self._loaded = self._ask(self._request, _COMPILE_SECS if candidate.kind == "torch" else 0.0)
        secs = self._loaded["first_secs"]
        if secs > _SLOW_SECS:  # the first call reads weights for the first time, and torch compiles in it
            secs = min(self._ask({"op": "burst", "calls": 1, "wake": False})["samples"])
        self._wake = secs <= _SLOW_SECS
        if not self._wake:
            self._calls = 1
            return
        once = min(self._ask({"op": "burst", "calls": 1, "wake": True})["samples"])
        self._calls = min(max(int(_BURST_SECS / once), _MIN_CALLS), _MAX_CALLS)

    def renew(self) -> None:
        """Load the model again, in a new process."""
        if self._request["kind"] != "torch":
            self._process.kill()
            self._ask(self._request)

    def burst(self) -> tuple[float, ...]:
        return tuple(self._ask({"op": "burst", "calls": self._calls, "wake": self._wake})["samples"])

    def result(self, rounds: Sequence[tuple[float, ...]]) -> EndToEnd:
        """What was measured since the model was loaded."""
        assert self._outputs is not None
        return EndToEnd(
            tuple(rounds),
            tuple(read_arrays(self._outputs)),
            self._loaded["load_secs"],
            self._loaded["first_secs"],
            self._peak_bytes,
        )

    def close(self) -> None:
        self._process.kill()

    def _ask(self, request: dict[str, Any], least_secs: float = 0.0) -> dict[str, Any]:
        """The answer, for which at least `least_secs` are allowed."""
        try:
            answer = self._process.call(request, max(self._timeout_secs, least_secs))
        except (WorkerCrashError, WorkerTimeoutError) as error:
            raise CostError(f"candidate {self._name} cannot be timed ({error}): check it on its own") from error
        if "error" in answer:
            raise CostError(f"candidate {self._name} cannot be timed ({answer['error']}): check its file and inputs")
        peak = answer["peak_bytes"]
        self._peak_bytes = None if peak is None else max(peak, self._peak_bytes or 0)
        return answer
