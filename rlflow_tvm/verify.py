"""Checking a rewritten module against the one it came from, by running both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.cost.machine import device_of
from rlflow_tvm.differences import TOLERANCE, Decided
from rlflow_tvm.errors import RewriteError, UncomparableError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.ir import Detached, extent_along
from rlflow_tvm.kernels import BY_SHAPE, Choices, pipeline
from rlflow_tvm.passes import GraphState, RewriteAction

log = logging.getLogger("rlflow_tvm")


def run_module(
    mod: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[np.ndarray], choices: Choices = BY_SHAPE
) -> list[np.ndarray]:
    """Compile `mod` (bound form) with our pipeline, run it once on the target's device here; outputs in order, tuples
    flattened."""
    return run_executable(build_module(mod, target, choices), inputs, device_of(target))


def build_module(mod: tvm.IRModule, target: tvm.target.Target, choices: Choices = BY_SHAPE) -> tvm.runtime.Executable:
    """Compile `mod` (bound form) with our pipeline."""
    return tvm.compile(mod, target, relax_pipeline=pipeline(target, choices))


def run_executable(
    executable: tvm.runtime.Executable | tvm.runtime.Module,
    inputs: Sequence[np.ndarray],
    device: tvm.runtime.Device | None = None,
) -> list[np.ndarray]:
    """Outputs of one run, by default on the CPU, of what `tvm.compile` made or of the library it was written to."""
    device = device or tvm.cpu()
    machine = relax.VirtualMachine(executable, device)
    result = machine["main"](*(tvm.runtime.tensor(array, device) for array in inputs))
    return [tensor.numpy() for tensor in flatten(result)]


def flatten(result: object) -> list[tvm.runtime.Tensor]:
    """The tensors of a virtual machine's result (a tensor or nested tuples), in order."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [tensor for item in result for tensor in flatten(item)]  # type: ignore[attr-defined]


def with_weights(state: GraphState, seed: int = 0) -> tvm.IRModule:
    """`state`'s module as it is deployed, with its weights as constants; those that it was given without are drawn, the
    same ones for all states that were reached from one module."""
    graph, weights = state.origin().graph, state.start.weights
    if all(parameter.name in weights for parameter in graph.params[graph.inputs :]):
        return state.bound()
    return Detached(state.mod, _drawn_weights(state.origin(), _OWN, seed)).bind()


def check_state(state: GraphState, target: tvm.target.Target, seed: int = 0, choices: Choices = BY_SHAPE) -> float:
    """Compare `state`'s outputs with those of the module it was reached from; see `Comparison`.

    It is built with what is decided from shapes alone, and once more with other `choices`: either may be deployed.
    """
    comparison = Comparison(state.origin(), target, seed)
    error = comparison.check(state)
    return error if choices is BY_SHAPE else max(error, comparison.check_kernels(state, choices))


class Comparison:
    """A module's outputs on random inputs, and those of the states reached from it beside them.

    The weights are drawn anew (the rules hold for any): in a model whose weights are all alike, or whose output is
    saturated by them, a wrong permutation would not show. Where the output is saturated all the same (a softmax over
    activations that grew from block to block gives zeros and a one), smaller weights are drawn, and at last the
    module's own are taken; where it is not finite (the root of a negative number), weights of the signs that the module
    has, then the module's own, and at last inputs without negative numbers, with either (the logarithm of a spectrum).

    UncomparableError if less than half of an output is finite with any of them; the log is told where an output is of
    one value with all of them.
    """

    def __init__(self, start: GraphState, target: tvm.target.Target, seed: int = 0) -> None:
        self._start, self._target, self._seed = start, target, seed
        inputs = list(random_inputs(start.mod, seed).values())
        best = (-1.0, -1.0)
        for draw in _DRAWS:
            if draw.only_if_not_finite and best[0] == 1.0:
                continue
            self._positive = draw.positive
            self._inputs = [positive(a) if draw.positive else a for a in inputs]
            weights = self._weights = _drawn_weights(start, draw, seed)
            expected = self._run(start)
            finite = finite_share(expected)
            visible = min((_visible_share(output) for output in expected), default=1.0)
            if finite >= ENOUGH_FINITE:
                # else it is saturated, as a sigmoid that is 0 or 1 whatever comes
                visible *= all(_distinct(expected[i]) > 2 for i in self._few)
            if (finite, visible) > best:
                best, chosen = (finite, visible), (self._positive, self._inputs, weights, expected)
            if finite == 1.0 and visible >= _ENOUGH_VISIBLE:
                break
        if best[0] < ENOUGH_FINITE:
            raise UncomparableError(
                f"the outputs cannot be compared: {100 * (1 - best[0]):.0f} % of one of them is NaN or infinite on "
                "random inputs, without negative ones and with the model's own weights too: look for the operator that "
                "makes it so"
            )
        if best[1] <= TOLERANCE:
            log.warning(
                "the outputs can hardly be compared: all but %.2f %% of one of them is one value or two on random "
                "inputs, with the model's own weights too: a wrong rewrite might not show",
                100 * best[1],
            )
        self._positive, self._inputs, self._weights, expected = chosen
        self._decided = Decided(self._started, self._inputs, expected)

    def _run(self, state: GraphState, choices: Choices = BY_SHAPE) -> list[np.ndarray]:
        """The state's outputs, as `joined` has them; `_few` are those of a few floats."""
        bound, device = Detached(state.mod, self._weights).bind(), device_of(self._target)
        executable = build_module(bound, self._target, choices)
        found = run_executable(executable, self._inputs, device)
        self._few = [i for i, output in enumerate(found) if _is_few_floats(output)]
        return joined(found, lambda number: run_executable(executable, self._other_inputs(number), device))

    def _started(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The start's outputs for other inputs."""
        return run_executable(self._executable, inputs, device_of(self._target))

    @cached_property
    def _executable(self) -> tvm.runtime.Executable:
        return build_module(Detached(self._start.mod, self._weights).bind(), self._target)

    def _other_inputs(self, number: int) -> list[np.ndarray]:
        drawn = random_inputs(self._start.mod, self._seed + number).values()
        return [positive(array) if self._positive else array for array in drawn]

    def error(self, state: GraphState, choices: Choices = BY_SHAPE) -> float:
        """Largest difference between `state`'s outputs and the start's, as a share of the output's range, of integers
        where the start itself decides (`Decided`); infinite where their types differ.

        The start was built with `BY_SHAPE`, whatever the `choices` here.
        """
        found = self._run(state, choices)
        if [output.dtype for output in found] != [output.dtype for output in self._decided.expected]:
            return float("inf")
        return self._decided.error(found)

    def check(self, state: GraphState) -> float:
        """`error`, if it is within `TOLERANCE`; else RewriteError, naming the first rule after which it is not."""
        error = self.error(state)
        if error > TOLERANCE:
            try:
                culprit, number = self._first_wrong(state.actions)
                where = f", first after {culprit} (action {number})"
            except KeyboardInterrupt:  # that they differ is known: nobody is to use the plan
                where = ""
            raise RewriteError(
                f"the rewritten module's outputs differ by {error:.1e} of their range{where}: this is a bug, please "
                "report it with the model and the plan"
            )
        return error

    def check_kernels(self, state: GraphState, choices: Choices) -> float:
        """`error` with the kernels of `choices`, if it is within `TOLERANCE`; else RewriteError. `check` comes first:
        it tells a wrong rewrite from a wrong kernel."""
        error = self.error(state, choices)
        if error > TOLERANCE:
            raise RewriteError(
                f"the outputs of the rewritten module differ by {error:.1e} of their range where it is built with the "
                "kernels that measured fastest (without a database they are right): this is a bug, please report it "
                "with the model and the plan"
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


@dataclass(frozen=True)
class _Draw:
    """How weights are drawn: matrices times `gain`; with the signs that they have; not at all, but as they are. And
    whether inputs are to be `positive`."""

    gain: float = 1.0
    keep_signs: bool = False
    own: bool = False
    positive: bool = False

    @property
    def only_if_not_finite(self) -> bool:
        return self.keep_signs or self.positive


_OWN = _Draw(own=True)
_DRAWS = (
    *(_Draw(gain) for gain in (1.0, 0.5, 0.2)),
    _Draw(keep_signs=True),
    _OWN,
    _Draw(positive=True),
    _Draw(own=True, positive=True),
)
_ENOUGH_VISIBLE = 0.1
_FEW = 16  # elements of an output, of which no share can be told
_NUMBERS = 8  # of such an output that are compared, from as many runs as it takes
_LABELS = 16  # likewise, of one of integers or booleans
ENOUGH_FINITE = 0.5
"""Of each output; else a difference may not show: NaN is as good as another."""


def finite_share(outputs: Sequence[np.ndarray]) -> float:
    """How much of the output of which it is least is neither NaN nor infinite."""
    return min((float(np.isfinite(output).mean()) for output in outputs if output.size), default=1.0)


def positive(array: np.ndarray) -> np.ndarray:
    """An input without negative numbers, for models that take a root or a logarithm of it; integers as they are."""
    return array if array.dtype.kind in "iub" else np.abs(array)


def joined(outputs: Sequence[np.ndarray], more: Callable[[int], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Outputs that can be compared, made of those of one run and of `more`, the runs for other inputs, by number.

    Those of a few floats have the ones for other inputs beside them, (runs, *shape): of a single number nobody knows
    the range. Those that are a few labels come for other inputs behind all others: one label stays what it is whatever
    was lost.
    """
    runs = {i: -(-(_NUMBERS if _is_few_floats(each) else _LABELS) // each.size)
            for i, each in enumerate(outputs) if _is_few(each)}  # fmt: skip
    others = [more(number) for number in range(1, max(runs.values(), default=1))]
    found, behind = list(outputs), []
    for i, count in runs.items():
        rest = [each[i] for each in others[: count - 1]]
        if not _is_few_floats(outputs[i]):
            behind += rest
        elif all(each.shape == outputs[i].shape for each in rest):
            found[i] = np.stack([outputs[i], *rest])
    return found + behind


def _is_few(output: np.ndarray) -> bool:
    return 0 < output.size <= _FEW


def _is_few_floats(output: np.ndarray) -> bool:
    return _is_few(output) and output.dtype.kind not in "iub"


def _distinct(values: np.ndarray) -> int:
    """How many finite values there are that are further apart than the tolerance."""
    values = np.sort(values[np.isfinite(values)].astype(np.float64))
    return 1 + int((np.diff(values) > TOLERANCE * np.ptp(values)).sum()) if values.size else 0


def _visible_share(output: np.ndarray) -> float:
    """How many of the output's finite elements differ from their median by more than the tolerance, of integers and
    booleans from the most frequent: a change of the others could not be seen. 1 for outputs of a few elements."""
    if output.size <= _FEW:
        return 1.0
    if output.dtype.kind in "iub":
        return 1.0 - np.unique(output, return_counts=True)[1].max() / output.size
    output = output.astype(np.float64)
    finite = output[np.isfinite(output)]
    if not finite.size:
        return 0.0
    return float(np.mean(np.abs(finite - np.median(finite)) > TOLERANCE * np.ptp(finite)))


def _drawn_weights(start: GraphState, draw: _Draw, seed: int) -> dict[str, tvm.runtime.Tensor]:
    """A value for each of the start's weight parameters, those that it was given without included."""
    rng = np.random.default_rng(seed)
    parameters = start.graph.params[start.graph.inputs :]
    channels = _output_channels(start)
    arrays = {name: tensor.numpy() for name, tensor in start.start.weights.items()}
    if any(parameter.name not in arrays for parameter in parameters):
        func = start.graph.function
        # as if all parameters were inputs: what indexes a table is drawn within it
        drawn = random_inputs(tvm.IRModule({"main": func.with_attr("num_input", len(func.params))}), seed)
        arrays = {name: np.abs(a) if draw.own or draw.only_if_not_finite else a for name, a in drawn.items()} | arrays
    return {
        p.name: tvm.runtime.tensor(
            arrays[p.name] if draw.own else _varied(arrays[p.name], draw, rng, channels.get(p.name))
        )
        for p in parameters
    }


def _output_channels(start: GraphState) -> dict[str, int]:
    """How many the kernels of convolutions have, by the parameter's name."""
    found = {}
    for node in start.graph.nodes:
        if node.op.startswith("relax.nn.conv") and isinstance(kernel := node.value.args[1], relax.Var):
            found[kernel.name] = extent_along("O", kernel.ty, str(node.value.attrs.kernel_layout))
    return found


def _varied(array: np.ndarray, draw: _Draw, rng: np.random.Generator, channels: int | None) -> np.ndarray:
    """Kernels (of so many output `channels`) and matrices, which may be several, of variance 2/fan-in (He et al. 2015)
    times the gain's square, so that activations neither vanish nor explode; anything smaller (biases, scales, masks)
    shrunk by factors in [0.9, 1), or small numbers where all of it is zero: biases of zeros would hide that they are
    lost; integers as they are."""
    if array.dtype.kind in "iub":
        return array
    if sum(extent > 1 for extent in array.shape) >= 2:
        fan_in = array.shape[-2] if channels is None else array.size / channels
        drawn = rng.standard_normal(array.shape) * (draw.gain * np.sqrt(2.0 / fan_in))
        drawn = np.abs(drawn) * np.sign(array) if draw.keep_signs else drawn
    elif array.any() or draw.keep_signs:
        drawn = array * rng.uniform(0.9, 1.0, array.shape)
    else:
        drawn = 0.1 * rng.standard_normal(array.shape)
    return drawn.astype(array.dtype)
