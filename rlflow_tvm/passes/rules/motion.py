"""Layouts in motion: reshape, permute_dims, concat, split and pad past other work; products in parts."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_IN_RANGE = 'dtype(x) != "float16"'  # in which both parts of a sum may be infinite

RULES = (
    RewriteRule(
        "reshape_after_binary", "motion",
        "Binary[f](reshape(x, shape=s), reshape(y, shape=s)) => reshape(Binary[f](x, y), shape=s)",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "reshape_before_binary", "motion",
        "reshape(Binary[f](x, y), shape=s) => Binary[f](reshape(x, shape=s), reshape(y, shape=s))",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "permute_before_binary", "motion",
        "permute_dims(Binary[f](x, y), axes=p) => Binary[f](permute_dims(x, axes=p), permute_dims(y, axes=p))",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "bias_before_reshape", "motion",
        "Commutative[f](reshape(x, shape=s), b) => reshape(Commutative[f](x, b), shape=s)",
        when=("rank(b) == 1", "rank(x) >= 1", "s[-1:] == shape(x)[-1:]", "shape(b) == s[-1:]"),
    ),
    RewriteRule(
        "bias_after_reshape", "motion",
        "reshape(Commutative[f](x, b), shape=s) => Commutative[f](reshape(x, shape=s), b)",
        when=("rank(b) == 1", "rank(x) >= 1", "s[-1:] == shape(x)[-1:]", "shape(b) == s[-1:]"),
    ),
    RewriteRule(
        "concat_after_permute", "motion",
        "concat(permute_dims(x, axes=p), permute_dims(y, axes=p), axis=k) => "
        "permute_dims(concat(x, y, axis=p[k]), axes=p)",
    ),
    RewriteRule(
        "concat_before_permute", "motion",
        "permute_dims(concat(x, y, axis=k), axes=p) => "
        "concat(permute_dims(x, axes=p), permute_dims(y, axes=p), axis=places([k], p)[0])",
    ),
    RewriteRule(
        "concat_of_three_after_unary", "motion",
        "concat(Unary[f](x), Unary[f](y), Unary[f](z), axis=k) => Unary[f](concat(x, y, z, axis=k))",
    ),
    RewriteRule(
        "concat_of_four_after_unary", "motion",
        "concat(Unary[f](x), Unary[f](y), Unary[f](z), Unary[f](t), axis=k) => Unary[f](concat(x, y, z, t, axis=k))",
    ),
    RewriteRule(
        "unary_before_concat_of_three", "motion",
        "Unary[f](concat(x, y, z, axis=k)) => concat(Unary[f](x), Unary[f](y), Unary[f](z), axis=k)",
    ),
    RewriteRule(
        "nest_concat", "motion", "concat(x, y, z, axis=k) => concat(concat(x, y, axis=k), z, axis=k)",
    ),
    RewriteRule(
        "flatten_concat_right", "motion", "concat(x, concat(y, z, axis=k), axis=k) => concat(x, y, z, axis=k)",
    ),
    RewriteRule(
        "scale_before_concat", "motion",
        "concat(multiply(x, a), multiply(y, b), axis=k) => multiply(concat(x, y, axis=k), concat(a, b, axis=k))",
        when=("rank(a) == rank(x)", "rank(b) == rank(y)", "dim(a, k) == dim(x, k)", "dim(b, k) == dim(y, k)",
              "shape(a)[:k] == shape(b)[:k]", "shape(a)[k + 1:] == shape(b)[k + 1:]",
              "shape(x)[:k] == shape(y)[:k]", "shape(x)[k + 1:] == shape(y)[k + 1:]"),
    ),
    RewriteRule(
        "scale_of_concat", "motion",
        "multiply(concat(x, y, axis=1), s) => concat(multiply(x, t[0]), multiply(y, t[1]), axis=1) "
        "where t = split(s, at=[dim(x, 1)], axis=1)",
        when=("is_weight(s)", "rank(x) == 4", "shape(s) == [1, dim(x, 1) + dim(y, 1), 1, 1]"),
    ),
    RewriteRule(
        "bias_of_concat", "motion",
        "add(concat(x, y, axis=1), s) => concat(add(x, t[0]), add(y, t[1]), axis=1) "
        "where t = split(s, at=[dim(x, 1)], axis=1)",
        when=("is_weight(s)", "rank(x) == 4", "shape(s) == [1, dim(x, 1) + dim(y, 1), 1, 1]"),
    ),
    RewriteRule(
        "split_of_unary", "motion",
        "split(Unary[f](x), at=p, axis=k)[0], split(Unary[f](x), at=p, axis=k)[1] => Unary[f](s[0]), Unary[f](s[1]) "
        "where s = split(x, at=p, axis=k)",
        when=("len(p) == 1",),
    ),
    RewriteRule(
        "pads_together", "motion",
        "pad(pad(x, pad_width=p, pad_value=v), pad_width=q, pad_value=v) => "
        "pad(x, pad_width=[p[0] + q[0], p[1] + q[1], p[2] + q[2], p[3] + q[3], p[4] + q[4], p[5] + q[5], p[6] + q[6], "
        "p[7] + q[7]], pad_value=v)",
        when=("rank(x) == 4",),
    ),
    RewriteRule(
        "pad_of_nothing", "motion", "pad(x, pad_width=p, pad_mode=m, pad_value=v) => x",
        when=("sorted(p)[-1:] in [[0], []]",),
    ),
    RewriteRule(
        "split_matmul_sum", "motion",
        "matmul(x, w) => add(matmul(s[0], t[0]), matmul(s[1], t[1])) "
        "where s = split(x, at=[dim(w, 0) // 2], axis=rank(x) - 1); t = split(w, at=[dim(w, 0) // 2], axis=0)",
        when=("rank(w) == 2", "rank(x) >= 2", "is_weight(w)", "dim(w, 0) % 256 == 0 or dim(w, 0) == 4", _IN_RANGE),
    ),
    RewriteRule(
        "split_matmul_columns", "motion",
        "matmul(x, w) => concat(matmul(x, t[0]), matmul(x, t[1]), axis=rank(x) - 1) "
        "where t = split(w, at=[dim(w, 1) // 2], axis=1)",
        when=("rank(w) == 2", "rank(x) >= 2", "is_weight(w)", "dim(w, 1) % 256 == 0 or dim(w, 1) == 4"),
    ),
    RewriteRule(
        "concat_matmul_columns", "motion",
        "concat(matmul(x, a), matmul(x, b), axis=k) => matmul(x, concat(a, b, axis=1))",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "rank(x) >= 2", "k == rank(x) - 1"),
    ),
    RewriteRule(
        "matmul_of_concat", "motion",
        "matmul(concat(x, y, axis=k), w) => add(matmul(x, t[0]), matmul(y, t[1])) "
        "where t = split(w, at=[dim(x, k)], axis=0)",
        when=("rank(w) == 2", "rank(x) >= 2", "is_weight(w)", "k == rank(x) - 1", _IN_RANGE),
    ),
    RewriteRule(
        "matmul_of_row_concat", "motion",
        "matmul(concat(x, y, axis=k), w) => concat(matmul(x, w), matmul(y, w), axis=k)",
        when=("rank(w) == 2", "rank(x) >= 2", "k < rank(x) - 1"),
    ),
    RewriteRule(
        "matmul_distribute_difference", "motion",
        "matmul(subtract(x, y), a) => subtract(matmul(x, a), matmul(y, a))",
        # halves: both may be infinite, and their difference is what the products lose
        when=("shape(x) == shape(y)", 'dtype(x) not in ["float16", "bfloat16"]'),
    ),
    RewriteRule(
        "matmul_factor_difference", "motion",
        "subtract(matmul(x, a), matmul(y, a)) => matmul(subtract(x, y), a)", when=("shape(x) == shape(y)",),
    ),
)  # fmt: skip
