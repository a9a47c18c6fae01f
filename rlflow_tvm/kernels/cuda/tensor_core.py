"""The rule of half-precision matrix products, convolutions among them, on tensor cores.

The schedule is that of dlight's `MatmulTensorization` (operands through shared memory in a two-stage pipeline, 16x16
fragments, results back through shared memory), which has one tile, float16, and products of more than 64 in each
extent. Here the tile follows the product's size, and bfloat16 is taken as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.s_tir.dlight.gpu.matmul import auto_inline_consumer_chain, auto_inline_producers, get_index_map
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from ..target import STATIC_SHARED_BYTES
from .products import Product, Tile, choose_tile, find_product, keep_within
from .wmma import DTYPES, DYNAMIC, FRAGMENT, STATIC, intrinsics

_WARP = 32
_VECTOR = 4  # elements that a thread fetches at once
_SMALLEST = 16  # of rows and columns; of less, most of a fragment would be padding
_SHALLOWEST = 32
_DEEP = 64  # from here on a step of the reduction is four fragments deep, else two
_ROW_GAP = 4  # elements between rows of results, so that rows begin in different banks
_FACTOR_GAP = 8  # likewise of factors
_STAGES = 2  # of the pipeline: factors are fetched into one while those in the other are multiplied
_FIRST_ARCH = 80  # bfloat16 fragments, and shared memory for the largest tile


@dataclass(frozen=True)
class Warps:
    """Warps of a thread block along rows and columns; each computes 2 x 2 fragments."""

    rows: int
    columns: int

    @property
    def result_scope(self) -> str:
        """Where results wait to be written: static shared memory, if they fit.

        TVM lets buffers in dynamic shared memory share their place, and in some kernels then finds float32 results
        where its intrinsics expect factors.
        """
        return STATIC if self._result_bytes <= STATIC_SHARED_BYTES else DYNAMIC

    def steps(self, depth: int) -> int:
        """Fragments along the reduction that are in shared memory at a time: more for a deep one, if it can start."""
        return next(filter(self._starts, (4, 2) if depth >= _DEEP else (2, 4)))

    @property
    def _result_bytes(self) -> int:
        return 4 * self.rows * _EACH * FRAGMENT * (self.columns * _EACH * FRAGMENT + _ROW_GAP)

    def _starts(self, steps: int) -> bool:
        """Whether a launch succeeds: TVM asks CUDA for more than the usual 48 KB of shared memory only where the
        dynamic part alone needs more."""
        factors = _STAGES * 2 * (self.rows + self.columns) * _EACH * FRAGMENT * (steps * FRAGMENT + _FACTOR_GAP)
        static, dynamic = (self._result_bytes, factors) if self.result_scope == STATIC else (0, self._result_bytes)
        return dynamic >= STATIC_SHARED_BYTES or static + dynamic <= STATIC_SHARED_BYTES


_EACH = 2
WARPS: dict[Tile, Warps] = {
    Tile(rows * _EACH * FRAGMENT, columns * _EACH * FRAGMENT, share): Warps(rows, columns)
    for rows, columns, share in ((4, 4, 1.0), (4, 2, 0.8), (2, 4, 0.8), (2, 2, 0.6), (1, 2, 0.4), (1, 1, 0.25))
}


class TensorCore(GPUScheduleRule):
    """Products of float16 or bfloat16 factors summed in float32, with the element-wise blocks round them.

    `tensorize=False` leaves the loops that the intrinsics stand for: the same program for machines without them.
    """

    def __init__(self, tensorize: bool = True) -> None:
        self._tensorize = tensorize

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where it is no such product, is too small, or the GPU too old."""
        sch = s_tir.Schedule(func)
        found = find_product(sch)
        if found is None or not _is_fit(found[1]) or _arch(target) < _FIRST_ARCH:
            return None
        block, product = found
        self._schedule(sch, block, product, WARPS[choose_tile(product, tuple(WARPS), target)])
        return s_tir.Schedule(keep_within(sch.mod["main"], product))

    def _schedule(self, sch: s_tir.Schedule, block: SBlockRV, product: Product, warps: Warps) -> None:
        steps = warps.steps(product.depth)
        _as_product(sch, block)
        sizes = [1, warps.rows * _EACH * FRAGMENT, warps.columns * _EACH * FRAGMENT, steps * FRAGMENT]
        sch.pad_einsum(block, sizes)
        batch, i, j, k = sch.get_loops(block)
        i, i_inner = sch.split(i, [None, FRAGMENT])
        j, j_inner = sch.split(j, [None, FRAGMENT])
        k, k_inner = sch.split(k, [None, FRAGMENT])
        sch.reorder(i, j, k, i_inner, j_inner, k_inner)
        fragment = sch.blockize(i_inner)
        i, i_warp, i_each = sch.split(i, [None, warps.rows, _EACH])
        j, j_warp, j_each = sch.split(j, [None, warps.columns, _EACH])
        k, k_step = sch.split(k, [None, steps])
        sch.annotate(k, "software_pipeline_order", [0, 3, 1, 4, 5, 2, 6])
        sch.annotate(k, "software_pipeline_stage", [0, 0, 0, 0, 0, 1, 1])
        sch.annotate(k_step, "software_pipeline_order", [0, 1, 2])
        sch.annotate(k_step, "software_pipeline_stage", [0, 0, 1])
        sch.reorder(i, j, j_warp, i_warp, k, k_step, i_each, j_each)
        warp = sch.fuse(j_warp, i_warp)
        for loop, axis in ((batch, "blockIdx.z"), (i, "blockIdx.x"), (j, "blockIdx.y"), (warp, "threadIdx.y")):
            sch.bind(loop, axis)
        for index in (0, 1):
            shared = _fetch(sch, fragment, index, k, warps)
            auto_inline_producers(sch, shared)
        left = sch.cache_read(fragment, 0, "wmma.matrix_a")
        right = sch.cache_read(fragment, 1, "wmma.matrix_b")
        sch.compute_at(left, k_step)
        sch.compute_at(right, k_step)
        result = sch.cache_write(fragment, 0, warps.result_scope)
        sch.storage_align(result, 0, -2, FRAGMENT, _ROW_GAP)
        store = sch.cache_write(fragment, 0, "wmma.accumulator")
        sch.reverse_compute_at(store, warp)
        sch.reverse_compute_at(result, warp)
        zero = sch.decompose_reduction(fragment, k)
        inner = {block: _by_fragments(sch, block) for block in (left, right, store)}
        if self._tensorize:
            names = intrinsics(product.factors[0], warps.result_scope)
            sch.tensorize(inner[left], names.load_left)
            sch.tensorize(inner[right], names.load_right)
            sch.tensorize(sch.get_loops(sch.get_child_blocks(zero)[0])[-2], names.fill)
            sch.tensorize(inner[store], names.store)
            sch.tensorize(sch.get_loops(block)[-3], names.multiply)
        auto_inline_consumer_chain(sch, result)
        _, thread, vector = sch.split(sch.fuse(*sch.get_loops(result)[-2:]), [None, _WARP, _VECTOR])
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(vector)


def _as_product(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """The block as C[S, I, J] += A[S, I, K] * B[S, J, K], reading and writing buffers of these axes."""
    left, right = sch.reindex(block, ("read", 0)), sch.reindex(block, ("read", 1))
    result = sch.reindex(block, ("write", 0))
    maps = get_index_map(sch.get(block))
    assert maps is not None  # `find_product` has seen that it is one
    product_map, left_map, right_map, result_map = maps
    sch.transform_layout(left, ("write", 0), left_map)
    sch.transform_layout(right, ("write", 0), right_map)
    sch.transform_layout(result, ("read", 0), result_map)
    sch.transform_block_layout(block, product_map)


def _fetch(sch: s_tir.Schedule, block: SBlockRV, index: int, at: LoopRV, warps: Warps) -> SBlockRV:
    """A factor's part of one step in shared memory, brought by all threads of the thread block."""
    shared = sch.cache_read(block, index, DYNAMIC)
    sch.compute_at(shared, at)
    fused = sch.fuse(*sch.get_loops(shared)[-2:])
    _, warp, thread, vector = sch.split(fused, [None, warps.rows * warps.columns, _WARP, _VECTOR])
    sch.bind(thread, "threadIdx.x")
    sch.bind(warp, "threadIdx.y")
    sch.vectorize(vector)
    sch.storage_align(shared, 0, axis=-2, factor=FRAGMENT, offset=_FACTOR_GAP)
    sch.annotate(shared, "tirx.manifest_shared_memory_local_stage", 1)
    sch.annotate(shared, "double_buffer_scope", 0)
    return shared


def _by_fragments(sch: s_tir.Schedule, block: SBlockRV) -> LoopRV:
    """The copy `block` in loops over fragments, unrolled; the loop that an intrinsic takes the place of."""
    i, j = sch.get_loops(block)[-2:]
    i, i_inner = sch.split(i, [None, FRAGMENT])
    j, j_inner = sch.split(j, [None, FRAGMENT])
    sch.reorder(i, j, i_inner, j_inner)
    sch.unroll(i)
    sch.unroll(j)
    return i_inner


def _is_fit(product: Product) -> bool:
    same = product.factors[0] == product.factors[1]
    fits = min(product.rows, product.columns) >= _SMALLEST and product.depth >= _SHALLOWEST
    return same and product.factors[0] in DTYPES and product.result == "float32" and fits


def _arch(target: Target) -> int:
    """80 for "sm_80", 90 for "sm_90a"; 0 where the target names none."""
    digits = str(target.attrs.get("arch", "")).removeprefix("sm_").rstrip("af")
    return int(digits) if digits.isdigit() else 0
