"""Pairs of equal terms of a world, grouped by what they are alike in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlflow_tvm.passes.synthesis.enumerate import Enumeration, enumerate_terms
from rlflow_tvm.passes.synthesis.generalise import TENSORS, Point, Roots, abstracted, skeleton
from rlflow_tvm.passes.synthesis.ground import Node, parts_of, tensors_of
from rlflow_tvm.passes.synthesis.world import World

_LARGEST_ROOTS = 3
_MERGED = 2  # operators of a term that is merged with others

Sides = tuple[Roots, Roots]


@dataclass
class Paired:
    """Of a world: how many terms it has and how many pairs of equal ones; and these by the key of their group."""

    terms: int
    pairs: int = 0
    by_key: dict[str, dict[Sides, list[Point]]] = field(default_factory=dict)


def paired(world: World, operators: tuple[str, ...], depth: int, seed: int) -> Paired:
    """What is equal among the terms of a world that `operators` make of its tensors."""
    found = enumerate_terms(world, operators, depth, seed)
    result = Paired(len(found.terms))
    for pairs in _pairs(found):
        result.pairs += 1
        general = [abstracted(point) for point in pairs]
        if len({skeleton(point) for point in general}) == 1:
            pairs = general
        if pairs[0].left != pairs[0].right:
            sides = pairs[0].left, pairs[0].right
            result.by_key.setdefault(skeleton(pairs[0]), {}).setdefault(sides, pairs)
    return result


def _pairs(found: Enumeration) -> Iterator[list[Point]]:
    """Equal terms, the larger left, under each valuation; and pairs of terms that are the parts of a split one."""
    valuations = range(len(found.world.valuations))
    splits: dict[Any, dict[int, tuple[Roots, Roots]]] = {}  # a small term that each part equals, and the part
    for numbers in found.classes.values():
        nodes: dict[Node, int] = {}
        for number in numbers:
            nodes.setdefault(found.node(number, 0), number)
        least = min(nodes)
        if least.size > found.depth:
            continue
        small = tuple(found.node(nodes[least], valuation) for valuation in valuations)
        for node, number in nodes.items():
            large = tuple(found.node(number, valuation) for valuation in valuations)
            if node.item is not None:
                alone = min((other for other in nodes if other.item is None), default=least)
                same = tuple(found.node(nodes[alone], valuation) for valuation in valuations)
                splits.setdefault((node.args, node.attributes), {})[node.item] = same, large
            ours, theirs = {*tensors_of(node)}, {*tensors_of(least)}
            if node is not least and len(ours | theirs) < len(TENSORS) and (ours <= theirs or theirs <= ours):
                yield [Point((a,), (b,)) for a, b in zip(large, small, strict=True)]
    for (_, attributes), items in splits.items():
        count = len(dict(attributes)["at"]) + 1
        parts = [items[item] for item in range(count) if item in items]
        if len(parts) == count and _can_merge([small[0] for small, _ in parts]):
            yield [
                Point(tuple(small[valuation] for small, _ in parts), tuple(part[valuation] for _, part in parts))
                for valuation in valuations
            ]


def _can_merge(terms: list[Node]) -> bool:
    """Whether they are terms alike side by side, which one split term may do the work of."""
    operators = {node.operator for node in terms}
    return (
        len(terms) <= _LARGEST_ROOTS
        and len(operators) == 1
        and operators.isdisjoint({"", "split"})
        and all(node.size <= _MERGED for node in terms)
        and len(set(terms)) == len(terms)
        and bool(set.intersection(*({*parts_of(node)} for node in terms)))
    )
