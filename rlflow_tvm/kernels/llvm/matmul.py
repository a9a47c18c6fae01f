"""The schedule rule of matrix products: a register tile of rows by column vectors, the reduction around it."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import block_kinds, extent, leaf_blocks
from ..target import vector_lanes, vector_registers
from .conv_loops import FEW_PRODUCTS, fold_epilogue, in_threads, merge_axes, steps
from .elementwise import schedule_map
from .matmul_legalize import PANEL_ATTR
from .matmul_packed import schedule_packed
from .matmul_tile import choose_tile


@dataclass(frozen=True)
class Product:
    """C[..., n] += A[..., k] * B[..., n]: which axes of the block (by position) are what.

    `row`: indexes A and not B, None where there is one row only. `column`: last index of B and C. `panel`: the axis
    before it, where B is packed in panels of columns. `reduced`: the one reduced axis.
    """

    row: int | None
    panel: int | None
    column: int
    reduced: int


class Matmul(CPUScheduleRule):
    """Matrix products and batches of them, any extents, with the element-wise blocks after them."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where it is not one product with one reduced axis."""
        sch = s_tir.Schedule(func)
        blocks = leaf_blocks(sch)
        reducing = [block for block in blocks if "R" in block_kinds(sch, block)]
        if len(reducing) != 1:
            return None
        product = find_product(sch, reducing[0])
        if product is None:
            return None
        position = blocks.index(reducing[0])
        if any("O" in block_kinds(sch, block) for block in blocks):
            return None
        for block in blocks[:position]:
            schedule_map(sch, block, target)
        out = fold_epilogue(sch, reducing[0], target)
        more = _more_axes(sch, reducing[0], out, product)
        if more:
            sch = merge_axes(sch, out, 0, more + 1)
        (block,) = (found for found in leaf_blocks(sch) if "R" in block_kinds(sch, found))
        (out,) = sch.get_consumers(block)
        if product.panel is not None:
            schedule_packed(sch, block, out, target)
        else:
            schedule_tile(sch, block, out, product, target)
        return sch


def find_product(sch: s_tir.Schedule, block: SBlockRV) -> Product | None:
    """The roles of the block's axes, or None where the block is no sum of products over one axis."""
    stmt = sch.get(block)
    kinds = block_kinds(sch, block)
    if kinds.count("R") != 1 or stmt.init is None or not isinstance(stmt.body, tirx.BufferStore):
        return None
    update = stmt.body.value
    if not isinstance(update, tirx.Add) or not isinstance(update.b, tirx.Mul):
        return None
    factors = [factor for factor in (_loaded(update.b.a), _loaded(update.b.b)) if factor is not None]
    if len(factors) != 2:
        return None
    axes = [axis.var for axis in stmt.iter_vars]
    output = list(stmt.body.indices)
    spatial = [i for i, kind in enumerate(kinds) if kind == "S"]
    if not spatial:  # of two vectors
        return None
    # the axes are those of the result, in its order
    if len(output) != len(spatial) or not all(index.same_as(axes[i]) for index, i in zip(output, spatial, strict=True)):
        return None
    reduced, column = kinds.index("R"), spatial[-1]
    right = [factor for factor in factors if _reads(factor, axes[column])]
    left = [factor for factor in factors if not _reads(factor, axes[column])]
    if len(right) != 1 or not right[0].indices[-1].same_as(axes[column]):
        return None

    def indexes(i: int, factor: tvm.ir.TensorLoad) -> bool:
        return int(stmt.iter_vars[i].dom.extent) > 1 and _reads(factor, axes[i])

    panel = spatial[-2] if len(spatial) > 1 and PANEL_ATTR in stmt.annotations else None
    rows = [i for i in spatial if i not in (column, panel) and indexes(i, left[0]) and not indexes(i, right[0])]
    return Product(rows[-1] if rows else None, panel, column, reduced)


def schedule_tile(sch: s_tir.Schedule, block: SBlockRV, out: SBlockRV, product: Product, target: Target) -> None:
    """Tile `out`, compute `block` under each tile and keep it in registers; tiles run in parallel."""
    loops = sch.get_loops(out)
    *others, column = loops
    row = loops[product.row] if product.row is not None else None
    height = extent(sch, row) if row is not None else 1
    width = extent(sch, column)
    lanes = min(vector_lanes(target), width)
    rows, vectors = choose_tile(height, width, lanes, vector_registers(target))
    column, *tile = sch.split(column, [None, vectors, lanes])
    outer = [loop for i, loop in enumerate(others) if i != product.row] + [column]
    if row is not None:
        row, inner_row = sch.split(row, [None, rows])
        outer, tile = [*outer, row], [inner_row, *tile]
    sch.reorder(*outer, *tile)
    task = sch.fuse(*outer)
    in_threads(sch, task, target, steps(sch, block), FEW_PRODUCTS)
    for loop in tile[:-1]:
        sch.unroll(loop)
    sch.vectorize(tile[-1])
    sch.compute_at(block, task, preserve_unit_loops=True)
    accumulate(sch, block, product, vectors, lanes)


def accumulate(sch: s_tir.Schedule, block: SBlockRV, product: Product, vectors: int, lanes: int) -> None:
    """Under a tile: the reduced axis outside, rows and column vectors unrolled."""
    axes = sch.get(block).iter_vars
    loops = sch.get_loops(block)[-len(axes) :]
    reduced, column = loops[product.reduced], loops[product.column]
    others = [loop for i, loop in enumerate(loops) if i not in (product.reduced, product.column)]
    unrolled, vector = sch.split(column, [vectors, lanes])
    sch.reorder(reduced, *others, unrolled, vector)
    for loop in (*others, unrolled):
        sch.unroll(loop)
    sch.vectorize(vector)
    sch.decompose_reduction(block, reduced)


def _more_axes(sch: s_tir.Schedule, block: SBlockRV, out: SBlockRV, product: Product) -> int:
    """How many axes `out` has more for the rows than `block`, the axis of panels being none; 0 for a plain copy."""
    axes, written = ([int(extent) for extent in sch.get(b).writes[0].source.shape] for b in (out, block))
    return 0 if axes == written else len(axes) - len(written) + (product.panel is not None)


def _reads(factor: tvm.ir.TensorLoad, axis: tirx.Var) -> bool:
    return any(axis.same_as(var) for index in factor.indices for var in tirx.analysis.undefined_vars(index))


def _loaded(value: tvm.ir.Expr) -> tvm.ir.TensorLoad | None:
    while isinstance(value, tirx.Cast):
        value = value.value
    return value if isinstance(value, tvm.ir.TensorLoad) else None
