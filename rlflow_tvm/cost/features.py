"""What a learned cost model is told of a kernel: numbers that are read off its unscheduled PrimFunc."""

from __future__ import annotations

from collections import Counter
from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from rlflow_tvm.cost.metrics import kernel_buffers, kernel_flops, tensor_bytes

_SPATIAL, _REDUCED = 6, 4  # axes of the heaviest block, the innermost first
_KINDS: dict[type, str] = {
    tvm.ir.prim.expr.Add: "add",
    tvm.ir.prim.expr.Sub: "add",
    tvm.ir.prim.expr.Mul: "mul",
    tvm.ir.prim.expr.Div: "div",
    tvm.ir.prim.expr.Max: "extremum",
    tvm.ir.prim.expr.Min: "extremum",
    tvm.ir.prim.expr.Select: "select",
    tvm.ir.prim.expr.FloorDiv: "index_div",
    tvm.ir.prim.expr.FloorMod: "index_div",
}


def kernel_features(func: tirx.PrimFunc) -> dict[str, float]:
    """By name: operations, bytes of each parameter, the heaviest block's extents, work by kind of operation, marks.

    Counts and extents as they are, not scaled. `mark:` features are the annotations by which implementations are told
    apart (direct, Winograd's ...); what is not there is left out. CostError for a parameter of no fixed shape.
    """
    buffers = kernel_buffers(func)
    sizes = [tensor_bytes(shape, dtype) for shape, dtype in buffers]
    features: dict[str, float] = {
        "flops": float(kernel_flops(func)),
        "params": float(len(buffers)),
        "bits": float(tvm.DataType(buffers[-1][1]).bits) if buffers else 0.0,
    }
    features.update({f"bytes:{i}": float(size) for i, size in enumerate(sizes)})
    blocks = _leaf_blocks(func)
    features["blocks"] = float(len(blocks))
    features["reductions"] = float(sum(any(_is_reduced(axis) for axis in block.iter_vars) for block in blocks))
    work: Counter[str] = Counter()
    for block in blocks:
        times = prod(int(axis.dom.extent) for axis in block.iter_vars)
        for kind, count in _operations(block.body).items():
            work[kind] += count * times
        for name, value in block.annotations.items():
            features[f"mark:{name}"] = _number(value)
    features.update({f"work:{kind}": float(count) for kind, count in work.items()})
    if blocks:
        features.update(_extents(max(blocks, key=lambda b: prod(int(axis.dom.extent) for axis in b.iter_vars))))
    return features


def _leaf_blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append))
    return [block for block in found if len(block.iter_vars) > 0]


def _extents(block: s_tir.SBlock) -> dict[str, float]:
    extents: dict[str, float] = {}
    for name, most, wanted in (("spatial", _SPATIAL, False), ("reduced", _REDUCED, True)):
        axes = [int(axis.dom.extent) for axis in block.iter_vars if _is_reduced(axis) == wanted]
        extents[name] = float(prod(axes))
        extents.update({f"{name}:{i}": float(extent) for i, extent in enumerate(axes[::-1][:most])})
    return extents


def _is_reduced(axis: tirx.IterVar) -> bool:
    return axis.iter_type == tirx.IterVar.CommReduce


def _operations(stmt: tirx.stmt.Stmt) -> Counter[str]:
    """Operations of each kind in one run of a block's body."""
    counts: Counter[str] = Counter()

    def note(node: tvm.ir.Expr) -> None:
        kind = _KINDS.get(type(node))
        if kind is not None:
            indexing = kind in ("add", "mul") and not str(node.ty).startswith(("float", "bfloat"))
            counts["index" if indexing else kind] += 1

    def call(node: tvm.ir.Call) -> None:
        counts[str(getattr(node.op, "name", "call"))] += 1

    tvm_ffi.structural_walk(stmt, [(tuple(_KINDS), note), (tvm.ir.Call, call)])
    return counts


def _number(value: object) -> float:
    """An annotation as a number: itself, the first of several, or 1 for what is none."""
    while isinstance(value, tvm_ffi.Array | list | tuple) and len(value):
        value = value[0]
    return float(value) if isinstance(value, int | float | tirx.IntImm | tirx.FloatImm) else 1.0
