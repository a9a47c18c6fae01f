"""Rules for kernels without a reduction, and the one that takes everything else."""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir.dlight.cpu.base import CPUScheduleRule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from ..loops import (
    block_kinds,
    extent,
    fuse_all,
    has_ragged_loop,
    inlined_maps,
    leaf_blocks,
    runs_over_axes,
    vectorise,
)
from ..target import num_cores, vector_lanes
from .cuts import cut_points, mark

_SMALL = 8192  # elements below which starting threads costs more than they save
_TASKS_EACH = 4  # parallel iterations a thread should have at least
_CHUNK = 32  # vectors a parallel iteration has at least


class Elementwise(CPUScheduleRule):
    """Only mapping blocks: all are inlined into the outputs; outer loops run in parallel, the inner in vectors."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where a block reduces or is not written out of loops and one store."""
        sch = s_tir.Schedule(func)
        outputs = inlined_maps(sch)
        if outputs is None:
            return None
        for block in outputs:
            schedule_map(sch, block, target)
        return sch


class Fallback(CPUScheduleRule):
    """Anything: each block by itself, its leading parallel axes in parallel, mapping blocks in vectors."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function (unchanged where it is not made of blocks)."""
        sch = s_tir.Schedule(func)
        for i in range(len(leaf_blocks(sch))):
            attempt = sch.copy()
            try:
                schedule_any(attempt, leaf_blocks(attempt)[i], target)
            except (s_tir.ScheduleError, InternalError):
                continue  # this block stays as it is: it is correct, and nothing is known that would be faster
            except TypeError:  # an extent is no number
                if not has_ragged_loop(func):
                    raise
                continue
            sch = attempt
        return sch


def schedule_any(sch: s_tir.Schedule, block: SBlockRV, target: Target) -> None:
    """Schedule one block of whatever kind; ScheduleError where its axes depend on one another."""
    kinds = block_kinds(sch, block)
    loops = sch.get_loops(block)
    if set(kinds) == {"S"}:
        schedule_map(sch, block, target)
        return
    outer = loops[: len(kinds) - len(kinds.lstrip("S"))]
    if outer and num_cores(target) > 1 and math.prod(extent(sch, loop) for loop in loops) > _SMALL:
        sch.parallel(fuse_all(sch, outer))


def schedule_map(sch: s_tir.Schedule, block: SBlockRV, target: Target) -> None:
    """Vectorise the innermost loop of a mapping block, run the outer ones in parallel.

    Trailing axes that all accesses walk through in memory order are one loop, or as many of them as whole vectors take.
    """
    loops = sch.get_loops(block)
    if not loops:
        return
    lanes = vector_lanes(target)
    turned = turned_axis(sch, block)
    if turned is not None:
        schedule_turned(sch, block, turned, lanes, num_cores(target))
        return
    own = runs_over_axes(sch, block)
    flat = _whole_vectors([extent(sch, loop) for loop in loops], flat_axes(sch, block), lanes) if own else 1
    cuts = cut_points(sch, block) if own and flat == 1 else []
    inner = fuse_all(sch, loops[len(loops) - flat :])
    outer = loops[: len(loops) - flat]
    tasks = math.prod(extent(sch, loop) for loop in outer)
    width = extent(sch, inner)
    threads = num_cores(target)
    parallel = threads > 1 and tasks * width > _SMALL
    if parallel and tasks < threads and width > _CHUNK * lanes:
        cuts = []  # a piece is run by one thread, and there would be too few
    if parallel and not cuts and tasks < _TASKS_EACH * threads and width > _CHUNK * lanes:
        chunk, inner = sch.split(inner, [None, _CHUNK * lanes])
        outer = [*outer, chunk]
    if cuts:
        mark(sch, inner, cuts, lanes)
    else:
        vectorise(sch, inner, lanes)
    if parallel and outer:
        sch.parallel(fuse_all(sch, outer))


def _whole_vectors(extents: list[int], flat: int, lanes: int) -> int:
    """How many of the `flat` trailing axes to make one: the fewest that whole vectors fill, or all of them.

    A vector over more of them than that has indices of which TVM does not see that they are neighbours, where the last
    axis is none of whole vectors.
    """
    if extents[-1] % lanes == 0:
        return flat
    fitting = (count for count in range(1, flat + 1) if math.prod(extents[-count:]) % lanes == 0)
    return next(fitting, flat)


def schedule_turned(sch: s_tir.Schedule, block: SBlockRV, turned: int, lanes: int, threads: int) -> None:
    """Schedule a block that reads along axis `turned` and writes along the last one: square tiles of both.

    Without them each vector gathers from as many cache lines as it has lanes, and the next one from others.
    """
    loops = sch.get_loops(block)
    total = math.prod(extent(sch, loop) for loop in loops)
    row, inner_row = sch.split(loops[turned], [None, min(lanes, extent(sch, loops[turned]))])
    column, vector = sch.split(loops[-1], [None, min(lanes, extent(sch, loops[-1]))])
    outer = [*(loop for i, loop in enumerate(loops[:-1]) if i != turned), row, column]
    sch.reorder(*outer, inner_row, vector)
    sch.vectorize(vector)
    if total > _SMALL and threads > 1:
        sch.parallel(fuse_all(sch, outer))


def turned_axis(sch: s_tir.Schedule, block: SBlockRV) -> int | None:
    """The axis, not the last, along which the block reads in memory order what it writes along its last axis."""
    stmt = sch.get(block)
    axes = list(stmt.iter_vars)
    if not runs_over_axes(sch, block) or int(axes[-1].dom.extent) < 2:
        return None
    found: list[int] = []

    def note(load: tvm.ir.TensorLoad) -> None:
        if not len(load.indices):
            return
        last = load.indices[-1]
        if isinstance(last, tirx.FloorMod) and isinstance(last.b, tirx.IntImm):
            last = last.a  # the lane of a blocked layout
        along = [i for i, axis in enumerate(axes[:-1]) if last.same_as(axis.var)]
        if along and int(axes[along[0]].dom.extent) > 1 and any(_uses(i, axes[-1].var) for i in load.indices):
            found.append(along[0])

    tvm_ffi.structural_walk(stmt.body, (tvm.ir.TensorLoad, note))
    return found[0] if found else None


def flat_axes(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """How many trailing axes can be one: every access has them last, in order and whole, or not at all."""
    stmt = sch.get(block)
    axes = list(stmt.iter_vars)
    accesses: list[tuple[list[tvm.ir.Expr], list[tvm.ir.Expr]]] = []

    def note_load(load: tvm.ir.TensorLoad) -> None:
        accesses.append((list(load.indices), list(load.source.shape)))

    def note_store(store: tirx.BufferStore) -> None:
        accesses.append((list(store.indices), list(store.buffer.shape)))

    tvm_ffi.structural_walk(stmt.body, [(tvm.ir.TensorLoad, note_load), (tirx.BufferStore, note_store)])
    count = 1
    while count < len(axes) and all(_walks(indices, shape, axes, count + 1) for indices, shape in accesses):
        count += 1
    return count


def _walks(indices: list[tvm.ir.Expr], shape: list[tvm.ir.Expr], axes: list[tirx.IterVar], count: int) -> bool:
    trailing = axes[-count:]
    used = [axis for axis in trailing if any(_uses(index, axis.var) for index in indices)]
    if not used:
        return True
    if len(used) != count or len(indices) < count:
        return False
    inside = list(zip(indices[-count:], shape[-count:], trailing, strict=True))
    if any(_uses(index, axis.var) for index in indices[:-count] for axis in trailing):
        return False
    if not all(index.same_as(axis.var) for index, _, axis in inside):
        return False
    return all(int(size) == int(axis.dom.extent) for _, size, axis in inside[1:])


def _uses(index: tvm.ir.Expr, var: tirx.Var) -> bool:
    return any(var.same_as(found) for found in tirx.analysis.undefined_vars(index))
