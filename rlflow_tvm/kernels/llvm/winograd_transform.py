"""Winograd's transforms of one line, as additions and multiplications without a wasted one.

F(m, 3) computes m outputs of a filter of three taps from m + 2 inputs with m + 2 products:
Y = A^T [(G g) * (B^T d)] (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015). In two dimensions
each transform is applied to the columns and then to the rows. F(2, 3) has the points 0, 1, -1 and infinity; F(4, 3)
has 0, a, -a, b, -b and infinity with a = 5/8 and b = 3/2, as oneDNN has: with the usual 1 and 2 the results are four
times less exact.

Greatest error against float64, as a part of the output's range, normal random data, 3x3 windows:

| input channels | F(2, 3) | F(4, 3) | direct, for comparison |
|---|---|---|---|
| 64 | 3.2e-7 | 1.9e-6 | 9.2e-7 |
| 128 | 4.9e-7 | 2.5e-6 | 1.6e-6 |
| 256 | 5.7e-7 | 2.7e-6 | 1.9e-6 |
| 512 | 9.3e-7 | 4.4e-6 | 2.8e-6 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TAPS = 3
_A, _B = 5 / 8, 3 / 2
_A2, _B2 = _A * _A, _B * _B
_NEAR, _FAR = 1 / (2 * _A2 * (_A2 - _B2)), 1 / (2 * _B2 * (_B2 - _A2))  # 1 / the product of a point's distances
Keep = Callable[[Any], Any]
"""Gives a value a name, so that an expression that is used twice is computed once."""


def keep_nothing(value: Any) -> Any:
    """The value itself: for numbers."""
    return value


def transform_data(d: Sequence[Any], keep: Keep = keep_nothing) -> list[Any]:
    """B^T d, for the four inputs of F(2, 3) or the six of F(4, 3)."""
    if len(d) == 4:
        return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]
    even, odd = keep(d[4] - d[2] * _B2), keep((d[3] - d[1] * _B2) * _A)
    even_b, odd_b = keep(d[4] - d[2] * _A2), keep((d[3] - d[1] * _A2) * _B)
    return [
        d[0] * (_A2 * _B2) + (d[4] - d[2] * (_A2 + _B2)),
        even + odd,
        even - odd,
        even_b + odd_b,
        even_b - odd_b,
        d[1] * (_A2 * _B2) + (d[5] - d[3] * (_A2 + _B2)),
    ]


def transform_product(p: Sequence[Any], keep: Keep = keep_nothing) -> list[Any]:
    """A^T p, for the four products of F(2, 3) or the six of F(4, 3)."""
    if len(p) == 4:
        return [p[0] + p[1] + p[2], p[1] - p[2] - p[3]]
    even, odd = keep(p[1] + p[2]), keep(p[1] - p[2])
    even_b, odd_b = keep(p[3] + p[4]), keep(p[3] - p[4])
    return [
        p[0] + even + even_b,
        odd * _A + odd_b * _B,
        even * _A2 + even_b * _B2,
        p[5] + odd * (_A * _A2) + odd_b * (_B * _B2),
    ]


def transform_taps(g: Sequence[Any], size: int, keep: Keep = keep_nothing) -> list[Any]:
    """G g, the three taps of a filter for F(size, 3)."""
    if size == 2:
        ends = keep((g[0] + g[2]) * 0.5)
        return [g[0], ends + g[1] * 0.5, ends - g[1] * 0.5, g[2]]
    ends, middle = keep((g[0] + g[2] * _A2) * _NEAR), keep(g[1] * (_A * _NEAR))
    ends_b, middle_b = keep((g[0] + g[2] * _B2) * _FAR), keep(g[1] * (_B * _FAR))
    return [g[0] * (1 / (_A2 * _B2)), ends + middle, ends - middle, ends_b + middle_b, ends_b - middle_b, g[2]]


def plane(lines: Sequence[Sequence[Any]], line: Callable[[Sequence[Any]], list[Any]], keep: Keep) -> list[list[Any]]:
    """A transform of one line applied to the columns of `lines`, then to its rows; `keep` names what lies between."""
    columns = [[keep(value) for value in line(column)] for column in zip(*lines, strict=True)]
    return [line(row) for row in zip(*columns, strict=True)]


def matrix(line: Callable[[Sequence[Any]], list[Any]], inputs: int) -> np.ndarray:
    """The matrix of a transform: its rows are outputs."""
    return np.array(line(list(np.eye(inputs))))
