"""Values to run kernels and models on, where only their time matters."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.prim import expr as prim

_NOISE = 1 << 20
_DIVISIONS = (prim.Div, prim.Mod, prim.FloorDiv, prim.FloorMod)


def plain_array(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Floats are normal with deviation `scale`, the same at each call; integers and booleans zero: a gather stays
    inside its table."""
    numpy_dtype = np.dtype(_registered(dtype))
    if not dtype.startswith(("float", "bfloat")):
        return np.zeros(shape, numpy_dtype)
    block = _noise()[: math.prod(shape)]
    return np.resize(block if scale == 1.0 else block * np.float32(scale), shape).astype(numpy_dtype, copy=False)


def plain_ones(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What integers may be divided by."""
    return np.ones(shape, np.dtype(_registered(dtype)))


def divisors(func: tirx.PrimFunc) -> frozenset[int]:
    """Numbers of the parameters that `func` divides integers by, also through other buffers: of zeros there it dies."""
    stored: dict[tvm.ir.Var, list[tvm.ir.Expr]] = {}
    todo: list[tvm.ir.Expr] = []
    read: set[tvm.ir.Var] = set()

    def divides(division: tvm.ir.Expr) -> None:
        if str(division.ty).startswith(("int", "uint")):
            todo.append(division.b)

    def stores(store: tirx.BufferStore) -> None:
        stored.setdefault(store.buffer, []).append(store.value)

    def loads(load: tvm.ir.TensorLoad) -> tvm_ffi.WalkResult:
        if load.source not in read:
            read.add(load.source)
            todo.extend(stored.get(load.source, ()))
        return tvm_ffi.WalkResult.SKIP  # what it is indexed by has to stay inside its extents

    def adds(sum_: tvm.ir.Expr) -> tvm_ffi.WalkResult:
        """x + 1 and x - 1 are no zeros where x is, the latter where it is one."""
        literal = any(isinstance(operand, tirx.IntImm) and int(operand) != 0 for operand in (sum_.a, sum_.b))
        return tvm_ffi.WalkResult.SKIP if literal else tvm_ffi.WalkResult.ADVANCE

    tvm_ffi.structural_walk(func.body, [(_DIVISIONS, divides), (tirx.BufferStore, stores)])
    while todo:
        tvm_ffi.structural_walk(todo.pop(), [(tvm.ir.TensorLoad, loads), ((prim.Add, prim.Sub), adds)], order="pre")
    return frozenset(number for number, param in enumerate(func.params) if param in read)


@cache
def _noise() -> np.ndarray:
    # Hundreds of megabytes of fresh random numbers take seconds: a block of them, repeated, does as well.
    return np.random.default_rng(0).standard_normal(_NOISE).astype("float32")


def _registered(dtype: str) -> str:
    if dtype.startswith(("bfloat", "float8")):
        import ml_dtypes  # noqa: F401  registers these names with numpy; comes with onnx
    return dtype
