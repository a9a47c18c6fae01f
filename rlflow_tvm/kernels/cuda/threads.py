"""Rules that give each output element, or a short vector of them, a thread: what dlight has only a fallback for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..loops import block_kinds, extent, fuse_all, inline_producers, inlined_maps, leaf_blocks, own_loops

THREADS = 256  # of a block: enough to hide the latency of memory, few enough for small outputs to reach every processor
_VECTOR_BYTES = 16  # the widest load and store
_VECTOR_OUTPUTS = 1 << 16  # elements below which vectors leave processors idle
_SHORT_REDUCTION = 256  # terms that one thread may sum alone
_PARTS = ("a", "b", "value", "condition", "true_value", "false_value")  # of expressions
_MANY_OUTPUTS = 1 << 15  # outputs that fill the machine with one thread each


class Elementwise(GPUScheduleRule):
    """Mapping blocks: producers are inlined, and a thread computes an element of each output, or a vector of them."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where a block is no plain mapping."""
        sch = s_tir.Schedule(func)
        outputs = inlined_maps(sch)
        if outputs is None:
            return None
        for block in outputs:
            bind(sch, _loops(sch, block), vector_width(sch, block))
        return sch


class Reduction(gpu.Reduction):
    """dlight's rule for a sum and what is done with it, where that is one number, too."""

    def _sch_inner_reduction(
        self,
        sch: s_tir.Schedule,
        target: Target,
        block: SBlockRV,
        unroll_spatial_factor: int | None,
        epilogue_info: SBlockInfo | None,
        *order: Any,
    ) -> None:
        if epilogue_info is not None and not sch.get_loops(epilogue_info.block_rv):
            # `rfactor` takes a block outside of all loops for the one that it divides, and ends in an InternalError
            sch.add_unit_loop(epilogue_info.block_rv)
        super()._sch_inner_reduction(sch, target, block, unroll_spatial_factor, epilogue_info, *order)


class ThreadReduction(GPUScheduleRule):
    """One reduction, each output summed by one thread in a register, with what comes before and after it.

    For windows: pools, depthwise convolutions, short sums over many outputs. With `always` for any reduction.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where it is not one reduction among mapping blocks, or too long a one."""
        sch = s_tir.Schedule(func)
        blocks = leaf_blocks(sch)
        kinds = [block_kinds(sch, block) for block in blocks]
        reducing = [i for i, kind in enumerate(kinds) if "R" in kind]
        if len(reducing) != 1 or any("O" in kind for kind in kinds):
            return None
        (position,) = reducing
        block = blocks[position]
        if not self._always and not is_short(sch, block):
            return None
        for before in blocks[:position]:
            sch.compute_inline(before)
        after = inline_producers(sch, blocks[position + 1 :])
        if len(after) > 1:
            return None
        written = len(sch.get(block).writes)
        if after:
            for number in range(written):  # the greatest element and where it is
                sch.set_scope(block, number, "local")
            (out,) = after
        elif written == 1:
            out = sch.cache_write(block, 0, "local")
        else:
            return None
        loops = own_loops(sch, block)
        spatial = [loop for loop, kind in zip(loops, kinds[position], strict=True) if kind == "S"]
        summed = [loop for loop, kind in zip(loops, kinds[position], strict=True) if kind == "R"]
        sch.reorder(*spatial, *summed)
        thread = bind(sch, spatial or [sch.add_unit_loop(summed[0])], 1)
        # the reduction stays where it is: moved under the loops of `out`, its axes could not be proved apart any more
        sch.reverse_compute_at(out, thread, preserve_unit_loops=True)
        sch.decompose_reduction(block, summed[0])
        return sch


def is_short(sch: s_tir.Schedule, block: SBlockRV) -> bool:
    """Whether one thread an output is enough for the reduction `block`."""
    kinds = block_kinds(sch, block)
    extents = [iv.dom.extent for iv in sch.get(block).iter_vars]
    if not all(isinstance(e, tirx.IntImm) for e in extents):
        return False  # the window's size depends on the output, as in an adaptive pool
    terms = math.prod(int(e) for e, kind in zip(extents, kinds, strict=True) if kind == "R")
    outputs = math.prod(int(e) for e, kind in zip(extents, kinds, strict=True) if kind == "S")
    return terms <= _SHORT_REDUCTION and (terms <= 32 or outputs >= _MANY_OUTPUTS)


def bind(sch: s_tir.Schedule, loops: list[LoopRV], vector: int) -> LoopRV:
    """All of `loops` as one over blocks, threads and, where it is more than 1, vectors of `vector` elements.

    The loop over threads.
    """
    fused = fuse_all(sch, loops)
    threads = min(THREADS, 1 << max(5, (extent(sch, fused) // vector - 1).bit_length()))
    if vector > 1:
        block, thread, lane = sch.split(fused, [None, threads, vector])
        sch.vectorize(lane)
    else:
        block, thread = sch.split(fused, [None, threads])
    sch.bind(block, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    return thread


def vector_width(sch: s_tir.Schedule, block: SBlockRV) -> int:
    """Elements that a thread of a mapping block may load and store at once: 1 unless all lie side by side."""
    stmt = sch.get(block)
    if not stmt.iter_vars or not isinstance(stmt.body, tirx.BufferStore):
        return 1
    last = stmt.iter_vars[-1]
    accesses = [(stmt.body.buffer, list(stmt.body.indices))]
    dtypes = [str(stmt.body.buffer.dtype)]
    plain = [True]

    def note_load(load: tvm.ir.TensorLoad) -> None:
        accesses.append((load.source, list(load.indices)))
        dtypes.append(str(load.source.dtype))

    def note_call(call: tvm.ir.Call) -> None:
        if getattr(call.op, "name", "") == "tirx.if_then_else":
            plain[0] = False  # lanes may take different ways

    tvm_ffi.structural_walk(stmt.body.value, [(tvm.ir.TensorLoad, note_load), (tvm.ir.Call, note_call)])
    outputs = math.prod(int(axis.dom.extent) for axis in stmt.iter_vars)
    widest = max(tvm.DataType(dtype).itemsize for dtype in dtypes)
    width = min(_VECTOR_BYTES // widest, _most_lanes(stmt.body.value))
    if "bool" in dtypes or not plain[0] or outputs < _VECTOR_OUTPUTS or int(last.dom.extent) % width:
        return 1
    return width if all(_side_by_side(buffer.shape, each, last.var, width) for buffer, each in accesses) else 1


def _most_lanes(expr: tvm.ir.Expr) -> int:
    """Of vectors of what is computed in an expression: CUDA's code generator has none of more than 4 truth values or
    numbers of 64 bits, or 8 of 32."""
    kind = tvm.DataType(str(expr.ty.dtype))
    most = 4 if str(kind) == "bool" or kind.bits == 64 else 8 if kind.bits == 32 else _VECTOR_BYTES
    if isinstance(expr, tvm.ir.TensorLoad):
        return most  # indices are no vectors
    parts = [getattr(expr, name, None) for name in _PARTS]
    parts += list(expr.args) if isinstance(expr, tvm.ir.Call) else []
    return min([most, *(_most_lanes(part) for part in parts if isinstance(part, tvm.ir.Expr))])


def _side_by_side(shape: Sequence[tvm.ir.Expr], indices: list[tvm.ir.Expr], axis: tirx.Var, width: int) -> bool:
    """Whether neighbours along `axis` are neighbours in memory, in rows of whole vectors of `width`, or the same
    element. A row of a slice begins where one of what it is cut from does: no GPU loads a vector from there else."""
    outer = indices[:-1]
    if any(axis.same_as(var) for index in outer for var in tirx.analysis.undefined_vars(index)):
        return False
    if not indices:
        return True
    if indices[-1].same_as(axis):
        return len(shape) == 1 or (isinstance(shape[-1], tirx.IntImm) and int(shape[-1]) % width == 0)
    return not any(axis.same_as(var) for var in tirx.analysis.undefined_vars(indices[-1]))


def _loops(sch: s_tir.Schedule, block: SBlockRV) -> list[LoopRV]:
    return sch.get_loops(block) or [sch.add_unit_loop(block)]
