"""How well the learned cost model predicts the kernels of a model of which it has seen nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tvm
from scipy.stats import spearmanr

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, LearnedCost, Measurement, Sample
from rlflow_tvm.cost.known_times import MeasurableKernel, known_as
from rlflow_tvm.cost.rehearsal import Rehearsal
from rlflow_tvm.cost.timer import Progress
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import CostError, RewriteError
from rlflow_tvm.passes import GraphState
from rlflow_tvm.search.random_walk import random_action

LEAST_KERNELS = 10
"""A model with fewer measured kernels says nothing of the predictions."""


@dataclass(frozen=True)
class ModelKernels:
    """What pricing a model's graphs came to. `launched`: kernels of those graphs, by what they are known as.

    `touched`: keys of all kernels measured on the way, the operators' other implementations among them.
    """

    launched: frozenset[str]
    touched: frozenset[str]


@dataclass(frozen=True)
class Score:
    """Predictions for one model's kernels by a cost model that has learned from other kernels only.

    `mape`: mean of |predicted / measured - 1|. `median_error`: their median. `spearman`: rank correlation.
    `total_error`: |sum predicted / sum measured - 1| of the kernels together.
    """

    model: str
    kernels: int
    trained_on: int
    mape: float
    median_error: float
    spearman: float
    total_error: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Recorder(KernelTimer):
    """A timer that notes what it is asked for."""

    def __init__(self, target: tvm.target.Target, database: KernelDatabase) -> None:
        super().__init__(target, database)
        self.touched: set[str] = set()

    def measure(
        self,
        kernels: Sequence[MeasurableKernel],
        on_progress: Progress | None = None,
        graph: Callable[[], Rehearsal] | None = None,
        *,
        confirmed: bool = False,
    ) -> list[Measurement]:
        self.touched.update(kernel.key for kernel in kernels)
        return super().measure(kernels, on_progress, graph, confirmed=confirmed)


def model_kernels(
    mod: tvm.IRModule, target: tvm.target.Target, database: KernelDatabase, walks: int, steps: int, seed: int
) -> ModelKernels:
    """Measure the kernels of `mod` and of the graphs that `walks` random walks of `steps` rewrites each come through.

    Errors as in `RewriteProblem`.
    """
    rng = np.random.default_rng(seed)
    with _Recorder(target, database) as timer, CostModel(target, timer=timer) as cost_model:
        problem = RewriteProblem(mod, cost_model)
        launched: set[str] = set()
        for state in _states(problem, walks, steps, rng):
            launched.update(known_as(kernel) for kernel in problem.kernels(state))
        return ModelKernels(frozenset(launched), frozenset(timer.touched))


def measure_rewritten(
    mod: tvm.IRModule, target: tvm.target.Target, database: KernelDatabase, walks: int, steps: int, seed: int
) -> frozenset[str]:
    """Measure the kernels of `mod` and of the graphs where `walks` random walks end, each of up to `steps` rewrites;
    what they are known as.

    Errors as in `RewriteProblem`.
    """
    rng = np.random.default_rng(seed)
    with CostModel(target, database) as cost_model:
        problem = RewriteProblem(mod, cost_model)
        states = [problem.start, *(_walked(problem.start, int(rng.integers(1, steps + 1)), rng) for _ in range(walks))]
        launched: set[str] = set()
        for state in states:
            problem.cost(state)
            launched.update(known_as(kernel) for kernel in problem.kernels(state))
        return frozenset(launched)


def _walked(state: GraphState, steps: int, rng: np.random.Generator) -> GraphState:
    """After `steps` random rewrites, those that cannot be applied left out; not priced."""
    for _ in range(steps):
        action = random_action(state, rng)
        if action is not None:
            with suppress(RewriteError):
                following = state.apply(action)
                state = state if following.graph.is_empty else following
    return state


def _states(problem: RewriteProblem, walks: int, steps: int, rng: np.random.Generator) -> Iterator[GraphState]:
    yield problem.start
    for _ in range(walks):
        state = problem.start
        for _ in range(steps):
            action = random_action(state, rng)
            following = None if action is None else problem.successor(state, action)
            if following is not None:
                state = following[0]
                yield state


def leave_one_out(
    kernels: Mapping[str, ModelKernels],
    database: KernelDatabase,
    target_key: str,
    version: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """For each model: train on all that the database holds but the kernels of that model, predict those.

    CostError where the database holds too little of a model.
    """
    rows = database.samples(target_key, version)
    asked_of = {
        model: [Sample(*row) for row in rows if f"{row[0]}/{row[2]}" in own.launched] for model, own in kernels.items()
    }
    for model, asked in asked_of.items():  # before the long work on others
        if len(asked) < LEAST_KERNELS:
            raise CostError(f"{model}: {len(asked)} measured kernels are too few to judge predictions by")
    scores = []
    for done, (model, own) in enumerate(kernels.items(), start=1):
        samples, asked = [Sample(*row) for row in rows if row[0] not in own.touched], asked_of[model]
        learned = LearnedCost.fit(samples, target_key, version)
        predicted = np.array([p.run_secs for p in learned.predict([(s.features, s.cold) for s in asked])])
        scores.append(_score(model, predicted, np.array([s.run_secs for s in asked]), learned.trained_on))
        if on_progress is not None:
            on_progress(done, len(kernels))
    return scores


def _score(model: str, predicted: np.ndarray, measured: np.ndarray, trained_on: int) -> Score:
    errors = np.abs(predicted / measured - 1.0)
    return Score(
        model=model,
        kernels=len(measured),
        trained_on=trained_on,
        mape=float(errors.mean()),
        median_error=float(np.median(errors)),
        spearman=float(spearmanr(predicted, measured).statistic),
        total_error=float(abs(predicted.sum() / measured.sum() - 1.0)),
    )
