"""The launches of a graph, and the tensors that they read and write by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tvm import relax, tirx

from rlflow_tvm.dataflow import Dataflow, Node
from rlflow_tvm.ir import CALL_IN_PLACE

from .fuse import FusedCall, count_tensors


class Launch(NamedTuple):
    """One launch in a graph. `operands`: the number of the tensor behind each parameter, inputs first, then results."""

    func: tirx.PrimFunc
    key: str
    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Launches:
    """A graph's launches in order, and which of their tensors are not made by them, or outlive the run."""

    launches: tuple[Launch, ...]
    inputs: frozenset[int]
    weights: frozenset[int]
    outputs: frozenset[int]


def number_launches(main: Dataflow, steps: Sequence[FusedCall | Node]) -> Launches:
    """The launches among `steps`, which are what fusion has made of `main`; the other steps only name tensors anew."""
    tensors = _Tensors()
    given, weights = (
        frozenset(number for param in params for number in tensors.of(param))
        for params in (main.params[: main.inputs], main.params[main.inputs :])
    )
    held = tensors.held
    launches: list[Launch] = []
    constants: set[int] = set()
    for step in steps:
        if not isinstance(step, FusedCall):
            held[step.var] = tensors.named(step)
            continue
        operands: list[int] = []
        for arg in step.args:
            numbers = held.get(arg)
            if numbers is None:
                numbers = tensors.of(arg)
                constants.update(numbers)
            operands += numbers
        if step.output.op == CALL_IN_PLACE:
            operands += tensors.in_place(step, operands)
        else:
            operands += tensors.new(step.output.var, step.results)
        launches.append(Launch(step.func, step.key, step.name, tuple(operands)))
    return Launches(tuple(launches), given, weights | constants, frozenset(tensors.of(main.output)))


class _Tensors:
    """`held`: which tensors a value consists of; what is none of `main`'s variables is a constant of its own."""

    def __init__(self) -> None:
        self.held: dict[relax.Expr, tuple[int, ...]] = {}
        self._count = 0

    def new(self, value: relax.Expr, count: int) -> tuple[int, ...]:
        """The value holds tensors that no other has."""
        self.held[value] = tuple(range(self._count, self._count + count))
        self._count += count
        return self.held[value]

    def in_place(self, call: FusedCall, operands: Sequence[int]) -> list[int]:
        """The tensors that `call` makes; its other results are those of its `operands` that it writes to."""
        results: list[int] = []
        for index in map(int, call.output.value.attrs.inplace_indices):
            if index < 0:
                self._count += 1
            results.append(self._count - 1 if index < 0 else operands[index])
        self.held[call.output.var] = tuple(results)
        return [number for number in results if number not in operands]

    def of(self, value: relax.Expr) -> tuple[int, ...]:
        known = self.held.get(value)
        if known is not None:
            return known
        if isinstance(value, relax.Tuple):
            return tuple(number for field in value.fields for number in self.of(field))
        return self.new(value, _tensors_in(value) if isinstance(value, relax.Var) else count_tensors(value.ty))

    def named(self, node: Node) -> tuple[int, ...]:
        """What a node that launches nothing consists of: a view, an item of a tuple, a tuple."""
        if node.op == "getitem":
            index, count = node.item
            fields = self.of(node.source)
            return (fields[index],) if len(fields) == count else fields
        if node.op == "other" and not isinstance(node.value, relax.Call):
            return self.of(node.value)
        return () if node.source is None else self.of(node.source)


@lru_cache(maxsize=65536)
def _tensors_in(var: relax.Var) -> int:
    return count_tensors(var.ty)
