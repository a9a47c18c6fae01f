"""A learned cost model: gradient-boosted trees that say what a kernel will take, and how sure they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlflow_tvm.errors import CostError

FORMAT = "rlflow_tvm.learned_cost/3"
LEAST_SAMPLES = 50
_MEMBERS = 8
_ROUNDS = 250
_LEARNT_SHARE = 0.8  # of the kernels, those that a member learns from; the others tell how far it errs
_LEAST_UNSEEN = 2  # members that have not learned from a sample, to say something of their deviation there
_PARAMETERS = {
    "objective": "reg:squarederror",
    "eta": 0.1,
    "max_depth": 7,
    "min_child_weight": 2,
    "subsample": 0.8,
    "colsample_bynode": 0.5,
    "tree_method": "hist",
    "max_bin": 512,
    "nthread": 1,  # more would spin for a while, and disturb what is measured next
}
# Rates for the first guess that the trees correct: any will do that are right to a factor of two or so.
_FLOPS_PER_SEC = 1e11
_BYTES_PER_SEC = 2e10
_LEAST_SECS = 1e-6


@dataclass(frozen=True)
class Sample:
    """One measurement to learn from. `cold`: the operands' temperatures, a digit each."""

    key: str
    features: Mapping[str, float]
    cold: str
    run_secs: float


@dataclass(frozen=True)
class Prediction:
    """Seconds, and how sure they are: the standard deviation of their natural logarithm, 0.1 for about a tenth."""

    run_secs: float
    deviation: float


class LearnedCost:
    """An ensemble of boosted trees over kernels' `Descriptions` and temperatures, for one target.

    Each member has learned from another draw of most of the kernels (without replacement: a bootstrap would leave out
    a third of what was measured): where they agree, the kernel is like those that were measured. What is learned is the
    logarithm of the time over a roofline's guess, so that a kernel larger than all that were seen is not taken for one
    of those.
    """

    def __init__(
        self,
        names: Sequence[str],
        boosters: Sequence[Any],
        scale: float,
        trained_on: int,
        target_key: str,
        version: str,
        usual_secs: float | None = None,
    ) -> None:
        self._names = tuple(names)
        self._boosters = list(boosters)
        self._scale = scale
        self.trained_on = trained_on
        self.target_key, self.version = target_key, version
        self.usual_secs = usual_secs

    @staticmethod
    def fit(
        samples: Sequence[Sample], target_key: str, version: str, seed: int = 0, usual_secs: float | None = None
    ) -> LearnedCost:
        """Train on `samples`, all of this target and version; CostError for fewer than `LEAST_SAMPLES` of them.

        `usual_secs`: the reference kernel's, to whose speed the samples' are reckoned.
        """
        import xgboost

        if len(samples) < LEAST_SAMPLES:
            raise CostError(
                f"{len(samples)} measured kernels are too few to learn from: measure at least {LEAST_SAMPLES} "
                "(search, or price more models)"
            )
        rows = [_row(sample.features, sample.cold) for sample in samples]
        names = sorted({name for row in rows for name in row})
        matrix = _matrix(rows, names)
        labels = np.array([math.log(s.run_secs / _guess(s.features)) for s in samples])
        keys = sorted({sample.key for sample in samples})
        index = {key: i for i, key in enumerate(keys)}
        owners = np.array([index[sample.key] for sample in samples])
        rng = np.random.default_rng(seed)
        boosters = []
        unseen = np.full((_MEMBERS, len(samples)), math.nan)
        for member in range(_MEMBERS):
            drawn = rng.choice(len(keys), round(_LEARNT_SHARE * len(keys)), replace=False)
            learnt = np.isin(owners, drawn)
            data = xgboost.DMatrix(matrix[learnt], labels[learnt], feature_names=names)
            parameters = {**_PARAMETERS, "seed": seed * _MEMBERS + member}
            boosters.append(xgboost.train(parameters, data, num_boost_round=_ROUNDS))
            left_out = xgboost.DMatrix(matrix[~learnt], feature_names=names)
            unseen[member, ~learnt] = boosters[-1].predict(left_out)
        scale = _scale(unseen, labels)
        return LearnedCost(names, boosters, scale, len(samples), target_key, version, usual_secs)

    def predict(self, kernels: Sequence[tuple[Mapping[str, float], str]]) -> list[Prediction]:
        """A prediction for each of `kernels`: (features, temperatures)."""
        import xgboost

        if not kernels:
            return []
        rows = [_row(features, cold) for features, cold in kernels]
        data = xgboost.DMatrix(_matrix(rows, self._names), feature_names=list(self._names))
        logs = np.stack([booster.predict(data) for booster in self._boosters])
        guesses = [_guess(features) for features, _ in kernels]
        return [
            Prediction(guess * math.exp(mean), self._scale * float(deviation))
            for guess, mean, deviation in zip(guesses, logs.mean(axis=0), logs.std(axis=0, ddof=1), strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, whole or not at all; CostError where it cannot be."""
        members = [json.loads(booster.save_raw("json").decode()) for booster in self._boosters]
        content = {
            "format": FORMAT,
            "target": self.target_key,
            "version": self.version,
            "usual_secs": self.usual_secs,
            "names": self._names,
            "scale": self._scale,
            "trained_on": self.trained_on,
            "members": members,
        }
        temporary = Path(f"{path}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise CostError(
                f"{path}: the learned cost model cannot be written ({error.strerror}): free its disk, or set "
                "RLFLOW_TVM_HOME to another folder"
            ) from error

    @staticmethod
    def load(path: str | Path, target_key: str, version: str) -> LearnedCost:
        """Read what `save` wrote; CostError for anything else, and for a model of another target or version."""
        import xgboost

        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            if (content["target"], content["version"]) != (target_key, version):
                raise ValueError(f"it was trained for {content['target']}, {content['version']}")
            boosters = []
            for member in content["members"]:
                booster = xgboost.Booster({"nthread": 1})
                booster.load_model(bytearray(json.dumps(member).encode()))
                boosters.append(booster)
            return LearnedCost(
                content["names"],
                boosters,
                float(content["scale"]),
                int(content["trained_on"]),
                target_key,
                version,
                content["usual_secs"],
            )
        except (OSError, ValueError, KeyError, TypeError, xgboost.core.XGBoostError) as error:
            raise CostError(f"{path}: no learned cost model ({str(error).splitlines()[0]}): train it again") from error


def _scale(unseen: np.ndarray, labels: np.ndarray) -> float:
    """What the members' deviation is to be multiplied with to be that of the error.

    `unseen`: (members, samples), NaN where a member has learned from the sample; what the others say of it is held
    against its label.
    """
    several = (~np.isnan(unseen)).sum(axis=0) >= _LEAST_UNSEEN
    errors = np.nanmean(unseen[:, several], axis=0) - labels[several]
    deviations = np.nanstd(unseen[:, several], axis=0, ddof=1)  # of few members, and alike for any number
    return float(np.sqrt(np.mean(errors**2) / np.mean(deviations**2))) if several.any() and deviations.any() else 1.0


def _row(features: Mapping[str, float], cold: str) -> dict[str, float]:
    """Features as the trees see them: bytes by temperature beside the kernel's own, all by ratio or logarithm."""
    row = {name: math.log2(value + 1.0) if value >= 0 else value for name, value in features.items()}
    sizes = [features[f"bytes:{i}"] for i in range(int(features["params"]))]
    cold = cold.ljust(len(sizes), cold[-1:] or "4")
    for name, digits in (("near", "0"), ("recent", "1"), ("far", "23456789")):
        row[f"bytes_{name}"] = math.log2(1.0 + sum(s for s, d in zip(sizes, cold, strict=False) if d in digits))
    row["reach"] = float(max((int(d) for d in cold), default=0))
    row["bytes"] = math.log2(1.0 + sum(sizes))
    row["intensity"] = math.log2((1.0 + features["flops"]) / (1.0 + sum(sizes)))
    row |= _of_schedule(features, sum(sizes))
    for axis in ("spatial:0", "spatial:1", "reduced:0"):
        if axis in features:
            extent = features[axis]
            row[f"{axis}%16"] = extent % 16
            row[f"{axis}/16"] = math.ceil(extent / 16) * 16 / max(extent, 1.0)
    return row


def _of_schedule(features: Mapping[str, float], moved: float) -> dict[str, float]:
    """Ratios of what the schedule comes to; nothing where there are no features of one."""
    if "schedule:tasks" not in features:
        return {}
    accesses = {name: n for name, n in features.items() if name.startswith(("schedule:stores", "schedule:loads"))}
    done = 1.0 + sum(accesses.values())
    return {
        "accesses": math.log2(done),
        "flops_each": math.log2((1.0 + features["flops"]) / done),
        "bytes_each": math.log2((1.0 + moved) / done),
        "task": math.log2(done / max(features["schedule:tasks"], 1.0)),
        "scalar": sum(n for name, n in accesses.items() if name.endswith(":scalar")) / done,
        "strided": sum(n for name, n in accesses.items() if name.endswith(":strided")) / done,
    }


def _matrix(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> np.ndarray:
    return np.array([[row.get(name, math.nan) for name in names] for row in rows], dtype="float32").reshape(
        len(rows), len(names)
    )


def _guess(features: Mapping[str, float]) -> float:
    """A roofline's: seconds."""
    moved = sum(features[f"bytes:{i}"] for i in range(int(features["params"])))
    return max(features["flops"] / _FLOPS_PER_SEC, moved / _BYTES_PER_SEC, _LEAST_SECS)
