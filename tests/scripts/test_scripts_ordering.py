"""What counts as equal to the original where a graph is ordered."""

from __future__ import annotations

import numpy as np
import ordering
import pytest
import tvm
from small_models import module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.verify import TOLERANCE, range_error

_X = np.random.default_rng(0).standard_normal((3, 64)).astype("float32")


def _of(body) -> tvm.IRModule:
    return module({"x": _X.shape}, {}, body)


def _nought(emit, x):
    """The sums of what is left of each row's mean: nought, and in floats rounding alone."""
    return emit(rx.sum(emit(rx.subtract(x, emit(rx.mean(x, [1], keepdims=True)))), [1]))


def _nought_otherwise(emit, x):
    mean = emit(rx.mean(x, [1]))
    return emit(rx.subtract(emit(rx.sum(x, [1])), emit(rx.multiply(mean, relax.const(64.0)))))


def _differences(body) -> tuple[float, float]:
    """Of a module that is not, or not quite, the first one: in single, and in double precision."""
    mod, made, draws = _of(_nought), _of(body), [[_X]]
    expected = ordering.outputs(mod, draws)
    single = max(map(range_error, ordering.outputs(made, draws), expected))
    return single, ordering.difference_in_double(made, mod, draws, expected)


def test_rounding_is_told_from_other_values() -> None:
    single, double = _differences(_nought_otherwise)
    assert single > TOLERANCE
    assert double < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        lambda emit, x: emit(rx.add(_nought(emit, x), relax.const(1e-6))),
        lambda emit, x: emit(rx.log(emit(rx.subtract(_nought(emit, x), relax.const(1.0))))),
    ],
)
def test_what_is_wrong_is_wrong_in_double_too(body) -> None:
    """Also by a little, or where it is no number."""
    single, double = _differences(body)
    assert single > TOLERANCE
    assert double > TOLERANCE
