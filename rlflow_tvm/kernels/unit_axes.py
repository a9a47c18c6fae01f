"""Leading axes of extent one: a kernel is scheduled, and known, without them.

A model's batch of one stands before the rows of everything that it computes, and rewrites take it away and put it
back. (1, M, K) x (K, N) and (M, K) x (K, N) are one loop nest over the same bytes: they get one key, so that neither is
measured for itself (whoever chooses the less of two measurements of one thing gains what they differ by), and one
schedule, so that the key tells the truth.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad, TensorRegion

from .llvm.matmul_legalize import PANEL_ATTR
from .loops import is_plain_buffer

_ATTRS = "rlflow."
_SCHEDULED_ATTR = "tirx.is_scheduled"
_Views = Mapping[tirx.Buffer, tuple[tirx.Buffer, int]]
"""A buffer -> the one in its place, and how many leading axes that one has less; below zero: more."""


def without_unit_axes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` (fused, not scheduled) with the leading axes of extent one dropped from each buffer.

    As many as all results have before their last two axes (so that a product of one row stays one), no buffer's last
    axis, and none of a product by panels. As it is, where that is none; where it is not made of blocks in loops over
    buffers as Relax makes them, or does anything but load from them and store to them; where it is scheduled; and where
    its schedule, or a block, knows axes by their place: a convolution's or a pool's (blocks of both carry attributes of
    this package).
    """
    if not isinstance(func.body, s_tir.SBlockRealize) or _SCHEDULED_ATTR in func.attrs:
        return func
    allocated = func.body.block.alloc_buffers
    if not all(is_plain_buffer(buffer.ty) for buffer in (*func.params, *allocated)):
        return func
    blocks, written = _uses(func)
    most = min((min(_leading(param), len(param.ty.shape) - 2) for param in func.params if param in written), default=0)
    if most <= 0 or any(map(_knows_places, blocks)):
        return func
    panels = {region.source for block in blocks if PANEL_ATTR in block.annotations for region in _by_panels(block)}
    buffers = {*func.params, *allocated} - panels
    views = {buffer: _dropped(buffer, most) for buffer in buffers if _leading(buffer) and len(buffer.ty.shape) > 1}
    body = _viewed(func.body, views)
    if not views.keys().isdisjoint(_variables(body)):  # a call is given the buffer itself
        return func
    body = tvm_ffi.structural_map(body, [(s_tir.SBlockRealize, _used), (tirx.For, _looped)])
    return tirx.PrimFunc([_view(param, views) for param in func.params], body, func.ret_type, func.attrs)


def with_unit_axes(scheduled: tirx.PrimFunc, original: tirx.PrimFunc) -> tirx.PrimFunc:
    """What a schedule made of `without_unit_axes(original)`, over the parameters of `original`."""
    pairs = list(zip(scheduled.params, original.params, strict=True))
    if all(_rank(ours) == _rank(theirs) for ours, theirs in pairs):
        return scheduled
    views = {ours: (theirs, _rank(ours) - _rank(theirs)) for ours, theirs in pairs}
    body = _viewed(scheduled.body, views)
    return tirx.PrimFunc(list(original.params), body, scheduled.ret_type, scheduled.attrs)


def _rank(param: tirx.Var) -> int:
    return len(param.ty.shape) if isinstance(param.ty, tirx.BufferType) else 0


def _leading(buffer: tirx.Buffer) -> int:
    """How many axes of extent one stand before all others."""
    shape, count = list(buffer.ty.shape), 0
    while count < len(shape) and _is_one(shape[count]):
        count += 1
    return count


def _dropped(buffer: tirx.Buffer, most: int) -> tuple[tirx.Buffer, int]:
    shape = list(buffer.ty.shape)
    count = min(_leading(buffer), len(shape) - 1, most)
    return tirx.decl_buffer(shape[count:], buffer.ty.dtype, buffer.name, layout=None), count


def _uses(func: tirx.PrimFunc) -> tuple[list[s_tir.SBlock], set[tirx.Buffer]]:
    """The blocks, and the buffers that are written."""
    blocks: list[s_tir.SBlock] = []
    written: set[tirx.Buffer] = set()
    tvm_ffi.structural_walk(
        func.body, [(s_tir.SBlock, blocks.append), (tirx.BufferStore, lambda store: written.add(store.buffer))]
    )
    return blocks, written


def _knows_places(block: s_tir.SBlock) -> bool:
    """Whether a schedule, or the block itself, which has another view of a buffer, knows axes by their place."""
    marks = (str(mark) for mark in block.annotations)
    return len(block.match_buffers) > 0 or any(mark.startswith(_ATTRS) and mark != PANEL_ATTR for mark in marks)


def _by_panels(product: s_tir.SBlock) -> tuple[TensorRegion, TensorRegion]:
    """The weight in panels and what it is multiplied into, which has all rows as one axis."""
    return product.reads[-1], product.writes[0]


def _view(buffer: tirx.Buffer, views: _Views) -> tirx.Buffer:
    return views[buffer][0] if buffer in views else buffer


def _viewed(stmt: tirx.Stmt, views: _Views) -> tirx.Stmt:
    """`stmt` with every access to a buffer of `views` made to the one in its place."""
    zero = tirx.const(0, "int64")

    def load(found: TensorLoad) -> TensorLoad:
        if found.source not in views:
            return found
        buffer, less = views[found.source]
        return tirx.BufferLoad(buffer, [*[zero] * -less, *list(found.indices)[max(less, 0) :]])

    def store(found: tirx.BufferStore) -> tirx.BufferStore:
        if found.buffer not in views:
            return found
        buffer, less = views[found.buffer]
        return tirx.BufferStore(buffer, found.value, [*[zero] * -less, *list(found.indices)[max(less, 0) :]])

    def region(found: TensorRegion) -> TensorRegion:
        if found.source not in views:
            return found
        buffer, less = views[found.source]
        unit = tvm.ir.Range.from_min_extent(zero, tirx.const(1, "int64"))
        return tirx.BufferRegion(buffer, [*[unit] * -less, *list(found.region)[max(less, 0) :]])

    def block(found: s_tir.SBlock) -> s_tir.SBlock:
        if not any(buffer in views for buffer in found.alloc_buffers):
            return found
        return _block(found, list(found.iter_vars), [_view(buffer, views) for buffer in found.alloc_buffers])

    callbacks = [(TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region), (s_tir.SBlock, block)]
    return tvm_ffi.structural_map(stmt, callbacks)


def _used(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
    """The block without those parallel axes of extent one that nothing in it reads any more."""
    block = realize.block
    read = _variables(block.body) | _variables(block.init)
    kept = [
        (axis, value)
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True)
        if axis.iter_type != tirx.IterVar.DataPar or axis.var in read or not _is_one(axis.dom.extent)
    ]
    if len(kept) == len(block.iter_vars):
        return realize
    plain = _block(block, [axis for axis, _ in kept], list(block.alloc_buffers))
    return s_tir.SBlockRealize([value for _, value in kept], realize.predicate, plain)


def _looped(loop: tirx.For) -> tirx.Stmt:
    unused = _is_one(loop.extent) and loop.loop_var not in _variables(loop.body)
    return loop.body if unused and loop.kind == tirx.ForKind.SERIAL else loop


def _variables(stmt: tirx.Stmt | None) -> set[tirx.Var]:
    found: set[tirx.Var] = set()
    if stmt is not None:
        tvm_ffi.structural_walk(stmt, (tirx.Var, found.add))
    return found


def _is_one(extent: tvm.ir.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _block(block: s_tir.SBlock, axes: list[tirx.IterVar], allocated: list[tirx.Buffer]) -> s_tir.SBlock:
    return s_tir.SBlock(
        axes, block.reads, block.writes, block.name_hint, block.body, block.init, allocated, block.match_buffers,
        block.annotations,
    )  # fmt: skip
