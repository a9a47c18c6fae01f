"""Tensor-core intrinsics of 16x16x16 fragments: TVM's for float16, and the same for bfloat16, which TVM lacks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.s_tir.tensor_intrin import cuda as tvm_intrinsics

FRAGMENT = 16
DYNAMIC, STATIC = "shared.dyn", "shared"
DTYPES = ("float16", "bfloat16")
"""Of the factors; sums are float32."""


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

    Those for bfloat16 are registered with TVM when first asked for.
    """
    group = tvm_intrinsics.get_wmma_intrin_group(DYNAMIC, result_scope, "float16", "float32", trans_b=True)
    if dtype == "float16":
        left, right, multiply = group["load_a"], group["load_b"], group["compute"]
    else:
        size = (FRAGMENT, FRAGMENT, FRAGMENT)
        left, right, multiply = (f"rlflow.wmma_bf16_{name}" for name in ("load_a", "load_b", "sync"))
        for name, pair in (
            (left, tvm_intrinsics.get_wmma_load_intrin(*size, dtype, DYNAMIC, False, False)),
            (right, tvm_intrinsics.get_wmma_load_intrin(*size, dtype, DYNAMIC, True, True)),
            (multiply, tvm_intrinsics.get_wmma_sync_intrin(*size, dtype, "float32", True)),
        ):
            TensorIntrin.register(name, *pair, override=True)
    return Intrinsics(left, right, group["init"], multiply, group["store"])
