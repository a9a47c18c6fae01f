"""Matrix products whose right side is a weight: the weight is packed into panels, once, at compile time.

A panel holds the columns of one register tile, the reduced axis outside: the kernel then reads the weight from front
to back. Read where it lies, a weight of 3072 columns is a stride of 12 KiB, which misses the caches' sets and the
address buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

from .matmul_tile import choose_tile

PANEL_ATTR = "rlflow.panel"  # on the block of a product with a packed right side
_MATMUL = "relax.matmul"
_OUT_ELEMENTWISE_FUSIBLE = 4  # TVM's OpPatternKind: element-wise operators behind the product go into its kernel


def is_packable(call: relax.Call) -> bool:
    """Whether the product's right side is one float32 matrix of static shape (it must be a weight besides)."""
    if call.op.name != _MATMUL:
        return False
    left, right = (_shape(arg) for arg in call.args)
    dtypes = {str(arg.ty.dtype) for arg in call.args} | {str(call.ty.dtype)}
    return len(right) == 2 and len(left) >= 2 and dtypes == {"float32"}


def panel_width(left: tuple[int, ...], columns: int, lanes: int) -> int:
    """Columns in a panel, for a left side of this shape: those of the register tile of its rows."""
    _, vectors = choose_tile(left[-2], columns, lanes)
    return vectors * lanes


def make_packed_matmul(lanes: int) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """The legalisation of a packable `relax.matmul` for vectors of `lanes` floats."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        left, right = call.args
        columns = _shape(right)[1]
        width = panel_width(_shape(left), columns, lanes)
        packed = bb.emit(bb.call_te(_pack, right, width, primfunc_name_hint="pack_matrix"))
        attrs = {"op_pattern": _OUT_ELEMENTWISE_FUSIBLE}
        return bb.call_te(_product, left, packed, columns, primfunc_name_hint="matmul", primfunc_attrs=attrs)

    return legalize


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
    panels, depth, width = (int(extent) for extent in packed.shape)
    rows = list(left.shape[:-1])
    k = te.reduce_axis((0, depth), "k")

    def tile(*index: tirx.Var) -> tvm.ir.Expr:
        *row, panel, column = index
        return te.sum(left[(*row, k)] * packed[panel, k, column], axis=k)

    tiles = te.compute((*rows, panels, width), tile, name="matmul", attrs={PANEL_ATTR: 1})

    def element(*index: tirx.Var) -> tvm.ir.Expr:
        *row, column = index
        return tiles[(*row, column // width, column % width)]

    return te.compute((*rows, columns), element, name="unpack")


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    """The extents of a tensor of static shape, none for another."""
    shape = expr.ty.shape
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(extent, tirx.IntImm) for extent in shape):
        return ()
    return tuple(int(extent) for extent in shape)
