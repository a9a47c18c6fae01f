"""A measurement is seconds or an error."""

from __future__ import annotations

import dataclasses

import pytest

from rlflow_tvm.cost import Measurement


def test_seconds():
    measurement = Measurement(run_secs=1e-3, repeats=5, spread=0.1)
    assert measurement.ok
    with pytest.raises(dataclasses.FrozenInstanceError):
        measurement.run_secs = 2.0


@pytest.mark.parametrize("kind", ["build", "crash", "timeout", "run"])
def test_error(kind):
    assert not Measurement(error="why", error_kind=kind).ok


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"run_secs": 1.0, "error": "both", "error_kind": "run"},
        {"error": "kind missing"},
        {"run_secs": 1.0, "error_kind": "run"},
        {"error": "why", "error_kind": "other"},
        {"run_secs": 0.0},
        {"run_secs": -1.0},
        {"run_secs": float("nan")},
    ],
)
def test_contradictions(fields):
    with pytest.raises(ValueError):
        Measurement(**fields)
