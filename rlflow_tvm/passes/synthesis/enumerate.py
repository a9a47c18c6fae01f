"""All terms of a world up to a number of operators, and those among them that are equal.

Only the first of equal terms is composed further, so that an equation that follows from one of a part of it does not
arise. Beside the terms of `depth` operators there are two kinds of larger ones, of the same depth, that equations with
small ones are known to have: the same work on both parts of a split, joined or added up; and a view of a product (or
convolution) of views.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any

import numpy as np

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.ops import COMMUTATIVE, NOT_FOR_INTEGERS, OPERATORS
from rlflow_tvm.passes.proof.domains import Domain, MachineIntegers, PrimeFields, Tensor, mixed, shape_of
from rlflow_tvm.passes.proof.meaning import meaning
from rlflow_tvm.passes.synthesis.ground import Node, apply, leaf
from rlflow_tvm.passes.synthesis.world import Choice, World, choices

VIEWS = ("permute_dims", "reshape")
PRODUCTS = ("matmul", "conv2d")
_LARGEST = 4096  # elements of a tensor
_HIGHEST = 4  # axes of a tensor


class ShuffledFields(PrimeFields):
    """Prime fields in a random order: maximum and minimum are associative, commutative and idempotent, and have no
    other law."""

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return self._chosen(a, b, np.greater_equal)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return self._chosen(a, b, np.less)

    def _chosen(self, a: Tensor, b: Tensor, compare: Callable[..., np.ndarray]) -> Tensor:
        first = compare(mixed(a[0], 3), mixed(b[0], 3))
        return np.where(first, a[0], b[0]), np.where(first, a[1], b[1])


def domain_for(operators: tuple[str, ...]) -> Domain:
    """Integers that wrap round, where all operators have a meaning there; otherwise prime fields."""
    return ShuffledFields() if NOT_FOR_INTEGERS & set(operators) else MachineIntegers("int64")


@dataclass(slots=True)
class Entry:
    """A term: an operator on earlier ones (by their numbers), or a leaf. `size`: its operators."""

    operator: str
    args: tuple[int, ...]
    choice: Choice
    item: int | None
    size: int
    digest: bytes
    values: tuple[Tensor, ...] | None  # under each valuation; only while it may be composed further


@dataclass
class Enumeration:
    """`terms` of a world, and `classes`: those with equal values, for each value that several have."""

    world: World
    depth: int
    terms: list[Entry] = field(default_factory=list)
    classes: dict[bytes, list[int]] = field(default_factory=dict)

    def node(self, number: int, valuation: int) -> Node:
        """The term under a valuation."""
        entry = self.terms[number]
        if not entry.operator:
            return leaf(list(self.world.leaves)[number], self.world.shapes(list(self.world.leaves)[number])[valuation])
        args = tuple(self.node(arg, valuation) for arg in entry.args)
        return apply(entry.operator, args, entry.choice[valuation], entry.item)


def enumerate_terms(world: World, operators: tuple[str, ...], depth: int, seed: int = 0) -> Enumeration:
    """Terms of up to `depth` operators, and of the larger kinds."""
    return _Enumerator(world, operators, depth, seed).run()


class _Enumerator:
    def __init__(self, world: World, operators: tuple[str, ...], depth: int, seed: int) -> None:
        self._world, self._operators = world, operators
        self._domain = domain_for(operators)
        self._found = Enumeration(world, depth)
        self._composed: list[list[int]] = [[]]  # by size: the first terms of their values
        rng = np.random.default_rng(seed)
        for name in world.leaves:
            values = tuple(self._domain.draw(shape, rng) for shape in world.shapes(name))
            self._composed[0].append(self._keep("", (), (), None, 0, values, True))

    def run(self) -> Enumeration:
        depth = self._found.depth
        with np.errstate(over="ignore"):
            for size in range(1, depth + 1):
                last = size == depth
                self._composed.append([])
                for operator in self._operators:
                    for args in self._operands(operator, size):
                        for number in self._applied(operator, args, size, not last):
                            if not last and self._is_first(number):
                                self._composed[size].append(number)
                if not last:
                    self._composed[size] = [n for n in self._composed[size] if self._is_first(n)]
            if depth > 1:
                for operator, args, size in [*self._on_parts(), *self._views_of_products()]:
                    for _ in self._applied(operator, args, size, False):
                        pass
        for entry in self._found.terms:
            entry.values = None
        self._found.classes = {key: numbers for key, numbers in self._found.classes.items() if len(numbers) > 1}
        return self._found

    def _is_first(self, number: int) -> bool:
        return self._found.classes[self._found.terms[number].digest][0] == number

    def _arity(self, operator: str) -> tuple[int, ...]:
        arity = OPERATORS[operator].arity
        return (arity,) if arity is not None else (2, 3)

    def _operands(self, operator: str, size: int) -> Iterator[tuple[int, ...]]:
        for arity in self._arity(operator):
            if arity == 1:
                for number in self._composed[size - 1]:
                    yield (number,)
            elif arity == 2:
                for first in range(size):
                    yield from self._pairs(operator, self._composed[first], self._composed[size - 1 - first])
                if size > 1:
                    yield from self._parts_of_one(size - 1)
            elif arity == 3 and size == 1:
                yield from permutations(self._composed[0], 3)

    def _pairs(self, operator: str, firsts: list[int], seconds: list[int]) -> Iterator[tuple[int, ...]]:
        for pair in product(firsts, seconds):
            if operator not in COMMUTATIVE or pair[0] <= pair[1]:
                yield pair

    def _parts_of_one(self, size: int) -> Iterator[tuple[int, ...]]:
        """Both results of a split, which is done once."""
        for number in self._composed[size]:
            entry = self._found.terms[number]
            if entry.operator == "split" and entry.item == 0:
                other = self._first_of(number + 1)  # a split's results follow one another
                yield (number, other)
                yield (other, number)

    def _applied(self, operator: str, args: tuple[int, ...], size: int, kept: bool) -> Iterator[int]:
        operands = [self._values(number) for number in args]
        if len(args) > 1 and not self._apart(operator, args):
            return
        for choice in choices(operator, self._world, [tuple(map(shape_of, values)) for values in operands]):
            try:
                results = self._computed(operator, operands, choice)
            except RewriteError:
                continue
            if operator == "split":
                for item in range(len(results[0])):
                    yield self._keep(operator, args, choice, item, size, tuple(r[item] for r in results), kept)
            elif all(r[0].size <= _LARGEST and r[0].ndim <= _HIGHEST for r in results):
                yield self._keep(operator, args, choice, None, size, tuple(results), kept)

    def _apart(self, operator: str, args: tuple[int, ...]) -> bool:
        """Whether the operands are different ones, and those of a product of different tensors: powers of a tensor are
        equal to much that nothing is made of."""
        if operator not in PRODUCTS:
            return len(set(args)) == len(args)
        first, second = map(self._tensors, args)
        images = self._world.images
        return first.isdisjoint(second) and (operator != "conv2d" or bool(first & images and not second & images))

    def _tensors(self, number: int) -> frozenset[str]:
        entry = self._found.terms[number]
        if not entry.operator:
            return frozenset({list(self._world.leaves)[number]})
        return frozenset().union(*map(self._tensors, entry.args))

    def _computed(self, operator: str, operands: list[tuple[Tensor, ...]], choice: Choice) -> list[Any]:
        return [
            meaning(operator, self._domain, [values[valuation] for values in operands], attributes)
            for valuation, attributes in enumerate(choice)
        ]

    def _values(self, number: int) -> tuple[Tensor, ...]:
        entry = self._found.terms[number]
        if entry.values is None:  # of the largest terms they are not kept
            results = self._computed(entry.operator, [self._values(arg) for arg in entry.args], entry.choice)
            return tuple(results if entry.item is None else (r[entry.item] for r in results))
        return entry.values

    def _keep(
        self, operator: str, args: tuple[int, ...], choice: Choice, item: int | None, size: int,
        values: tuple[Tensor, ...], kept: bool,
    ) -> int:  # fmt: skip
        hashed = hashlib.blake2b(digest_size=16)
        for value in values:
            hashed.update(repr(shape_of(value)).encode())
            hashed.update(np.ascontiguousarray(value[0]).tobytes())
        digest, number = hashed.digest(), len(self._found.terms)
        same = self._found.classes.setdefault(digest, [])
        same.append(number)
        self._found.terms.append(
            Entry(operator, args, choice, item, size, digest, values if kept and len(same) == 1 else None)
        )
        return number

    def _on_parts(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """f(u, v), f(u', v') joined or added: v and v' the parts of a split tensor, u and u' likewise, or two tensors,
        or one."""
        if "split" not in self._operators:
            return
        split = [pair for pair in self._parts_of_one(1) if pair[0] < pair[1]]
        plain = list(product(self._composed[0], repeat=2))
        binary = [name for name in self._operators if OPERATORS[name].arity == 2]
        joins = [name for name in self._operators if name in ("add", "concat")]
        for operator in binary:
            for (u, w), (v, t) in [*product(plain, split), *product(split, plain), *product(split, split)]:
                if operator in COMMUTATIVE and (u, w) > (v, t):
                    continue
                cost = sum(self._found.terms[pair].operator != "" for pair in (u, v))
                first = list(self._applied(operator, (u, v), 1 + cost, True))
                second = list(self._applied(operator, (w, t), 1 + cost, True))
                for one, other in zip(first, second, strict=False):
                    if self._found.terms[one].choice != self._found.terms[other].choice:
                        continue
                    for join in joins:
                        yield join, (self._first_of(one), self._first_of(other)), 3 + cost

    def _first_of(self, number: int) -> int:
        return self._found.classes[self._found.terms[number].digest][0]

    def _views_of_products(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """A view of a product of tensors or views of them, of at least four operators."""
        views = [name for name in self._operators if name in VIEWS]
        seen = [n for n in self._composed[1] if self._found.terms[n].operator in VIEWS]
        for operator in (name for name in self._operators if name in PRODUCTS):
            for args in product(seen, repeat=2):
                for number in list(self._applied(operator, args, 3, True)):
                    first = self._found.terms[self._first_of(number)]
                    if (first.operator, first.args) == (operator, args):
                        for view in views:
                            yield view, (self._first_of(number),), 4
