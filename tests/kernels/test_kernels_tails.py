"""The last, partly filled tile gets loops of its own; no block keeps a predicate, and nothing is computed wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_checks import TARGET, allocated, predicates
from tvm import s_tir, te, tirx

from rlflow_tvm.kernels.llvm.tails import peel_tails

_GUARD = 8192
"""Elements before and behind an output."""


def add_one(rows: int, columns: int) -> tirx.PrimFunc:
    """B = A + 1."""

    a = te.placeholder((rows, columns), "float32", name="a")
    add = te.compute((rows, columns), lambda i, j: a[i, j] + tirx.const(1, "float32"), name="add")
    return te.create_prim_func([a, add]).with_attrs({"tirx.noalias": True, "global_symbol": "main"})


def check(func: tirx.PrimFunc, rows: int, columns: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype("float32")
    # the output lies amidst a larger array: a store beyond its end shows, one far beyond it too
    whole = np.full(rows * columns + 2 * _GUARD + 16, np.nan, "float32")
    start = _GUARD + -(whole.ctypes.data // 4) % 16  # kernels rely on 64 bytes
    inside = whole[start : start + rows * columns].reshape(rows, columns)
    tvm.tirx.build(func, target=TARGET)["main"](tvm.runtime.tensor(x), tvm.runtime.from_dlpack(inside))
    np.testing.assert_array_equal(inside, x + 1)
    inside[...] = np.nan
    assert np.isnan(whole).all()


@pytest.mark.parametrize(("rows", "columns"), [(7, 19), (8, 16), (9, 33), (3, 5), (1, 1), (13, 47)])
def test_both_axes_tiled_in_one_parallel_loop(rows: int, columns: int) -> None:
    sch = s_tir.Schedule(add_one(rows, columns))
    i, j = sch.get_loops(sch.get_sblock("add"))
    i0, i1 = sch.split(i, [None, 4])
    j0, j1, j2 = sch.split(j, [None, 2, 8])
    sch.reorder(i0, j0, i1, j1, j2)
    sch.parallel(sch.fuse(i0, j0))
    sch.unroll(i1)
    sch.unroll(j1)
    sch.vectorize(j2)
    peeled = peel_tails(sch.mod["main"])
    assert predicates(peeled) == []
    check(peeled, rows, columns)


@pytest.mark.parametrize("columns", [5, 16, 17, 100])
def test_serial_loop_is_cut_in_two(columns: int) -> None:
    sch = s_tir.Schedule(add_one(2, columns))
    _, j = sch.get_loops(sch.get_sblock("add"))
    _, inner = sch.split(j, [None, 16])
    sch.vectorize(inner)
    peeled = peel_tails(sch.mod["main"])
    assert predicates(peeled) == []
    assert "if " not in peeled.script()
    check(peeled, 2, columns)


def test_function_without_predicates_is_returned_as_it_is() -> None:
    func = add_one(4, 16)
    assert peel_tails(func).same_as(func)


def test_predicate_that_is_no_tile_is_kept() -> None:
    sch = s_tir.Schedule(add_one(5, 7))
    fused = sch.fuse(*sch.get_loops(sch.get_sblock("add")))
    outer, inner = sch.split(fused, [None, 8])
    sch.parallel(outer)
    sch.reorder(inner, outer)
    check(peel_tails(sch.mod["main"]), 5, 7)


@pytest.mark.parametrize("columns", [64, 70])
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_tile_keeps_is_no_larger_where_the_last_one_is_not_full(columns: int, parallel: bool) -> None:
    """The full tiles and the last one have buffers of their own: one for both would be a row."""
    sch = s_tir.Schedule(add_one(6, columns))
    block = sch.get_sblock("add")
    store = sch.cache_write(block, 0, "local")
    i, j = sch.get_loops(block)
    outer, inner = sch.split(j, [None, 16])
    task = sch.fuse(i, outer) if parallel else outer
    if parallel:
        sch.parallel(task)
    sch.reverse_compute_at(store, task)
    sch.vectorize(inner)
    sch.vectorize(sch.get_loops(store)[-1])
    peeled = peel_tails(sch.mod["main"])
    assert predicates(peeled) == []
    assert list(allocated(peeled).values()) == [4 * 16]
    check(peeled, 6, columns)


@dataclass(frozen=True)
class Tiling:
    """How two axes are split from the outside in, in which order their loops stand, and what becomes of them."""

    extents: tuple[int, int]
    factors: tuple[tuple[int, ...], tuple[int, ...]]
    order: tuple[int, ...]
    parallel: int  # so many outer loops are fused to a parallel one
    store_at: int  # the loop, from the outside, under which the result is copied out


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Any nest of two axes with up to two splits each."""
    factor = st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 16]), max_size=2).map(tuple)
    factors = (draw(factor), draw(factor))
    order = draw(st.permutations([axis for axis in range(2) for _ in range(1 + len(factors[axis]))]))
    parallel = draw(st.integers(0, len(order)))
    extents = (draw(st.integers(1, 70)), draw(st.integers(1, 70)))
    return Tiling(extents, factors, tuple(order), parallel, draw(st.integers(0, len(order))))


def scheduled(tiling: Tiling) -> tirx.PrimFunc:
    """B = A + 1 through a register tile, as a product's sums and its epilogue go."""
    sch = s_tir.Schedule(add_one(*tiling.extents))
    block = sch.get_sblock("add")
    store = sch.cache_write(block, 0, "local")
    loops = sch.get_loops(block)
    tiles = [list(sch.split(a, [None, *f])) if f else [a] for a, f in zip(loops, tiling.factors, strict=True)]
    nest = [tiles[axis].pop(0) for axis in tiling.order]
    sch.reorder(*nest)
    if tiling.parallel:
        fused = nest[0] if tiling.parallel == 1 else sch.fuse(*nest[: tiling.parallel])
        sch.parallel(fused)
        nest = [fused, *nest[tiling.parallel :]]
    if tiling.store_at < len(nest):
        sch.reverse_compute_at(store, nest[tiling.store_at])
    own = sch.get_loops(store)
    if own and len(own) > tiling.store_at + 1:
        sch.vectorize(own[-1])
    return sch.mod["main"]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@example(Tiling((1, 1), ((), (2, 2)), (0, 1, 1, 1), parallel=3, store_at=0))  # a tile that lies wholly beyond the end
@given(tilings())
def test_any_tiling_computes_each_element_and_nothing_beyond(tiling: Tiling) -> None:
    check(peel_tails(scheduled(tiling)), *tiling.extents)
