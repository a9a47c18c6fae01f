"""Checking a rewritten module against the one it came from, by running both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.ir import Detached
from rlflow_tvm.kernels import pipeline
from rlflow_tvm.passes import GraphState, RewriteAction

TOLERANCE = 1e-3
"""Largest difference allowed, as a share of the output's range: rewriting changes the order of float sums."""


def run_module(mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compile `mod` (bound form) with our pipeline, run it once on the CPU; outputs in order, tuples flattened."""
    executable = tvm.compile(mod, target, relax_pipeline=pipeline(target))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(array) for array in inputs))
    return [tensor.numpy() for tensor in flatten(result)]


def flatten(result: object) -> list[tvm.runtime.Tensor]:
    """The tensors of a virtual machine's result (a tensor or nested tuples), in order."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for item in result for tensor in flatten(item)]  # type: ignore[attr-defined]


def range_error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest absolute difference, divided by the range (max - min) of the expected output it occurs in.

    The range counts as at least a hundredth of the largest magnitude, so that an output that is constant but for
    rounding has one. Infinite where shapes, counts or non-finite places differ.
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
        extent = max(float(np.ptp(b[finite])), 0.01 * float(np.abs(b[finite]).max()))
        worst = max(worst, difference / extent if extent else float(difference > 0))
    return worst


def check_state(state: GraphState, target: tvm.target.Target, seed: int = 0) -> float:
    """Compare `state`'s outputs with those of the module it was reached from; see `Comparison`."""
    return Comparison(GraphState.from_module(state.start.mod, state.ruleset), target, seed).check(state)


class Comparison:
    """A module's outputs on random inputs, and those of the states reached from it beside them.

    The weights are drawn anew (the rules hold for any): in a model whose weights are all alike, or whose output is
    saturated by them, a wrong permutation would not show. Where the output is saturated all the same (a softmax over
    activations that grew from block to block gives zeros and a one), smaller weights are drawn.
    """

    def __init__(self, start: GraphState, target: tvm.target.Target, seed: int = 0) -> None:
        self._start, self._target = start, target
        self._inputs = list(random_inputs(start.mod, seed).values())
        best = -1.0
        for gain in _GAINS:
            weights = self._weights = _drawn_weights(start, gain, seed)
            expected = self._run(start)
            visible = min((_visible_share(output) for output in expected), default=1.0)
            if visible > best:
                best, chosen = visible, (weights, expected)
            if visible >= _ENOUGH_VISIBLE:
                break
        self._weights, self._expected = chosen

    def _run(self, state: GraphState) -> list[np.ndarray]:
        return run_module(Detached(state.mod, self._weights).bind(), self._target, self._inputs)

    def error(self, state: GraphState) -> float:
        """Largest difference between `state`'s outputs and the start's, as a share of the output's range."""
        return range_error(self._run(state), self._expected)

    def check(self, state: GraphState) -> float:
        """`error`, if it is within `TOLERANCE`; else RewriteError, naming the first rule after which it is not."""
        error = self.error(state)
        if error > TOLERANCE:
            culprit, number = self._first_wrong(state.actions)
            raise RewriteError(
                f"the rewritten module's outputs differ by {error:.1e} of their range, first after {culprit} "
                f"(action {number}): this is a bug, please report it with the model and the plan"
            )
        return error

    def _first_wrong(self, actions: tuple[RewriteAction, ...]) -> tuple[RewriteAction, int]:
        """Bisect for the first action after which the outputs are wrong (right before all, wrong after all)."""
        states = [self._start]
        for action in actions:
            states.append(states[-1].apply(action))
        right, wrong = 0, len(actions)
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if self.error(states[middle]) <= TOLERANCE:
                right = middle
            else:
                wrong = middle
        return actions[wrong - 1], wrong


_GAINS = (1.0, 0.5, 0.2)
_ENOUGH_VISIBLE = 0.1


def _visible_share(output: np.ndarray) -> float:
    """How many of the output's elements differ from their median by more than the tolerance: a change of the others
    could not be seen. 1 for integers and for outputs of a few elements."""
    if output.size <= 16 or output.dtype.kind != "f":
        return 1.0
    finite = output[np.isfinite(output)].astype(np.float64)
    if not finite.size:
        return 0.0
    return float(np.mean(np.abs(finite - np.median(finite)) > TOLERANCE * np.ptp(finite)))


def _drawn_weights(start: GraphState, gain: float, seed: int) -> dict[str, tvm.runtime.Tensor]:
    """A value for each of the start's weight parameters, those that it was given without included."""
    rng = np.random.default_rng(seed)
    known = start.start.weights
    parameters = start.graph.params[start.graph.inputs :]
    return {
        p.name: _varied(known[p.name].numpy() if p.name in known else _drawn(p, rng), gain, rng) for p in parameters
    }


def _drawn(parameter: relax.Var, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal([int(extent) for extent in parameter.ty.shape.values])
    return values.astype(str(parameter.ty.dtype))


def _varied(array: np.ndarray, gain: float, rng: np.random.Generator) -> tvm.runtime.Tensor:
    """Kernels and matrices of variance 2/fan-in (He et al. 2015) times the gain's square, so that activations neither
    vanish nor explode; anything smaller (biases, scales, masks) shrunk by factors in [0.9, 1); integers as they are."""
    if array.dtype.kind != "f":
        return tvm.runtime.tensor(array)
    if sum(extent > 1 for extent in array.shape) < 2:
        drawn = array * rng.uniform(0.9, 1.0, array.shape)
    else:
        fan_in = array.size / array.shape[0 if array.ndim == 4 else -1]
        drawn = rng.standard_normal(array.shape) * (gain * np.sqrt(2.0 / fan_in))
    return tvm.runtime.tensor(drawn.astype(array.dtype))
