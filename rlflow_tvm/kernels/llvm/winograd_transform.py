"""Winograd's transforms of one line, as additions and multiplications without a wasted one.

F(m, 3) computes m outputs of a filter of three taps from m + 2 inputs with m + 2 products:
Y = A^T [(G g) * (B^T d)] (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015). In two dimensions
each transform is applied to the columns and then to the rows. The points are 0, 1, -1 and infinity for F(2, 3), and
2 and -2 besides for F(4, 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TAPS = 3
Keep = Callable[[Any], Any]
"""Gives a value a name, so that an expression that is used twice is computed once."""


def keep_nothing(value: Any) -> Any:
    """The value itself: for numbers."""
    return value


def transform_data(d: Sequence[Any], keep: Keep = keep_nothing) -> list[Any]:
    """B^T d, for the four inputs of F(2, 3) or the six of F(4, 3)."""
    if len(d) == 4:
        return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]
    even, odd = keep(d[4] - d[2] * 4.0), keep(d[3] - d[1] * 4.0)
    outer, inner = keep(d[4] - d[2]), keep(d[3] - d[1])
    return [
        d[0] * 4.0 + (d[4] - d[2] * 5.0),
        even + odd,
        even - odd,
        outer + inner * 2.0,
        outer - inner * 2.0,
        d[1] * 4.0 + (d[5] - d[3] * 5.0),
    ]


def transform_product(p: Sequence[Any], keep: Keep = keep_nothing) -> list[Any]:
    """A^T p, for the four products of F(2, 3) or the six of F(4, 3)."""
    if len(p) == 4:
        return [p[0] + p[1] + p[2], p[1] - p[2] - p[3]]
    even, odd = keep(p[1] + p[2]), keep(p[1] - p[2])
    outer, inner = keep(p[3] + p[4]), keep(p[3] - p[4])
    return [p[0] + even + outer, odd + inner * 2.0, even + outer * 4.0, p[5] + odd + inner * 8.0]


def transform_taps(g: Sequence[Any], size: int, keep: Keep = keep_nothing) -> list[Any]:
    """G g, the three taps of a filter for F(size, 3)."""
    if size == 2:
        ends = keep((g[0] + g[2]) * 0.5)
        return [g[0], ends + g[1] * 0.5, ends - g[1] * 0.5, g[2]]
    ends, middle = keep((g[0] + g[2]) * (-1.0 / 6)), keep(g[1] * (1.0 / 6))
    far, between = keep(g[0] * (1.0 / 24) + g[2] * (1.0 / 6)), keep(g[1] * (1.0 / 12))
    return [g[0] * 0.25, ends - middle, ends + middle, far + between, far - between, g[2]]


def plane(lines: Sequence[Sequence[Any]], line: Callable[[Sequence[Any]], list[Any]], keep: Keep) -> list[list[Any]]:
    """A transform of one line applied to the columns of `lines`, then to its rows; `keep` names what lies between."""
    columns = [[keep(value) for value in line(column)] for column in zip(*lines, strict=True)]
    return [line(row) for row in zip(*columns, strict=True)]


def matrix(line: Callable[[Sequence[Any]], list[Any]], inputs: int) -> np.ndarray:
    """The matrix of a transform: its rows are outputs."""
    return np.array(line(list(np.eye(inputs))))
