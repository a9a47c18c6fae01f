"""Moves on a schedule that convolutions and pools share: epilogues, padding, accumulators in registers."""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm import IRModule, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..loops import extent, own_loops
from ..target import num_cores
from .conv_compute import APART_ATTR, CONV_ATTR, DEPTHWISE_ATTR, PAD_ATTR
from .pool_legalize import POOL_ATTR, ROWS_ATTR
from .tails import distinct_variables

_WINDOWS = frozenset({CONV_ATTR, DEPTHWISE_ATTR, POOL_ATTR, ROWS_ATTR})
RESULT_ATTR = "rlflow.result"  # on the block that makes the output of what is scheduled: nothing is inlined into it
_MARKS = _WINDOWS | {PAD_ATTR, RESULT_ATTR}

# Multiply-adds, elements that windows read, elements that are copied: up to so many, starting threads costs more than
# they save.
FEW_PRODUCTS, FEW_TAPS, FEW_COPIES = 65536, 16384, 8192


def narrowed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with 32-bit indices, where its buffers allow that.

    TVM's `LoopPartition` looks a marked loop up by its variable, which the lowering of 64-bit indices replaces before.
    Integers of 64 bits that the function computes with would be narrowed along.
    """
    inner = [buffer.ty for buffer in func.body.block.alloc_buffers]
    types = [param.ty for param in func.params] + inner
    if any(ty.dtype == "int64" for ty in types):
        return func
    shapes = [ty.shape for ty in types if isinstance(ty, tirx.BufferType)]
    if any(math.prod(int(d) for d in shape) >= 2**31 for shape in shapes):
        return func
    return tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]


def steps(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """How often the block is run."""
    return math.prod(int(axis.dom.extent) for axis in sch.get(block).iter_vars)


def in_threads(sch: s_tir.Schedule, loop: LoopRV, target: Target, work: int, few: int) -> None:
    """Divide the turns of `loop` between the cores, where there are several and its `work` is more than `few`."""
    if num_cores(target) > 1 and work > few:
        sch.parallel(loop)


def fold_epilogue(
    sch: s_tir.Schedule, block: SBlockRV, target: Target, axes: int | None = None, *, apart: bool = False
) -> SBlockRV:
    """Inlines the element-wise blocks after `block` into the last of them, which is returned.

    Where what follows is not one block with an axis for each axis of its output, or stretches the result of `block`
    over something larger (as the gate of a squeeze-and-excitation is), or has another number of `axes`, or with
    `apart`, that result is copied, the copy returned, and the rest runs as loop nests of its own. Blocks before `block`
    are inlined too where an epilogue reads them, and left alone where a window does. The result of `block` stays in
    global scope: TVM keeps buffers of less than a kilobyte on the stack in that scope, and in no other.
    """

    def is_window(reader: SBlockRV) -> bool:
        stmt = sch.get(reader)
        return stmt.same_as(sch.get(block)) or bool(_WINDOWS & set(stmt.annotations))

    nests: list[SBlockRV] = []
    behind = False
    for other in sch.get_child_blocks(sch.get_sblock("root")):
        behind = behind or sch.get(other).same_as(sch.get(block))
        readers = sch.get_consumers(other)
        if _MARKS & set(sch.get(other).annotations) or any(is_window(reader) for reader in readers):
            continue
        if readers and is_injective(sch, other):
            sch.compute_inline(other)
        elif behind:
            nests.append(other)
    consumers = sch.get_consumers(block)
    if not apart and len(consumers) == 1 and _is_epilogue(sch, consumers[0], block, axes):
        out = consumers[0]
    else:
        out = sch.cache_write(block, 0, "global")
    for other in nests:
        if is_injective(sch, other) and not sch.get(other).same_as(sch.get(out)):
            loops = sch.get_loops(other)
            work = steps(sch, other)
            in_threads(sch, sch.fuse(*loops[: max(1, len(loops) - 2)]), target, work, FEW_COPIES)
    return out


def is_injective(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Every axis is parallel, and the block writes the element its axes name."""
    stmt = sch.get(block)
    if len(stmt.writes) != 1 or any(i.iter_type != tirx.IterVar.DataPar for i in stmt.iter_vars):
        return False
    region = stmt.writes[0].region
    return len(region) == len(stmt.iter_vars) and all(
        r.min.same_as(i.var) for r, i in zip(region, stmt.iter_vars, strict=True)
    )


def _is_epilogue(sch: s_tir.Schedule, reader: SBlockRV, block: SBlockRV, axes: int | None) -> bool:
    if not is_injective(sch, reader) or axes not in (None, len(sch.get(reader).iter_vars)):
        return False
    return not _stretches(sch, reader, block)


def _stretches(sch: s_tir.Schedule, reader: SBlockRV, block: SBlockRV) -> bool:
    """Whether `reader` reads one element of the result of `block` for several of its own."""
    stmt, (result,) = sch.get(reader), sch.get(block).writes
    used: list[tirx.Var] = []

    def note(load: tvm.ir.TensorLoad) -> None:
        if load.source.same_as(result.source):
            used.extend(var for index in load.indices for var in tirx.analysis.undefined_vars(index))

    tvm_ffi.structural_walk(stmt.body, (tvm.ir.TensorLoad, note))
    wide = [axis.var for axis in stmt.iter_vars if int(axis.dom.extent) > 1]
    return any(not any(axis.same_as(var) for var in used) for axis in wide)


def divide_at_edges(sch: s_tir.Schedule, loop: LoopRV) -> None:
    """Have the loop divided where the conditions on its variable change.

    TVM does not find one of 64 bits again (see `narrowed`), or fails on the halves of which its lowering narrows one.
    """
    if str(sch.get(loop).loop_var.ty.dtype) == "int32":
        sch.annotate(loop, "pragma_loop_partition_hint", True)


def marked_blocks(sch: s_tir.Schedule, attribute: str) -> list[SBlockRV]:
    """The blocks of the function that carry an attribute."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [block for block in blocks if attribute in sch.get(block).annotations]


def merge_axes(sch: s_tir.Schedule, block: SBlockRV, start: int, stop: int) -> s_tir.Schedule:
    """A new schedule in which the axes `start` to `stop` - 1 of `block`, those of its result, are one axis."""
    axes = sch.get(block).iter_vars
    extents = [int(axis.dom.extent) for axis in axes]

    def merged(*index: tirx.Var) -> list[tvm.ir.Expr]:
        place: tvm.ir.Expr = index[start]
        for axis in range(start + 1, stop):
            place = place * extents[axis] + index[axis]
        return [*index[:start], place, *index[stop:]]

    merge = tirx.IndexMap.from_func(merged, ndim=len(axes), index_dtype=str(axes[start].var.ty.dtype))
    sch.transform_block_layout(block, merge)
    # p // width * width + p % width must become p, or the tile that is read cannot be told from its index; and what was
    # inlined twice defines its variables twice
    return s_tir.Schedule(distinct_variables(tirx.transform.StmtSimplify()(sch.mod)["main"]))


def split_loops(sch: s_tir.Schedule, block: SBlockRV) -> tuple[list[LoopRV], list[LoopRV]]:
    """The loops of `block`'s own axes, the innermost ones: spatial, reduction."""
    kinds = list(zip(own_loops(sch, block), sch.get(block).iter_vars, strict=True))
    spatial = [loop for loop, axis in kinds if axis.iter_type == tirx.IterVar.DataPar]
    return spatial, [loop for loop, axis in kinds if axis.iter_type == tirx.IterVar.CommReduce]


def accumulate(sch: s_tir.Schedule, block: SBlockRV, channel_inside: bool = False) -> None:
    """Under a tile: the reduction outside, the tile unrolled, the innermost axis in vectors.

    The order of the unrolled axes is that of the instructions: with `channel_inside`, the vectors of the channels stay
    in registers while one pixel after the other is read; otherwise the pixels stay.
    """
    spatial, reduction = split_loops(sch, block)
    if channel_inside:
        batch, channel, *pixels, lane = spatial
        spatial = [batch, *pixels, channel, lane]
    sch.reorder(*reduction, *spatial)
    if extent(sch, reduction[-1]) == 1:
        # LLVM would unroll a loop of a few turns, keep what its turns have in common, and run out of registers.
        reduction = [sch.fuse(*reduction)]
    *tile, lane = spatial
    for loop in tile:
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.decompose_reduction(block, reduction[0])  # the copy that sets the start values keeps the kinds of the loops


def schedule_pad(sch: s_tir.Schedule, pad: SBlockRV, target: Target) -> None:
    """A padding block of (N, C, H, W[, c]), or of columns in parts: rows in parallel, the channel block in vectors."""
    work = steps(sch, pad)
    batch, channel, row, *rest = sch.get_loops(pad)
    in_threads(sch, sch.fuse(batch, channel, row), target, work, FEW_COPIES)
    _copy_rows(sch, pad, rest)


def pad_under(sch: s_tir.Schedule, pad: SBlockRV, loop: LoopRV) -> None:
    """A padding block of (N, C, H, W), or of columns in parts, computed where `loop` needs it."""
    sch.compute_at(pad, loop, preserve_unit_loops=True)
    _copy_rows(sch, pad, own_loops(sch, pad)[3:])


def _copy_rows(sch: s_tir.Schedule, pad: SBlockRV, loops: list[LoopRV]) -> None:
    """The loops of a padding block along a row."""
    if APART_ATTR in sch.get(pad).annotations:
        part, column = loops
        sch.unroll(part)
        divide_at_edges(sch, column)
        return
    column, *lane = loops
    divide_at_edges(sch, column)  # between them it is a plain copy
    if lane:
        sch.vectorize(lane[0])
