"""Attention as the products, the softmax and the permutations that it is made of, for any target.

TVM makes one function of it all, which schedule rules take for one reduction: its products become sums of scalars. It
counts the heads of keys and values by the queries', and reads beyond them where they are fewer.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, te, tirx

from rlflow_tvm.ir import known_shape

from .choice import LegalizeFunc

_HEADS_FIRST = [0, 2, 1, 3]  # (batch, sequence, heads, features) to (batch, heads, sequence, features), and back


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.nn.attention` or `relax.nn.attention_bias` as relax operators, which are legalised in their turn.

    What has no static shape, a window or operands of several types is left to TVM.
    """
    op, emit, attrs = relax.op, builder.emit, call.attrs
    types = {str(arg.ty.dtype) for arg in call.args}
    known = [shape for shape in (known_shape(arg.ty) for arg in call.args) if shape is not None]
    if len(known) < len(call.args) or len(types) > 1 or attrs.window_size is not None:
        return call.op.get_attr("FLegalize")(builder, call)
    query, key, value, *bias = call.args
    (_, rows, heads, features), (_, columns, *_), *_ = known
    dtype = types.pop()
    query, key, value = (
        emit(op.permute_dims(_with_heads(builder, each, heads), axes))
        for each, axes in ((query, _HEADS_FIRST), (key, [0, 2, 3, 1]), (value, _HEADS_FIRST))
    )
    scale = 1 / math.sqrt(features) if attrs.scale is None else float(attrs.scale)
    scores = emit(op.multiply(emit(op.matmul(query, key)), relax.const(scale, dtype)))
    for each in bias:
        scores = emit(op.add(scores, each))
    if attrs.causal_mask is not None:
        behind = {"TopLeft": 0, "BottomRight": abs(rows - columns)}[str(attrs.causal_mask)]
        scores = emit(builder.call_te(_causal, scores, behind, primfunc_name_hint="causal_mask"))
    result = emit(op.matmul(emit(op.nn.softmax(scores)), value))
    return op.permute_dims(result, _HEADS_FIRST)


def _with_heads(builder: relax.BlockBuilder, operand: relax.Expr, heads: int) -> relax.Expr:
    """(batch, sequence, heads, features) with each head as often as makes `heads`: for as many queries it is there."""
    own = int(operand.ty.shape[2])
    return operand if own == heads else builder.emit(relax.op.repeat(operand, heads // own, 2))


def _causal(scores: te.Tensor, behind: int) -> te.Tensor:
    """Scores (batch, heads, queries, keys), minus infinity where the key is more than `behind` after the query."""

    def score(*place: tirx.Var) -> tvm.ir.Expr:
        *_, query, key = place
        return tirx.Select(key <= query + behind, scores(*place), tirx.const(-math.inf, scores.dtype))

    return te.compute(scores.shape, score, name="causal_mask")


ATTENTION: dict[str, LegalizeFunc] = {"relax.nn.attention": _legalize, "relax.nn.attention_bias": _legalize}
