"""Matrix products: merging parallel ones, association, distribution, scales, transposes."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_IN_RANGE = 'dtype(x) != "float16"'  # in which both parts of a sum may be infinite

RULES = (
    RewriteRule(
        "merge_matmuls", "merge",
        "matmul(x, a), matmul(x, b) => s[0], s[1] "
        "where s = split(matmul(x, concat(a, b, axis=1)), at=[dim(a, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "not same(a, b)", "rank(x) >= 2"),
        symmetric=True,
    ),
    RewriteRule(
        "merge_three_matmuls", "merge",
        "matmul(x, a), matmul(x, b), matmul(x, c) => s[0], s[1], s[2] "
        "where s = split(matmul(x, concat(a, b, c, axis=1)), at=[dim(a, 1), dim(a, 1) + dim(b, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "rank(c) == 2", "is_weight(a)", "is_weight(b)", "is_weight(c)",
              "not same(a, b)", "not same(b, c)", "not same(a, c)", "rank(x) >= 2"),
        symmetric=True,
    ),
    RewriteRule(
        "merge_split_bias", "merge",
        "add(split(y, at=p, axis=k)[0], a), add(split(y, at=p, axis=k)[1], b) => s[0], s[1] "
        "where s = split(add(y, concat(a, b, axis=0)), at=p, axis=k)",
        when=("len(p) == 1", "k == rank(y) - 1", "shape(a) == [p[0]]", "shape(b) == [dim(y, k) - p[0]]"),
    ),
    RewriteRule(
        "matmul_associate_right", "matmul",
        "matmul(matmul(x, a), b) => matmul(x, matmul(a, b))",
        when=("rank(x) >= 2", "rank(a) >= 2", "rank(b) >= 2", _IN_RANGE),
    ),
    RewriteRule(
        "matmul_associate_left", "matmul",
        "matmul(x, matmul(a, b)) => matmul(matmul(x, a), b)",
        when=("rank(x) >= 2", "rank(a) >= 2", "rank(b) >= 2", _IN_RANGE),
    ),
    RewriteRule(
        "matmul_distribute_left", "matmul",
        "matmul(add(x, y), a) => add(matmul(x, a), matmul(y, a))",
        when=("shape(x) == shape(y)", _IN_RANGE), symmetric=True,
    ),
    RewriteRule(
        "matmul_factor_left", "matmul",
        "add(matmul(x, a), matmul(y, a)) => matmul(add(x, y), a)",
        when=("shape(x) == shape(y)",), symmetric=True,
    ),
    RewriteRule(
        "matmul_distribute_right", "matmul",
        "matmul(x, add(a, b)) => add(matmul(x, a), matmul(x, b))",
        when=("shape(a) == shape(b)", "not (is_weight(a) and is_weight(b))", _IN_RANGE), symmetric=True,
    ),
    RewriteRule(
        "matmul_factor_right", "matmul",
        "add(matmul(x, a), matmul(x, b)) => matmul(x, add(a, b))",
        when=("shape(a) == shape(b)",), symmetric=True,
    ),
    RewriteRule(
        "matmul_sum_to_concat", "matmul",
        "add(matmul(x, a), matmul(y, b)) => matmul(concat(x, y, axis=rank(x) - 1), concat(a, b, axis=0))",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "rank(x) >= 2",
              "rank(x) == rank(y)", "shape(x)[:-1] == shape(y)[:-1]", "dim(a, 1) == dim(b, 1)"),
        symmetric=True,
    ),
    RewriteRule(
        "concat_matmuls", "matmul",
        "concat(matmul(x, a), matmul(y, a), axis=k) => matmul(concat(x, y, axis=k), a)",
        when=("rank(a) == 2", "rank(x) >= 2", "k < rank(x) - 1"),
    ),
    RewriteRule(
        "fold_scale_into_matmul", "fold",
        "multiply(matmul(x, a), s) => matmul(x, multiply(a, s))",
        when=("is_weight(a)", "is_weight(s)", "rank(a) == 2", "rank(x) >= 2",
              "rank(s) == 0 or shape(s) == [1] or shape(s) == [dim(a, 1)]", _IN_RANGE),
    ),
    RewriteRule(
        "scale_after_matmul", "matmul",
        "matmul(multiply(x, s), a) => multiply(matmul(x, a), s)",
        when=("is_weight(s)", "not is_weight(x)", "rank(s) == 0 or (shape(s) == [1] and rank(x) >= 2)",
              'dtype(x) != "float16"'),  # products are scaled before because they would be infinite there
    ),
    RewriteRule(
        "scale_before_matmul", "matmul",
        "multiply(matmul(x, a), s) => matmul(multiply(x, s), a)",
        when=("is_weight(s)", "not is_weight(x)", "rank(x) >= 2", "rank(s) == 0 or shape(s) == [1]"),
    ),
    RewriteRule(
        "transpose_of_matmul", "transpose",
        "permute_dims(matmul(x, y), axes=p) => matmul(permute_dims(y, axes=p), permute_dims(x, axes=p))",
        when=("rank(x) == rank(y)", "rank(x) >= 2", "p == swap_last(rank(x))"),
    ),
)  # fmt: skip
