"""Where a resize looks along an axis, and with what weights: exact rationals, which TVM rounds.

After topi/image/resize.py. TVM's positions are floats: one that lies exactly between two elements may be nearer to the
other one there. Which one it is depends on the two extents and the attributes alone, as here, and no rule on more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Any

from rlflow_tvm.passes.proof.domains import Unfit

Taps = list[tuple[int, Fraction]]
"""Elements and their weights, which sum up to 1."""

_HALF = Fraction(1, 2)


def _half_pixel(i: int, extent: int, count: int) -> Fraction:
    return (i + _HALF) * Fraction(extent, count) - _HALF


COORDINATES: dict[str, Callable[[int, int, int], Fraction]] = {
    "half_pixel": _half_pixel,
    "pytorch_half_pixel": lambda i, extent, count: _half_pixel(i, extent, count) if count > 1 else Fraction(0),
    "asymmetric": lambda i, extent, count: i * Fraction(extent, count),
    "align_corners": lambda i, extent, count: i * Fraction(extent - 1, count - 1),
    "tf_half_pixel_for_nn": lambda i, extent, count: (i + _HALF) * Fraction(extent, count),
}
"""(element of the result, the axis's extent, the result's) -> position on the axis. `tf_crop_and_resize` is none of
them: beyond the image it gives a number, not a sum of elements."""

ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "round": round,  # halves to the even one
    "round_prefer_floor": lambda position: ceil(position - _HALF),
    "round_prefer_ceil": lambda position: floor(position + _HALF),
    "floor": floor,
    "ceil": ceil,
}


def _nearest(position: Fraction, extent: int, k: Mapping[str, Any]) -> Taps:
    usual = "round" if k["coordinate_transformation_mode"] == "align_corners" else "floor"
    return [(ROUNDINGS[k["rounding_method"] or usual](position), Fraction(1))]


def _linear(position: Fraction, extent: int, k: Mapping[str, Any]) -> Taps:
    first = floor(position)
    return [(first, 1 - position + first), (first + 1, position - first)]


def _cubic(position: Fraction, extent: int, k: Mapping[str, Any]) -> Taps:
    """Keys's kernel (1981) with the given slope; with `cubic_exclude` what lies beyond the edges has no weight."""
    first, a = floor(position), Fraction(k["cubic_alpha"])
    t = position - first
    weights = [
        a * (t**3 - 2 * t**2 + t),
        (a + 2) * t**3 - (a + 3) * t**2 + 1,
        -(a + 2) * t**3 + (2 * a + 3) * t**2 - a * t,
        a * (t**2 - t**3),
    ]
    places = range(first - 1, first + 3)
    if k["cubic_exclude"]:
        weights = [w if 0 <= place < extent else Fraction(0) for place, w in zip(places, weights, strict=True)]
        if sum(weights) == 0:
            raise Unfit("weights that sum up to 0")
        weights = [w / sum(weights) for w in weights]
    return list(zip(places, weights, strict=True))


METHODS: dict[str, Callable[[Fraction, int, Mapping[str, Any]], Taps]] = {
    "nearest_neighbor": _nearest,
    "linear": _linear,
    "cubic": _cubic,
}


def taps(extent: int, count: int, k: Mapping[str, Any]) -> list[Taps]:
    """For each of `count` elements that an axis of `extent` is resized to, what it is the sum of: as many taps for
    each. `k`: the attributes of the resize. `Unfit` for attributes that it does not take."""
    mode, method = k["coordinate_transformation_mode"], k["method"]
    rounding = k["rounding_method"]
    if mode not in COORDINATES or method not in METHODS or (rounding and rounding not in ROUNDINGS):
        raise Unfit(f"no resize is {method}, {mode}, {rounding}")
    if count < 1 or (mode == "align_corners" and count == 1):
        raise Unfit(f"{extent} to {count} by {mode}")
    found = [METHODS[method](COORDINATES[mode](i, extent, count), extent, k) for i in range(count)]
    return [[(min(max(place, 0), extent - 1), weight) for place, weight in each] for each in found]
