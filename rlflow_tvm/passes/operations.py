"""What a graph does at run time, counted on the graph: operations by kind, arithmetic, transcendental functions.

For comparing graphs of one model that differ by a few passes; what kernels do is `cost.metrics`' to tell.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import tvm
from tvm import relax, tirx
from tvm.s_tir.analysis import estimate_tir_flops

from rlflow_tvm.dataflow import Node
from rlflow_tvm.ir import extent_along
from rlflow_tvm.passes.graph import Graph

_MOVES = frozenset(
    f"relax.{name}"
    for name in (
        *("arange", "astype", "broadcast_to", "concat", "expand_dims", "flatten", "flip", "full"),
        *("full_like", "gather_elements", "gather_nd", "layout_transform", "one_hot", "ones", "ones_like"),
        *("permute_dims", "repeat", "reshape", "scatter_elements", "scatter_nd", "shape_of", "shape_to_tensor"),
        *("split", "squeeze", "stack", "strided_slice", "take", "tensor_to_shape", "tile", "tril", "triu"),
        *("nn.pad", "zeros", "zeros_like"),
    )
)
"""Operators that calculate nothing."""

_REDUCTIONS = frozenset(
    f"relax.{name}"
    for name in (
        *("argmax", "argmin", "collapse_sum_to", "cumprod", "cumsum", "max", "mean", "min", "prod", "std", "sum"),
        *("collapse_sum_like", "nn.adaptive_avg_pool2d", "variance"),
    )
)
"""One operation for each element of the input."""

_PER_ELEMENT = {
    "relax.nn.softmax": 4, "relax.nn.log_softmax": 4, "relax.nn.layer_norm": 8, "relax.nn.group_norm": 8,
    "relax.nn.instance_norm": 8, "relax.nn.rms_norm": 5, "relax.nn.batch_norm": 4, "relax.nn.gelu": 5,
    "relax.nn.gelu_tanh": 8, "relax.nn.silu": 3,
}  # fmt: skip
"""Operations for each element of the result, one where it is not said."""

_TRANSCENDENTAL = frozenset(
    f"relax.{name}"
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "log", "power", "rsqrt"),
        *("nn.gelu", "nn.gelu_tanh", "nn.log_softmax", "nn.silu", "nn.softmax", "nn.softplus"),
        *("sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)


@dataclass(frozen=True)
class Operations:
    """Of a graph's run: `counts` by operator; `flops`, a multiply-add being two; `transcendentals`: elements that a
    function such as `exp` is taken of; `written`: elements of all results. Work on weights alone is in none of them."""

    counts: Counter[str]
    flops: int
    transcendentals: int
    written: int

    @property
    def total(self) -> int:
        return self.counts.total()

    @staticmethod
    def of(graph: Graph) -> Operations:
        """Count those of `graph`."""
        counts: Counter[str] = Counter()
        flops = transcendentals = written = 0
        kernels = {gv.name_hint: func for gv, func in graph.prim_funcs.items()}
        for node in graph.nodes:
            if not isinstance(node.value, relax.Call) or node.var in graph.weight_only:
                continue
            counts[node.op] += 1
            size = elements(node.var.ty)
            written += size
            flops += _flops(node, size, kernels)
            transcendentals += size if node.op in _TRANSCENDENTAL else 0
        return Operations(counts, flops, transcendentals, written)


def elements(ty: relax.Type) -> int:
    """How many a value of this (static) type has, tuples added up; none where it is no tensor."""
    if isinstance(ty, relax.TupleType):
        return sum(map(elements, ty.fields))
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return 0
    return prod(int(extent) if isinstance(extent, tirx.IntImm) else 1 for extent in ty.shape.values)


def _flops(node: Node, size: int, kernels: dict[str, tirx.PrimFunc]) -> int:
    call = node.value
    if node.op in _MOVES:
        return 0
    if node.op == "relax.call_tir":
        func = kernels.get(call.args[0].name_hint)
        return 0 if func is None else int(estimate_tir_flops(tvm.IRModule({"main": func})))
    if node.op in _REDUCTIONS:
        return elements(call.args[0].ty)
    if node.op == "relax.matmul":
        shape = call.args[0].ty.shape.values
        return 2 * size * int(shape[-1])
    layout = str(getattr(call.attrs, "kernel_layout", ""))
    if node.op in ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"):
        return 2 * size * elements(call.args[1].ty) // extent_along("O", call.args[1].ty, layout)
    if node.op in ("relax.nn.conv1d_transpose", "relax.nn.conv2d_transpose"):
        return 2 * elements(call.args[0].ty) * elements(call.args[1].ty) // extent_along("I", call.args[1].ty, layout)
    if hasattr(call.attrs, "pool_size"):
        return size * prod(int(extent) for extent in call.attrs.pool_size)
    return size * _PER_ELEMENT.get(node.op, 1)
