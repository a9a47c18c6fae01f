"""Seconds for the kernels of a search: measured, or predicted where the learned cost model is sure enough."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlflow_tvm.cost.known_times import known_as
from rlflow_tvm.cost.learned import LEAST_SAMPLES, LearnedCost, Prediction, Sample
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.rehearsal import Rehearsal
from rlflow_tvm.cost.schema import ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.errors import CostError, KernelError
from rlflow_tvm.kernels import Kernel

log = logging.getLogger("rlflow_tvm")

_GROWTH = 1.25  # of the kernels measured, from which the model is trained again


@dataclass(frozen=True)
class PredictionPolicy:
    """How far a search's costs may rest on predictions.

    `share`: what predicted kernels may make up of a graph's time, 0 (nothing is predicted) to 1. `deviation`: a kernel
    on which the ensemble's members differ by more than this factor (a standard deviation of the logarithm) is measured.
    CostError for values outside their range.
    """

    share: float = 0.0
    deviation: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise CostError(f"prediction share {self.share}: give a part of a graph's time, from 0 to 1")
        if not self.deviation > 0.0:
            raise CostError(f"prediction deviation {self.deviation}: it must lie above 0")


MEASURED = PredictionPolicy()
"""Nothing is predicted."""


class KernelEstimator:
    """Gives each kernel a measurement, or a prediction where `policy` allows one; learns from what is measured.

    The model is read from beside the database, or trained on what the database holds for this target and this version
    of the kernels, and trained again once that has grown by a quarter, or what it was trained on is gone. Without a
    database nothing is predicted.
    """

    def __init__(self, timer: KernelTimer, policy: PredictionPolicy = MEASURED) -> None:
        self.timer = timer
        self.policy = policy
        self.predicted = 0
        """Predictions handed out, of kernels that were not known."""
        self._model: LearnedCost | None = None
        self._looked_at = -1  # kernels that the timer had measured when training was last thought of

    def estimate(
        self,
        kernels: Sequence[Kernel],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        graph: Callable[[], Rehearsal],
        confirmed: bool = False,
    ) -> list[Measurement | Prediction]:
        """One for each of `kernels`, in their order; with `confirmed` only measurements, all of them confirmed
        but for those that failed when they were measured again.

        `graph` as in `KernelTimer.measure`.
        """
        predictions = {} if confirmed else self._predictions(kernels)
        asked = [k for k in kernels if known_as(k) not in predictions]
        found = self.timer.measure(asked, on_progress, graph, confirmed=confirmed)
        self.predicted += len(predictions)
        rest = iter(found)
        return [predictions[known_as(k)] if known_as(k) in predictions else next(rest) for k in kernels]

    def _predictions(self, kernels: Sequence[Kernel]) -> dict[str, Prediction]:
        """Of the kernels that are not known those that may stay so, the surest first."""
        if not self.policy.share:
            return {}
        times = [self.timer.lookup(k, in_graph=True) for k in kernels]
        unknown = {known_as(k): k for k, m in zip(kernels, times, strict=True) if m is None}
        if not unknown or (model := self._learned()) is None:
            return {}
        described = self._described(unknown)
        predictions = dict(zip(described, model.predict(list(described.values())), strict=True))
        secs = {key: unknown[key].count * each.run_secs for key, each in predictions.items()}
        known = sum(k.count * (m.run_secs or 0.0) for k, m in zip(kernels, times, strict=True) if m is not None)
        total = sum(secs.values()) + known
        allowed = self.policy.share * total * (1.0 + 1e-9)  # sums are rounded
        taken: dict[str, Prediction] = {}
        spent = 0.0
        for key, each in sorted(predictions.items(), key=lambda item: item[1].deviation):
            if each.deviation > self.policy.deviation or spent + secs[key] > allowed:
                break
            taken[key] = each
            spent += secs[key]
        return taken

    def _described(self, kernels: Mapping[str, Kernel]) -> dict[str, tuple[Mapping[str, float], str]]:
        """What the model is asked by; without those that cannot be scheduled, of which measuring says why."""
        found: dict[str, tuple[Mapping[str, float], str]] = {}
        for name, kernel in kernels.items():
            with suppress(KernelError):
                found[name] = self.timer.descriptions.of(kernel), kernel.cold
        return found

    def _learned(self) -> LearnedCost | None:
        database = self.timer.database
        if database is None:
            return None
        if self.timer.measured == self._looked_at:  # counting takes milliseconds: every step would feel them
            return self._model
        self._looked_at = self.timer.measured
        held = database.sample_count(self.timer.target_key, self.timer.graph_version)
        path = learned_path(database.path, self.timer.target_key, self.timer.graph_version)
        if self._model is None and path is not None and path.exists():
            try:
                self._model = LearnedCost.load(path, self.timer.target_key, self.timer.graph_version)
            except CostError as error:
                log.warning("%s", error)  # which is done below
        if self._model is not None and _is_gone(self._model, held, self.timer):
            self._model = None
            if path is not None:
                with suppress(OSError):  # then it is found gone again
                    path.unlink()
        if held >= LEAST_SAMPLES and (self._model is None or held >= _GROWTH * self._model.trained_on):
            self._model = train_model(self.timer)
            if path is not None:
                try:
                    self._model.save(path)
                except CostError as error:
                    log.warning("%s; until then each run trains it anew", error)
        return self._model


def train_model(timer: KernelTimer) -> LearnedCost:
    """A model of all that the timer's database holds for its target and version; CostError where that is too little."""
    if timer.database is None:
        raise CostError("there is no kernel database to learn from: give one")
    rows = timer.database.samples(timer.target_key, timer.graph_version)
    samples = [Sample(*row) for row in rows]
    model = LearnedCost.fit(samples, timer.target_key, timer.graph_version, usual_secs=_usual_secs(timer))
    log.info("learned cost model trained on %d kernels", model.trained_on)
    return model


def _is_gone(model: LearnedCost, held: int, timer: KernelTimer) -> bool:
    """Whether the times that a model has learned from are no longer those of the database, which holds `held`: they
    were dropped, or it is another file in the place of one that was moved away."""
    return held < model.trained_on or model.usual_secs != _usual_secs(timer)


def _usual_secs(timer: KernelTimer) -> float | None:
    """The reference kernel's, as the database has it."""
    assert timer.database is not None, "there are times to learn from"
    stored = timer.database.get(REFERENCE_KEY, timer.target_key, ONCE_VERSION)
    return None if stored is None else stored.run_secs


def learned_path(database: str, target_key: str, version: str) -> Path | None:
    """Where the model of a target and version is kept: beside the database. None for one in memory."""
    if database == ":memory:":
        return None
    name = hashlib.sha256(f"{target_key}\n{version}".encode()).hexdigest()[:12]
    return Path(database).parent / f"learned-{name}.json"
