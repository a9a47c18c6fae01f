"""From equal ground terms to an equation: tensors become variables, attributes variables or expressions of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlflow_tvm.passes.synthesis import expressions
from rlflow_tvm.passes.synthesis.expressions import OTHER, SHAPE, candidates, extent_candidates, kind, literal, value
from rlflow_tvm.passes.synthesis.ground import Env, Node, apply, expression_env, leaf, parts_of, tensors_of
from rlflow_tvm.passes.synthesis.values import differ

_LAYOUTS = frozenset({"data_layout", "kernel_layout", "out_layout"})  # plain ones: worlds have no others
TENSORS = ("x", "y", "z", "w", "u", "v", "t", "r")
Roots = tuple[Node, ...]


@dataclass(frozen=True)
class Point:
    """Ground terms of equal values, root by root."""

    left: Roots
    right: Roots


@dataclass(frozen=True)
class Equation:
    """`text`, with the points that it holds for and what its attribute variables are there."""

    text: str
    points: tuple[Point, ...]
    tensors: tuple[str, ...]
    variables: dict[str, str]  # attribute variables with their kinds
    rests: tuple[str, ...]
    envs: tuple[Env, ...]  # what all of them stand for at each point, for attribute expressions


def skeleton(point: Point) -> str:
    """The two sides without attributes; tensors by the order in which they occur."""
    names: dict[Node, str] = {}

    def told(node: Node) -> str:
        if not node.operator:
            return names.setdefault(node, TENSORS[len(names)] if len(names) < len(TENSORS) else f"x{len(names)}")
        item = "" if node.item is None else f"[{node.item}]"
        return f"{node.operator}({', '.join(map(told, node.args))}){item}"

    return f"{', '.join(map(told, point.left))} => {', '.join(map(told, point.right))}"


def abstracted(point: Point) -> Point:
    """The point with tensors for what stands on both sides as a whole, where it holds whatever computes them."""
    roots = (*point.left, *point.right)
    for part in sorted({*parts_of(point.left[0])}, key=lambda node: (-node.size, node.text)):
        if not part.operator or part in point.left or not all(part in parts_of(root) for root in roots):
            continue
        tensor = leaf(f"<{part.text}>", part.shape)
        swapped = [_swapped(root, part, tensor) for root in roots]
        inside = {*tensors_of(part)}
        count = len(point.left)
        left, right = tuple(swapped[:count]), tuple(swapped[count:])
        if not any(inside.intersection(tensors_of(root)) for root in swapped) and _hold(left, right):
            return abstracted(Point(left, right))
    return point


@lru_cache(maxsize=1 << 16)
def _hold(left: Roots, right: Roots) -> bool:
    return not differ(left, right, draws=1)


def _swapped(node: Node, part: Node, other: Node) -> Node:
    if node is part:
        return other
    if not node.args:
        return node
    return apply(
        node.operator, tuple(_swapped(arg, part, other) for arg in node.args), dict(node.attributes), node.item
    )


def generalised(points: Sequence[Point]) -> Iterator[Equation]:
    """Equations for points of one skeleton; together they hold for all of them, or for as many as any can."""
    left = list(points)
    while left:
        found = _Fit(left).equation()
        if found is None:
            left = left[1:]
            continue
        if len(found.points) < len(left):  # what is the same for these alone is one variable
            found = _Fit(list(found.points)).equation() or found
        yield found
        covered = set(found.points)
        rest = [point for point in left if point not in covered]
        if len(rest) == len(left):
            return
        left = rest


@dataclass
class _Column:
    """An attribute of one operator of a side: its value at each point, and what stands for it in the equation."""

    operator: str
    name: str
    values: list[Any]
    text: str = ""


class _Fit:
    """One equation for the first of `points` and as many others as can be."""

    def __init__(self, points: list[Point]) -> None:
        self._points = points
        self._names: dict[Node, str] = {}
        for root in (*points[0].left, *points[0].right):
            self._name_tensors(root)
        self._tensors: list[dict[str, Node]] = [self._tensors_of(point) for point in points]
        self._variables: dict[str, str] = {}
        self._values: dict[str, list[Any]] = {}
        self._rests: dict[str, list[dict[str, Any]]] = {}
        self._covered = list(range(len(points)))

    def _name_tensors(self, node: Node) -> None:
        if not node.operator and node not in self._names:
            self._names[node] = TENSORS[len(self._names)]
        for arg in node.args:
            self._name_tensors(arg)

    def _tensors_of(self, point: Point) -> dict[str, Node]:
        found: dict[str, Node] = {}

        def walk(ours: Node, theirs: Node) -> None:
            if not ours.operator:
                found.setdefault(self._names[ours], theirs)
            for a, b in zip(ours.args, theirs.args, strict=True):
                walk(a, b)

        for ours, theirs in zip(
            (*self._points[0].left, *self._points[0].right), (*point.left, *point.right), strict=True
        ):
            walk(ours, theirs)
        return found

    def equation(self) -> Equation | None:
        self._named = self._differing()
        left = [self._rendered(root, [p.left[i] for p in self._points], is_left=True)
                for i, root in enumerate(self._points[0].left)]  # fmt: skip
        self._envs = [
            expression_env({**self._tensors[i], **{n: v[i] for n, v in self._values.items()},
                            **{n: v[i] for n, v in self._rests.items()}})
            for i in range(len(self._points))
        ]  # fmt: skip
        self._ranks = {
            name: len(node.shape) for name, node in self._tensors[0].items()
            if all(len(tensors[name].shape) == len(node.shape) for tensors in self._tensors)
        }  # fmt: skip
        try:
            right = [self._rendered(root, [p.right[i] for p in self._points], is_left=False)
                     for i, root in enumerate(self._points[0].right)]  # fmt: skip
        except _NoExpression:
            return None
        return Equation(
            f"{', '.join(left)} => {', '.join(right)}", tuple(self._points[i] for i in self._covered),
            tuple(self._tensors[0]), dict(self._variables), tuple(self._rests),
            tuple(self._envs[i] for i in self._covered),
        )  # fmt: skip

    def _rendered(self, ours: Node, theirs: list[Node], is_left: bool) -> str:
        if not ours.operator:
            return self._names[ours]
        args = [self._rendered(arg, [node.args[i] for node in theirs], is_left) for i, arg in enumerate(ours.args)]
        told = self._attributes(ours.operator, [dict(node.attributes) for node in theirs], is_left)
        text = f"{ours.operator}({', '.join(args + told)})"
        return text if ours.item is None else f"{text}[{ours.item}]"

    # convolutions have many attributes: those that no expression reads stand together, as **c

    def _calls(self, side: str) -> list[list[dict[str, Any]]]:
        """Attributes of each convolution of a side, at each point."""
        found: list[list[dict[str, Any]]] = []

        def walk(nodes: list[Node]) -> None:
            if nodes[0].operator == "conv2d":
                found.append([dict(node.attributes) for node in nodes])
            for i in range(len(nodes[0].args)):
                walk([node.args[i] for node in nodes])

        for i in range(len(getattr(self._points[0], side))):
            walk([getattr(point, side)[i] for point in self._points])
        return found

    def _differing(self) -> frozenset[str] | None:
        """The attributes in which convolutions of the two sides differ; None where a side has none."""
        left, right = self._calls("left"), self._calls("right")
        if not left or not right:
            return None
        first = left[0]
        return _LAYOUTS | frozenset(
            name for call in (*left[1:], *right) for ours, theirs in zip(first, call, strict=True)
            for name in ours if ours[name] != theirs[name]
        )  # fmt: skip

    def _with_rest(self, attributes: list[dict[str, Any]]) -> str:
        others = [{n: v for n, v in a.items() if n not in (self._named or ())} for a in attributes]
        for name, values in self._rests.items():
            if values == others:
                return name
        name = "c" if not self._rests else f"c{len(self._rests) + 1}"
        self._rests[name] = others
        return name

    def _attributes(self, operator: str, attributes: list[dict[str, Any]], is_left: bool) -> list[str]:
        """What a call's attributes are told as: variables on the left, expressions on the right; defaults are left
        out, on the left where they are of no kind that could be anything."""
        rest = operator == "conv2d" and self._named is not None
        told = []
        for name in sorted(attributes[0]):
            if rest and name not in (self._named or ()):
                continue
            values, of = [a[name] for a in attributes], kind(operator, name)
            default = expressions.defaults(operator)[name]
            idle = not rest and (of == OTHER or not is_left)
            if not (idle and all(values[i] == default for i in self._covered)):
                told.append(f"{name}={(self._variable if is_left else self._expression)(of, values)}")
        return [*told, f"**{self._with_rest(attributes)}"] if rest else told

    def _variable(self, of: str, values: list[Any]) -> str:
        for name, known in self._values.items():
            if self._variables[name] == of and known == values:
                return name
        if of == OTHER and all(v == values[0] for v in values):
            return literal(values[0])
        count = sum(other == of for other in self._variables.values())
        name = expressions.NAMES[of] + (str(count + 1) if count else "")
        self._variables[name], self._values[name] = of, values
        return name

    def _expression(self, of: str, values: list[Any]) -> str:
        """The expression that gives the first point its value, and most others; the others are not covered any more."""
        found = self._best(candidates(of, tuple(self._tensors[0]), self._ranks, self._variables,
                                      [values[i] for i in self._covered]), values)  # fmt: skip
        if of == SHAPE and (found is None or len(found[1]) < len(self._covered)):
            extents = self._extents(values)
            found = max((f for f in (found, extents) if f is not None), key=lambda f: len(f[1]), default=None)
        if found is None:
            raise _NoExpression
        self._covered = found[1]
        return found[0]

    def _extents(self, values: list[Any]) -> tuple[str, list[int]] | None:
        parts, covered = [], [i for i in self._covered if len(values[i]) == len(values[0])]
        shapes = [name for name, of in self._variables.items() if of == SHAPE]
        for axis in range(len(values[0])):
            extents = [v[axis] if len(v) > axis else None for v in values]
            best = self._best(extent_candidates(tuple(self._tensors[0]), self._ranks, shapes), extents, covered)
            if best is None:
                return None
            parts.append(best[0])
            covered = best[1]
        return f"[{', '.join(parts)}]", covered

    def _best(
        self, texts: Iterator[str], values: list[Any], among: list[int] | None = None
    ) -> tuple[str, list[int]] | None:
        best: tuple[str, list[int]] | None = None
        covered = self._covered if among is None else among
        for text in dict.fromkeys(texts):
            if value(text, self._envs[0]) != values[0]:
                continue
            fits = [i for i in covered if value(text, self._envs[i]) == values[i]]
            if best is None or len(fits) > len(best[1]):
                best = text, fits
                if len(fits) == len(covered):
                    break
        return best


class _NoExpression(Exception):
    """An attribute of the right side that nothing on the left gives."""
