"""The schedule rule of reductions along with what surrounds them: softmax, layer norm, means, sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..loops import block_kinds, extent, fuse_all, leaf_blocks, loop_kinds, own_loops, vectorise
from ..target import num_cores, vector_lanes
from .tails import LIMIT_ATTR

_CHAINS = 4  # vector sums side by side, to hide the latency of an addition
_PARALLEL_WORK = 16384  # element operations below which starting threads costs more than they save


class Reduction(CPUScheduleRule):
    """Blocks over the same rows: one parallel loop over the rows, all blocks inside it.

    A sum over the contiguous axis becomes vector sums, added up at the end; one over another axis has its
    contiguous parallel axis in vectors. Where rows are reduced in groups, as channels are, a group takes a row's place.
    """

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where no block reduces or the blocks do not share their rows."""
        sch = s_tir.Schedule(func)
        blocks = leaf_blocks(sch)
        if not blocks or not any("R" in block_kinds(sch, block) for block in blocks):
            return None
        if any(not _is_row_block(sch, block) for block in blocks):
            return None
        if len(sch.get_output_blocks(sch.get_sblock("root"))) != 1:
            return None
        inline_single_maps(sch, blocks)
        blocks = leaf_blocks(sch)
        for block in blocks:
            if not sch.get_loops(block):
                sch.add_unit_loop(block)  # beside a block without loops `rfactor` fails
        rows = min(shared_rows(sch, blocks), len(sch.get_loops(blocks[-1])))
        column = summed_column(sch, blocks)
        rows = rows if column is None else min(rows, column)
        width = group_width(sch, blocks, rows) if column is None else None
        work = sum(_volume(sch, block) for block in blocks)
        lanes = vector_lanes(target)
        partial: list[list[SBlockRV]] = []
        for block in blocks:
            summed = "R" in block_kinds(sch, block) and _sums_contiguous(sch, block)
            partial.append(split_sum(sch, block, lanes) if summed else [])
        each_alone = list(zip(blocks, partial, strict=True))
        blocks = leaf_blocks(sch)
        *others, last = blocks
        threads = num_cores(target) if work > _PARALLEL_WORK else 1
        loops = sch.get_loops(last)
        if column is not None and rows == column == _leading(block_kinds(sch, last)) - 1:
            # sums over another axis than the contiguous one: a task is a few vectors of neighbours
            columns, _ = sch.split(loops[column], [None, min(_CHAINS * lanes, extent(sch, loops[column]))])
            row = fuse_all(sch, [*loops[:rows], columns])
        elif width is not None:
            groups, _ = sch.split(loops[rows], [None, width])
            row = fuse_all(sch, [*loops[:rows], groups])
        elif rows == 0 or (threads > 1 and math.prod(extent(sch, loop) for loop in loops[:rows]) == 1):
            # all partial sums first: what else is done makes TVM look again at predicates that it then does not prove
            for block, sums in reversed(each_alone):
                gather_partial(sch, block, sums)
            for block, sums in each_alone:
                schedule_alone(sch, block, target, sums)
            return sch
        else:
            row = fuse_all(sch, loops[:rows])
        for block in reversed(others):
            sch.compute_at(block, row)
        if threads > 1:
            sch.parallel(row)
        for block in blocks:
            schedule_rest(sch, block, sch.get_loops(block)[1:], lanes)
        return sch


def inline_single_maps(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> None:
    """Inline the mapping blocks that one block reads and that are no work to repeat (see `is_costly`)."""
    for block in blocks:
        consumers = sch.get_consumers(block)
        if set(block_kinds(sch, block)) <= {"S"} and len(consumers) == 1 and not is_costly(sch, block):
            sch.compute_inline(block)


def shared_rows(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> int:
    """How many leading axes all blocks share: each writes, and reads what another wrote, at its own leading axes."""
    written = {stmt.writes[0].source for stmt in (sch.get(block) for block in blocks)}
    rows = min(_leading(block_kinds(sch, block)) for block in blocks)
    extents = [int(axis.dom.extent) for axis in sch.get(blocks[-1]).iter_vars]
    for block in blocks:
        stmt = sch.get(block)
        axes = stmt.iter_vars
        regions = [*stmt.writes, *(region for region in stmt.reads if region.source in written)]
        for i in range(rows):
            same = all(len(r.region) > i and r.region[i].min.same_as(axes[i].var) for r in regions)
            if not same or int(axes[i].dom.extent) != extents[i]:
                rows = i
                break
    return rows


def group_width(sch: s_tir.Schedule, blocks: list[SBlockRV], axis: int) -> int | None:
    """How many steps of the last block's `axis` are one step of what was reduced by group (of channels, for example);
    None where some block is neither over these groups nor over their members, or there are no groups.
    """
    if min(_leading(block_kinds(sch, block)) for block in blocks) <= axis:
        return None
    written = {stmt.writes[0].source for stmt in (sch.get(block) for block in blocks)}
    widths: set[int] = set()
    for block in blocks:
        stmt = sch.get(block)
        own = stmt.iter_vars[axis]
        for region in (*stmt.writes, *(region for region in stmt.reads if region.source in written)):
            index = region.region[axis].min if len(region.region) > axis else None
            if isinstance(index, tirx.FloorDiv) and index.a.same_as(own.var) and isinstance(index.b, tirx.IntImm):
                widths.add(int(index.b))
            elif index is None or not index.same_as(own.var):
                return None
    members = int(sch.get(blocks[-1]).iter_vars[axis].dom.extent)
    if len(widths) != 1 or members % (width := widths.pop()):
        return None
    extents = {int(sch.get(block).iter_vars[axis].dom.extent) for block in blocks}
    return width if extents == {members, members // width} else None


def summed_column(sch: s_tir.Schedule, blocks: list[SBlockRV]) -> int | None:
    """The parallel axis along which some sum reads in memory order, None where all sums run along memory."""
    for block in blocks:
        stmt = sch.get(block)
        kinds = block_kinds(sch, block)
        if "R" not in kinds or _sums_contiguous(sch, block):
            continue
        written = {region.source for region in stmt.writes}
        for region in stmt.reads:
            for i, axis in enumerate(stmt.iter_vars):
                if region.source not in written and len(region.region) and region.region[-1].min.same_as(axis.var):
                    return i
    return None


def split_sum(sch: s_tir.Schedule, block: SBlockRV, lanes: int) -> list[SBlockRV]:
    """Make a reduction over the contiguous axis one of vectors (`_CHAINS` side by side), and one over their lanes.

    The blocks of the partial sums, in order; none where the axis is short.
    """
    kinds = block_kinds(sch, block)
    loops = own_loops(sch, block)
    summed = fuse_all(sch, [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"])
    length = extent(sch, summed)
    if length < 2 * lanes:
        return []
    chains = _CHAINS if length >= 2 * _CHAINS * lanes else 1
    axis = len(sch.get(block).writes[0].region)
    partial = [_split_off(sch, summed, axis, chains * lanes)]
    if chains > 1:
        partial.append(_split_off(sch, sch.get_loops(block)[-1], axis, lanes))
    return partial


def _split_off(sch: s_tir.Schedule, summed: LoopRV, axis: int, width: int) -> SBlockRV:
    """Make the reduction over `summed` one into `width` partial sums, whose block it gives, and one over those."""
    length = extent(sch, summed)
    _, inner = sch.split(summed, [None, width])
    partial = sch.rfactor(inner, axis)
    if length % width:
        # compute_at forgets the predicate of the last, partly filled chunk: keep it where peel_tails finds it
        axes = sch.get(partial).iter_vars
        # the one that the chunks are counted by: axes of one step that were summed with it have stayed
        reduced = next(a.var.name for a in axes if a.iter_type == tirx.IterVar.CommReduce and int(a.dom.extent) > 1)
        sch.annotate(partial, LIMIT_ATTR, [reduced, axes[0].var.name, width, length])
    return partial


def gather_partial(sch: s_tir.Schedule, block: SBlockRV, partial: Sequence[SBlockRV]) -> None:
    """Compute the partial sums of a reduction (none: it has none) where it is, row by row; its rows become one loop."""
    if not partial:
        return
    loops = sch.get_loops(block)
    rows = loops[: _leading(loop_kinds(sch, block, loops))]
    row = fuse_all(sch, rows) if rows else sch.add_unit_loop(loops[0])  # around all that is summed
    for each in reversed(partial):
        sch.compute_at(each, row)


def schedule_alone(sch: s_tir.Schedule, block: SBlockRV, target: Target, partial: Sequence[SBlockRV] = ()) -> None:
    """Schedule a block that shares no rows with others, in threads of its own where it is work enough; `partial`: the
    blocks of its partial sums, which go into its rows."""
    lanes, loops = vector_lanes(target), sch.get_loops(block)
    kinds = loop_kinds(sch, block, loops)
    if partial:
        row, work = loops[0], sum(_volume(sch, each) for each in partial)
        if extent(sch, row) > 1 and num_cores(target) > 1 and work > _PARALLEL_WORK:
            sch.parallel(row)
        for each in (*partial, block):
            schedule_rest(sch, each, sch.get_loops(each)[1:], lanes)
        return
    outer, behind = loops[: _leading(kinds)], kinds[_leading(kinds) :]
    if outer and num_cores(target) > 1 and _volume(sch, block) > _PARALLEL_WORK:
        if "S" not in behind:  # the last is for vectors
            *outer, inner = outer
            if math.prod(extent(sch, loop) for loop in outer) < num_cores(target):
                outer = [*outer, sch.split(inner, [None, min(_CHAINS * lanes, extent(sch, inner))])[0]]
        if math.prod(extent(sch, loop) for loop in outer) > 1:
            sch.parallel(fuse_all(sch, outer))
            loops = sch.get_loops(block)[1:]
    schedule_rest(sch, block, loops, lanes)


def schedule_rest(sch: s_tir.Schedule, block: SBlockRV, loops: list[LoopRV], lanes: int) -> None:
    """Schedule the loops of a block inside the row: reduced axes outside, the last parallel one in vectors."""
    kinds = loop_kinds(sch, block, loops)
    parallel = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "S"]
    summed = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"]
    if not summed:
        if parallel:
            vectorise(sch, parallel[-1], lanes)
        return
    if parallel:
        *outer, inner = parallel
        if extent(sch, inner) > _CHAINS * lanes:
            rest, inner = sch.split(inner, [None, _CHAINS * lanes])
            outer = [*outer, rest]
        sch.reorder(*outer, *summed, inner)
        vectorise(sch, inner, lanes, unroll=True)
    sch.decompose_reduction(block, summed[0])


def _is_row_block(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """One store, parallel axes first, the store's indices the parallel axes in order."""
    stmt = sch.get(block)
    kinds, loops = block_kinds(sch, block), sch.get_loops(block)
    if not loops:  # of a single number
        return set(kinds) <= {"S"} and len(stmt.writes) == 1 and not len(stmt.writes[0].region)
    if "O" in kinds or "RS" in kinds or len(stmt.writes) != 1 or len(stmt.iter_vars) != len(loops):
        return False
    spatial = [axis.var for axis, kind in zip(stmt.iter_vars, kinds, strict=True) if kind == "S"]
    region = stmt.writes[0].region
    return len(region) == len(spatial) and all(r.min.same_as(v) for r, v in zip(region, spatial, strict=True))


def is_costly(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the block divides, or computes what is called by a name."""
    found: list[object] = []
    tvm_ffi.structural_walk(sch.get(block).body, ((tvm.ir.Call, tirx.Div), found.append))
    return bool(found)


def _sums_contiguous(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether the last index of what the block reads is its last reduced axis."""
    stmt = sch.get(block)
    if not isinstance(stmt.body, tirx.BufferStore):
        return False
    last = stmt.iter_vars[-1].var
    reads = [r for r in stmt.reads if len(r.region) and r.source not in {w.source for w in stmt.writes}]
    return any(r.region[-1].min.same_as(last) for r in reads)


def _volume(sch: s_tir.Schedule, block: SBlockRV) -> int:
    volume = 1
    for axis in sch.get(block).iter_vars:
        volume *= int(axis.dom.extent)
    return volume


def _leading(kinds: str) -> int:
    return len(kinds) - len(kinds.lstrip("S"))
