"""Convolution algebra: compositions into one kernel, groups, strides, pools and pads beside and inside convolutions."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_NCHW = 'data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW"'
_POINT = "shape({})[2:] == [1, 1]"
_CHANNELS = "shape({}) == [1, dim(x, 1), 1, 1]"
_ONE_TYPE = 'k["out_dtype"] in [None, dtype(x)]'
_IN_RANGE = 'dtype(x) != "float16"'  # in which products of weights are infinite, or 0
_GROUPED = f"concat(conv2d(s[0], t[0], groups=1, {_NCHW}, **k), conv2d(s[1], t[1], groups=1, {_NCHW}, **k), axis=1)"
_PLAIN_POOL = ('k["layout"] == "NCHW"', 'k["out_layout"] == "NCHW"')
_UNPADDED = 'not k["count_include_pad"] or (k["padding"] == [0, 0, 0, 0] and not k["ceil_mode"])'

RULES = (
    RewriteRule(
        "compose_conv_with_pointwise", "conv_algebra",
        f"conv2d(conv2d(x, a, groups=1, {_NCHW}, **k), b) => conv2d(x, reshape(matmul(reshape(b, shape=[dim(b, 0), "
        "dim(b, 1)]), reshape(a, shape=[dim(a, 0), prod(shape(a)[1:])])), shape=replaced(shape(a), 0, dim(b, 0))), "
        f"groups=1, {_NCHW}, **k)",
        when=("is_weight(a)", "is_weight(b)", _POINT.format("b"), _ONE_TYPE, "is_float(x)", _IN_RANGE),
    ),
    RewriteRule(
        "depthwise_and_pointwise_to_dense", "conv_algebra",
        f"conv2d(conv2d(x, a, groups=g, {_NCHW}, **k), b) => conv2d(x, multiply(b, reshape(a, "
        f"shape=[1, dim(a, 0), dim(a, 2), dim(a, 3)])), groups=1, {_NCHW}, **k)",
        when=("is_weight(a)", "is_weight(b)", _POINT.format("b"), "g == dim(x, 1)", "g == dim(a, 0)", _ONE_TYPE,
              "is_float(x)", _IN_RANGE),
    ),
    RewriteRule(
        "bias_past_pointwise", "conv_algebra",
        f"conv2d(add(x, c), w, padding=[0, 0, 0, 0], groups=1, {_NCHW}, **k) => "
        f"add(conv2d(x, w, padding=[0, 0, 0, 0], groups=1, {_NCHW}, **k), conv2d(c, w))",
        # halves: both may be infinite, and their sum, of x less its mean, is what the products lose
        when=("is_weight(c)", "is_weight(w)", "rank(x) == 4", _CHANNELS.format("c"), _POINT.format("w"), _ONE_TYPE,
              "is_float(x)", 'dtype(x) not in ["float16", "bfloat16"]'),
    ),
    RewriteRule(
        "scale_into_next_conv", "conv_algebra",
        f"conv2d(multiply(x, s), w, groups=1, {_NCHW}, **k) => conv2d(x, multiply(w, s), groups=1, {_NCHW}, **k)",
        when=("is_weight(s)", "is_weight(w)", "rank(x) == 4", _CHANNELS.format("s"), _ONE_TYPE, _IN_RANGE),
    ),
    RewriteRule(
        "scalar_into_conv", "conv_algebra",
        "multiply(conv2d(x, w, **k), s) => conv2d(x, multiply(w, s), **k)",
        when=("is_weight(w)", "rank(s) == 0", _ONE_TYPE, _IN_RANGE),
    ),
    RewriteRule(
        "split_groups", "conv_algebra",
        f"conv2d(x, w, groups=2, {_NCHW}, **k) => {_GROUPED} "
        "where s = split(x, at=[dim(x, 1) // 2], axis=1); t = split(w, at=[dim(w, 0) // 2], axis=0)",
        when=("is_weight(w)",),
    ),
    RewriteRule(
        "join_groups", "conv_algebra",
        f"concat(conv2d(x, a, groups=1, {_NCHW}, **k), conv2d(y, b, groups=1, {_NCHW}, **k), axis=1) => "
        f"conv2d(concat(x, y, axis=1), concat(a, b, axis=0), groups=2, {_NCHW}, **k)",
        when=("is_weight(a)", "is_weight(b)", "shape(x) == shape(y)", "shape(a) == shape(b)", "not same(x, y)"),
    ),
    RewriteRule(
        "groups_to_dense", "conv_algebra",
        f"conv2d(x, w, groups=2, {_NCHW}, **k) => conv2d(x, concat("
        "pad(t[0], pad_width=[0, 0, 0, dim(w, 1), 0, 0, 0, 0]), pad(t[1], pad_width=[0, 0, dim(w, 1), 0, 0, 0, 0, 0]), "
        f"axis=0), groups=1, {_NCHW}, **k) where t = split(w, at=[dim(w, 0) // 2], axis=0)",
        when=("is_weight(w)",),
    ),
    RewriteRule(
        "split_output_channels", "conv_algebra",
        f"conv2d(x, w, groups=1, {_NCHW}, **k) => concat(conv2d(x, t[0], groups=1, {_NCHW}, **k), "
        f"conv2d(x, t[1], groups=1, {_NCHW}, **k), axis=1) where t = split(w, at=[dim(w, 0) // 2], axis=0)",
        when=("is_weight(w)", "dim(w, 0) % 32 == 0 or dim(w, 0) == 4", "dim(w, 0) > 1"),
    ),
    RewriteRule(
        "subsample_before_pointwise", "conv_algebra",
        f"conv2d(x, w, strides=d, padding=[0, 0, 0, 0], {_NCHW}, **k) => conv2d(max_pool2d(x, pool_size=[1, 1], "
        f"strides=d), w, strides=[1, 1], padding=[0, 0, 0, 0], {_NCHW}, **k)",
        when=(_POINT.format("w"), "d != [1, 1]"),
    ),
    RewriteRule(
        "pointwise_of_subsampled", "conv_algebra",
        f"conv2d(max_pool2d(x, pool_size=[1, 1], strides=d), w, strides=[1, 1], padding=[0, 0, 0, 0], {_NCHW}, **k) => "
        f"conv2d(x, w, strides=d, padding=[0, 0, 0, 0], {_NCHW}, **k)",
        when=(_POINT.format("w"),),
    ),
    RewriteRule(
        "avg_pool_before_pointwise", "conv_algebra",
        "avg_pool2d(conv2d(x, w), **k) => conv2d(avg_pool2d(x, **k), w)",
        when=(_POINT.format("w"), *_PLAIN_POOL),
    ),
    RewriteRule(
        "avg_pool_after_pointwise", "conv_algebra",
        "conv2d(avg_pool2d(x, **k), w) => avg_pool2d(conv2d(x, w), **k)",
        when=(_POINT.format("w"), *_PLAIN_POOL, _IN_RANGE),
    ),
    RewriteRule(
        "avg_pool_before_bias", "conv_algebra",
        "avg_pool2d(add(x, b), **k) => add(avg_pool2d(x, **k), b)",
        when=("rank(x) == 4", _CHANNELS.format("b"), *_PLAIN_POOL, _UNPADDED),
    ),
    RewriteRule(
        "avg_pool_after_bias", "conv_algebra",
        "add(avg_pool2d(x, **k), b) => avg_pool2d(add(x, b), **k)",
        when=("rank(x) == 4", _CHANNELS.format("b"), *_PLAIN_POOL, _UNPADDED),
    ),
    RewriteRule(
        "avg_pool_after_scale", "conv_algebra",
        "avg_pool2d(multiply(x, s), **k) => multiply(avg_pool2d(x, **k), s)",
        when=("rank(x) == 4", _CHANNELS.format("s"), *_PLAIN_POOL),
    ),
    RewriteRule(
        "max_pool_before_bias", "conv_algebra",
        "max_pool2d(add(x, b), **k) => add(max_pool2d(x, **k), b)",
        when=("rank(x) == 4", _CHANNELS.format("b"), *_PLAIN_POOL, "is_float(x)"),
    ),
    RewriteRule(
        "max_pool_after_bias", "conv_algebra",
        "add(max_pool2d(x, **k), b) => max_pool2d(add(x, b), **k)",
        when=("rank(x) == 4", _CHANNELS.format("b"), *_PLAIN_POOL, "is_float(x)"),
    ),
    RewriteRule(
        "pools_of_concat", "conv_algebra",
        "max_pool2d(concat(x, y, axis=1), **k) => concat(max_pool2d(x, **k), max_pool2d(y, **k), axis=1)",
        when=_PLAIN_POOL,
    ),
    RewriteRule(
        "concat_of_pools", "conv_algebra",
        "concat(max_pool2d(x, **k), max_pool2d(y, **k), axis=1) => max_pool2d(concat(x, y, axis=1), **k)",
        when=(*_PLAIN_POOL, "shape(x)[2:] == shape(y)[2:]"),
    ),
    RewriteRule(
        "avg_pool_of_concat", "conv_algebra",
        "avg_pool2d(concat(x, y, axis=1), **k) => concat(avg_pool2d(x, **k), avg_pool2d(y, **k), axis=1)",
        when=_PLAIN_POOL,
    ),
    RewriteRule(
        "avg_pool_to_depthwise", "conv_algebra",
        "avg_pool2d(x, pool_size=p, strides=d, padding=q, count_include_pad=c) => "
        "conv2d(x, broadcast_to(number(1 / (p[0] * p[1])), shape=[dim(x, 1), 1, p[0], p[1]]), strides=d, padding=q, "
        "groups=dim(x, 1))",
        when=("c or q == [0, 0, 0, 0]",),
    ),
    RewriteRule(
        "pad_into_conv", "conv_algebra",
        'conv2d(pad(x, pad_width=q, pad_mode="constant", pad_value=0.0), w, padding=p, data_layout="NCHW", **k) => '
        'conv2d(x, w, padding=[p[0] + q[4], p[1] + q[6], p[2] + q[5], p[3] + q[7]], data_layout="NCHW", **k)',
        when=("q[:4] == [0, 0, 0, 0]",),
    ),
    RewriteRule(
        "pad_out_of_conv", "conv_algebra",
        'conv2d(x, w, padding=p, data_layout="NCHW", **k) => conv2d(pad(x, pad_width=[0, 0, 0, 0, p[0], p[2], p[1], '
        'p[3]], pad_mode="constant", pad_value=0.0), w, padding=[0, 0, 0, 0], data_layout="NCHW", **k)',
        when=("p != [0, 0, 0, 0]",),
    ),
    RewriteRule(
        "conv_of_transposed", "conv_algebra",
        f"conv2d(permute_dims(x, axes=[0, 1, 3, 2]), w, strides=s, padding=p, dilation=d, {_NCHW}, **k) => "
        "permute_dims(conv2d(x, permute_dims(w, axes=[0, 1, 3, 2]), strides=[s[1], s[0]], "
        f"padding=[p[1], p[0], p[3], p[2]], dilation=[d[1], d[0]], {_NCHW}, **k), axes=[0, 1, 3, 2])",
    ),
    RewriteRule(
        "transposed_of_conv", "conv_algebra",
        f"permute_dims(conv2d(x, w, strides=s, padding=p, dilation=d, {_NCHW}, **k), axes=[0, 1, 3, 2]) => "
        "conv2d(permute_dims(x, axes=[0, 1, 3, 2]), permute_dims(w, axes=[0, 1, 3, 2]), strides=[s[1], s[0]], "
        f"padding=[p[1], p[0], p[3], p[2]], dilation=[d[1], d[0]], {_NCHW}, **k)",
    ),
    RewriteRule(
        "batches_into_conv", "conv_algebra",
        f"concat(conv2d(x, w, {_NCHW}, **k), conv2d(y, w, {_NCHW}, **k), axis=0) => "
        f"conv2d(concat(x, y, axis=0), w, {_NCHW}, **k)",
        when=("shape(x)[1:] == shape(y)[1:]",),
    ),
)  # fmt: skip
