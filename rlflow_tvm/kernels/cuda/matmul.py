"""The rule of matrix products, convolutions among them, on the processors' ordinary units."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight import gpu
from tvm.s_tir.dlight.gpu.base import GPUScheduleRule
from tvm.s_tir.schedule import LoopRV
from tvm.target import Target

from .products import Tile, choose_tile, find_product, keep_within

_UNROLL = "pragma_auto_unroll_max_step"
_EXPLICIT = "pragma_unroll_explicit"

CONFIGS: dict[Tile, gpu.Matmul.Config] = {
    Tile(rows, columns, share): gpu.Matmul.Config(
        block_size_x=threads[0],
        block_size_y=threads[1],
        micro_size_x=rows // threads[0],
        micro_size_y=columns // threads[1],
        micro_size_k=depth,
        vector_size=2,
        unroll=1024,
        use_shared=True,
        storage_align=True,
    )
    for rows, columns, share, threads, depth in (
        (128, 128, 1.0, (16, 16), 8),
        (64, 64, 0.8, (8, 16), 16),
        (32, 64, 0.6, (8, 16), 16),
        (32, 32, 0.45, (8, 8), 16),
        (16, 32, 0.3, (8, 8), 16),
    )
}
"""dlight's schedule has 32 x 64 only: too little for large products, too much for the small ones of one image."""


class Matmul(GPUScheduleRule):
    """dlight's rule for products, with the tile chosen by the product's size."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or None where it is not one matrix product."""
        found = find_product(s_tir.Schedule(func))
        if found is None:
            return None
        tile = choose_tile(found[1], tuple(CONFIGS), target)
        sch = _Tiled(CONFIGS[tile]).apply(func.with_attr("dlight.do_not_tensorize", True), target, tunable)
        return None if sch is None else s_tir.Schedule(keep_within(leave_unrolling_to_nvcc(sch).mod["main"], found[1]))


class _Tiled(gpu.Matmul):
    def __init__(self, config: gpu.Matmul.Config) -> None:
        self._config = config

    def get_configs(self, target: Target) -> gpu.Matmul.Config:
        return self._config


def leave_unrolling_to_nvcc(sch: s_tir.Schedule) -> s_tir.Schedule:
    """Loops marked to be written out carry `#pragma unroll` instead: the same code from a tenth of the source."""
    for loop in _all_loops(sch):
        if _EXPLICIT in sch.get(loop).annotations:
            sch.unannotate(loop, _EXPLICIT)
            sch.annotate(loop, _EXPLICIT, 0)
    return sch


def _all_loops(sch: s_tir.Schedule) -> list[LoopRV]:
    return [loop for block in sch.get_child_blocks(sch.get_sblock("root")) for loop in sch.get_loops(block)]
