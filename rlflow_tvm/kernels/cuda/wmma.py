"""Tensor-core intrinsics of 16x16x16 fragments, for factors in float16 or bfloat16 and sums in float32.

After `tvm.s_tir.tensor_intrin.cuda`, which lacks bfloat16 and registers all of its intrinsics when imported: that takes
half a minute. Each is a pair: what it computes, and the call in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import tvm
from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

FRAGMENT = 16
DYNAMIC, STATIC = "shared.dyn", "shared"
DTYPES = ("float16", "bfloat16")
"""Of the factors."""

Pair = tuple[tirx.PrimFunc, tirx.PrimFunc]


@dataclass(frozen=True)
class Intrinsics:
    """Names of registered intrinsics; the right factor is read column by column, as (columns, depth)."""

    load_left: str
    load_right: str
    fill: str
    multiply: str
    store: str


@cache
def intrinsics(dtype: str, result_scope: str) -> Intrinsics:
    """The intrinsics for factors of `dtype`, one of `DTYPES`, in dynamic shared memory, and results in `result_scope`.

    They are registered with TVM when first asked for.
    """
    names = Intrinsics(
        f"rlflow.wmma_load_left_{dtype}",
        f"rlflow.wmma_load_right_{dtype}",
        "rlflow.wmma_fill",
        f"rlflow.wmma_multiply_{dtype}",
        f"rlflow.wmma_store_{result_scope}",
    )
    for name, pair in (
        (names.load_left, _load(dtype, "wmma.matrix_a", "row_major")),
        (names.load_right, _load(dtype, "wmma.matrix_b", "col_major")),
        (names.fill, _fill()),
        (names.multiply, _multiply(dtype)),
        (names.store, _store(result_scope)),
    ):
        TensorIntrin.register(name, *pair, override=True)
    return names


def _index(buffer: tirx.Buffer, stride: tirx.Var) -> tvm.ir.Expr:
    """The number of the fragment that `buffer` begins with, in rows of `stride` elements."""
    row = buffer.elem_offset // stride // FRAGMENT
    return row * (stride // FRAGMENT) + buffer.elem_offset % stride // FRAGMENT


def _copy(dtype: str, source: str, target: str) -> tirx.PrimFunc:
    """A fragment of `dtype` from one memory scope to another, element by element."""

    @T.prim_func(s_tir=True)
    def computed(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (16, 16), dtype, align=64, offset_factor=16, scope=source)
        C = T.match_buffer(c, (16, 16), dtype, align=64, offset_factor=16, scope=target)
        with T.sblock("root"):
            T.reads(A[0:16, 0:16])
            T.writes(C[0:16, 0:16])
            for i, j in T.grid(16, 16):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj]

    return computed


def _load(dtype: str, scope: str, layout: str) -> Pair:
    @T.prim_func(s_tir=True)
    def called(a: T.handle, c: T.handle) -> None:
        s1 = T.int32()
        s0 = T.int32()
        d1 = T.int32()
        d0 = T.int32()
        A = T.match_buffer(a, (16, 16), dtype, align=64, offset_factor=16, scope="shared.dyn", strides=[s1, s0])
        C = T.match_buffer(c, (16, 16), dtype, align=64, offset_factor=16, scope=scope, strides=[d1, d0])
        with T.sblock("root"):
            T.reads(A[0:16, 0:16])
            T.writes(C[0:16, 0:16])
            T.evaluate(
                T.tvm_load_matrix_sync(
                    C.data, 16, 16, 16, _index(C, d1), A.access_ptr("r", ptr_type=dtype), s1, layout, dtype="void"
                )
            )

    return _copy(dtype, "shared.dyn", scope), called


def _fill() -> Pair:
    @T.prim_func(s_tir=True)
    def computed(c: T.handle) -> None:
        C = T.match_buffer(c, (16, 16), "float32", align=64, offset_factor=16, scope="wmma.accumulator")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:16, 0:16])
            for i, j in T.grid(16, 16):
                with T.sblock("init"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = T.float32(0)

    @T.prim_func(s_tir=True)
    def called(c: T.handle) -> None:
        d1 = T.int32()
        d0 = T.int32()
        C = T.match_buffer(
            c, (16, 16), "float32", align=64, offset_factor=16, scope="wmma.accumulator", strides=[d1, d0]
        )
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:16, 0:16])
            T.evaluate(T.tvm_fill_fragment(C.data, 16, 16, 16, _index(C, d1), T.float32(0), dtype="void"))

    return computed, called


def _store(scope: str) -> Pair:
    @T.prim_func(s_tir=True)
    def called(a: T.handle, c: T.handle) -> None:
        s1 = T.int32()
        s0 = T.int32()
        d1 = T.int32()
        d0 = T.int32()
        A = T.match_buffer(
            a, (16, 16), "float32", align=64, offset_factor=16, scope="wmma.accumulator", strides=[d1, d0]
        )
        C = T.match_buffer(c, (16, 16), "float32", align=64, offset_factor=16, scope=scope, strides=[s1, s0])
        with T.sblock("root"):
            T.reads(A[0:16, 0:16])
            T.writes(C[0:16, 0:16])
            T.evaluate(
                T.tvm_store_matrix_sync(
                    A.data,
                    16,
                    16,
                    16,
                    _index(A, d1),
                    C.access_ptr("w", ptr_type="float32"),
                    s1,
                    "row_major",
                    dtype="void",
                )
            )

    return _copy("float32", "wmma.accumulator", scope), called


def _multiply(dtype: str) -> Pair:
    @T.prim_func(s_tir=True)
    def computed(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (16, 16), dtype, align=64, offset_factor=16, scope="wmma.matrix_a")
        B = T.match_buffer(b, (16, 16), dtype, align=64, offset_factor=16, scope="wmma.matrix_b")
        C = T.match_buffer(c, (16, 16), "float32", align=64, offset_factor=16, scope="wmma.accumulator")
        with T.sblock("root"):
            T.reads(C[0:16, 0:16], A[0:16, 0:16], B[0:16, 0:16])
            T.writes(C[0:16, 0:16])
            for i, j, k in T.grid(16, 16, 16):
                with T.sblock(""):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vj, vk])

    @T.prim_func(s_tir=True)
    def called(a: T.handle, b: T.handle, c: T.handle) -> None:
        a1 = T.int32()
        a0 = T.int32()
        b1 = T.int32()
        b0 = T.int32()
        c1 = T.int32()
        c0 = T.int32()
        A = T.match_buffer(a, (16, 16), dtype, align=64, offset_factor=16, scope="wmma.matrix_a", strides=[a1, a0])
        B = T.match_buffer(b, (16, 16), dtype, align=64, offset_factor=16, scope="wmma.matrix_b", strides=[b1, b0])
        C = T.match_buffer(
            c, (16, 16), "float32", align=64, offset_factor=16, scope="wmma.accumulator", strides=[c1, c0]
        )
        with T.sblock("root"):
            T.reads(C[0:16, 0:16], A[0:16, 0:16], B[0:16, 0:16])
            T.writes(C[0:16, 0:16])
            T.evaluate(
                T.tvm_mma_sync(
                    C.data,
                    _index(C, c1),
                    A.data,
                    _index(A, a1),
                    B.data,
                    _index(B, b1),
                    C.data,
                    _index(C, c1),
                    dtype="void",
                )
            )

    return computed, called
