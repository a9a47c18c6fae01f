"""Attention as ONNX Runtime fuses it, written as products and a softmax.

B: batch, S: tokens, T: tokens that are looked at, N: heads, H: extent of one. Formulas: ONNX Runtime's
docs/ContribOperators.md and onnxruntime/contrib_ops/cpu/bert/attention_helper.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlflow_tvm.frontend.expansion import Expansion

_DAMAGED = "the model is damaged, optimise it again"
_NO_CACHE = "export the model without a cache (use_cache=False), or with standard operators"
_FILTER = -10000.0
"""What `mask_filter_value` is where it is left out."""


def _to_heads(e: Expansion, x: str, batch: int, heads: int, extent: int) -> str:
    """(B, S, N H) -> (B, N, S, H)"""
    return e.add("Transpose", e.reshape(x, [batch, -1, heads, extent]), perm=[0, 2, 1, 3])


def _from_heads(e: Expansion, x: str, batch: int, length: int) -> str:
    """(B, N, S, H) -> (B, S, N H)"""
    return e.reshape(e.add("Transpose", x, perm=[0, 2, 1, 3]), [batch, length, -1])


def _attend(e: Expansion, q: str, k: str, v: str, scale: float, dtype: np.dtype, added: Sequence[str]) -> str:
    """softmax(scale Q K^T + all that is `added`) V, each (B, N, S or T, H)."""
    scores = e.add("Mul", e.add("MatMul", q, e.add("Transpose", k, perm=[0, 1, 3, 2])), e.tensor(scale, dtype))
    return e.add("MatMul", e.add("Softmax", _plus(e, scores, added), axis=-1), v)


def _plus(e: Expansion, scores: str, added: Sequence[str]) -> str:
    """The scores and what is added to them, as far as it is there."""
    for name in added:
        if name:
            scores = e.add("Add", scores, name)
    return scores


def _scale(e: Expansion, extent: int) -> float:
    """That of the scores, 1 / sqrt(H) where it is 0 or left out."""
    return float(e.attribute("scale", 0.0)) or 1 / math.sqrt(extent)


def _causal(e: Expansion, length: int, total: int, past: int, dtype: np.dtype, window: int = 0) -> str:
    """(1, 1, S, T), the least number where a token is later than the one that looks, or lies `window` before it or
    more; the first of S is that of T behind the `past`, and the last of S sees all that are later, of which there are
    some where keys are others than queries."""
    ahead = np.arange(total)[None] - (np.arange(length)[:, None] + past)
    ahead[-1] = np.minimum(ahead[-1], 0)  # so does ONNX Runtime
    hidden = (ahead > 0) | (ahead <= -window if window else np.zeros_like(ahead, bool))
    return e.tensor(np.where(hidden, np.finfo(dtype).min, 0)[None, None], dtype)


def _padding(e: Expansion, mask: str, batch: int, length: int, total: int, dtype: np.dtype) -> str:
    """What a mask adds to the scores, to be broadcast to (B, N, S, T): `mask_filter_value` where tokens are hidden.

    A mask is (B, T) or (B, S, T), not above 0 where they are, or the numbers of the tokens at which those of each row
    end (B), then those at which they begin (2 B).
    """
    hidden_by = float(e.attribute("mask_filter_value", _FILTER))
    if not mask:
        return ""
    shape, numbers = e.shape(mask), e.dtype(mask)
    if shape in ((batch, total), (batch, length, total)):
        seen = e.add("Greater", e.reshape(mask, [batch, 1, -1, total]), e.tensor(0, numbers))
    elif shape in ((batch,), (2 * batch,)):
        places = e.tensor(np.arange(total).reshape(1, 1, 1, total), numbers)
        ends, *begins = (e.reshape(part, [batch, 1, 1, 1]) for part in e.split(mask, 0, [batch] * (shape[0] // batch)))
        seen = e.add("Less", places, ends)
        if begins:
            seen = e.add("And", seen, e.add("Not", e.add("Less", places, begins[0])))
    else:
        e.refuse(f"with a mask of shape {shape} for {batch} rows of {length} tokens that look at {total}")
    return e.add("Where", seen, e.tensor(0, dtype), e.tensor(hidden_by, dtype))


def _hidden(e: Expansion, padding: str, causal: str, dtype: np.dtype) -> str:
    """What both add to the scores, the least number in the place of minus infinity: in rows of which all is hidden
    what either hides counts the same."""
    if not padding or not causal:
        return padding or causal
    both, least = e.add("Add", padding, causal), np.finfo(dtype).min
    if float(e.attribute("mask_filter_value", _FILTER)) > float(least) * 2.0**-26:  # lost beside the least number
        return both
    return e.add("Max", both, e.tensor(least, dtype))


def self_attention(e: Expansion, projected: str, shape: Sequence[int], dtype: np.dtype, places: Sequence[int]) -> None:
    """Give `Attention`'s outputs from its product: queries, keys and values side by side, (B, S, all their extents).

    `shape`: (B, S, all their extents). `places`: of the inputs mask, past and bias of the scores (-1: it has none).
    """
    batch, length, extent = shape
    heads = e.needed("num_heads")
    sizes = list(e.attribute("qkv_hidden_sizes", [extent // 3] * 3))
    for name in ("do_rotary", "past_present_share_buffer"):
        if e.attribute(name, 0):
            e.refuse(f"with the attribute {name!r}")
    mask, past, bias = (e.input(place) if place >= 0 else "" for place in places)
    q, k, v = (
        _to_heads(e, part, batch, heads, size // heads)
        for part, size in zip(e.split(projected, 2, sizes), sizes, strict=True)
    )
    total = length
    before = e.shape(past)[3] if past else 0
    if before:
        kept = (e.reshape(part, [batch, heads, before, -1]) for part in e.split(past, 0, [1, 1]))
        k, v = (e.add("Concat", old, new, axis=2) for old, new in zip(kept, (k, v), strict=True))
        total += before
    causal = _causal(e, length, total, total - length, dtype) if e.attribute("unidirectional", 0) else ""
    masks = _hidden(e, _padding(e, mask, batch, length, total, dtype), causal, dtype)
    added = [masks, bias]
    found = _attend(e, q, k, v, _scale(e, sizes[0] // heads), dtype, added)
    e.give(0, _from_heads(e, found, batch, length))
    if e.wants(1):
        e.give(1, e.add("Concat", *(e.reshape(x, [1, batch, heads, total, -1]) for x in (k, v)), axis=0))


def _attention(e: Expansion) -> None:
    """Of X W + b: queries, keys and values of the same tokens, with those of `past` before them."""
    x, weight, bias = e.required(0), e.required(1), e.input(2)
    projected = e.add("MatMul", x, weight)
    if bias:
        projected = e.add("Add", projected, bias)
    self_attention(e, projected, (*e.shape(x)[:2], e.shape(weight)[1]), e.dtype(x), (3, 4, 5))


def _multi_head_attention(e: Expansion) -> None:
    """Of queries (B, S, N H), and keys and values as these or as heads already."""
    query, key, value = e.required(0), e.input(1), e.input(2)
    heads = e.needed("num_heads")
    if len(e.shape(query)) != 3 or not key or not value or len(e.shape(key)) not in (3, 4):
        e.refuse("with queries, keys and values in one tensor", "optimise the model for the CPU (use_gpu=False)")
    dtype, given = e.dtype(query), [query, key, value]
    batch, length, hidden = e.shape(query)
    if e.input(3):
        sizes = [hidden, hidden, e.shape(e.input(3))[0] - 2 * hidden]
        parts = e.split(e.input(3), 0, sizes)
        given = [e.add("Add", x, part) if len(e.shape(x)) == 3 else x for x, part in zip(given, parts, strict=True)]
        if len(e.shape(key)) == 4:
            e.refuse("with a bias for keys that are heads already", _DAMAGED)
    ready = len(e.shape(key)) == 4
    total = e.shape(key)[2 if ready else 1]
    q = _to_heads(e, given[0], batch, heads, hidden // heads)
    k, v = (
        given[1:]
        if ready
        else (
            _to_heads(e, x, batch, heads, e.shape(name)[2] // heads)
            for x, name in zip(given[1:], (key, value), strict=True)
        )
    )
    past = e.shape(e.input(6))[2] if e.input(6) else 0
    if e.input(6):
        k, v = e.add("Concat", e.input(6), k, axis=2), e.add("Concat", e.required(7), v, axis=2)
    total += past
    causal = _causal(e, length, total, past, dtype) if e.attribute("unidirectional", 0) else ""
    masks = _hidden(e, _padding(e, e.input(4), batch, length, total, dtype), causal, dtype)
    added = [masks, e.input(5)]
    e.give(0, _from_heads(e, _attend(e, q, k, v, _scale(e, hidden // heads), dtype, added), batch, length))
    for place, name in ((1, k), (2, v)):
        if e.wants(place):
            e.give(place, name)


def _group_query_attention(e: Expansion) -> None:
    """Of a prompt: each head of keys and values serves several heads of queries, tokens see those before them.

    `seqlens_k`, the rows' numbers of tokens less one, changes only what padding at their ends gives, which ONNX Runtime
    does not define.
    """
    query, key, value = e.required(0), e.input(1), e.input(2)
    heads, groups = e.needed("num_heads"), e.needed("kv_num_heads")
    batch, length, hidden = e.shape(query)
    dtype = e.dtype(query)
    e.required(5)
    if e.input(3) or e.input(4):
        e.refuse("with a cache of keys and values", _NO_CACHE)
    total = e.constant(e.required(6))
    if total is None or total.size != 1 or total.item() != length:
        e.refuse("with a number of tokens that may differ from the prompt's", _NO_CACHE)
    extent = hidden // heads
    if not key:
        extent = hidden // (heads + 2 * groups)
        query, key, value = e.split(query, 2, [heads * extent, groups * extent, groups * extent])
    q, k = _to_heads(e, query, batch, heads, extent), _to_heads(e, key, batch, groups, extent)
    v = _to_heads(e, value, batch, groups, extent)
    if e.attribute("do_rotary", 0):
        places = e.tensor(np.arange(length)[None], np.int64)
        if e.input(9):  # of a prompt only the first number is read
            first = e.slice(e.slice(e.input(9), 0, 0, 1), 1, 0, 1)
            places = e.add("Add", places, first)
        waves = [e.add("Gather", e.required(at), places, axis=0) for at in (7, 8)]
        turned = 2 * e.shape(e.required(7))[1]
        interleaved = bool(e.attribute("rotary_interleaved", 0))
        waves = [e.reshape(wave, [-1, 1, length, turned // 2]) for wave in waves]
        q, k = (
            _rotated(e, x, waves, turned, (batch, n, length, extent), interleaved) for x, n in ((q, heads), (k, groups))
        )
    else:
        e.attribute("rotary_interleaved")
    _check_scores(e)
    # the heads of a group are rows of one product, so that no key is repeated
    rows = e.reshape(q, [batch, groups, -1, extent])
    product = e.add("MatMul", rows, e.add("Transpose", k, perm=[0, 1, 3, 2]))
    scores = e.add("Mul", e.reshape(product, [batch, heads, length, length]), e.tensor(_scale(e, extent), dtype))
    cap = e.attribute("softcap", 0.0)
    if cap:
        bound = e.tensor(cap, dtype)
        scores = e.add("Mul", e.add("Tanh", e.add("Div", scores, bound)), bound)
    window = e.attribute("local_window_size", -1)
    if window == 0:
        e.refuse("with a window of no tokens", _DAMAGED)
    window = max(window, 0)
    scores = _plus(e, scores, [_causal(e, length, length, 0, dtype, window), e.input(10)])
    seen = e.reshape(e.add("Softmax", scores, axis=-1), [batch, groups, -1, length])
    found = e.reshape(e.add("MatMul", seen, v), [batch, heads, length, extent])
    e.give(0, _from_heads(e, found, batch, length))
    for place, name in ((1, k), (2, v)):
        if e.wants(place):
            e.give(place, name)


def _check_scores(e: Expansion) -> None:
    """Attributes that are allowed at their defaults only."""
    for name, usual in (("smooth_softmax", 0), ("qk_output", 0), ("k_quant_type", "NONE"), ("v_quant_type", "NONE")):
        if e.attribute(name, usual) != usual:
            e.refuse(f"with the attribute {name!r}", _NO_CACHE)
    e.attribute("kv_cache_bit_width")  # of a cache that is quantised


def _rotary_embedding(e: Expansion) -> None:
    """Pairs of each token's numbers turned by angles that grow with its place: of (B, S, N H) or (B, N, S, H)."""
    x, places, waves = e.required(0), e.required(1), [e.required(2), e.required(3)]
    shape, turned = e.shape(x), 2 * e.shape(waves[0])[1]
    interleaved = bool(e.attribute("interleaved", 0))
    if e.attribute("scale", 1.0) != 1 or e.attribute("is_packed_batching", 0):
        e.refuse("with another 'scale' or 'is_packed_batching' than usual")
    length = shape[1] if len(shape) == 3 else shape[2]
    if len(e.shape(places)) < 2:
        places = e.add("Add", e.tensor(np.arange(length)[None], np.int64), places)
    heads = e.attribute("num_heads", 0)
    angles = [e.add("Gather", wave, places, axis=0) for wave in waves]
    if e.attribute("rotary_embedding_dim", 0) not in (0, turned):
        e.refuse("with another 'rotary_embedding_dim' than its cosines have", _DAMAGED)
    if len(shape) == 4:
        angles = [e.reshape(angle, [-1, 1, length, turned // 2]) for angle in angles]
        e.give(0, _rotated(e, x, angles, turned, shape, interleaved))
        return
    extent = shape[2] // heads if e.attribute("rotary_embedding_dim", 0) else turned
    angles = [e.reshape(angle, [-1, length, 1, turned // 2]) for angle in angles]
    parts = (shape[0], length, shape[2] // extent, extent)
    e.give(0, e.reshape(_rotated(e, e.reshape(x, parts), angles, turned, parts, interleaved), shape))


def _rotated(e: Expansion, x: str, waves: Sequence[str], turned: int, shape: Sequence[int], interleaved: bool) -> str:
    """The first `turned` numbers along the last axis of `x`, of that shape, as pairs (a, b) -> (a cos - b sin, a sin +
    b cos): neighbours where `interleaved`, else one of either half."""
    *outer, extent = shape
    rest = ""
    if turned < extent:
        x, rest = e.split(x, -1, [turned, extent - turned])
    half = turned // 2
    if interleaved:
        x = e.reshape(x, [*outer, half, 2])
        a, b = (e.reshape(part, [*outer, half]) for part in e.split(x, -1, [1, 1]))
    else:
        a, b = e.split(x, -1, [half, half])
    cosine, sine = waves
    pair = [
        e.add("Sub", e.add("Mul", a, cosine), e.add("Mul", b, sine)),
        e.add("Add", e.add("Mul", a, sine), e.add("Mul", b, cosine)),
    ]
    if interleaved:
        columns = e.add("Concat", *(e.reshape(part, [*outer, half, 1]) for part in pair), axis=-1)
        parts = [e.reshape(columns, [*outer, turned])]
    else:
        parts = pair
    parts += [rest] if rest else []
    return parts[0] if len(parts) == 1 else e.add("Concat", *parts, axis=-1)


ATTENTION: dict[str, Callable[[Expansion], None]] = {
    "Attention": _attention,
    "GroupQueryAttention": _group_query_attention,
    "MultiHeadAttention": _multi_head_attention,
    "RotaryEmbedding": _rotary_embedding,
}
"""Operators of com.microsoft."""
