"""Which kernels are matrix products, how large, and the tile of the result that a thread block computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.matmul import IterKind, detect_iter_traits, get_reduction_blocks
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import leaf_blocks

_PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132}  # streaming multiprocessors: A100, H100, ...
_DEFAULT_PROCESSORS = 108


@dataclass(frozen=True)
class Product:
    """C[batch, rows, columns] += A[batch, rows, depth] * B[batch, columns, depth], axes of the block fused so."""

    batch: int
    rows: int
    columns: int
    depth: int
    factors: tuple[str, str]
    """The dtypes of A and B."""
    result: str
    """The dtype of C."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a thread block computes, and the share of the peak rate it is good for.

    The shares are a guess from how often an operand is used once it is in shared memory; they only order the tiles.
    """

    rows: int
    columns: int
    share: float


def find_product(sch: s_tir.Schedule) -> tuple[SBlockRV, Product] | None:
    """The only reducing block and its sizes, or None where it is no matrix product of static shape, or the function has
    not as many outputs as the product has results: the rules write each result once, where it has been summed.
    """
    blocks = leaf_blocks(sch)
    reducing = get_reduction_blocks(sch, blocks) if blocks else None
    if not reducing:
        return None
    stmt = sch.get(reducing[0])
    traits = detect_iter_traits(stmt)
    if traits is None or not all(isinstance(trait.extent, tirx.IntImm) for trait in traits[3]):
        return None

    def size(kind: IterKind) -> int:
        return math.prod(int(trait.extent) for trait in traits[3] if trait.kind == kind)

    left, right = (str(region.source.dtype) for region in stmt.reads)
    product = Product(
        batch=size(IterKind.kIter_S),
        rows=size(IterKind.kIter_I),
        columns=size(IterKind.kIter_J),
        depth=size(IterKind.kIter_K),
        factors=(left, right),
        result=str(stmt.writes[0].source.dtype),
    )
    if _outputs(sch.get(blocks[-1])) != product.batch * product.rows * product.columns:
        return None
    return reducing[0], product


def _outputs(stmt: s_tir.SBlock) -> int | None:
    """How many elements a block writes; None where that is not known."""
    extents = [axis.dom.extent for axis in stmt.iter_vars if axis.iter_type == tirx.IterVar.DataPar]
    return math.prod(map(int, extents)) if all(isinstance(extent, tirx.IntImm) for extent in extents) else None


def keep_within(func: tirx.PrimFunc, product: Product) -> tirx.PrimFunc:
    """`func`, a scheduled product, writing no result beyond the product's rows and columns.

    Tiles are padded. Where axes of the result are joined as it is written (the groups of a convolution with their
    channels), TVM's `reverse_compute_inline` asks only that the joined index be inside the output, and columns of
    padding are written over the first ones of the next group: by another thread block than that group's, before or
    after it.
    """

    def guarded(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        stmt = realize.block.body
        if not isinstance(stmt, tirx.BufferStore) or not any(map(stmt.buffer.same_as, func.params)):
            return realize
        _batch, row, column = realize.iter_values
        within = tirx.all(realize.predicate, row < product.rows, column < product.columns)
        return s_tir.SBlockRealize(realize.iter_values, within, realize.block)

    return tvm_ffi.structural_map(func, (s_tir.SBlockRealize, guarded))


def choose_tile(product: Product, tiles: tuple[Tile, ...], target: Target) -> Tile:
    """The tile with the least estimated time: rounds of tiles over the processors, by work over share of the rate."""
    processors = _PROCESSORS.get(str(target.attrs.get("arch", "")).rstrip("af"), _DEFAULT_PROCESSORS)

    def secs(tile: Tile) -> float:
        blocks = product.batch * math.ceil(product.rows / tile.rows) * math.ceil(product.columns / tile.columns)
        return math.ceil(blocks / processors) * tile.rows * tile.columns / tile.share

    return min(tiles, key=secs)
