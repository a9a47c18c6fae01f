"""Comparing what the search found with TVM's default build, the strongest unsearched graph and ONNX Runtime.

Two gains are kept apart. *Graph gain*: the searched graph against the strongest unsearched one (TVM's clean-up
passes, with and without `ConvertLayout`), all compiled with the same kernels, none of them tuned. *Kernel gain*: the
same, unsearched graph by TVM's default pipeline against ours; *tuning gain*: the searched graph by the schedule rules
against the same with what tuning found (`--tune` of `optimize`).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.cost import Candidate, EndToEnd, export_library, measure_interleaved
from rlflow_tvm.errors import RewriteError, UsageError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.kernels import BY_SHAPE, TUNED_RULE, Choices, explain, num_cores, pipeline, vector_lanes
from rlflow_tvm.verify import TOLERANCE, range_error

log = logging.getLogger("rlflow_tvm")

SEARCHED = "rlflow_tvm, searched"
TUNED = "rlflow_tvm, searched and tuned"
UNSEARCHED = "rlflow_tvm, unsearched"
CONVERTED = "rlflow_tvm, ConvertLayout"
TVM_DEFAULT = "tvm-default"
ONNXRUNTIME = "onnxruntime"
AGAINST = (TVM_DEFAULT, ONNXRUNTIME)


@dataclass(frozen=True)
class Row:
    """One candidate: seconds a run (median and quartiles) and its largest difference from the reference's outputs,
    as a share of the output's range (None for the reference itself)."""

    name: str
    run_secs: float
    quartiles: tuple[float, float]
    error: float | None

    @property
    def outputs_match(self) -> bool:
        """Whether the difference is one that the order of sums explains."""
        return self.error is None or self.error <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """`error` is null for the reference and where it is infinite: `outputs_match` tells the two apart."""
        error = self.error if self.error is not None and isfinite(self.error) else None
        return {
            "name": self.name,
            "run_secs": self.run_secs,
            "quartiles": list(self.quartiles),
            "error": error,
            "outputs_match": self.outputs_match,
        }


@dataclass(frozen=True)
class Comparison:
    """The rows, and ratios old/new taken round by round (their median): above 1 is faster.

    `graph_gain`: the strongest unsearched graph (`baseline`) over the searched one, same kernels. `kernel_gain`:
    TVM's default over ours on the same graph; `tuning_gain`: the searched module's time over its time with tuned
    kernels; `against_onnxruntime`: ONNX Runtime's time over the searched (and tuned) module's. None where a side was
    not measured.
    """

    rows: tuple[Row, ...]
    baseline: str
    graph_gain: float
    kernel_gain: float | None
    tuning_gain: float | None
    against_onnxruntime: float | None
    reference: str
    constant_outputs: bool = False
    """Whether each of the reference's outputs is one number repeated: then equal outputs prove little."""

    def check(self) -> None:
        """RewriteError if a candidate's outputs differ from the reference's by more than `verify.TOLERANCE`."""
        wrong = [f"{row.name} by {row.error:.1e}" for row in self.rows if not row.outputs_match]
        if wrong:
            raise RewriteError(
                f"outputs differ from those of {self.reference}, as a share of their range: {', '.join(wrong)} "
                f"({TOLERANCE:g} is allowed): do not use them, and report the model"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "baseline": self.baseline,
            "graph_gain": self.graph_gain,
            "kernel_gain": self.kernel_gain,
            "tuning_gain": self.tuning_gain,
            "against_onnxruntime": self.against_onnxruntime,
            "reference": self.reference,
            "constant_outputs": self.constant_outputs,
        }


def check_names(against: Sequence[str]) -> None:
    """UsageError for a name that is not in `AGAINST`."""
    unknown = [name for name in against if name not in AGAINST]
    if unknown:
        raise UsageError(f"--against {unknown[0]}: there are {', '.join(AGAINST)}")


def unsearched(mod: tvm.IRModule, lanes: int) -> dict[str, tvm.IRModule]:
    """What a user gets of `mod` without a search, by the candidates' names."""
    modules = {UNSEARCHED: cleaned(mod)}
    if _has_convolutions(mod):
        try:
            modules[CONVERTED] = converted_layout(mod, lanes)
        except tvm.error.InternalError as error:  # as for axes counted from the end, behind a convolution
            reason = str(error).strip().splitlines()[-1]
            log.warning("TVM's ConvertLayout fails on this model (%s): it is not compared with", reason)
    return modules


def converted_layout(mod: tvm.IRModule, lanes: int) -> tvm.IRModule:
    """TVM's own blocked-layout pass over `mod`, with its clean-up passes: what a user gets without a search."""
    layouts = {"relax.nn.conv2d": [f"NCHW{lanes}c", f"OIHW{lanes}o"]}
    return cleaned(relax.transform.ConvertLayout(layouts)(mod))


def cleaned(mod: tvm.IRModule) -> tvm.IRModule:
    """TVM's clean-up passes."""
    passes = [
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(mod)


def compare(
    original: tvm.IRModule,
    searched: tvm.IRModule,
    onnx_file: Path,
    target: tvm.target.Target,
    against: Sequence[str],
    *,
    choices: Choices = BY_SHAPE,
    rounds: int = 10,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compile and time everything in interleaved rounds, and compare the outputs.

    Args:
        original: the imported model (bound form); `searched`: what the search made of it.
        onnx_file: the file both came from.
        target: what to compile for; its `num-cores` threads are used by every candidate.
        against: names in `AGAINST`.
        choices: decides for all our candidates where an operator has several implementations, or a kernel several
            schedules.

    Raises:
        UsageError: an unknown name in `against`, or a target that is no CPU.
        CostError: a candidate cannot be built or run.
    """
    check_names(against)
    if target.kind.name != "llvm":
        raise UsageError(f"--target {target.kind.name}: models are compared on CPUs; for GPUs use scripts/bench_gpu.py")
    inputs = list(random_inputs(original, seed).values())
    with tempfile.TemporaryDirectory() as folder:
        candidates = _build(Path(folder), original, searched, onnx_file, target, against, choices, progress)
        measured = measure_interleaved(
            candidates,
            inputs,
            rounds,
            threads=num_cores(target),
            on_progress=None if progress is None else lambda done, total: progress(done, total, "timing"),
        )
    return summary(measured)


def _build(
    folder: Path,
    original: tvm.IRModule,
    searched: tvm.IRModule,
    onnx_file: Path,
    target: tvm.target.Target,
    against: Sequence[str],
    choices: Choices,
    progress: Callable[[int, int, str], None] | None,
) -> dict[str, Candidate]:
    modules = {SEARCHED: searched, **unsearched(original, vector_lanes(target))}
    if any(kernel.rule == TUNED_RULE for kernel in explain(searched, target, choices)):
        modules[TUNED] = searched
    if TVM_DEFAULT in against:
        modules[TVM_DEFAULT] = original
    candidates = {}
    for number, (name, mod) in enumerate(modules.items()):
        if progress is not None:
            progress(number, len(modules), f"building {name}")
        ours = pipeline(target, choices if name == TUNED else Choices(choices.implementation))
        how = relax.get_pipeline("default_build") if name == TVM_DEFAULT else ours
        candidates[name] = export_library(mod, target, folder / f"{number}.so", how)
    if ONNXRUNTIME in against:
        candidates[ONNXRUNTIME] = Candidate("onnx", onnx_file)
    return candidates


def _has_convolutions(mod: tvm.IRModule) -> bool:
    found = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == "relax.nn.conv2d":
            found.append(expr)

    relax.analysis.post_order_visit(mod["main"], visit)
    return bool(found)


def summary(measured: Mapping[str, EndToEnd]) -> Comparison:
    """What the times and outputs of the candidates, by name, come to."""
    reference = ONNXRUNTIME if ONNXRUNTIME in measured else UNSEARCHED
    expected = measured[reference].outputs
    rows = tuple(
        Row(name, m.run_secs, m.quartiles, None if name == reference else range_error(m.outputs, expected))
        for name, m in measured.items()
    )
    baseline = min((n for n in (UNSEARCHED, CONVERTED) if n in measured), key=lambda n: measured[n].run_secs)
    best = TUNED if TUNED in measured else SEARCHED
    return Comparison(
        rows,
        baseline,
        _gain(measured[baseline], measured[SEARCHED]),
        _gain(measured[TVM_DEFAULT], measured[UNSEARCHED]) if TVM_DEFAULT in measured else None,
        _gain(measured[SEARCHED], measured[TUNED]) if TUNED in measured else None,
        _gain(measured[ONNXRUNTIME], measured[best]) if ONNXRUNTIME in measured else None,
        reference,
        constant_outputs=_constant(expected),
    )


def _constant(outputs: Sequence[np.ndarray]) -> bool:
    large = [array for array in outputs if array.size > 1]
    return bool(large) and all(bool((array == array.flat[0]).all()) for array in large)


def _gain(old: EndToEnd, new: EndToEnd) -> float:
    """Median over the rounds of old/new: a round's two sides saw the same machine."""
    return float(np.median([a / b for a, b in zip(old.round_secs, new.round_secs, strict=True)]))
