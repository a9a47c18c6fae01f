"""What a learned cost model is told of a kernel: numbers that are read off its unscheduled PrimFunc."""

from __future__ import annotations

from collections import Counter
from math import prod

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from rlflow_tvm.cost.access import axes_by_step, is_reduced, leaf_blocks, loads, step, times, touched
from rlflow_tvm.cost.metrics import kernel_buffers, kernel_flops, tensor_bytes

_SPATIAL, _REDUCED = 6, 4  # axes of the heaviest block, the innermost first
_OPERANDS, _STEPS = 2, 3  # of the heaviest block: operands and axes of which steps are told
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
    apart (direct, Winograd's ...); what is not there is left out. Bytes are those that are read or written at all: few
    of a table from which rows are picked. CostError for a parameter of no fixed shape.
    """
    buffers = kernel_buffers(func)
    sizes = [tensor_bytes((elements,), dtype) for elements, (_, dtype) in zip(touched(func), buffers, strict=True)]
    features: dict[str, float] = {
        "flops": float(kernel_flops(func)),
        "params": float(len(buffers)),
        "bits": float(tvm.DataType(buffers[-1][1]).bits) if buffers else 0.0,
    }
    features.update({f"bytes:{i}": float(size) for i, size in enumerate(sizes)})
    blocks = leaf_blocks(func)
    features["blocks"] = float(len(blocks))
    features["reductions"] = float(sum(any(map(is_reduced, block.iter_vars)) for block in blocks))
    features["worst_step"] = _worst_step(blocks)
    work: Counter[str] = Counter()
    for block in blocks:
        for kind, count in _operations(block.body).items():
            work[kind] += count * times(block)
        for name, value in block.annotations.items():
            features[f"mark:{name}"] = _number(value)
    features.update({f"work:{kind}": float(count) for kind, count in work.items()})
    if blocks:
        heaviest = max(blocks, key=times)
        features.update({**_extents(heaviest), **_steps(heaviest)})
    return features


def _extents(block: s_tir.SBlock) -> dict[str, float]:
    extents: dict[str, float] = {}
    for name, most, axes in zip(("spatial", "reduced"), (_SPATIAL, _REDUCED), axes_by_step(block), strict=True):
        lengths = [int(axis.dom.extent) for axis in axes]
        extents[name] = float(prod(lengths))
        extents.update({f"{name}:{i}": float(length) for i, length in enumerate(lengths[:most])})
    return extents


def _steps(block: s_tir.SBlock) -> dict[str, float]:
    """Elements between neighbouring reads of the largest operands, along the innermost axes."""
    spatial, reduced = axes_by_step(block)
    found = sorted(loads(block), key=lambda load: -prod(int(extent) for extent in load.source.ty.shape))
    steps: dict[str, float] = {}
    for i, load in enumerate(found[:_OPERANDS]):
        for name, axes, most in (("spatial", spatial, _STEPS), ("reduced", reduced, 1)):
            for j, axis in enumerate(axes[:most]):
                length = step(load.source, load.indices, axis.var, block)
                if length is not None:
                    steps[f"step:{i}:{name}:{j}"] = float(abs(length))
    return steps


def _worst_step(blocks: list[s_tir.SBlock]) -> float:
    """The longest step along the axis that is innermost in the result, of any block."""
    worst = 0
    for block in blocks:
        spatial, _ = axes_by_step(block)
        for load in loads(block) if spatial else ():
            worst = max(worst, abs(step(load.source, load.indices, spatial[0].var, block) or 0))
    return float(worst)


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
