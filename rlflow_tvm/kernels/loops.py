"""Small questions and moves on a schedule that several rules share."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

_block_realize = tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")
_KINDS = {tirx.IterVar.DataPar: "S", tirx.IterVar.CommReduce: "R"}


def leaf_blocks(sch: s_tir.Schedule) -> list[SBlockRV]:
    """The blocks of a function in order; none where it is not a root block over leaf blocks in loops."""
    body = sch.mod["main"].body
    if not isinstance(body, s_tir.SBlockRealize) or body.block.name_hint != "root":
        return []
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    if any(sch.get_child_blocks(block) for block in blocks):
        return []
    return blocks


def is_nothing(extent: tvm.ir.Expr) -> bool:
    """Whether it is the number 0."""
    return isinstance(extent, tirx.IntImm) and int(extent) == 0


def has_empty_loop(func: tirx.PrimFunc) -> bool:
    """Whether a loop of `func` has no turns."""
    found: list[bool] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: found.append(is_nothing(loop.extent))))
    return any(found)


def has_ragged_loop(func: tirx.PrimFunc) -> bool:
    """Whether how many turns a loop of `func` has hangs on another's."""
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    used = [var for loop in loops for var in tirx.analysis.undefined_vars(loop.extent)]
    return any(loop.loop_var.same_as(var) for loop in loops for var in used)


def is_plain_buffer(ty: tvm.ir.Type) -> bool:
    """Whether it is the type of a buffer such as Relax makes of a tensor; `FuseTIR` joins no other ones.

    TVMScript's have extents of 32 bits where the writer did not ask for 64, or a layout.
    """
    if not isinstance(ty, tirx.BufferType):
        return False
    shape = [tirx.IntImm("int64", int(e)) if isinstance(e, tirx.IntImm) else e for e in ty.shape]
    return tvm_ffi.structural_equal(ty, tirx.decl_buffer(shape, ty.dtype, layout=None).ty)


def block_kinds(sch: s_tir.Schedule, block: SBlockRV) -> str:
    """The kinds of the block's axes, for example "SSR"; "O" for an axis that is neither parallel nor reduced."""
    return "".join(_KINDS.get(axis.iter_type, "O") for axis in sch.get(block).iter_vars)


def loop_kinds(sch: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV]) -> str:
    """For each of `loops`, the kind of the axis that it runs over; "O" where that is none or several."""
    realize = _block_realize(sch, block)
    kinds = ""
    for loop in loops:
        var = sch.get(loop).loop_var
        used = {
            _KINDS.get(axis.iter_type, "O")
            for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
            if any(var.same_as(found) for found in tirx.analysis.undefined_vars(value))
        }
        kinds += used.pop() if len(used) == 1 else "O"
    return kinds


def extent(sch: s_tir.Schedule, loop: LoopRV) -> int:
    """The constant extent of a loop."""
    return int(sch.get(loop).extent)


def runs_over_axes(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the loops around a block are its axes, each of them whole, in order."""
    loops, realize = sch.get_loops(block), _block_realize(sch, block)
    return len(loops) == len(realize.iter_values) and all(
        sch.get(loop).loop_var.same_as(value) for loop, value in zip(loops, realize.iter_values, strict=True)
    )


def own_loops(sch: s_tir.Schedule, block: SBlockRV) -> list[LoopRV]:
    """The loops of a block that has one for each axis, in the order of the axes."""
    return sch.get_loops(block)[-len(sch.get(block).iter_vars) :]


def inline_producers(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> list[SBlockRV]:
    """Inline every mapping block into those that read it, and return the ones left (the outputs)."""
    left = []
    for block in blocks:
        if sch.get_consumers(block):
            sch.compute_inline(block)
        else:
            left.append(block)
    return left


def inlined_maps(sch: s_tir.Schedule) -> list[SBlockRV] | None:
    """Where the function is all mapping blocks, each of one store: its outputs, with everything else inlined into them.
    Or None: a block without axes that sorts is no mapping."""
    blocks = leaf_blocks(sch)
    if not blocks or any(set(block_kinds(sch, block)) - {"S"} for block in blocks):
        return None
    if not all(isinstance(sch.get(block).body, tirx.BufferStore) for block in blocks):
        return None
    return inline_producers(sch, blocks)


def fuse_all(sch: s_tir.Schedule, loops: list[LoopRV]) -> LoopRV:
    """The loops as one."""
    return loops[0] if len(loops) == 1 else sch.fuse(*loops)


def vectorise(sch: s_tir.Schedule, loop: LoopRV, lanes: int, *, unroll: bool = False) -> None:
    """Run a loop in vectors of `lanes` (its tail is split off by `peel_tails`); `unroll` the loop over the vectors."""
    if extent(sch, loop) <= lanes:
        sch.vectorize(loop)
        return
    outer, inner = sch.split(loop, [None, lanes])
    if unroll:
        sch.unroll(outer)
    sch.vectorize(inner)
