"""How far two modules' outputs are apart, and which of their elements say anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import ml_dtypes
import numpy as np

TOLERANCE = 1e-3
"""Largest difference allowed, as a share of the output's range: rewriting changes the order of float sums. Of integers
and booleans also the share of elements that may differ."""
_FILLED = 5e3  # and a hundred times all that is below
_SMALL = 0.01  # share of the whole's range, of a slice that has a range of its own
_ENOUGH_TO_RANGE = 16  # elements
_DISTURBANCE = 1e-5
"""Of an input's elements, as a share of each: what it changes is as much as rewriting changes sums, and more."""
_PAIRS = 4  # of disturbed inputs: one and its opposite


def range_error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest absolute difference, divided by the range (max - min) of the expected output it occurs in; at
    least 1 where of integers or booleans a larger share of elements than `TOLERANCE` differ.

    Fillings such as -1e9 have a range of their own, and so have slices beside which the rest is large
    (`_slices_error`). The range counts as at least a hundredth of the largest magnitude, so that an output that is
    constant but for rounding has one. Infinite where shapes or counts differ, or NaN and the two infinities are not the
    same in place.
    """
    if len(actual) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a.shape == b.shape and not _is_float(b) and b.size and np.mean(a != b) > TOLERANCE:
            worst = max(worst, 1.0)
        floats = _is_float(b)
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(b)
        if a.shape != b.shape or not np.isfinite(a[finite]).all():
            return float("inf")
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return float("inf")
        parts = _parts(b[finite])
        for part in parts:
            found, wanted = a[finite][part], b[finite][part]
            difference = float(np.abs(found - wanted).max())
            extent = float(_extent(wanted))
            worst = max(worst, difference / extent if extent else float(difference > 0))
        if floats and len(parts) == 1 and finite.all():
            worst = max(worst, _slices_error(a, b))
    return worst


def _extent(values: np.ndarray) -> np.ndarray:
    """The range along the last axis, at least a hundredth of the largest magnitude, which it is of a single number."""
    least = 0.01 if values.shape[-1] > 1 else 1.0
    return np.maximum(np.ptp(values, axis=-1), least * np.abs(values).max(axis=-1))


def _slices_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference in slices, along the second axis and the last, whose range is less than a hundredth of the
    whole's: of a detector's output the scores beside the coordinates, which could all be wrong else. As a share of ten
    times the slice's range (few elements carry what rounding leaves of larger ones), at least a hundredth of the
    whole's."""
    worst, whole = 0.0, float(_extent(wanted.ravel()))
    for axis in {1, wanted.ndim - 1} if wanted.ndim > 1 else ():
        if wanted.size < _ENOUGH_TO_RANGE * wanted.shape[axis]:
            continue
        a, b = (np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1) for each in (found, wanted))
        extents = _extent(b)
        small = extents < _SMALL * whole
        if small.any():
            differences = np.abs(a[small] - b[small]).max(axis=1)
            worst = max(worst, float((differences / np.maximum(10 * extents[small], _SMALL * whole)).max()))
    return worst


def _parts(values: np.ndarray) -> list[np.ndarray]:
    """Which of the values have a range together: all, but for those that stand for minus infinity (-1e9, as a mask
    fills in, or adds): many of nearly one size, beside which nothing else would count."""
    size = np.abs(values)
    filled = size >= _FILLED
    if filled.any() and not filled.all() and filled.sum() >= max(2, 0.01 * values.size):
        rest, least, most = size[~filled].max(), size[filled].min(), size[filled].max()
        if rest <= 0.01 * least and np.ptp(values[filled]) <= 0.01 * most:
            return [filled, ~filled]
    return [np.full(values.shape, True)] if values.size else []


class Decided:
    """A model's outputs, and what others are apart from them where the model itself decides.

    A label is that of the largest of some numbers. Where two of them are equal but for rounding, as on a pixel of some
    hundred thousand, any rewrite may make it another one, and so does a change of the input's last digits: of integers
    and booleans, elements that are not what they were for disturbed inputs are left out, unless a larger share of them
    than `TOLERANCE` is: that share may differ at all.

    Args:
        run: the model's outputs for inputs; called only where outputs are apart.
        inputs: those of `expected`.
        expected: the outputs for them; more may follow, in which nothing is left out.
    """

    def __init__(
        self,
        run: Callable[[list[np.ndarray]], Sequence[np.ndarray]],
        inputs: Sequence[np.ndarray],
        expected: Sequence[np.ndarray],
    ) -> None:
        self._run, self._inputs, self.expected = run, list(inputs), list(expected)

    def error(self, found: Sequence[np.ndarray]) -> float:
        """`range_error` of what is decided."""
        error = range_error(found, self.expected)
        if error <= TOLERANCE or [a.shape for a in found] != [b.shape for b in self.expected]:
            return error
        pairs = zip(found, self.expected, self._undecided, strict=True)
        return range_error([a if mask is None else np.where(mask, b, a) for a, b, mask in pairs], self.expected)

    @cached_property
    def _undecided(self) -> list[np.ndarray | None]:
        """Of each output which elements are; None where all count."""
        masks = [None if _is_float(each) else np.zeros(each.shape, bool) for each in self.expected]
        if any(mask is not None for mask in masks):
            for inputs in _disturbed(self._inputs):
                for mask, now, before in zip(masks, self._run(inputs), self.expected, strict=False):
                    if mask is not None and now.shape == before.shape:
                        mask |= now != before
        return [mask if mask is not None and mask.size and mask.mean() <= TOLERANCE else None for mask in masks]


def _disturbed(inputs: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The inputs with their floats' last digits changed, and changed the other way: of two nearly equal numbers the
    order changes with one of the two, as long as what is done to them is smooth. None without floats."""
    if not any(_is_float(array) for array in inputs):
        return
    rng = np.random.default_rng(0)
    for _ in range(_PAIRS):
        noise = [rng.standard_normal(array.shape) for array in inputs]
        for sign in (1.0, -1.0):
            pairs = zip(inputs, noise, strict=True)
            yield [_scaled(array, sign * each) if _is_float(array) else array for array, each in pairs]


def _scaled(array: np.ndarray, noise: np.ndarray) -> np.ndarray:
    size = max(_DISTURBANCE, float(ml_dtypes.finfo(array.dtype).eps))
    return np.asarray(array.astype(np.float64) * (1.0 + size * noise)).astype(array.dtype)


def _is_float(array: np.ndarray) -> bool:
    """Neither integers nor booleans."""
    return array.dtype.kind not in "iub"
