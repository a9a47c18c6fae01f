"""How a block of a kernel walks through memory: the steps between neighbouring reads, and what is touched at all."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    tvm.ir.prim.expr.Add: operator.add,
    tvm.ir.prim.expr.Sub: operator.sub,
    tvm.ir.prim.expr.Mul: operator.mul,
    tvm.ir.prim.expr.FloorDiv: operator.floordiv,
    tvm.ir.prim.expr.FloorMod: operator.mod,
    tvm.ir.prim.expr.Max: max,
    tvm.ir.prim.expr.Min: min,
}
Point = Mapping[tvm.ir.Var, int]


def leaf_blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    """The blocks that compute something, in order."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append))
    return [block for block in found if len(block.iter_vars) > 0]


def times(block: s_tir.SBlock) -> int:
    """How often the block's body runs."""
    return prod(int(axis.dom.extent) for axis in block.iter_vars)


def is_reduced(axis: tirx.IterVar) -> bool:
    return axis.iter_type == tirx.IterVar.CommReduce


def loads(block: s_tir.SBlock) -> list[tvm.ir.TensorLoad]:
    """The reads in a block's body, but for those of what it writes itself (a sum so far)."""
    found: list[tvm.ir.TensorLoad] = []
    written: list[tvm.ir.Expr] = []
    tvm_ffi.structural_walk(
        block.body,
        [(tvm.ir.TensorLoad, found.append), (tirx.BufferStore, lambda store: written.append(store.buffer))],
    )
    return [load for load in found if not any(load.source.same_as(buffer) for buffer in written)]


def touched(func: tirx.PrimFunc) -> list[int]:
    """Elements of each parameter that one run reads or writes: all, or as many as there are accesses where fewer."""
    accesses: Counter[tvm.ir.Var] = Counter()
    for block in leaf_blocks(func):
        for load in loads(block):
            accesses[load.source] += times(block)
    sizes = [prod(int(extent) for extent in param.ty.shape) for param in func.params]
    return [min(size, accesses.get(param, size)) for size, param in zip(sizes, func.params, strict=True)]


def axes_by_step(block: s_tir.SBlock) -> tuple[list[tirx.IterVar], list[tirx.IterVar]]:
    """The spatial and the reduced axes longer than 1, those first along which neighbours lie closest in the result."""
    spatial = [axis for axis in block.iter_vars if not is_reduced(axis) and int(axis.dom.extent) > 1]
    reduced = [axis for axis in block.iter_vars if is_reduced(axis) and int(axis.dom.extent) > 1]
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(block.body, (tirx.BufferStore, stores.append))
    if not stores:
        return spatial[::-1], reduced[::-1]
    store = stores[0]
    steps = {axis.var: step(store.buffer, store.indices, axis.var, block) or 0 for axis in spatial}
    spatial.reverse()  # of equal steps the axis written last is the inner one
    return sorted(spatial, key=lambda axis: abs(steps[axis.var])), reduced[::-1]


def step(buffer: tvm.ir.Expr, indices: list[tvm.ir.Expr], var: tvm.ir.Var, block: s_tir.SBlock) -> int | None:
    """Elements from an access to the next along `var`, at the block's first point; None where data decide."""
    first = {axis.var: 0 for axis in block.iter_vars}
    before = element_offset(buffer, indices, first)
    after = element_offset(buffer, indices, {**first, var: 1})
    return None if before is None or after is None else after - before


def element_offset(buffer: tvm.ir.Expr, indices: list[tvm.ir.Expr], point: Point) -> int | None:
    """Elements from the buffer's first to the one accessed at `point`; None where data decide."""
    offset = 0
    for index, extent in zip(indices, buffer.ty.shape, strict=True):
        value = index_value(index, point)
        if value is None:
            return None
        offset = offset * int(extent) + value
    return offset


def index_value(expr: tvm.ir.Expr, point: Point) -> int | None:
    """An index at a point; None for what is no arithmetic of axes."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tvm.ir.Var):
        return point.get(expr)
    if isinstance(expr, tvm.ir.prim.expr.Cast):
        return index_value(expr.value, point)
    function = _ARITHMETIC.get(type(expr))
    if function is None:
        return None
    a, b = index_value(expr.a, point), index_value(expr.b, point)
    return None if a is None or b is None else function(a, b)
