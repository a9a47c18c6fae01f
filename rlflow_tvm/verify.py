"""Checking a rewritten module against the one it came from, by running both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.kernels import pipeline
from rlflow_tvm.passes import GraphState, RewriteAction

TOLERANCE = 1e-3
"""Largest difference allowed, as a share of the output's range: rewriting changes the order of float sums."""


def run_module(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compile `mod` (bound form) with our pipeline, run it once on the CPU; outputs in order, tuples flattened."""
    executable = tvm.compile(mod, target, relax_pipeline=pipeline(target))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in inputs))
    return [tensor.numpy() for tensor in _flatten(result)]


def _flatten(result: object) -> list[tvm.runtime.Tensor]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for item in result for tensor in _flatten(item)]  # type: ignore[attr-defined]


def range_error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest absolute difference, divided by the range (max - min) of the expected output it occurs in.

    Infinite where shapes, counts or non-finite places differ.
    """
    if len(actual) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        if b.size == 0:
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(b)
        if not finite.any():
            continue
        difference = float(np.abs(a[finite] - b[finite]).max())
        extent = float(b[finite].max() - b[finite].min()) or max(float(np.abs(b[finite]).max()), 1.0)
        worst = max(worst, difference / extent)
    return worst


def check_state(state: GraphState, start: GraphState, target: tvm.target.Target, seed: int = 0) -> float:
    """Compare `state`'s outputs with those of `start`, which it was reached from, on random inputs.

    Returns the error as a share of the output's range. RewriteError, naming the first rule after which the outputs
    differ, if it is above `TOLERANCE`.
    """
    inputs = list(random_inputs(start.bound(), seed).values())
    expected = run_module(start.bound(), target, inputs)
    error = range_error(run_module(state.bound(), target, inputs), expected)
    if error <= TOLERANCE:
        return error
    culprit, at = _first_wrong(start, state.actions, target, inputs, expected)
    raise RewriteError(
        f"the rewritten module's outputs differ by {error:.1e} of their range, first after {culprit} (action {at}): "
        "this is a bug, please report it with the model and the plan"
    )


def _first_wrong(
    start: GraphState,
    actions: Sequence[RewriteAction],
    target: tvm.target.Target,
    inputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
) -> tuple[RewriteAction, int]:
    """Bisect for the first action after which the outputs are wrong (they are right before all, wrong after all)."""
    states = [start]
    for action in actions:
        states.append(states[-1].apply(action))
    right, wrong = 0, len(actions)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        outputs = run_module(states[middle].bound(), target, inputs)
        if range_error(outputs, expected) <= TOLERANCE:
            right = middle
        else:
            wrong = middle
    return actions[wrong - 1], wrong
