"""The kernels of a graph with the times that its cost is the sum of."""

from __future__ import annotations

from typing import Any

from rlflow_tvm.cost import CostModel
from rlflow_tvm.errors import KernelError
from rlflow_tvm.kernels import Kernel, explain_kernel
from rlflow_tvm.passes import GraphState


def kernel_rows(cost_model: CostModel, state: GraphState, reach: int, run_secs: float | None) -> list[dict[str, Any]]:
    """The kernels of a state that `cost_model` has priced with this `reach`, those with the most time first.

    Of each: `key` (equal in every process), `name`, `shapes` of its parameters, the results last, the schedule `rule`,
    how often it is launched (`count`), seconds of one launch (`each`) and of all (`secs`), their `share` of
    `run_secs`, None where it has no time, and why that is (`error`).
    """
    rows = [_row(cost_model, kernel, run_secs) for kernel in cost_model.kernels(state.graph, reach)]
    return sorted(rows, key=lambda row: -(row["secs"] or 0.0))


def _row(cost_model: CostModel, kernel: Kernel, run_secs: float | None) -> dict[str, Any]:
    found = cost_model.timer.lookup(kernel, in_graph=True)
    each = None if found is None else found.run_secs
    secs = None if each is None else kernel.count * each
    try:
        told = explain_kernel(kernel, cost_model.target, cost_model.choices)
        rule, shapes, error = told.rule, told.shapes, "" if found is None or found.ok else str(found.error)
    except KernelError as failure:
        rule, shapes, error = "", (), str(failure)
    return {
        "key": kernel.key,
        "name": kernel.name,
        "shapes": ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes),
        "rule": rule,
        "count": kernel.count,
        "each": each,
        "secs": secs,
        "share": secs / run_secs if secs is not None and run_secs else None,
        "error": error,
    }
