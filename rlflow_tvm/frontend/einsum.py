"""`Einsum` of two tensors as the matrix product that it is, between permutations and reshapes.

Rules and schedules know products; of an einsum they know nothing, and where both operands are summed along their last
axis, as attention's queries and keys are, its loops cannot run in vectors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from rlflow_tvm.frontend.writer import dtype_of
from rlflow_tvm.ir import known_shape

_TWO = re.compile(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)")


@dataclass(frozen=True)
class _Product:
    """The letters of the left and right operands and of the result, and what each letter stands for.

    `swapped`: whether the second operand is the left one.
    """

    left: str
    right: str
    result: str
    swapped: bool

    @staticmethod
    def of(equation: str) -> _Product | None:
        """None where it is no product of matrices, or of batches of them."""
        match = _TWO.fullmatch(equation.replace(" ", ""))
        if match is None:
            return None
        first, second, result = match.groups()
        swapped = result[-1] not in second  # the last axis of the result is best that of the columns
        product = _Product(*((second, first) if swapped else (first, second)), result, swapped)
        return product if product._is_one() else None

    @property
    def batch(self) -> str:
        return "".join(x for x in self.result if x in self.left and x in self.right)

    @property
    def rows(self) -> str:
        return "".join(x for x in self.result if x in self.left and x not in self.right)

    @property
    def columns(self) -> str:
        return "".join(x for x in self.result if x in self.right and x not in self.left)

    @property
    def summed(self) -> str:
        return "".join(x for x in self.left if x in self.right and x not in self.result)

    def _is_one(self) -> bool:
        """Whether each letter stands for one axis of an operand, and each operand has all kinds and no others."""
        batch, rows, summed, columns = self.batch, self.rows, self.summed, self.columns
        parts = (
            (self.left, batch + rows + summed),
            (self.right, batch + summed + columns),
            (self.result, batch + rows + columns),
        )
        return bool(rows and summed and columns) and all(
            len({*own}) == len(own) and {*own} == {*letters} for own, letters in parts
        )


def convert_einsum(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
    """A product where it is one of floats, else Relax's einsum, which is loops over all letters."""
    equation = attrs["equation"].decode()
    product = _Product.of(equation) if len(inputs) == 2 and "float" in dtype_of(inputs[0]) else None
    extents = None if product is None else _extents(product, inputs[::-1] if product.swapped else inputs)
    if product is None or extents is None:
        return relax.op.einsum(list(inputs), equation)
    left, right = inputs[::-1] if product.swapped else inputs
    batch, rows, summed, columns = product.batch, product.rows, product.summed, product.columns
    # beside a single matrix the rows need not be one axis
    left = _in_order(bb, left, product.left, [*batch, rows, summed] if batch else [*rows, summed], extents)
    right = _in_order(bb, right, product.right, [*batch, summed, columns], extents)
    made = batch + rows + columns
    result = _reshaped(bb, bb.normalize(relax.op.matmul(left, right)), [extents[x] for x in made])
    return _permuted(bb, result, made, product.result)


def _extents(product: _Product, operands: Sequence[relax.Expr]) -> dict[str, int] | None:
    """Each letter's; None where they are not known, or differ: one of 1 is broadcast, others are an error of TVM's."""
    extents: dict[str, int] = {}
    for letters, operand in zip((product.left, product.right), operands, strict=True):
        shape = known_shape(operand.ty)
        if shape is None or len(shape) != len(letters):
            return None
        if any(extents.setdefault(x, extent) != extent for x, extent in zip(letters, shape, strict=True)):
            return None
    return extents


def _in_order(
    bb: relax.BlockBuilder, operand: relax.Expr, letters: str, groups: Sequence[str], extents: Mapping[str, int]
) -> relax.Expr:
    """The operand with one axis for each group of letters."""
    moved = _permuted(bb, operand, letters, "".join(groups))
    return _reshaped(bb, moved, [math.prod(extents[x] for x in group) for group in groups])


def _permuted(bb: relax.BlockBuilder, operand: relax.Expr, letters: str, wanted: str) -> relax.Expr:
    if letters == wanted:
        return operand
    return bb.normalize(relax.op.permute_dims(operand, [letters.index(letter) for letter in wanted]))


def _reshaped(bb: relax.BlockBuilder, operand: relax.Expr, shape: list[int]) -> relax.Expr:
    return operand if list(known_shape(operand.ty) or ()) == shape else bb.normalize(relax.op.reshape(operand, shape))
