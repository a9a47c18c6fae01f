"""Blocked layouts: a convolution moves into NCHW16c with transforms round it; transforms move, meet and cancel.

`unpack` only moves towards the outputs and `pack` only towards the inputs; two that meet cancel, and a convolution can
read or write either layout itself. Moving a transform often gains nothing, and the first one costs.
"""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_PLAIN = 'data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW"'

_NUMBER = ("prod(shape(s)) == 1", "rank(s) <= 4")
_BESIDE = ("rank(y) == 4", "broadcasts_along_channels(shape(y), [dim(x, 0), dim(x, 1) * b, dim(x, 2), dim(x, 3)])")
_POOLS = ("max_pool2d", "avg_pool2d")


def _pool_rules(pool: str) -> tuple[RewriteRule, ...]:
    blocked = f"{pool}({{}}, layout=nchwc(b), out_layout=nchwc(b), **k)"
    plain = f'{pool}({{}}, layout="NCHW", out_layout="NCHW", **k)'
    return (
        RewriteRule(
            f"unpack_after_{pool}", "layout",
            f"{plain.format('unpack(x, block=b)')} => unpack({blocked.format('x')}, block=b)",
        ),
        RewriteRule(
            f"pack_before_{pool}", "layout",
            f"pack({plain.format('x')}, block=b) => {blocked.format('pack(x, block=b)')}",
        ),
    )  # fmt: skip


def _concat_rule(count: int, place: int = 0) -> RewriteRule:
    """By an unpacked operand in that place."""
    others = [f"y{i}" for i in range(count) if i != place]
    before, after = others.copy(), [f"pack({name}, block=b)" for name in others]
    before.insert(place, "unpack(x, block=b)")
    after.insert(place, "x")
    return RewriteRule(
        f"unpack_after_concat_{count}{'' if place == 0 else f'_by_{place + 1}'}", "layout",
        f"concat({', '.join(before)}, axis=1) => unpack(concat({', '.join(after)}, axis=1), block=b)",
        when=tuple(f"dim({name}, 1) % b == 0" for name in others),
    )  # fmt: skip


def _split_rule(item: int) -> RewriteRule:
    return RewriteRule(
        f"unpack_after_split_{item}", "layout",
        f"split(unpack(x, block=b), at=p, axis=1)[{item}] => unpack(split(x, at=[p[0] // b], axis=1)[{item}], block=b)",
        when=("len(p) == 1", "p[0] % b == 0"),
    )  # fmt: skip


RULES = (
    RewriteRule(
        "block_conv", "layout",
        f"conv2d(x, w, groups=1, {_PLAIN}, **k) => "
        "unpack(conv2d(pack(x, block=i), pack_kernel(w, block=o), data_layout=nchwc(i), kernel_layout=oihwo(o), "
        "out_layout=nchwc(o), **k), block=o) where i = block(dim(x, 1)); o = block(dim(w, 0))",
        when=("i > 1", "o > 1", "is_weight(w)"),
    ),
    RewriteRule(
        "block_conv_output", "layout",
        f"conv2d(x, w, groups=1, {_PLAIN}, **k) => "
        'unpack(conv2d(x, pack_kernel(w, block=o), data_layout="NCHW", kernel_layout=oihwo(o), out_layout=nchwc(o), '
        "**k), block=o) where o = block(dim(w, 0))",
        when=("block(dim(x, 1)) == 1", "o > 1", "is_weight(w)"),
    ),
    RewriteRule(
        "block_depthwise_conv", "layout",
        f"conv2d(x, w, groups=g, {_PLAIN}, **k) => "
        "unpack(conv2d(pack(x, block=o), pack_kernel(w, block=o), groups=g, data_layout=nchwc(o), "
        "kernel_layout=oihwo(o), out_layout=nchwc(o), **k), block=o) where o = block(dim(w, 0))",
        when=("g > 1", "g == dim(x, 1)", "g == dim(w, 0)", "o > 1", "is_weight(w)"),
    ),
    RewriteRule(
        "block_grouped_conv", "layout",
        f"conv2d(x, w, groups=g, {_PLAIN}, **k) => "
        "unpack(conv2d(pack(x, block=i), pack_kernel(w, block=o), groups=g, data_layout=nchwc(i), "
        "kernel_layout=oihwo(o), out_layout=nchwc(o), **k), block=o) where i = block(dim(x, 1)); o = block(dim(w, 0))",
        when=("g > 1", "dim(w, 1) > 1", "i > 1", "o > 1", "is_weight(w)"),
    ),
    RewriteRule(
        "conv_writes_blocked", "layout",
        'conv2d(x, w, kernel_layout="OIHW", out_layout="NCHW", **k) => '
        'unpack(conv2d(x, w, kernel_layout="OIHW", out_layout=nchwc(o), **k), block=o) where o = block(dim(w, 0))',
        when=("o > 1", 'k["groups"] == 1'),
    ),
    RewriteRule(
        "conv_reads_blocked", "layout",
        'conv2d(unpack(x, block=b), w, groups=1, kernel_layout="OIHW", data_layout="NCHW", **k) => '
        'conv2d(x, w, groups=1, kernel_layout="OIHW", data_layout=nchwc(b), **k)',
    ),
    RewriteRule(
        "conv_writes_plain", "layout",
        'unpack(conv2d(x, w, kernel_layout="OIHW", out_layout=l, **k), block=b) => '
        'conv2d(x, w, kernel_layout="OIHW", out_layout="NCHW", **k)',
    ),
    RewriteRule(
        "cancel_pack_of_unpack", "layout",
        "pack(unpack(x, block=b), block=b) => x",
    ),
    RewriteRule(
        "cancel_unpack_of_pack", "layout",
        "unpack(pack(x, block=b), block=b) => x",
    ),
    RewriteRule(
        "unpack_after_unary", "layout",
        "Unary[f](unpack(x, block=b)) => unpack(Unary[f](x), block=b)",
    ),
    RewriteRule(
        "pack_before_unary", "layout",
        "pack(Unary[f](x), block=b) => Unary[f](pack(x, block=b))",
    ),
    RewriteRule(
        "unpack_after_binary", "layout",
        "Commutative[f](unpack(x, block=b), y) => unpack(Commutative[f](x, pack(y, block=b)), block=b)",
        when=_BESIDE,
    ),
    RewriteRule(
        "unpack_after_minuend", "layout",
        "subtract(unpack(x, block=b), y) => unpack(subtract(x, pack(y, block=b)), block=b)", when=_BESIDE,
    ),
    RewriteRule(
        "unpack_after_subtrahend", "layout",
        "subtract(y, unpack(x, block=b)) => unpack(subtract(pack(y, block=b), x), block=b)", when=_BESIDE,
    ),
    RewriteRule(
        "unpack_after_channelwise", "layout",
        "Commutative[f](unpack(x, block=b), y) => "
        "unpack(Commutative[f](x, pack(reshape(y, shape=[1, dim(y, 0), 1, 1]), block=b)), block=b)",
        when=("shape(y) == [dim(x, 1) * b, 1, 1]",),
    ),
    RewriteRule(
        "unpack_after_number", "layout",
        "Binary[f](unpack(x, block=b), s) => unpack(Binary[f](x, s), block=b)", when=_NUMBER,
    ),
    RewriteRule(
        "unpack_after_number_left", "layout",
        "Binary[f](s, unpack(x, block=b)) => unpack(Binary[f](s, x), block=b)", when=_NUMBER,
    ),
    RewriteRule(
        "pack_before_number", "layout",
        "pack(Binary[f](x, s), block=b) => Binary[f](pack(x, block=b), s)", when=("rank(x) == 4", *_NUMBER),
    ),
    RewriteRule(
        "unpack_after_pad", "layout",
        "pad(unpack(x, block=b), pad_width=q, pad_value=v) => "
        "unpack(pad(x, pad_width=[q[0], q[1], 0, 0, q[4], q[5], q[6], q[7], 0, 0], pad_value=v), block=b)",
        when=("q[2] == 0", "q[3] == 0"),
    ),
    RewriteRule(
        "unpack_after_resize", "layout",
        'resize2d(unpack(x, block=b), layout="NCHW", **k) => unpack(resize2d(x, layout=nchwc(b), **k), block=b)',
    ),
    RewriteRule(
        "pack_before_resize", "layout",
        'pack(resize2d(x, layout="NCHW", **k), block=b) => resize2d(pack(x, block=b), layout=nchwc(b), **k)',
    ),
    RewriteRule(
        "unpack_after_max", "layout",
        "max(unpack(x, block=b), axis=a, keepdims=True) => unpack(max(x, axis=[2, 3], keepdims=True), block=b)",
        when=("normal(a, 4) == [2, 3]",),
    ),
    RewriteRule(
        "unpack_into_dense", "layout",  # a flattened image: the rows of the weights change places in its stead
        "matmul(reshape(unpack(x, block=b), shape=s), w) => matmul(reshape(x, shape=s), reshape(permute_dims(reshape("
        "w, shape=[dim(x, 1), b, dim(x, 2) * dim(x, 3), dim(w, 1)]), axes=[0, 2, 1, 3]), shape=shape(w)))",
        when=("is_weight(w)", "rank(w) == 2", "s == [dim(x, 0), dim(w, 0)]"),
    ),
    RewriteRule(
        "unpack_to_channels_last", "layout",
        "permute_dims(unpack(x, block=b), axes=[0, 2, 3, 1]) => reshape(permute_dims(x, axes=[0, 2, 3, 1, 4]), "
        "shape=[dim(x, 0), dim(x, 2), dim(x, 3), dim(x, 1) * b])",
    ),
    RewriteRule(
        "pack_of_channels_last", "layout",
        "pack(permute_dims(x, axes=[0, 3, 1, 2]), block=b) => permute_dims(reshape(x, shape=[dim(x, 0), dim(x, 1), "
        "dim(x, 2), dim(x, 3) // b, b]), axes=[0, 3, 1, 2, 4])",
    ),
    RewriteRule(
        "unpack_to_patches", "layout",
        "permute_dims(reshape(unpack(x, block=b), shape=s), axes=[0, 2, 1]) => "
        "reshape(permute_dims(x, axes=[0, 2, 3, 1, 4]), shape=[s[0], s[2], s[1]])",
        when=("s == [dim(x, 0), dim(x, 1) * b, dim(x, 2) * dim(x, 3)]",),
    ),
    RewriteRule(
        "pack_of_points_to_reshape", "layout",
        "pack(x, block=b) => reshape(x, shape=[dim(x, 0), dim(x, 1) // b, 1, 1, b])",
        when=("dim(x, 2) == 1", "dim(x, 3) == 1"),
    ),
    RewriteRule(
        "pack_before_binary", "layout",
        "pack(Binary[f](x, y), block=b) => Binary[f](pack(x, block=b), pack(y, block=b))",
        when=("rank(x) == 4", "rank(y) == 4", "broadcasts_along_channels(shape(y), shape(x))"),
    ),
    *(rule for pool in _POOLS for rule in _pool_rules(pool)),
    RewriteRule(
        "unpack_after_global_pool", "layout",
        'adaptive_avg_pool2d(unpack(x, block=b), output_size=s, layout="NCHW", out_layout="NCHW") => '
        "unpack(adaptive_avg_pool2d(x, output_size=s, layout=nchwc(b), out_layout=nchwc(b)), block=b)",
    ),
    RewriteRule(
        "unpack_after_mean", "layout",
        "mean(unpack(x, block=b), axis=a, keepdims=True) => unpack(mean(x, axis=[2, 3], keepdims=True), block=b)",
        when=("normal(a, 4) == [2, 3]",),
    ),
    RewriteRule(
        "unpack_after_flat_mean", "layout",
        "mean(unpack(x, block=b), axis=a, keepdims=False) => "
        "reshape(mean(x, axis=[2, 3], keepdims=False), shape=[dim(x, 0), dim(x, 1) * b])",
        when=("normal(a, 4) == [2, 3]",),
    ),
    RewriteRule(
        "unpack_of_points_to_reshape", "layout",
        "unpack(x, block=b) => reshape(x, shape=[dim(x, 0), dim(x, 1) * b, 1, 1])",
        when=("dim(x, 2) == 1", "dim(x, 3) == 1"),
    ),
    *(_concat_rule(count) for count in range(2, 9)),
    *(_concat_rule(count, 1) for count in (2, 3)),
    *(_split_rule(item) for item in (0, 1)),
)  # fmt: skip

# `unpack` only sinks, meets its inverse or becomes a reshape, of which none makes a transform again, a `pack` meets its
# inverse, is a reshape or a permutation with the one before it, and each convolution is blocked once: no sequence of
# these goes on forever.
TERMINATING = (
    *(rule.name for rule in RULES if rule.name.startswith(("cancel_", "unpack_"))),
    *(rule.name for rule in RULES if rule.name.startswith("block_")),
    "pack_of_points_to_reshape",
    "pack_of_channels_last",
)
