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
    that are convolved, with what is made of others; `idle`: whether permutations and reshapes that leave all elements
    where they are have terms of their own, which doubles their number.

    No two symbols agree under every valuation, so that what fits fits because of its symbols.
    """

    name: str
    leaves: dict[str, tuple[str, ...]]
    valuations: tuple[dict[str, int], ...]
    images: frozenset[str] = frozenset()
    idle: bool = False

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

STACKS = World(
    "stacks",
    {"x": ("b", "m", "k"), "y": ("b", "m", "k"), "v": ("b", "k", "n"), "w": ("b", "k", "n")},
    ({"b": 3, "m": 4, "k": 6, "n": 5}, {"b": 2, "m": 5, "k": 4, "n": 3}),
)

SUMS = World(  # j = k + l
    "sums",
    {
        "x": ("m", "j"), "y": ("m", "k"), "z": ("m", "l"), "h": ("j", "n"), "a": ("k", "n"), "f": ("l", "n"),
        "c": ("j",), "b": ("k",), "d": ("l",),
    },
    ({"m": 3, "k": 4, "l": 5, "j": 9, "n": 6}, {"m": 7, "k": 2, "l": 3, "j": 5, "n": 4}),
)  # fmt: skip

HEADS = World(  # g = 2 h, f = h d, e = g d
    "heads",
    {"x": ("b", "s", "e"), "y": ("b", "s", "f"), "w": ("e",)},
    (
        {"b": 2, "s": 5, "h": 3, "d": 7, "g": 6, "f": 21, "e": 42},
        {"b": 3, "s": 4, "h": 2, "d": 5, "g": 4, "f": 10, "e": 20},
    ),
)  # fmt: skip

UNITS = World(
    "units",
    {"x": ("m", "k"), "y": ("m", "1", "k"), "z": ("c", "1", "1"), "a": ("k", "n")},
    ({"m": 3, "k": 4, "n": 6, "c": 5}, {"m": 5, "k": 2, "n": 4, "c": 3}),
    idle=True,
)

DEPTHWISE = World(
    "depthwise",
    {"x": ("n", "c", "h", "w"), "a": ("c", "1", "r", "t"), "p": ("q", "c", "1", "1"), "s": ()},
    (
        {"n": 2, "c": 3, "h": 5, "w": 7, "r": 2, "t": 3, "q": 6},
        {"n": 3, "c": 4, "h": 6, "w": 5, "r": 2, "t": 1, "q": 8},
    ),
    frozenset({"x"}),
    idle=True,
)

WORLDS = (MATRICES, BATCHES, IMAGES, EQUALS, STACKS, SUMS, HEADS, UNITS, DEPTHWISE)

Choices = Callable[[World, Operands], Iterator[Choice]]

_OF_IMAGES = frozenset({"conv2d"})
_STEPPED = {"strides": (2, 1), "padding": (1, 0, 1, 2), "dilation": (1, 3)}
_TURNED = {"strides": (1, 2), "padding": (0, 1, 2, 1), "dilation": (3, 1)}  # rows and columns exchanged
_ORDERS_OF_FOUR: tuple[tuple[int, ...], ...] = ((0, 1, 3, 2), (1, 0, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))


def worlds_for(operators: tuple[str, ...]) -> tuple[World, ...]:
    """Those in which these operators have something to work on."""
    return tuple(world for world in WORLDS if not world.images or _OF_IMAGES & set(operators))


def _alike(count: int, attributes: dict[str, Any]) -> Choice:
    return (attributes,) * count


def _units(shapes: Shapes) -> set[int]:
    """Axes of extent 1."""
    return {axis for axis in range(len(shapes[0])) if all(shape[axis] == 1 for shape in shapes)}


def _permutes(world: World, operands: Operands) -> Iterator[Choice]:
    """Only in a world of idle terms the one that changes nothing, or where an axis has the extent 1: to move that is a
    reshape."""
    shapes = operands[0]
    rank = len(shapes[0])
    orders = list(_ORDERS_OF_FOUR if rank == 4 else permutations(range(rank)) if 1 < rank < 4 else ())
    orders = [axes for axes in orders if axes != tuple(range(rank))]
    if world.idle and orders:
        orders.append(tuple(range(rank)))
    for axes in orders:
        if world.idle or not _units(shapes):
            yield _alike(len(shapes), {"axes": axes})


def _reshapes(world: World, operands: Operands) -> Iterator[Choice]:
    """Neighbouring axes joined; an axis taken apart into two extents of the world; axes of extent 1
    dropped, or moved to where the other axis stands first, in a world of idle terms to wherever they can stand, and the
    shape that is there."""
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
    if world.idle and rank:
        found += [tuple(zip(*order, strict=True)) for order in _with_units_moved(shapes, units)]
    for target in dict.fromkeys(found):
        if world.idle or target != shapes:
            yield tuple({"shape": shape} for shape in target)


def _with_units_moved(shapes: Shapes, units: set[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Orders of the axes, each by its extents under the valuations, that leave those in order that are not of extent
    1; the present one among them."""
    axes = [*zip(*shapes, strict=True)]
    for order in permutations(range(len(axes))):
        if [axis for axis in order if axis not in units] == [axis for axis in range(len(axes)) if axis not in units]:
            yield tuple(axes[axis] for axis in order)


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
    """In two or three where all parts are extents of the world, in two halves."""
    shapes, extents = operands[0], world.extents
    for axis in range(len(shapes[0])):
        whole = tuple(s[axis] for s in shapes)
        places: list[tuple[tuple[int, ...], ...]] = []
        for part in extents:
            rest = tuple(e - p for e, p in zip(whole, part, strict=True))
            if rest in extents:
                places.append(tuple((p,) for p in part))
            for second in extents:
                if tuple(e - p for e, p in zip(rest, second, strict=True)) in extents:
                    places.append(tuple((p, p + q) for p, q in zip(part, second, strict=True)))
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
        if len(operands[1][0]) == 4 and all(w[1] == 1 and w[0] == x[1] for x, w in zip(*operands, strict=True)):
            yield tuple({**plain, "groups": x[1]} for x in image)


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
