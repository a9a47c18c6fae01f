"""Reductions: one for two, past layouts, concatenations and products; means as pools."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_PLANE = "mean(x, axis=a, keepdims=True)"
_IN_RANGE = 'dtype(x) != "float16"'  # in which a sum that is divided, or scaled, afterwards may be infinite
_IMAGE = ("rank(x) == 4", "normal(a, rank(x)) == [2, 3]", "is_float(x)")

RULES = (
    RewriteRule(
        "sum_of_sums", "reduction",
        "sum(sum(x, axis=a, keepdims=True), axis=b, keepdims=True) => "
        "sum(x, axis=normal(normal(a, rank(x)) + normal(b, rank(x)), rank(x)), keepdims=True)",
        when=("disjoint(normal(a, rank(x)), normal(b, rank(x)))",),
    ),
    RewriteRule(
        "mean_of_means", "reduction",
        "mean(mean(x, axis=a, keepdims=True), axis=b, keepdims=True) => "
        "mean(x, axis=normal(normal(a, rank(x)) + normal(b, rank(x)), rank(x)), keepdims=True)",
        when=("disjoint(normal(a, rank(x)), normal(b, rank(x)))", "is_float(x)"),
    ),
    RewriteRule(
        "max_of_maxima", "reduction",
        "max(max(x, axis=a, keepdims=True), axis=b, keepdims=True) => "
        "max(x, axis=normal(normal(a, rank(x)) + normal(b, rank(x)), rank(x)), keepdims=True)",
        when=("disjoint(normal(a, rank(x)), normal(b, rank(x)))",),
    ),
    RewriteRule(
        "keep_reduced_axes", "reduction",
        "mean(x, axis=a, keepdims=False) => "
        "reshape(mean(x, axis=a, keepdims=True), shape=reduced(shape(x), normal(a, rank(x)), False))",
    ),
    RewriteRule(
        "drop_reduced_axes", "reduction",
        "reshape(mean(x, axis=a, keepdims=True), shape=s) => mean(x, axis=a, keepdims=False)",
        when=("s == reduced(shape(x), normal(a, rank(x)), False)",),
    ),
    RewriteRule(
        "mean_to_sum", "reduction",
        "mean(x, axis=a, keepdims=d) => multiply(sum(x, axis=a, keepdims=d), "
        "number(prod(reduced(shape(x), normal(a, rank(x)), True)) / prod(shape(x))))",
        when=("is_float(x)", _IN_RANGE),
    ),
    RewriteRule(
        "sum_after_scale", "reduction",
        "sum(multiply(x, s), axis=a, keepdims=d) => multiply(sum(x, axis=a, keepdims=d), s)",
        when=("rank(s) == 0", _IN_RANGE),
    ),
    RewriteRule(
        "mean_after_scale", "reduction",
        "mean(multiply(x, s), axis=a, keepdims=d) => multiply(mean(x, axis=a, keepdims=d), s)",
        when=("rank(s) == 0", "is_float(x)"),
    ),
    RewriteRule(
        "mean_after_channel_scale", "reduction",
        "mean(multiply(x, s), axis=a, keepdims=True) => multiply(mean(x, axis=a, keepdims=True), s)",
        when=("is_float(x)", "fits(shape(s), shape(x))", "constant_along(shape(s), a, rank(x))"),
    ),
    RewriteRule(
        "mean_after_bias", "reduction",
        "mean(add(x, b), axis=a, keepdims=True) => add(mean(x, axis=a, keepdims=True), b)",
        when=("is_float(x)", "fits(shape(b), shape(x))", "constant_along(shape(b), a, rank(x))"),
    ),
    RewriteRule(
        "mean_of_sum", "reduction",
        "mean(add(x, y), axis=a, keepdims=d) => add(mean(x, axis=a, keepdims=d), mean(y, axis=a, keepdims=d))",
        when=("is_float(x)", "shape(x) == shape(y)"),
    ),
    RewriteRule(
        "sum_of_means", "reduction",
        "add(mean(x, axis=a, keepdims=d), mean(y, axis=a, keepdims=d)) => mean(add(x, y), axis=a, keepdims=d)",
        when=("is_float(x)", "shape(x) == shape(y)"),
    ),
    *(
        RewriteRule(
            f"{name}_after_permute", "reduction",
            f"{name}(permute_dims(x, axes=p), axis=a, keepdims=True) => "
            f"permute_dims({name}(x, axis=picked(normal(a, rank(x)), p), keepdims=True), axes=p)",
        )
        for name in ("mean", "sum", "max", "min")
    ),
    *(
        RewriteRule(
            f"{name}_before_concat", "reduction",
            f"{name}(concat(x, y, axis=k), axis=a, keepdims=True) => "
            f"concat({name}(x, axis=a, keepdims=True), {name}(y, axis=a, keepdims=True), axis=k)",
            when=("k not in normal(a, rank(x))",),
        )
        for name in ("mean", "sum", "max")
    ),
    RewriteRule(
        "sum_of_concat", "reduction",
        "sum(concat(x, y, axis=k), axis=a, keepdims=d) => add(sum(x, axis=a, keepdims=d), sum(y, axis=a, keepdims=d))",
        when=("k in normal(a, rank(x))", _IN_RANGE),
    ),
    RewriteRule(
        "max_of_concat", "reduction",
        "max(concat(x, y, axis=k), axis=a, keepdims=d) => "
        "maximum(max(x, axis=a, keepdims=d), max(y, axis=a, keepdims=d))",
        when=("k in normal(a, rank(x))",),
    ),
    RewriteRule(
        "sum_of_matmul_rows", "reduction",
        "sum(matmul(x, w), axis=a, keepdims=True) => matmul(sum(x, axis=a, keepdims=True), w)",
        when=("rank(w) == 2", "rank(x) >= 2", "rank(x) - 1 not in normal(a, rank(x))", _IN_RANGE),
    ),
    RewriteRule(
        "mean_of_matmul_rows", "reduction",
        "mean(matmul(x, w), axis=a, keepdims=True) => matmul(mean(x, axis=a, keepdims=True), w)",
        when=("rank(w) == 2", "rank(x) >= 2", "rank(x) - 1 not in normal(a, rank(x))", "is_float(x)"),
    ),
    RewriteRule(
        "matmul_of_mean_rows", "reduction",
        "matmul(mean(x, axis=a, keepdims=True), w) => mean(matmul(x, w), axis=a, keepdims=True)",
        when=("rank(w) == 2", "rank(x) >= 2", "rank(x) - 1 not in normal(a, rank(x))", "is_float(x)", _IN_RANGE),
    ),
    RewriteRule(
        "sum_of_matmul_columns", "reduction",
        "sum(matmul(x, w), axis=a, keepdims=True) => matmul(x, sum(w, axis=[1], keepdims=True))",
        when=("rank(w) == 2", "rank(x) >= 2", "normal(a, rank(x)) == [rank(x) - 1]"),
    ),
    RewriteRule(
        "mean_to_adaptive_pool", "reduction", f"{_PLANE} => adaptive_avg_pool2d(x, output_size=[1, 1])", when=_IMAGE,
    ),
    RewriteRule(
        "adaptive_pool_to_mean", "reduction",
        "adaptive_avg_pool2d(x, output_size=[1, 1]) => mean(x, axis=[2, 3], keepdims=True)",
    ),
    RewriteRule(
        "mean_to_avg_pool", "reduction",
        f"{_PLANE} => avg_pool2d(x, pool_size=shape(x)[2:], strides=[1, 1])", when=_IMAGE,
    ),
    RewriteRule(
        "avg_pool_to_mean", "reduction",
        "avg_pool2d(x, pool_size=p, padding=[0, 0, 0, 0], **k) => mean(x, axis=[2, 3], keepdims=True)",
        when=('k["layout"] == "NCHW"', "p == shape(x)[2:]", 'k["dilation"] == [1, 1]', 'not k["ceil_mode"]',
              'k["out_layout"] == "NCHW"'),
    ),
    RewriteRule(
        "mean_as_one_axis", "reduction",
        "mean(x, axis=a, keepdims=True) => "
        "reshape(mean(reshape(x, shape=[dim(x, 0), dim(x, 1), dim(x, 2) * dim(x, 3)]), axis=[2], "
        "keepdims=True), shape=[dim(x, 0), dim(x, 1), 1, 1])",
        when=_IMAGE,
    ),
)  # fmt: skip
