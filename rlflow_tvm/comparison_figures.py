"""What a comparison comes to: a row for each candidate, gains kept apart, and how sure the ratios are."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from rlflow_tvm.cost import Candidate, EndToEnd, Ratio, ratio_json
from rlflow_tvm.differences import TOLERANCE, Decided
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.verify import finite_share

UNSEARCHED = "rlflow_tvm, unsearched"
CONVERTED = "rlflow_tvm, ConvertLayout"
TVM_DEFAULT = "tvm-default"
ONNXRUNTIME = "onnxruntime"
ONNXRUNTIME_EXPORT = "onnxruntime-export"
TORCH = "torch"
AGAINST = (TVM_DEFAULT, ONNXRUNTIME, ONNXRUNTIME_EXPORT, TORCH)


def searched_name(label: str) -> str:
    """The candidate that is the graph of the search `label`."""
    return f"rlflow_tvm, {label}"


def tuned_name(label: str) -> str:
    """The same with tuned kernels."""
    return f"{searched_name(label)} and tuned"


def export_name(label: str) -> str:
    """The same graph written as ONNX, run by ONNX Runtime."""
    return f"{ONNXRUNTIME_EXPORT}, {label}"


EXPORT_UNSEARCHED = export_name("unsearched")
"""`UNSEARCHED` written as ONNX, run by ONNX Runtime."""


def finite(number: float | None) -> float | None:
    """The number; None, as JSON has none, where it is infinite or no number."""
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class Row:
    """One candidate: seconds a run (median and quartiles) and its largest difference from the reference's outputs,
    as a share of the output's range (None for the reference itself).

    `against_baseline`: the baseline's time over its (None for the baseline itself). `compile_secs`: building and
    linking; of ONNX Runtime making the session; of torch.compile loading the program and the first call. `peak_bytes`:
    as in `EndToEnd`. `kernels`: launches a run, None where others' runtimes do not tell.
    """

    name: str
    run_secs: float
    quartiles: tuple[float, float]
    error: float | None
    against_baseline: Ratio | None = None
    compile_secs: float | None = None
    peak_bytes: int | None = None
    kernels: int | None = None

    @property
    def outputs_match(self) -> bool:
        """Whether the difference is one that the order of sums explains."""
        return self.error is None or self.error <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """`error` is null for the reference and where it is infinite: `outputs_match` tells the two apart."""
        return {
            "name": self.name,
            "run_secs": self.run_secs,
            "quartiles": list(self.quartiles),
            "error": finite(self.error),
            "outputs_match": self.outputs_match,
            **ratio_json("against_baseline", self.against_baseline),
            "compile_secs": self.compile_secs,
            "peak_bytes": self.peak_bytes,
            "kernels": self.kernels,
        }


@dataclass(frozen=True)
class Gains:
    """What one search's graph is worth; above 1 it is faster. None where a side was not measured.

    `graph`: the strongest unsearched graph over the searched one, same kernels. `tuning`: the searched module's time
    over its time with tuned kernels. `export`: ONNX Runtime's time of the unsearched graph over that of the searched
    one, both exported.
    `onnxruntime`, `torch`: their times of the original over the searched (and tuned) module's.
    """

    label: str
    graph: Ratio
    tuning: Ratio | None = None
    export: Ratio | None = None
    onnxruntime: Ratio | None = None
    torch: Ratio | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **ratio_json("graph_gain", self.graph),
            **ratio_json("tuning_gain", self.tuning),
            **ratio_json("export_gain", self.export),
            **ratio_json("against_onnxruntime", self.onnxruntime),
            **ratio_json("against_torch", self.torch),
        }


@dataclass(frozen=True)
class Comparison:
    """The rows, and the gains: of kernels (TVM's default over ours on the same, unsearched graph; None without it), and
    of each search's graph against `baseline`, the strongest unsearched one."""

    rows: tuple[Row, ...]
    baseline: str
    gains: tuple[Gains, ...]
    kernel_gain: Ratio | None
    reference: str
    constant_outputs: bool = False
    """Whether each of the reference's outputs is one number repeated: then equal outputs prove little."""
    finite_outputs: float = 1.0
    """How much of the reference's output of which it is least is neither NaN nor infinite: so with the others."""

    def check(self) -> None:
        """RewriteError if a candidate's outputs differ from the reference's by more than `differences.TOLERANCE`."""
        wrong = [f"{row.name} by {row.error:.1e}" for row in self.rows if not row.outputs_match]
        if wrong:
            raise RewriteError(
                f"outputs differ from those of {self.reference}, as a share of their range: {', '.join(wrong)} "
                f"({TOLERANCE:g} is allowed): do not use them, and report the model"
            )

    def to_json(self) -> dict[str, Any]:
        """The first search's gains stand at the top level too, where they stood when there was but one."""
        return {
            "rows": [row.to_json() for row in self.rows],
            "baseline": self.baseline,
            **ratio_json("kernel_gain", self.kernel_gain),
            **self.gains[0].to_json(),
            "reference": self.reference,
            "constant_outputs": self.constant_outputs,
            "finite_outputs": self.finite_outputs,
            "searches": [
                {"label": each.label, "candidate": searched_name(each.label), **each.to_json()} for each in self.gains
            ],
        }


def reference_of(names: Container[str]) -> str:
    """The candidate whose outputs the others' are held against."""
    return ONNXRUNTIME if ONNXRUNTIME in names else UNSEARCHED


def summary(
    measured: Mapping[str, EndToEnd],
    candidates: Mapping[str, Candidate],
    labels: Sequence[str],
    inputs: Sequence[np.ndarray] = (),
    run: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] | None = None,
) -> Comparison:
    """What the times and outputs of the candidates, by name, come to; `labels` of the searches, at least one; `run`:
    the reference's outputs for `inputs`, and for others, by which it is told what it decides (all of it without). ONNX
    Runtime's outputs are those of the graph as it is: what it makes of one to be fast may round otherwise."""
    reference = reference_of(measured)
    expected = measured[reference].outputs if run is None or reference != ONNXRUNTIME else run(inputs)
    decided = Decided(run or (lambda _: []), inputs, expected)
    baseline = min((n for n in (UNSEARCHED, CONVERTED) if n in measured), key=lambda n: measured[n].run_secs)
    rows = tuple(
        Row(
            name,
            each.run_secs,
            each.quartiles,
            None if name == reference else decided.error(each.outputs),
            None if name == baseline else Ratio.of(measured[baseline], each),
            _compile_secs(candidates[name], each),
            each.peak_bytes,
            candidates[name].kernels,
        )
        for name, each in measured.items()
    )

    def ratio(old: str, new: str) -> Ratio | None:
        return Ratio.of(measured[old], measured[new]) if {old, new} <= measured.keys() else None

    def gains(label: str) -> Gains:
        searched, tuned = searched_name(label), tuned_name(label)
        best = tuned if tuned in measured else searched
        return Gains(
            label,
            Ratio.of(measured[baseline], measured[searched]),
            ratio(searched, tuned),
            ratio(EXPORT_UNSEARCHED, export_name(label)),
            ratio(ONNXRUNTIME, best),
            ratio(TORCH, best),
        )

    return Comparison(
        rows,
        baseline,
        tuple(map(gains, labels)),
        ratio(TVM_DEFAULT, UNSEARCHED),
        reference,
        constant_outputs=_constant(expected),
        finite_outputs=finite_share(expected),
    )


def _compile_secs(candidate: Candidate, measured: EndToEnd) -> float:
    if candidate.kind == "tvm":
        return (candidate.compile_secs or 0.0) + (candidate.link_secs or 0.0)
    return measured.load_secs + (measured.first_secs if candidate.kind == "torch" else 0.0)


def _constant(outputs: Sequence[np.ndarray]) -> bool:
    large = [array for array in outputs if array.size > 1]
    return bool(large) and all(
        np.array_equal(a, np.full_like(a, a.flat[0]), equal_nan=a.dtype.kind in "fc") for a in large
    )
