"""The schedule rule of Winograd convolutions: their loop nest is written out, with the blocks behind as epilogue."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target
from tvm.tirx.stmt import Stmt

from ..loops import leaf_blocks
from ..target import num_cores, vector_lanes
from .conv_loops import FEW_PRODUCTS, marked_blocks, narrowed
from .elementwise import schedule_map
from .emit import Emitter, Index
from .tails import distinct_variables
from .winograd_legalize import WINOGRAD_ATTR, root_block
from .winograd_nest import Finish, Nest
from .winograd_plan import Plan


class Winograd(CPUScheduleRule):
    """Schedules the functions that hold a convolution of `winograd_legalize`, with its epilogue."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where `func` holds no convolution of this form."""
        sch = s_tir.Schedule(narrowed(func))
        marked = marked_blocks(sch, WINOGRAD_ATTR)
        if len(marked) != 1 or plan_of(sch.get(marked[0])).panel % vector_lanes(target):
            return None  # or it is cut for other vectors: of weights alone, in a build for another processor
        (output,) = marked
        (product,) = sch.get_producers(output)
        transformed = next(b for b in sch.get_producers(product))
        before = _inline(sch, (transformed, product, output))
        last = leaf_blocks(sch)[-1]
        behind = [] if _is_epilogue(sch.get(last), sch.get(output)) else [last]
        for block in (*before, *behind):
            schedule_map(sch, block, target)
        own = [sch.get(block) for block in (transformed, product, output)]
        written = _written(sch, own, [sch.get(block) for block in before], len(behind), target)
        # whole tiles and cut ones hold what follows the convolution twice
        return s_tir.Schedule(distinct_variables(written))


def plan_of(output: s_tir.SBlock) -> Plan:
    """What the last of a convolution's own blocks says of how it is cut."""
    return Plan(*(int(number) for number in output.annotations[WINOGRAD_ATTR]))


def _inline(sch: s_tir.Schedule, own: Sequence[SBlockRV]) -> list[SBlockRV]:
    """Inline the element-wise blocks into the last one; those that the convolution reads stay, and are returned.

    `own`: the convolution's blocks, the one that reads the data first.
    """
    before = []
    for block in leaf_blocks(sch):
        if _is_one_of(sch, block, own):
            continue
        if _is_one_of(sch, block, sch.get_producers(own[0])):
            before.append(block)
        elif sch.get_consumers(block):
            sch.compute_inline(block)
    return before


def _is_one_of(sch: s_tir.Schedule, block: SBlockRV, others: Sequence[SBlockRV]) -> bool:
    """Asked of the schedule as it is now: an inlined block leaves new statements behind."""
    return any(sch.get(block).same_as(sch.get(other)) for other in others)


def _is_epilogue(last: s_tir.SBlock, output: s_tir.SBlock) -> bool:
    """Whether the last block makes of each output of the convolution one element, in the same place.

    It does not where the convolution's result is stretched over something larger, as a squeeze-and-excitation's is.
    """
    convolved = output.writes[0].source
    if last.same_as(output):
        return True
    if [int(axis.dom.extent) for axis in last.iter_vars] != [int(extent) for extent in convolved.shape]:
        return False
    axes, loads = [axis.var for axis in last.iter_vars], []

    def note(load: tvm.ir.TensorLoad) -> None:
        if load.source.same_as(convolved):
            loads.append(list(load.indices))

    tvm_ffi.structural_walk(last.body, (tvm.ir.TensorLoad, note))
    extents = [int(extent) for extent in convolved.shape]
    return all(
        extent == 1 or index.same_as(axis)
        for indices in loads
        for index, axis, extent in zip(indices, axes, extents, strict=True)
    )


def _written(
    sch: s_tir.Schedule, own: list[s_tir.SBlock], before: list[s_tir.SBlock], behind: int, target: Target
) -> tirx.PrimFunc:
    """The function with the nests of the convolution and its epilogue replaced by the written one.

    `behind`: how many nests at the end are no epilogue and stay; they read the convolution's result from memory.
    """
    func = sch.mod["main"]
    root = func.body.block
    nests = list(root.body.seq)
    transformed, product, output = own
    last = output if behind else sch.get(leaf_blocks(sch)[-1])
    convolved = output.writes[0].source
    plan = plan_of(output)
    taps = next(r.source for r in product.reads if not r.source.same_as(transformed.writes[0].source))
    shape = tuple(int(extent) for extent in convolved.shape)
    work = math.prod(int(axis.dom.extent) for axis in product.iter_vars)
    threads = num_cores(target) > 1 and work > FEW_PRODUCTS
    nest = Nest(plan, transformed.reads[0].source, taps, shape, vector_lanes(target), threads)
    emit = Emitter()
    for stmt in nests[: len(before)]:
        emit.add(stmt)
    nest.emit(emit, _finish(last, output))
    for stmt in nests[len(nests) - behind :]:
        emit.add(stmt)
    used = [region.source for block in before for region in block.writes] + [convolved] * bool(behind)
    held = [b for b in root.alloc_buffers if any(b.same_as(other) for other in used)]
    return func.with_body(root_block(emit.statement(), [*held, *emit.buffers]))


def _finish(last: s_tir.SBlock, output: s_tir.SBlock) -> Finish:
    """What stores one output: the body of the last block, or a plain store where that is the convolution's own."""
    convolved = output.writes[0].source
    if last.same_as(output):
        return lambda index, value: tirx.BufferStore(convolved, value, list(index))
    axes = [axis.var for axis in last.iter_vars]

    def finish(index: Sequence[Index], value: tvm.ir.Expr) -> Stmt:
        def replaced(load: tvm.ir.TensorLoad) -> tvm.ir.Expr:
            return value if load.source.same_as(convolved) else load

        body = tvm_ffi.structural_map(last.body, (tvm.ir.TensorLoad, replaced))
        return _with_axes(body, axes, index)

    return finish


def _with_axes(stmt: Stmt, axes: Sequence[tirx.Var], index: Sequence[Index]) -> Stmt:
    def value(var: tirx.Var) -> Index:
        return next((i for axis, i in zip(axes, index, strict=True) if axis.same_as(var)), var)

    return tvm_ffi.structural_map(stmt, (tirx.Var, value))
