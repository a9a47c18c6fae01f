"""The last, partly filled tile gets loops of its own; no block keeps a predicate, and nothing is computed wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET
from tvm import s_tir, tirx
from tvm.script import tirx as T

from rlflow_tvm.kernels.llvm.tails import peel_tails


def add_one(rows: int, columns: int) -> tirx.PrimFunc:
    """B = A + 1."""

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((rows, columns), "float32"), b: T.Buffer((rows, columns), "float32")) -> None:
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        for i, j in T.grid(rows, columns):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vi, vj] + T.float32(1)

    return main


def predicates(func: tirx.PrimFunc) -> list[str]:
    """The predicates of the blocks of `func` that are not simply true."""
    found: list[str] = []

    def note(realize: s_tir.SBlockRealize) -> None:
        if not isinstance(realize.predicate, tirx.IntImm):
            found.append(str(realize.predicate))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, note))
    return found


def check(func: tirx.PrimFunc, rows: int, columns: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype("float32")
    out = tvm.runtime.tensor(np.full((rows, columns), np.nan, "float32"))
    tvm.tirx.build(func, target=TARGET)["main"](tvm.runtime.tensor(x), out)
    np.testing.assert_array_equal(out.numpy(), x + 1)


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
