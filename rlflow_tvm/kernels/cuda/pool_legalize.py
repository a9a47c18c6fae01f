"""Legalisation of the adaptive average pool for GPUs: windows that differ in size are all as wide as the widest.

TVM's own form sums over an extent that depends on the output's index, which no schedule rule takes.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, te, tirx


def legalize_adaptive_avg_pool2d(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.adaptive_avg_pool2d` in "NCHW" and "NHWC" as a call of a PrimFunc; other layouts as TVM has them."""
    layout = str(call.attrs.layout)
    shapes = [call.args[0].ty.shape, call.ty.shape]
    static = all(isinstance(s, relax.ShapeExpr) and all(isinstance(d, tirx.IntImm) for d in s.values) for s in shapes)
    if layout not in ("NCHW", "NHWC") or str(call.attrs.out_layout or layout) != layout or not static:
        return call.op.get_attr("FLegalize")(bb, call)
    shape = [int(d) for d in shapes[1].values]
    pool = partial(_pool, shape=shape, rows=layout.index("H"), columns=layout.index("W"))
    return bb.call_te(pool, call.args[0], primfunc_name_hint="adaptive_avg_pool2d")


def _pool(data: te.Tensor, shape: list[int], rows: int, columns: int) -> te.Tensor:
    """The mean over rows floor(y*H/h) to ceil((y+1)*H/h), and columns alike."""
    axes = {rows: "kh", columns: "kw"}
    sizes = {axis: int(data.shape[axis]) for axis in axes}

    def bounds(index: tirx.Var, axis: int) -> tuple[tvm.ir.Expr, tvm.ir.Expr]:
        """Where the window begins, and how many it counts."""
        start = tirx.floordiv(index * sizes[axis], shape[axis])
        return start, tirx.floordiv((index + 1) * sizes[axis] + shape[axis] - 1, shape[axis]) - start

    def widest(axis: int) -> int:
        size, out = sizes[axis], shape[axis]
        return max(-(-(i + 1) * size // out) - i * size // out for i in range(out))

    taps = {axis: te.reduce_axis((0, widest(axis)), name) for axis, name in axes.items()}

    def term(*index: tirx.Var) -> tvm.ir.Expr:
        at = list(index)
        inside = []
        for axis, tap in taps.items():
            start, count = bounds(index[axis], axis)
            at[axis] = start + tap
            if sizes[axis] % shape[axis]:
                inside.append(tap < count)
        value = data(*at)
        if inside:
            value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, data.dtype))
        return te.sum(value, axis=list(taps.values()))

    total = te.compute(shape, term, name="pool_sum")

    def mean(*index: tirx.Var) -> tvm.ir.Expr:
        counted = bounds(index[rows], rows)[1] * bounds(index[columns], columns)[1]
        return tirx.div(total(*index), counted.astype(data.dtype))  # integers have no "/"

    return te.compute(shape, mean, name="pool_average")
