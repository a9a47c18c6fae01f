"""Writing what a search found as an ONNX file or a compiled library, checked before it is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import tvm

from rlflow_tvm.cost import link_library
from rlflow_tvm.differences import TOLERANCE, Decided
from rlflow_tvm.errors import FrontendError, RewriteError, UsageError
from rlflow_tvm.frontend import onnxruntime_outputs, put_in_place, random_inputs, saved, to_onnx
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.verify import ENOUGH_FINITE, finite_share, joined, positive, run_executable

LIBRARY_SUFFIXES = (".so", ".dylib", ".dll")


def export(mod: tvm.IRModule, path: Path, original: Path, seed: int = 0) -> float | None:
    """Write `mod` (bound form) to `path`, after `onnx.checker` and, where onnxruntime is installed, a run beside the
    `original` file on random inputs: the largest difference of their outputs, as a share of the output's range; None
    without onnxruntime. Nothing is written where one of them finds something wrong.

    Raises:
        FrontendError: ONNX cannot say an operator of it, the file cannot be written, or is refused by the checker or
            by ONNX Runtime.
        RewriteError: the outputs differ by more than `differences.TOLERANCE`.
    """
    with saved(to_onnx(mod), path) as file:
        try:
            onnx.checker.check_model(str(file))
        except onnx.checker.ValidationError as refused:
            raise FrontendError(
                f"{path}: onnx.checker refuses it ({one_line(refused)}): this is a bug, please report it"
            ) from refused
        run = reference_run(mod, original, seed)
        return None if run is None else _checked(lambda inputs: onnxruntime_outputs(str(file), inputs), run, path)


def save_library(
    executable: tvm.runtime.Executable, mod: tvm.IRModule, path: Path, original: Path | None, seed: int = 0
) -> float | None:
    """Link what `rlflow_tvm.compile` made of `mod` (bound form) into the shared library `path`, and load and run it
    beside ONNX Runtime's run of the `original` file, as `export` does; None without that, or onnxruntime: a library for
    another machine cannot be run here.

    Raises:
        CostError: it cannot be linked.
        FrontendError: the file cannot be written.
        RewriteError: the outputs differ by more than `differences.TOLERANCE`.
    """
    with put_in_place(path) as temporary:
        link_library(executable, temporary)
        run = None if original is None else reference_run(mod, original, seed)
        if original is None or run is None:
            return None
        library = tvm.runtime.load_module(str(temporary))
        return _checked(lambda inputs: run_executable(library, list(inputs.values())), run, path)


def check_library_name(path: Path) -> None:
    """UsageError for a name that TVM would not load: it goes by what the name ends in."""
    if path.suffix not in LIBRARY_SUFFIXES:
        raise UsageError(
            f"--library {path}: TVM loads a shared library by what its name ends in; call it {path.name}.so"
        )


@dataclass(frozen=True)
class ReferenceRun:
    """ONNX Runtime's run of the `original` file, of which `mod` was imported, for inputs drawn by `seed`, without
    negative numbers if they are to be `positive`."""

    mod: tvm.IRModule
    original: Path
    seed: int
    positive: bool

    def inputs(self, number: int = 0) -> dict[str, np.ndarray]:
        """Those of the run, or others."""
        drawn = random_inputs(self.mod, self.seed + number)
        return {name: positive(array) for name, array in drawn.items()} if self.positive else drawn

    def outputs(self, number: int = 0) -> list[np.ndarray]:
        """For those."""
        return onnxruntime_outputs(str(self.original), self.inputs(number))


def reference_run(mod: tvm.IRModule, original: Path, seed: int = 0) -> ReferenceRun | None:
    """A run of the `original` file, without negative numbers where the model takes a root of them or a logarithm; None
    without onnxruntime.

    Raises:
        FrontendError: as `check_original`.
        RewriteError: more than half of an output is NaN or infinite all the same: any two of them would be equal.
    """
    if not _has_onnxruntime():
        return None
    for only_positive in (False, True):
        run = ReferenceRun(mod, original, seed, only_positive)
        share = finite_share(run.outputs())
        if share >= ENOUGH_FINITE:
            return run
    raise RewriteError(
        f"{original}: {100 * (1 - share):.0f} % of an output is NaN or infinite on random inputs, without negative "
        "ones too: nothing could be held against it; look for the operator that makes it so"
    )


def check_original(mod: tvm.IRModule, original: Path, seed: int = 0) -> None:
    """FrontendError where ONNX Runtime, if it is there, cannot run the `original` file, of which `mod` was imported:
    what is made of it could not be held against it."""
    if _has_onnxruntime():
        onnxruntime_outputs(str(original), random_inputs(mod, seed))


def _has_onnxruntime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def onnxruntime_run(file: Path, names: Iterable[str]) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """ONNX Runtime's outputs of a file for inputs in the order of `names`."""
    names = list(names)
    return lambda arrays: onnxruntime_outputs(str(file), dict(zip(names, arrays, strict=True)))


def _checked(
    run: Callable[[dict[str, np.ndarray]], Sequence[np.ndarray]], reference: ReferenceRun, path: Path
) -> float:
    """How far what `run` computes is from what the original does; RewriteError where that is too far."""
    inputs = reference.inputs()
    expected = joined(reference.outputs(), reference.outputs)
    found = joined(run(inputs), lambda number: run(reference.inputs(number)))
    error = Decided(onnxruntime_run(reference.original, inputs), list(inputs.values()), expected).error(found)
    if not error <= TOLERANCE:
        raise RewriteError(
            f"{path}: its outputs differ from those of {reference.original} by {error:.1e} of their range "
            f"({TOLERANCE:g} is allowed) with ONNX Runtime: it was not written; this is a bug, please report it with "
            "the plan"
        )
    return error
