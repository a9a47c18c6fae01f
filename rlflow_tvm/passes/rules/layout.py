"""Blocked layouts: a convolution moves into NCHW16c with transforms round it; transforms move, meet and cancel.

`unpack` only moves towards the outputs and `pack` only towards the inputs; two that meet cancel, and a convolution can
read or write either layout itself. Moving a transform often gains nothing, and the first one costs.
"""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

_OPEN = {"strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "out_dtype": None}
_SAME = {**_OPEN, "padding": (1, 1, 1, 1)}
_STRIDED = {**_OPEN, "strides": (2, 1), "padding": (1, 0, 1, 0)}
_PLAIN = 'data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW"'
_POOL = {
    "pool_size": (3, 3), "strides": (2, 2), "dilation": (1, 1), "padding": (1, 1, 1, 1),
    "ceil_mode": False, "count_include_pad": False,
}  # fmt: skip
_POOL_ONE = {**_POOL, "pool_size": (1, 1), "strides": (1, 1), "padding": (0, 0, 0, 0)}
_GROUPS = {"groups": 1}
_W = ("w",)

_POOLS = ("max_pool2d", "avg_pool2d")


def _pool_rules(pool: str) -> tuple[RewriteRule, ...]:
    blocked = f"{pool}({{}}, layout=nchwc(b), out_layout=nchwc(b), **k)"
    plain = f'{pool}({{}}, layout="NCHW", out_layout="NCHW", **k)'
    return (
        RewriteRule(
            f"unpack_after_{pool}", "layout",
            f"{plain.format('unpack(x, block=b)')} => unpack({blocked.format('x')}, block=b)",
            instances=(
                Instance({"x": (1, 2, 6, 6, 4)}, {"b": 4, "k": _POOL}),
                Instance({"x": (2, 1, 1, 1, 2)}, {"b": 2, "k": _POOL_ONE}),
                Instance({"x": (1, 1, 7, 1, 4)}, {"b": 4, "k": {**_POOL, "pool_size": (3, 1)}}),
            ),
            near_misses=(
                Instance({"x": (1, 2, 6, 6)}, {"k": _POOL, "f": "relu"}, left=plain.format("relu(x)"),
                         reason="unpack is needed, not nn.relu"),
            ),
        ),
        RewriteRule(
            f"pack_before_{pool}", "layout",
            f"pack({plain.format('x')}, block=b) => {blocked.format('pack(x, block=b)')}",
            instances=(
                Instance({"x": (1, 8, 6, 6)}, {"b": 4, "k": _POOL}),
                Instance({"x": (2, 2, 1, 1)}, {"b": 2, "k": _POOL_ONE}),
                Instance({"x": (1, 4, 7, 1)}, {"b": 4, "k": {**_POOL, "pool_size": (3, 1)}}),
            ),
            near_misses=(
                Instance({"x": (1, 4, 6, 6)}, {"b": 4, "k": -1}, left="pack(softmax(x, axis=k), block=b)",
                         reason=f"{pool} is needed, not nn.softmax"),
            ),
        ),
    )  # fmt: skip


def _concat_rule(count: int) -> RewriteRule:
    rest = ["y", "z", "t"][: count - 1]
    return RewriteRule(
        f"unpack_after_concat_{count}", "layout",
        f"concat(unpack(x, block=b), {', '.join(rest)}, axis=1) => "
        f"unpack(concat(x, {', '.join(f'pack({v}, block=b)' for v in rest)}, axis=1), block=b)",
        when=tuple(f"dim({v}, 1) % b == 0" for v in rest),
        instances=(
            Instance({"x": (1, 2, 3, 5, 4), **dict.fromkeys(rest, (1, 4, 3, 5))}, {"b": 4}),
            Instance({"x": (2, 1, 1, 1, 2), **dict.fromkeys(rest, (2, 6, 1, 1))}, {"b": 2}),
            Instance({"x": (1, 1, 4, 1, 4), **dict.fromkeys(rest, (1, 8, 4, 1))}, {"b": 4}),
        ),
        near_misses=(
            Instance({"x": (1, 2, 3, 5, 4), **dict.fromkeys(rest, (1, 3, 3, 5))}, {"b": 4},
                     reason="dim(y, 1) % b == 0"),
        ),
    )  # fmt: skip


def _split_rule(item: int) -> RewriteRule:
    return RewriteRule(
        f"unpack_after_split_{item}", "layout",
        f"split(unpack(x, block=b), at=p, axis=1)[{item}] => unpack(split(x, at=[p[0] // b], axis=1)[{item}], block=b)",
        when=("len(p) == 1", "p[0] % b == 0"),
        instances=(
            Instance({"x": (1, 3, 3, 5, 4)}, {"b": 4, "p": (4,)}),
            Instance({"x": (2, 2, 1, 1, 2)}, {"b": 2, "p": (2,)}),
            Instance({"x": (1, 4, 4, 1, 1)}, {"b": 1, "p": (3,)}),
        ),
        near_misses=(Instance({"x": (1, 3, 3, 5, 4)}, {"b": 4, "p": (6,)}, reason="p[0] % b == 0"),),
    )  # fmt: skip


RULES = (
    RewriteRule(
        "block_conv", "layout",
        f"conv2d(x, w, groups=1, {_PLAIN}, **k) => "
        "unpack(conv2d(pack(x, block=i), pack_kernel(w, block=o), data_layout=nchwc(i), kernel_layout=oihwo(o), "
        "out_layout=nchwc(o), **k), block=o) where i = block(dim(x, 1)); o = block(dim(w, 0))",
        when=("i > 1", "o > 1", "is_weight(w)"),
        instances=(
            Instance({"x": (1, 8, 6, 6), "w": (4, 8, 3, 3)}, {"k": _SAME}, _W),
            Instance({"x": (2, 4, 1, 1), "w": (2, 4, 1, 1)}, {"k": _OPEN}, _W),
            Instance({"x": (1, 6, 7, 3), "w": (12, 6, 3, 1)}, {"k": _STRIDED}, _W),
        ),
        near_misses=(Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)}, {"k": _SAME}, _W, reason="i > 1"),),
    ),
    RewriteRule(
        "block_conv_output", "layout",
        f"conv2d(x, w, groups=1, {_PLAIN}, **k) => "
        'unpack(conv2d(x, pack_kernel(w, block=o), data_layout="NCHW", kernel_layout=oihwo(o), out_layout=nchwc(o), '
        "**k), block=o) where o = block(dim(w, 0))",
        when=("block(dim(x, 1)) == 1", "o > 1", "is_weight(w)"),
        instances=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)}, {"k": _SAME}, _W),
            Instance({"x": (2, 1, 1, 1), "w": (2, 1, 1, 1)}, {"k": _OPEN}, _W),
            Instance({"x": (1, 3, 7, 3), "w": (12, 3, 3, 1)}, {"k": _STRIDED}, _W),
        ),
        near_misses=(
            Instance({"x": (1, 8, 6, 6), "w": (4, 8, 3, 3)}, {"k": _SAME}, _W, reason="block(dim(x, 1)) == 1"),
        ),
    ),
    RewriteRule(
        "block_depthwise_conv", "layout",
        f"conv2d(x, w, groups=g, {_PLAIN}, **k) => "
        "unpack(conv2d(pack(x, block=o), pack_kernel(w, block=o), groups=g, data_layout=nchwc(o), "
        "kernel_layout=oihwo(o), out_layout=nchwc(o), **k), block=o) where o = block(dim(w, 0))",
        when=("g > 1", "g == dim(x, 1)", "g == dim(w, 0)", "o > 1", "is_weight(w)"),
        instances=(
            Instance({"x": (1, 8, 6, 6), "w": (8, 1, 3, 3)}, {"g": 8, "k": _SAME}, _W),
            Instance({"x": (2, 2, 1, 1), "w": (2, 1, 1, 1)}, {"g": 2, "k": _OPEN}, _W),
            Instance({"x": (1, 4, 7, 3), "w": (4, 1, 3, 1)}, {"g": 4, "k": _STRIDED}, _W),
        ),
        near_misses=(
            Instance({"x": (1, 8, 6, 6), "w": (8, 4, 3, 3)}, {"g": 2, "k": _SAME}, _W, reason="g == dim(x, 1)"),
        ),
    ),
    RewriteRule(
        "conv_writes_blocked", "layout",
        'conv2d(x, w, kernel_layout="OIHW", out_layout="NCHW", **k) => '
        'unpack(conv2d(x, w, kernel_layout="OIHW", out_layout=nchwc(o), **k), block=o) where o = block(dim(w, 0))',
        when=("o > 1", 'k["groups"] == 1'),
        instances=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)}, {"k": {**_SAME, **_GROUPS, "data_layout": "NCHW"}}, _W),
            Instance({"x": (2, 1, 1, 1), "w": (2, 1, 1, 1)}, {"k": {**_OPEN, **_GROUPS, "data_layout": "NCHW"}}, _W),
            Instance({"x": (1, 2, 7, 3, 4), "w": (12, 8, 3, 1)},
                     {"k": {**_STRIDED, **_GROUPS, "data_layout": "NCHW4c"}}, _W),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "w": (5, 3, 3, 3)}, {"k": {**_SAME, **_GROUPS, "data_layout": "NCHW"}}, _W,
                     reason="o > 1"),
        ),
    ),
    RewriteRule(
        "conv_reads_blocked", "layout",
        'conv2d(unpack(x, block=b), w, groups=1, kernel_layout="OIHW", data_layout="NCHW", **k) => '
        'conv2d(x, w, groups=1, kernel_layout="OIHW", data_layout=nchwc(b), **k)',
        instances=(
            Instance({"x": (1, 2, 6, 6, 4), "w": (4, 8, 3, 3)}, {"b": 4, "k": {**_SAME, "out_layout": "NCHW"}}, _W),
            Instance({"x": (2, 1, 1, 1, 2), "w": (1, 2, 1, 1)}, {"b": 2, "k": {**_OPEN, "out_layout": "NCHW"}}, _W),
            Instance({"x": (1, 2, 7, 3, 4), "w": (12, 8, 3, 1)},
                     {"b": 4, "k": {**_STRIDED, "out_layout": "NCHW4c"}}, _W),
        ),
        near_misses=(
            Instance({"x": (1, 8, 6, 6), "w": (4, 8, 3, 3)}, {"k": {**_SAME, "out_layout": "NCHW"}}, _W,
                     left='conv2d(relu(x), w, groups=1, kernel_layout="OIHW", data_layout="NCHW", **k)',
                     reason="unpack is needed, not nn.relu"),
        ),
    ),
    RewriteRule(
        "conv_writes_plain", "layout",
        'unpack(conv2d(x, w, kernel_layout="OIHW", out_layout=l, **k), block=b) => '
        'conv2d(x, w, kernel_layout="OIHW", out_layout="NCHW", **k)',
        when=("l == nchwc(b)",),
        instances=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)},
                     {"b": 4, "l": "NCHW4c", "k": {**_SAME, **_GROUPS, "data_layout": "NCHW"}}, _W),
            Instance({"x": (2, 1, 1, 1), "w": (2, 1, 1, 1)},
                     {"b": 2, "l": "NCHW2c", "k": {**_OPEN, **_GROUPS, "data_layout": "NCHW"}}, _W),
            Instance({"x": (1, 2, 7, 3, 4), "w": (12, 8, 3, 1)},
                     {"b": 4, "l": "NCHW4c", "k": {**_STRIDED, **_GROUPS, "data_layout": "NCHW4c"}}, _W),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)},
                     {"b": 4, "l": "NCHW4c", "k": {**_SAME, **_GROUPS, "data_layout": "NCHW"}}, _W,
                     left='unpack(relu(conv2d(x, w, kernel_layout="OIHW", out_layout=l, **k)), block=b)',
                     reason="conv2d is needed, not nn.relu"),
        ),
    ),
    RewriteRule(
        "cancel_pack_of_unpack", "layout",
        "pack(unpack(x, block=b), block=b) => x",
        instances=(
            Instance({"x": (1, 2, 3, 5, 4)}, {"b": 4}),
            Instance({"x": (1, 1, 1, 1, 2)}, {"b": 2}),
            Instance({"x": (2, 1, 4, 1, 8)}, {"b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 2, 3, 5, 4)}, {"b": 4, "c": 8}, left="pack(unpack(x, block=b), block=c)",
                     reason="block = 8, not b = 4"),
        ),
    ),
    RewriteRule(
        "cancel_unpack_of_pack", "layout",
        "unpack(pack(x, block=b), block=b) => x",
        instances=(
            Instance({"x": (1, 8, 3, 5)}, {"b": 4}),
            Instance({"x": (1, 2, 1, 1)}, {"b": 2}),
            Instance({"x": (2, 8, 4, 1)}, {"b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 8, 3, 5)}, {"b": 4}, left="unpack(relu(pack(x, block=b)), block=b)",
                     reason="pack is needed, not nn.relu"),
        ),
    ),
    RewriteRule(
        "unpack_after_unary", "layout",
        "Unary[f](unpack(x, block=b)) => unpack(Unary[f](x), block=b)",
        instances=(
            Instance({"x": (1, 2, 3, 5, 4)}, {"f": "relu", "b": 4}),
            Instance({"x": (1, 1, 1, 1, 2)}, {"f": "sigmoid", "b": 2}),
            Instance({"x": (2, 1, 4, 1, 8)}, {"f": ("leaky_relu", {"alpha": 0.2}), "b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 8, 3, 5)}, {"f": "relu", "b": 4}, left="Unary[f](pack(x, block=b))",
                     reason="unpack is needed, not layout_transform"),
        ),
    ),
    RewriteRule(
        "pack_before_unary", "layout",
        "pack(Unary[f](x), block=b) => Unary[f](pack(x, block=b))",
        instances=(
            Instance({"x": (1, 8, 3, 5)}, {"f": "relu", "b": 4}),
            Instance({"x": (1, 2, 1, 1)}, {"f": "tanh", "b": 2}),
            Instance({"x": (2, 8, 4, 1)}, {"f": "sigmoid", "b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 8, 3, 5)}, {"b": 4, "k": -1}, left="pack(softmax(x, axis=k), block=b)",
                     reason="Unary is needed, not nn.softmax"),
        ),
    ),
    RewriteRule(
        "unpack_after_binary", "layout",
        "Commutative[f](unpack(x, block=b), y) => unpack(Commutative[f](x, pack(y, block=b)), block=b)",
        when=("rank(y) == 4", "broadcasts_along_channels(shape(y), [dim(x, 0), dim(x, 1) * b, dim(x, 2), dim(x, 3)])"),
        instances=(
            Instance({"x": (1, 2, 3, 5, 4), "y": (1, 8, 1, 1)}, {"f": "add", "b": 4}),
            Instance({"x": (1, 1, 1, 1, 2), "y": (1, 2, 1, 1)}, {"f": "multiply", "b": 2}),
            Instance({"x": (2, 1, 4, 1, 8), "y": (2, 8, 4, 1)}, {"f": "maximum", "b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 2, 3, 5, 4), "y": (5,)}, {"f": "add", "b": 4}, reason="rank(y) == 4"),
        ),
    ),
    RewriteRule(
        "pack_before_binary", "layout",
        "pack(Binary[f](x, y), block=b) => Binary[f](pack(x, block=b), pack(y, block=b))",
        when=("rank(x) == 4", "rank(y) == 4", "broadcasts_along_channels(shape(y), shape(x))"),
        instances=(
            Instance({"x": (1, 8, 3, 5), "y": (1, 8, 1, 1)}, {"f": "add", "b": 4}),
            Instance({"x": (1, 2, 1, 1), "y": (1, 2, 1, 1)}, {"f": "subtract", "b": 2}),
            Instance({"x": (2, 8, 4, 1), "y": (2, 8, 4, 1)}, {"f": "multiply", "b": 8}),
        ),
        near_misses=(Instance({"x": (1, 8, 3, 5), "y": (5,)}, {"f": "add", "b": 4}, reason="rank(y) == 4"),),
    ),
    *(rule for pool in _POOLS for rule in _pool_rules(pool)),
    RewriteRule(
        "unpack_after_global_pool", "layout",
        'adaptive_avg_pool2d(unpack(x, block=b), output_size=s, layout="NCHW", out_layout="NCHW") => '
        "unpack(adaptive_avg_pool2d(x, output_size=s, layout=nchwc(b), out_layout=nchwc(b)), block=b)",
        instances=(
            Instance({"x": (1, 2, 4, 6, 4)}, {"b": 4, "s": (1, 1)}),
            Instance({"x": (1, 1, 1, 1, 2)}, {"b": 2, "s": (1, 1)}),
            Instance({"x": (2, 1, 4, 2, 8)}, {"b": 8, "s": (2, 1)}),
        ),
        near_misses=(
            Instance({"x": (1, 8, 4, 6)}, {"s": (1, 1)},
                     left='adaptive_avg_pool2d(relu(x), output_size=s, layout="NCHW", out_layout="NCHW")',
                     reason="unpack is needed, not nn.relu"),
        ),
    ),
    RewriteRule(
        "unpack_after_mean", "layout",
        "mean(unpack(x, block=b), axis=[2, 3], keepdims=True) => unpack(mean(x, axis=[2, 3], keepdims=True), block=b)",
        instances=(
            Instance({"x": (1, 2, 4, 6, 4)}, {"b": 4}),
            Instance({"x": (1, 1, 1, 1, 2)}, {"b": 2}),
            Instance({"x": (2, 1, 4, 1, 8)}, {"b": 8}),
        ),
        near_misses=(
            Instance({"x": (1, 2, 4, 6, 4)}, {"b": 4}, left="mean(unpack(x, block=b), axis=[1, 2], keepdims=True)",
                     reason="axis = (1, 2)"),
        ),
    ),
    RewriteRule(
        "unpack_of_points_to_reshape", "layout",
        "unpack(x, block=b) => reshape(x, shape=[dim(x, 0), dim(x, 1) * b, 1, 1])",
        when=("dim(x, 2) == 1", "dim(x, 3) == 1"),
        instances=(
            Instance({"x": (1, 2, 1, 1, 4)}, {"b": 4}),
            Instance({"x": (1, 1, 1, 1, 2)}, {"b": 2}),
            Instance({"x": (2, 3, 1, 1, 8)}, {"b": 8}),
        ),
        near_misses=(Instance({"x": (1, 2, 3, 1, 4)}, {"b": 4}, reason="dim(x, 2) == 1"),),
    ),
    *(_concat_rule(count) for count in (2, 3, 4)),
    *(_split_rule(item) for item in (0, 1)),
)  # fmt: skip

# `unpack` only sinks and meets its inverse, and each convolution is blocked once: no sequence of these goes on forever.
TERMINATING = (
    *(rule.name for rule in RULES if rule.name.startswith(("cancel_", "unpack_"))),
    *(rule.name for rule in RULES if rule.name.startswith("block_")),
)
