"""Matrix products: merging parallel ones, association, distribution, scales, transposes."""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

_MERGE2 = tuple(
    Instance({"x": x, "a": a, "b": b}, weights=("a", "b"))
    for x, a, b in [
        ((2, 5, 8), (8, 4), (8, 6)),
        ((3, 8), (8, 1), (8, 4)),
        ((1, 1, 1), (1, 1), (1, 3)),
    ]
)
_THREE = (
    Instance({"x": (2, 5, 8), "a": (8, 4), "b": (4, 6)}),
    Instance({"x": (3, 8), "a": (8, 1), "b": (1, 4)}),
    Instance({"x": (1, 2, 3), "a": (4, 3, 5), "b": (5, 1)}),
)
_LEFT_SUM = (
    Instance({"x": (2, 5, 8), "y": (2, 5, 8), "a": (8, 4)}),
    Instance({"x": (3, 8), "y": (3, 8), "a": (8, 1)}),
    Instance({"x": (1, 1), "y": (1, 1), "a": (1, 1)}),
)
_RIGHT_SUM = (
    Instance({"x": (2, 5, 8), "a": (8, 4), "b": (8, 4)}),
    Instance({"x": (3, 8), "a": (8, 1), "b": (8, 1)}),
    Instance({"x": (1, 1), "a": (1, 1), "b": (1, 1)}),
)
_BROADCAST_SUM = Instance({"x": (2, 5, 8), "y": (8,), "a": (8, 4)}, reason="shape(x) == shape(y)")
_BROADCAST_RIGHT = Instance({"x": (2, 5, 8), "a": (8, 4), "b": (1, 4)}, reason="shape(a) == shape(b)")

RULES = (
    RewriteRule(
        "merge_matmuls", "merge",
        "matmul(x, a), matmul(x, b) => s[0], s[1] "
        "where s = split(matmul(x, concat(a, b, axis=1)), at=[dim(a, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "not same(a, b)", "rank(x) >= 2"),
        symmetric=True, instances=_MERGE2,
        near_misses=(Instance({"x": (2, 8), "a": (8, 4), "b": (8, 4)}, reason="is_weight(a)"),),
    ),
    RewriteRule(
        "merge_three_matmuls", "merge",
        "matmul(x, a), matmul(x, b), matmul(x, c) => s[0], s[1], s[2] "
        "where s = split(matmul(x, concat(a, b, c, axis=1)), at=[dim(a, 1), dim(a, 1) + dim(b, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "rank(c) == 2", "is_weight(a)", "is_weight(b)", "is_weight(c)",
              "not same(a, b)", "not same(b, c)", "not same(a, c)", "rank(x) >= 2"),
        symmetric=True,
        instances=(
            Instance({"x": (2, 5, 8), "a": (8, 4), "b": (8, 6), "c": (8, 4)}, weights=("a", "b", "c")),
            Instance({"x": (3, 8), "a": (8, 1), "b": (8, 4), "c": (8, 1)}, weights=("a", "b", "c")),
            Instance({"x": (1, 1, 1), "a": (1, 1), "b": (1, 2), "c": (1, 3)}, weights=("a", "b", "c")),
        ),
        near_misses=(Instance({"x": (2, 8), "a": (8, 4), "b": (8, 4), "c": (8, 4)}, reason="is_weight(a)"),),
    ),
    RewriteRule(
        "merge_split_bias", "merge",
        "add(split(y, at=p, axis=k)[0], a), add(split(y, at=p, axis=k)[1], b) => s[0], s[1] "
        "where s = split(add(y, concat(a, b, axis=0)), at=p, axis=k)",
        when=("len(p) == 1", "k == rank(y) - 1", "shape(a) == [p[0]]", "shape(b) == [dim(y, k) - p[0]]"),
        instances=(
            Instance({"y": (2, 3, 10), "a": (4,), "b": (6,)}, {"p": (4,), "k": 2}, ("a", "b")),
            Instance({"y": (3, 5), "a": (1,), "b": (4,)}, {"p": (1,), "k": 1}, ("a", "b")),
            Instance({"y": (1, 1, 2), "a": (1,), "b": (1,)}, {"p": (1,), "k": 2}, ("a", "b")),
        ),
        near_misses=(
            Instance({"y": (3, 8), "a": (3, 4), "b": (3, 4)}, {"p": (4,), "k": 1}, ("a", "b"), reason="shape(a)"),
        ),
    ),
    RewriteRule(
        "matmul_associate_right", "matmul",
        "matmul(matmul(x, a), b) => matmul(x, matmul(a, b))",
        when=("rank(x) >= 2", "rank(a) >= 2", "rank(b) >= 2"), instances=_THREE,
        near_misses=(Instance({"x": (2, 3), "a": (3, 4), "b": (4,)}, reason="rank(b) >= 2"),),
    ),
    RewriteRule(
        "matmul_associate_left", "matmul",
        "matmul(x, matmul(a, b)) => matmul(matmul(x, a), b)",
        when=("rank(x) >= 2", "rank(a) >= 2", "rank(b) >= 2"), instances=_THREE,
        near_misses=(Instance({"x": (3,), "a": (3, 4), "b": (4, 2)}, reason="rank(x) >= 2"),),
    ),
    RewriteRule(
        "matmul_distribute_left", "matmul",
        "matmul(add(x, y), a) => add(matmul(x, a), matmul(y, a))",
        when=("shape(x) == shape(y)",), symmetric=True, instances=_LEFT_SUM, near_misses=(_BROADCAST_SUM,),
    ),
    RewriteRule(
        "matmul_factor_left", "matmul",
        "add(matmul(x, a), matmul(y, a)) => matmul(add(x, y), a)",
        when=("shape(x) == shape(y)",), symmetric=True, instances=_LEFT_SUM,
        near_misses=(
            Instance({"x": (2, 8), "y": (2, 8), "a": (8, 4), "b": (8, 4)}, left="add(matmul(x, a), matmul(y, b))",
                     reason="a would stand for two different things"),
        ),
    ),
    RewriteRule(
        "matmul_distribute_right", "matmul",
        "matmul(x, add(a, b)) => add(matmul(x, a), matmul(x, b))",
        when=("shape(a) == shape(b)", "not is_weight(a)"), symmetric=True, instances=_RIGHT_SUM,
        near_misses=(_BROADCAST_RIGHT,),
    ),
    RewriteRule(
        "matmul_factor_right", "matmul",
        "add(matmul(x, a), matmul(x, b)) => matmul(x, add(a, b))",
        when=("shape(a) == shape(b)",), symmetric=True, instances=_RIGHT_SUM,
        near_misses=(
            Instance({"x": (2, 8), "y": (2, 8), "a": (8, 4), "b": (8, 4)}, left="add(matmul(x, a), matmul(y, b))",
                     reason="x would stand for two different things"),
        ),
    ),
    RewriteRule(
        "matmul_sum_to_concat", "matmul",
        "add(matmul(x, a), matmul(y, b)) => matmul(concat(x, y, axis=rank(x) - 1), concat(a, b, axis=0))",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "rank(x) >= 2",
              "rank(x) == rank(y)", "shape(x)[:-1] == shape(y)[:-1]", "dim(a, 1) == dim(b, 1)"),
        symmetric=True,
        instances=(
            Instance({"x": (2, 3, 4), "a": (4, 5), "y": (2, 3, 6), "b": (6, 5)}, weights=("a", "b")),
            Instance({"x": (3, 1), "a": (1, 5), "y": (3, 6), "b": (6, 5)}, weights=("a", "b")),
            Instance({"x": (1, 1), "a": (1, 1), "y": (1, 1), "b": (1, 1)}, weights=("a", "b")),
        ),
        near_misses=(
            Instance({"x": (2, 4), "a": (4, 5), "y": (1, 6), "b": (6, 5)}, weights=("a", "b"),
                     reason="shape(x)[:-1] == shape(y)[:-1]"),
        ),
    ),
    RewriteRule(
        "concat_matmuls", "matmul",
        "concat(matmul(x, a), matmul(y, a), axis=k) => matmul(concat(x, y, axis=k), a)",
        when=("rank(a) == 2", "rank(x) >= 2", "k < rank(x) - 1"),
        instances=(
            Instance({"x": (2, 3, 4), "y": (2, 5, 4), "a": (4, 6)}, {"k": 1}),
            Instance({"x": (1, 4), "y": (2, 4), "a": (4, 1)}, {"k": 0}),
            Instance({"x": (1, 1, 1), "y": (1, 1, 1), "a": (1, 1)}, {"k": 0}),
        ),
        near_misses=(Instance({"x": (2, 4), "y": (2, 4), "a": (4, 6)}, {"k": 1}, reason="k < rank(x) - 1"),),
    ),
    RewriteRule(
        "fold_scale_into_matmul", "fold",
        "multiply(matmul(x, a), s) => matmul(x, multiply(a, s))",
        when=("is_weight(a)", "is_weight(s)", "rank(a) == 2", "rank(x) >= 2",
              "rank(s) == 0 or shape(s) == [1] or shape(s) == [dim(a, 1)]"),
        instances=(
            Instance({"x": (2, 3, 4), "a": (4, 5), "s": (5,)}, weights=("a", "s")),
            Instance({"x": (3, 4), "a": (4, 1), "s": (1,)}, weights=("a", "s")),
            Instance({"x": (1, 1), "a": (1, 1), "s": ()}, weights=("a", "s")),
        ),
        near_misses=(Instance({"x": (3, 4), "a": (4, 5), "s": (3, 5)}, weights=("a", "s"), reason="shape(s)"),),
    ),
    RewriteRule(
        "scale_after_matmul", "matmul",
        "matmul(multiply(x, s), a) => multiply(matmul(x, a), s)",
        when=("is_weight(s)", "not is_weight(x)", "rank(s) == 0 or (shape(s) == [1] and rank(x) >= 2)"),
        instances=(
            Instance({"x": (2, 3, 4), "a": (4, 5), "s": (1,)}, weights=("a", "s")),
            Instance({"x": (3, 4), "a": (4, 1), "s": ()}, weights=("s",)),
            Instance({"x": (1, 1), "a": (1, 1), "s": ()}, weights=("s",)),
        ),
        near_misses=(Instance({"x": (3, 4), "a": (4, 5), "s": (4,)}, weights=("a", "s"), reason="shape(s)"),),
    ),
    RewriteRule(
        "scale_before_matmul", "matmul",
        "multiply(matmul(x, a), s) => matmul(multiply(x, s), a)",
        when=("is_weight(s)", "not is_weight(x)", "rank(x) >= 2", "rank(s) == 0 or shape(s) == [1]"),
        instances=(
            Instance({"x": (2, 3, 4), "a": (4, 5), "s": (1,)}, weights=("a", "s")),
            Instance({"x": (3, 4), "a": (4, 1), "s": ()}, weights=("s",)),
            Instance({"x": (1, 1), "a": (1, 1), "s": ()}, weights=("s",)),
        ),
        near_misses=(Instance({"x": (3, 4), "a": (4, 5), "s": (5,)}, weights=("a", "s"), reason="shape(s)"),),
    ),
    RewriteRule(
        "transpose_of_matmul", "transpose",
        "permute_dims(matmul(x, y), axes=p) => matmul(permute_dims(y, axes=p), permute_dims(x, axes=p))",
        when=("rank(x) == rank(y)", "rank(x) >= 2", "p == swap_last(rank(x))"),
        instances=(
            Instance({"x": (2, 3, 4), "y": (2, 4, 5)}, {"p": (0, 2, 1)}),
            Instance({"x": (3, 4), "y": (4, 1)}, {"p": (1, 0)}),
            Instance({"x": (1, 1), "y": (1, 1)}, {"p": (1, 0)}),
        ),
        near_misses=(Instance({"x": (2, 3, 4), "y": (2, 4, 5)}, {"p": (1, 0, 2)}, reason="swap_last"),),
    ),
)  # fmt: skip
