"""Worlds: the tensors that terms are made of, and the attributes that operators can have on them.

The extents of a world's tensors are symbols, and every term is evaluated under two valuations of them at once: what
is equal under both is hardly so by coincidence of extents, and an attribute is the list of its values under each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

from rlflow_tvm.passes.ops import OPERATORS
from rlflow_tvm.passes.proof.domains import Shape

Shapes = tuple[Shape, ...]
"""A tensor's shape under each valuation."""

Operands = list[Shapes]

Choice = tuple[dict[str, Any], ...]
"""All attributes of a call, under each valuation."""


@dataclass(frozen=True)
class World:
    """`leaves`: the tensors with their extents, symbols or "1"; `valuations`: what each symbol is; `images`: the leaves
    that are convolved, with what is made of others.

    No two symbols agree under every valuation, so that what fits fits because of its symbols.
    """

    name: str
    leaves: dict[str, tuple[str, ...]]
    valuations: tuple[dict[str, int], ...]
    images: frozenset[str] = frozenset()

    def shapes(self, leaf: str) -> Shapes:
        return tuple(
            tuple(1 if symbol == "1" else values[symbol] for symbol in self.leaves[leaf]) for values in self.valuations
        )

    @property
    def extents(self) -> list[tuple[int, ...]]:
        """Every symbol's value under each valuation."""
        return [tuple(values[symbol] for values in self.valuations) for symbol in self.valuations[0]]


MATRICES = World(
    "matrices",
    {
        "x": ("m", "k"), "y": ("m", "k"), "z": ("m", "k"), "e": ("m", "l"), "g": ("l", "k"),
        "a": ("k", "n"), "b": ("k", "n"), "d": ("k", "q"), "f": ("l", "n"), "c": ("n", "q"),
        "v": ("n",), "s": (),
    },
    (
        {"m": 3, "k": 4, "n": 6, "l": 5, "q": 7},
        {"m": 5, "k": 2, "n": 4, "l": 3, "q": 6},
    ),
)  # fmt: skip

BATCHES = World(
    "batches",
    {
        "x": ("b", "m", "k"), "y": ("b", "m", "k"), "e": ("b", "m", "l"), "a": ("k", "n"), "w": ("b", "k", "n"),
        "d": ("k", "q"), "v": ("k",), "s": (),
    },
    ({"b": 3, "m": 4, "k": 6, "n": 5, "l": 2, "q": 7}, {"b": 2, "m": 5, "k": 4, "n": 3, "l": 6, "q": 8}),
)  # fmt: skip

IMAGES = World(
    "images",
    {
        "x": ("n", "c", "h", "w"), "y": ("n", "c", "h", "w"), "z": ("n", "d", "h", "w"),
        "a": ("o", "c", "r", "t"), "b": ("o", "c", "r", "t"), "f": ("q", "c", "r", "t"),
        "p": ("q", "c", "1", "1"), "s": ("1", "c", "1", "1"), "v": ("1", "o", "1", "1"),
    },
    (
        {"n": 2, "c": 3, "h": 5, "w": 7, "d": 8, "o": 4, "r": 2, "t": 3, "q": 6},
        {"n": 3, "c": 4, "h": 6, "w": 5, "d": 7, "o": 6, "r": 2, "t": 1, "q": 8},
    ),
    frozenset({"x", "y", "z"}),
)  # fmt: skip

EQUALS = World(
    "equals",
    dict.fromkeys("xyzw", ("m", "k")),
    ({"m": 3, "k": 4}, {"m": 4, "k": 6}),
)

WORLDS = (MATRICES, BATCHES, IMAGES, EQUALS)

Choices = Callable[[World, Operands], Iterator[Choice]]

_OF_IMAGES = frozenset({"conv2d"})
_STEPPED = {"strides": (2, 1), "padding": (1, 0, 1, 2), "dilation": (1, 3)}
_TURNED = {"strides": (1, 2), "padding": (0, 1, 2, 1), "dilation": (3, 1)}  # rows and columns exchanged
_ORDERS_OF_FOUR = ((0, 1, 3, 2), (1, 0, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))


def worlds_for(operators: tuple[str, ...]) -> tuple[World, ...]:
    """Those in which these operators have something to work on."""
    return tuple(world for world in WORLDS if world is not IMAGES or _OF_IMAGES & set(operators))


def _alike(count: int, attributes: dict[str, Any]) -> Choice:
    return (attributes,) * count


def _units(shapes: Shapes) -> set[int]:
    """Axes of extent 1."""
    return {axis for axis in range(len(shapes[0])) if all(shape[axis] == 1 for shape in shapes)}


def _permutes(world: World, operands: Operands) -> Iterator[Choice]:
    """None where an axis has the extent 1: to move that is a reshape."""
    shapes = operands[0]
    rank = len(shapes[0])
    orders = _ORDERS_OF_FOUR if rank == 4 else permutations(range(rank)) if 1 < rank < 4 else ()
    for axes in orders:
        if axes != tuple(range(rank)) and not _units(shapes):
            yield _alike(len(shapes), {"axes": axes})


def _reshapes(world: World, operands: Operands) -> Iterator[Choice]:
    """Neighbouring axes joined; an axis taken apart into two extents of the world; axes of extent 1
    dropped, or moved to where the other axis stands first."""
    shapes = operands[0]
    rank, units = len(shapes[0]), _units(operands[0])
    found: list[Shapes] = []
    for axis in range(rank - 1):
        found.append(tuple((*s[:axis], s[axis] * s[axis + 1], *s[axis + 2 :]) for s in shapes))
    for axis in range(rank if rank < 4 else 0):
        for first in world.extents:
            for second in world.extents:
                if all(s[axis] == a * b for s, a, b in zip(shapes, first, second, strict=True)):
                    found.append(tuple((*s[:axis], a, b, *s[axis + 1 :])
                                       for s, a, b in zip(shapes, first, second, strict=True)))  # fmt: skip
    if units:
        kept = [axis for axis in range(rank) if axis not in units]
        found.append(tuple(tuple(s[axis] for axis in kept) for s in shapes))
        if len(kept) == 1:
            found.append(tuple((s[kept[0]], *(1,) * (rank - 1)) for s in shapes))
    for target in dict.fromkeys(found):
        if target != shapes:
            yield tuple({"shape": shape} for shape in target)


def _reductions(world: World, operands: Operands) -> Iterator[Choice]:
    shapes = operands[0]
    rank = len(shapes[0])
    pairs = combinations(range(rank), 2) if rank < 4 else [(2, 3)]
    for axes in [*((axis,) for axis in range(rank)), *pairs]:
        if not _units(shapes).isdisjoint(axes):
            continue
        for keepdims in (True, False) if rank < 4 else (True,):
            if keepdims or len(axes) < rank:
                yield _alike(len(shapes), {"axis": axes, "keepdims": keepdims})


def _splits(world: World, operands: Operands) -> Iterator[Choice]:
    """In two where both parts are extents of the world, in two halves, in three equal parts."""
    shapes, extents = operands[0], world.extents
    for axis in range(len(shapes[0])):
        whole = tuple(s[axis] for s in shapes)
        places: list[tuple[tuple[int, ...], ...]] = []
        for part in extents:
            if tuple(e - p for e, p in zip(whole, part, strict=True)) in extents:
                places.append(tuple((p,) for p in part))
            if whole == tuple(3 * p for p in part):
                places.append(tuple((p, 2 * p) for p in part))
        if all(e % 2 == 0 for e in whole):
            places.append(tuple((e // 2,) for e in whole))
        for at in dict.fromkeys(places):
            yield tuple({"at": points, "axis": axis} for points in at)


def _concats(world: World, operands: Operands) -> Iterator[Choice]:
    for axis in range(len(operands[0][0])):
        yield _alike(len(operands[0]), {"axis": axis})


def _products(world: World, operands: Operands) -> Iterator[Choice]:
    """Of matrices and batches of them: what holds for these holds for more axes."""
    if all(2 <= len(shapes[0]) <= 3 for shapes in operands):
        yield _alike(len(operands[0]), dict(OPERATORS["matmul"].attributes))


def _convolutions(world: World, operands: Operands) -> Iterator[Choice]:
    plain, image = OPERATORS["conv2d"].attributes, operands[0]
    if len(image[0]) == 4 and not _units(image):
        for changed in ({}, _STEPPED, _TURNED, {"groups": 2}):
            yield _alike(len(image), {**plain, **changed})


def _last_axis(world: World, operands: Operands) -> Iterator[Choice]:
    if operands[0][0]:
        yield _alike(len(operands[0]), {"axis": len(operands[0][0]) - 1})


def _defaults(name: str) -> Choices:
    def choices(world: World, operands: Operands) -> Iterator[Choice]:
        yield _alike(len(operands[0]), dict(OPERATORS[name].attributes))

    return choices


_CHOICES: dict[str, Choices] = {
    "permute_dims": _permutes,
    "reshape": _reshapes,
    "split": _splits,
    "concat": _concats,
    "matmul": _products,
    "conv2d": _convolutions,
    "softmax": _last_axis,
    **dict.fromkeys(("sum", "mean", "max", "min"), _reductions),
    **{name: _defaults(name) for name in (
        "add", "subtract", "multiply", "divide", "maximum", "minimum", "relu", "tanh", "sigmoid", "exp",
        "erf", "sqrt", "rsqrt", "negative", "abs", "gelu", "silu",
    )},
}  # fmt: skip

KNOWN = tuple(_CHOICES)
"""The operators that rules can be sought over."""


def choices(name: str, world: World, operands: Operands) -> Iterator[Choice]:
    """What the attributes of `name` can be on operands of these shapes."""
    yield from _CHOICES[name](world, operands)
