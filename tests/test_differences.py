"""Which elements of a model's outputs are held against another's: those that the model itself decides."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax import op as rx

from rlflow_tvm.differences import TOLERANCE, Decided, range_error
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import RewriteRule
from rlflow_tvm.verify import check_state
from tests.small_models import module
from tests.test_verify import TARGET, rewritten


def labels(arrays):
    return [arrays[0].argmax(axis=1)]


@pytest.fixture
def scores():
    """Of four labels for each of 4096 pixels: on the first two the best are equal but for rounding."""
    scores = np.random.default_rng(0).standard_normal((64, 4, 64)).astype("float32")
    scores[0, :, :2] = np.array([[0.5], [1.0], [np.nextafter(np.float32(1), np.float32(2))], [0.0]])
    return scores


def test_labels_that_rounding_decides_are_left_out(scores):
    expected = labels([scores])
    decided, asked = Decided(lambda arrays: asked.append(1) or labels(arrays), [scores], expected), []
    found = expected[0].copy()
    assert decided.error([found]) == 0.0
    assert not asked, "it is run again only where outputs are apart"
    found[0, :2] = 1
    assert range_error([found], expected) > 0.3
    assert decided.error([found]) == 0.0
    pixels = len(asked)
    found[0, 2] += 1
    assert decided.error([found]) > 0.3, "this one is decided"
    assert len(asked) == pixels, "for all that is held against it the model is run again but once"


def test_a_larger_share_than_may_differ_is_not_left_out(scores):
    scores[0, :, :5] = scores[0, :, :1]
    expected = labels([scores])
    found = expected[0].copy()
    found[0, 0] = 1
    assert Decided(labels, [scores], expected).error([found]) > 0.3


def test_numbers_are_all_held_against_each_other(scores):
    """Halves too, whose last digits are larger than what single floats are disturbed by."""
    half = scores.argsort(axis=1).astype("float16")  # all decided
    half[0, 1, :2] = half[0, 2, :2] = 4.0

    def both(arrays):
        return [arrays[0] * arrays[0], *labels(arrays)]

    expected = both([half])
    decided = Decided(both, [half], expected)
    label = expected[1].copy()
    label[0, :2] = 2
    assert decided.error([expected[0], label]) == 0.0
    assert decided.error([expected[0] + np.float16(0.1), label]) > TOLERANCE
    assert decided.error([expected[0]]) == decided.error([label, label]) == float("inf")


def test_without_floats_nothing_is_undecided(scores):
    whole = (100 * scores).astype("int32")
    expected = labels([whole])
    found = [expected[0].copy()]
    found[0][0, 0] = 3
    assert Decided(labels, [whole], expected).error(found) > 0.3


@pytest.mark.parametrize(("shift", "right"), [(5e-6, True), (1e-3, False), (0.1, False)])
def test_a_rewrite_may_flip_what_rounding_decides(shift, right):
    """Of a million pixels some."""

    def labelled(emit, x, y):
        return rx.argmax(emit(rx.concat([x, emit(rx.nn.relu(y))], axis=1)), 1)

    mod = module({"x": (1 << 20, 3), "y": (1 << 20, 1)}, {}, labelled)
    state = rewritten(mod, {}, RewriteRule("shift", "none", f"relu(x) => relu(add(x, {shift}))"))
    if right:
        assert check_state(state, TARGET) == 0.0
    else:
        with pytest.raises(RewriteError, match="first after shift@"):
            check_state(state, TARGET)
