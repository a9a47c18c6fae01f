"""Convolutions in plain layout: merging parallel ones, enlarging kernels, folding scales, 1x1 as matmul."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_PLAIN = 'k["groups"] == 1', 'k["kernel_layout"] == "OIHW"', 'k["data_layout"] == "NCHW"', 'k["out_layout"] == "NCHW"'
_ONE_TYPE = 'k["out_dtype"] in [None, dtype({})]'  # sums and products of int8 weights would not fit into int8
_IN_RANGE = 'dtype(x) != "float16"'  # in which products of weights are infinite, or 0


RULES = (
    RewriteRule(
        "merge_convs", "merge",
        "conv2d(x, a, **k), conv2d(x, b, **k) => s[0], s[1] "
        "where s = split(conv2d(x, concat(a, b, axis=0), **k), at=[dim(a, 0)], axis=1)",
        when=(*_PLAIN, "shape(a)[1:] == shape(b)[1:]", "is_weight(a)", "is_weight(b)", "not same(a, b)"),
        symmetric=True,
    ),
    RewriteRule(
        "enlarge_conv_1x1", "enlarge",
        "conv2d(x, w, padding=p, groups=1, **k) => "
        "conv2d(x, pad(w, pad_width=[0, 0, 0, 0, 1, 1, 1, 1]), padding=[p[0] + 1, p[1] + 1, p[2] + 1, p[3] + 1], **k)",
        when=("rank(w) == 4", "shape(w)[2:] == [1, 1]", 'k["dilation"] == [1, 1]', "is_weight(w)",
              'k["kernel_layout"] == "OIHW"', 'k["data_layout"] == "NCHW"'),
    ),
    RewriteRule(
        "conv_1x1_to_matmul", "conv_matmul",
        "conv2d(x, w) => reshape(matmul(reshape(w, shape=[dim(w, 0), dim(w, 1)]), "
        "reshape(x, shape=[dim(x, 0), dim(x, 1), dim(x, 2) * dim(x, 3)])), "
        "shape=[dim(x, 0), dim(w, 0), dim(x, 2), dim(x, 3)])",
        when=("shape(w)[2:] == [1, 1]",),
    ),
    RewriteRule(
        "matmul_to_conv_1x1", "conv_matmul",
        "matmul(w, x) => reshape(conv2d(reshape(x, shape=[dim(x, 0), dim(x, 1), dim(x, 2), 1]), "
        "reshape(w, shape=[dim(w, 0), dim(w, 1), 1, 1])), shape=[dim(x, 0), dim(w, 0), dim(x, 2)])",
        when=("rank(w) == 2", "rank(x) == 3", "is_weight(w)"),
    ),
    RewriteRule(
        "fold_scale_into_conv", "fold",
        "multiply(conv2d(x, w, **k), s) => conv2d(x, multiply(w, reshape(s, shape=[dim(w, 0), 1, 1, 1])), **k)",
        when=("is_weight(w)", "is_weight(s)", 'k["kernel_layout"] == "OIHW"', 'k["out_layout"] == "NCHW"',
              "shape(s) == [1, dim(w, 0), 1, 1]", _ONE_TYPE.format("w"), _IN_RANGE),
    ),
    RewriteRule(
        "conv_factor_kernels", "conv_algebra",
        "add(conv2d(x, a, **k), conv2d(x, b, **k)) => conv2d(x, add(a, b), **k)",
        when=("shape(a) == shape(b)", _ONE_TYPE.format("a")), symmetric=True,
    ),
    RewriteRule(
        "conv_sum_to_concat", "conv_algebra",
        "add(conv2d(x, a, **k), conv2d(y, b, **k)) => conv2d(concat(x, y, axis=1), concat(a, b, axis=1), **k)",
        when=(*_PLAIN, "shape(a)[2:] == shape(b)[2:]", "is_weight(a)", "is_weight(b)", "dim(x, 0) == dim(y, 0)",
              "shape(x)[2:] == shape(y)[2:]", "dim(a, 0) == dim(b, 0)"),
        symmetric=True,
    ),
    RewriteRule(
        "conv_of_concat", "conv_algebra",
        "conv2d(concat(x, y, axis=1), w, **k) => add(conv2d(x, s[0], **k), conv2d(y, s[1], **k)) "
        "where s = split(w, at=[dim(x, 1)], axis=1)",
        when=(*_PLAIN, "is_weight(w)", _IN_RANGE),
    ),
    RewriteRule(
        "concat_convs", "merge",
        "concat(conv2d(x, a, **k), conv2d(x, b, **k), axis=1) => conv2d(x, concat(a, b, axis=0), **k)",
        when=(*_PLAIN, "shape(a)[1:] == shape(b)[1:]", "is_weight(a)", "is_weight(b)"),
    ),
)  # fmt: skip
