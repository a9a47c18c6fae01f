"""Matrix products whose right side is one matrix: all rows are one axis; a weight is packed into panels, once, at
compile time.

A panel holds the columns of one register tile, the reduced axis outside: the kernel then reads the weight from front
to back. Read where it lies, a weight of 3072 columns is a stride of 12 KiB, which misses the caches' sets and the
address buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm
from tvm import relax, te, tirx
from tvm.target import Target

from ..target import vector_lanes, vector_registers
from .matmul_tile import choose_tile

PANEL_ATTR = "rlflow.panel"  # on the block of a product with a packed right side
_MATMUL = "relax.matmul"
_MANY_ROWS = 64  # as many as a tile has columns: they read the right side as often from afar as it reads them
_OUT_ELEMENTWISE_FUSIBLE = 4  # TVM's OpPatternKind: element-wise operators behind the product go into its kernel


def is_packable(call: relax.Call) -> bool:
    """Whether the product's right side is one float32 matrix of static shape (it must be a weight besides)."""
    if call.op.name != _MATMUL:
        return False
    left, right = (_shape(arg) for arg in call.args)
    dtypes = {str(arg.ty.dtype) for arg in call.args} | {str(call.ty.dtype)}
    return len(right) == 2 and len(left) >= 2 and dtypes == {"float32"}


def make_packed_matmul(target: Target) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The legalisation of a packable `relax.matmul`; a panel has the columns of the register tile of all rows."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        left, right = call.args
        columns, lanes = _shape(right)[1], vector_lanes(target)
        _, vectors = choose_tile(math.prod(_shape(left)[:-1]), columns, lanes, vector_registers(target))
        packed = bb.emit(bb.call_te(_pack, right, vectors * lanes, primfunc_name_hint="pack_matrix"))
        attrs = {"op_pattern": _OUT_ELEMENTWISE_FUSIBLE}
        return bb.call_te(_product, left, packed, columns, primfunc_name_hint="matmul", primfunc_attrs=attrs)

    return legalize


def has_rows_apart(call: relax.Call) -> bool:
    """Whether a matrix is multiplied by several of a few rows each, which are better taken for one."""
    if not is_packable(call):
        return False
    *batches, rows, _ = _shape(call.args[0])
    return math.prod(batches) > 1 and rows < _MANY_ROWS


def legalize_rows(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A `relax.matmul` of float32, its right side one matrix, with all rows of the left side as one axis."""
    attrs = {"op_pattern": _OUT_ELEMENTWISE_FUSIBLE}
    return bb.call_te(_plain_product, *call.args, primfunc_name_hint="matmul", primfunc_attrs=attrs)


def _pack(matrix: te.Tensor, width: int) -> te.Tensor:
    depth, columns = (int(extent) for extent in matrix.shape)
    panels = math.ceil(columns / width)

    def element(panel: tirx.Var, k: tirx.Var, column: tirx.Var) -> tvm.ir.Expr:
        source = panel * width + column
        if panels * width == columns:
            return matrix[k, source]
        inside = tirx.max(tirx.min(source, tirx.const(columns - 1, "int64")), tirx.const(0, "int64"))
        return tirx.Select(source < columns, matrix[k, inside], tirx.const(0.0, matrix.dtype))

    return te.compute((panels, depth, width), element, name="packed")


def _product(left: te.Tensor, packed: te.Tensor, columns: int) -> te.Tensor:
    """All rows of `left` are one axis: a tile is full though the last axis of rows be short, as it is where a sequence
    comes before its batch of one."""
    panels, depth, width = (int(extent) for extent in packed.shape)
    rows = [int(extent) for extent in left.shape[:-1]]
    k = te.reduce_axis((0, depth), "k")

    def tile(row: tirx.Var, panel: tirx.Var, column: tirx.Var) -> tvm.ir.Expr:
        return te.sum(left[(*_places(row, rows), k)] * packed[panel, k, column], axis=k)

    tiles = te.compute((math.prod(rows), panels, width), tile, name="matmul", attrs={PANEL_ATTR: 1})

    def element(*index: tirx.Var) -> tvm.ir.Expr:
        *places, column = index
        return tiles[_row(places, rows), column // width, column % width]

    return te.compute((*rows, columns), element, name="unpack")


def _plain_product(left: te.Tensor, right: te.Tensor) -> te.Tensor:
    depth, columns = (int(extent) for extent in right.shape)
    rows = [int(extent) for extent in left.shape[:-1]]
    k = te.reduce_axis((0, depth), "k")

    def product(row: tirx.Var, column: tirx.Var) -> tvm.ir.Expr:
        return te.sum(left[(*_places(row, rows), k)] * right[k, column], axis=k)

    result = te.compute((math.prod(rows), columns), product, name="matmul")
    return te.compute((*rows, columns), lambda *i: result[_row(i[:-1], rows), i[-1]], name="unpack")


def _row(places: Sequence[tvm.ir.Expr], extents: Sequence[int]) -> tvm.ir.Expr:
    """The number of the row at `places` of the axes of `extents`."""
    row: tvm.ir.Expr = tirx.const(0, "int64")
    for place, extent in zip(places, extents, strict=True):
        if extent > 1:
            row = row * extent + place
    return row


def _places(row: tvm.ir.Expr, extents: Sequence[int]) -> list[tvm.ir.Expr]:
    """The inverse of `_row`; an axis of extent one leaves no trace, so that kernels with and without it are equal."""
    places: list[tvm.ir.Expr] = []
    before = sum(extent > 1 for extent in extents)  # axes that are not yet told apart
    for extent in reversed(extents):
        if extent <= 1:
            places.insert(0, tirx.const(0, "int64"))
            continue
        before -= 1
        places.insert(0, row % extent if before else row)
        row = row // extent
    return places


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    """The extents of a tensor of static shape, none for another."""
    shape = expr.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        return ()
    return tuple(int(extent) for extent in shape)
