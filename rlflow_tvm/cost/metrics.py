"""What can be counted of a kernel without running it: floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import tvm
from tvm import tirx
from tvm.s_tir.analysis import estimate_tir_flops

from rlflow_tvm.errors import CostError


def kernel_flops(func: tirx.PrimFunc) -> int:
    """Floating-point operations of one run, by TVM's estimate: a multiply-add is two, `exp` and other calls none."""
    return int(estimate_tir_flops(tvm.IRModule({"main": func})))


def kernel_bytes(func: tirx.PrimFunc) -> int:
    """Bytes of all parameters, inputs and outputs: what the kernel moves if it touches each element once."""
    return sum(tensor_bytes(shape, dtype) for shape, dtype in kernel_buffers(func))


def cold_bytes(func: tirx.PrimFunc, cold: str) -> int:
    """Bytes of the parameters for which `cold`, as in `Kernel`, says that they are not in the private caches; none for
    an empty one, which says nothing."""
    return sum(tensor_bytes(*buffer) for buffer, digit in zip(kernel_buffers(func), cold, strict=False) if digit != "0")


def kernel_buffers(func: tirx.PrimFunc) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each parameter; CostError for a parameter that is no tensor or of no fixed shape."""
    found = []
    for param in func.params:
        if not isinstance(param.ty, tirx.buffer.BufferType):
            raise CostError(f"kernel parameter {param} is no tensor: give the model static shapes (from_onnx does)")
        found.append((static_shape(param.ty.shape, f"kernel parameter {param}"), str(param.ty.dtype)))
    return found


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor, elements in whole bytes (a boolean takes one)."""
    return prod(shape) * ((tvm.runtime.DataType(dtype).bits + 7) // 8)


def static_shape(extents: Iterable[object], owner: str) -> tuple[int, ...]:
    """`extents` as integers; CostError naming `owner` when one of them is not known."""
    known = []
    for extent in extents:
        if not isinstance(extent, int | tirx.IntImm):
            raise CostError(f"{owner} has the unknown extent {extent}: give the model static shapes (from_onnx does)")
        known.append(int(extent))
    return tuple(known)
