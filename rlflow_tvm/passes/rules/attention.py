"""What attention is made of: scales through products and layouts, parallel projections merged, heads laid out."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_SCALAR = "rank({}) == 0"
_ONE_ROW = "rank({}) == 2"


def _split_rules(name: str, before: str, after: str, when: tuple[str, ...]) -> RewriteRule:
    """`before` of each part of a tensor split in two, done once `after` on the whole."""
    part = "split(x, at=p, axis=k)[{}]"
    left = ", ".join(before.format(part.format(item)) for item in range(2))
    return RewriteRule(name, "attention", f"{left} => s[0], s[1] where s = {after}", when=("len(p) == 1", *when))


RULES = (
    RewriteRule(
        "scale_right_operand", "attention",
        "multiply(matmul(x, y), s) => matmul(x, multiply(y, s))", when=(_SCALAR.format("s"), "not is_weight(y)"),
    ),
    RewriteRule(
        "scale_after_right_operand", "attention",
        "matmul(x, multiply(y, s)) => multiply(matmul(x, y), s)",
        when=(_SCALAR.format("s"), "not is_weight(y)", 'dtype(x) != "float16"'),  # as `scale_after_matmul`
    ),
    RewriteRule(
        "divide_left_operand", "attention",
        "divide(matmul(x, y), s) => matmul(divide(x, s), y)", when=(_SCALAR.format("s"), "is_float(x)"),
    ),
    RewriteRule(
        "scalar_before_permute", "attention",
        "Binary[f](permute_dims(x, axes=p), s) => permute_dims(Binary[f](x, s), axes=p)", when=(_SCALAR.format("s"),),
    ),
    RewriteRule(
        "scalar_after_permute", "attention",
        "permute_dims(Binary[f](x, s), axes=p) => Binary[f](permute_dims(x, axes=p), s)", when=(_SCALAR.format("s"),),
    ),
    RewriteRule(
        "scalar_before_reshape", "attention",
        "Binary[f](reshape(x, shape=t), s) => reshape(Binary[f](x, s), shape=t)", when=(_SCALAR.format("s"),),
    ),
    RewriteRule(
        "scalar_after_reshape", "attention",
        "reshape(Binary[f](x, s), shape=t) => Binary[f](reshape(x, shape=t), s)", when=(_SCALAR.format("s"),),
    ),
    RewriteRule(
        "merge_three_split_biases", "attention",
        "add(split(y, at=p, axis=k)[0], a), add(split(y, at=p, axis=k)[1], b), add(split(y, at=p, axis=k)[2], c) => "
        "s[0], s[1], s[2] where s = split(add(y, concat(a, b, c, axis=0)), at=p, axis=k)",
        when=("len(p) == 2", "k == rank(y) - 1", "shape(a) == [p[0]]", "shape(b) == [p[1] - p[0]]",
              "shape(c) == [dim(y, k) - p[1]]"),
    ),
    RewriteRule(
        "merge_biased_matmuls", "attention",
        "add(matmul(x, a), c), add(matmul(x, b), d) => s[0], s[1] where s = "
        "split(add(matmul(x, concat(a, b, axis=1)), concat(c, d, axis=0)), at=[dim(a, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "is_weight(a)", "is_weight(b)", "is_weight(c)", "is_weight(d)",
              "not same(a, b)", "rank(x) >= 2", "shape(c) == [dim(a, 1)]", "shape(d) == [dim(b, 1)]"),
        symmetric=True,
    ),
    RewriteRule(
        "merge_three_biased_matmuls", "attention",
        "add(matmul(x, a), d), add(matmul(x, b), e), add(matmul(x, c), f) => s[0], s[1], s[2] where s = "
        "split(add(matmul(x, concat(a, b, c, axis=1)), concat(d, e, f, axis=0)), "
        "at=[dim(a, 1), dim(a, 1) + dim(b, 1)], axis=rank(x) - 1)",
        when=("rank(a) == 2", "rank(b) == 2", "rank(c) == 2", "is_weight(a)", "is_weight(b)", "is_weight(c)",
              "is_weight(d)", "is_weight(e)", "is_weight(f)", "not same(a, b)", "not same(b, c)", "not same(a, c)",
              "rank(x) >= 2", "shape(d) == [dim(a, 1)]", "shape(e) == [dim(b, 1)]", "shape(f) == [dim(c, 1)]"),
        symmetric=True,
    ),
    RewriteRule(
        "unmerge_matmul", "attention",
        "split(matmul(x, w), at=p, axis=k)[0], split(matmul(x, w), at=p, axis=k)[1] => "
        "matmul(x, split(w, at=p, axis=1)[0]), matmul(x, split(w, at=p, axis=1)[1])",
        when=("len(p) == 1", "is_weight(w)", "rank(w) == 2", "rank(x) >= 2", "k == rank(x) - 1"),
    ),
    _split_rules(
        "permute_after_split", "permute_dims({}, axes=q)",
        "split(permute_dims(x, axes=q), at=p, axis=places([k], q)[0])", (),
    ),
    _split_rules(
        "heads_after_split", "reshape({}, shape=t)",
        "split(reshape(x, shape=replaced(t, 2, 2 * t[2])), at=[t[2]], axis=2)",
        ("rank(x) == 3", "k == 2", "len(t) == 4", "t[:2] == shape(x)[:2]", "dim(x, 2) == 2 * p[0]"),
    ),
    RewriteRule(
        "flatten_matmul", "attention",
        "matmul(x, w) => reshape(matmul(reshape(x, shape=[prod(shape(x)[:-1]), dim(x, -1)]), w), "
        "shape=replaced(shape(x), -1, dim(w, 1)))",
        when=("rank(x) >= 3", _ONE_ROW.format("w")),
    ),
    RewriteRule(
        "matmul_after_reshape", "attention",
        "matmul(reshape(x, shape=s), w) => reshape(matmul(x, w), shape=replaced(s, -1, dim(w, 1)))",
        when=("rank(x) >= 2", "len(s) >= 2", "s[-1] == dim(x, -1)", _ONE_ROW.format("w")),
    ),
    RewriteRule(
        "matmul_before_reshape", "attention",
        "reshape(matmul(x, w), shape=s) => matmul(reshape(x, shape=replaced(s, -1, dim(x, -1))), w)",
        when=("rank(x) >= 2", "len(s) >= 2", _ONE_ROW.format("w"), "s[-1] == dim(w, 1)"),
    ),
    RewriteRule(
        "batches_after_matmul", "attention",
        "matmul(permute_dims(x, axes=p), permute_dims(y, axes=p)) => permute_dims(matmul(x, y), axes=p)",
        when=("len(p) >= 3", "p[-2:] == range(len(p) - 2, len(p))"),
    ),
    RewriteRule(
        "batches_before_matmul", "attention",
        "permute_dims(matmul(x, y), axes=p) => matmul(permute_dims(x, axes=p), permute_dims(y, axes=p))",
        when=("rank(x) == rank(y)", "rank(x) >= 3", "p[-2:] == range(len(p) - 2, len(p))"),
    ),
    RewriteRule(
        "transposed_operands", "attention",
        "matmul(permute_dims(x, axes=p), permute_dims(y, axes=p)) => permute_dims(matmul(y, x), axes=p)",
        when=("rank(x) >= 2", "p == swap_last(rank(x))"),
    ),
    RewriteRule(
        "merge_heads_of_matmul", "attention",
        "matmul(concat(x, y, axis=k), concat(a, b, axis=k)) => concat(matmul(x, a), matmul(y, b), axis=k)",
        when=("rank(x) == rank(a)", "rank(x) >= 3", "k < rank(x) - 2", "dim(x, k) == dim(a, k)"),
    ),
    RewriteRule(
        "merge_batches", "attention",
        "concat(matmul(x, a), matmul(y, b), axis=k) => matmul(concat(x, y, axis=k), concat(a, b, axis=k))",
        when=("rank(x) == rank(a)", "rank(y) == rank(b)", "rank(x) >= 3", "k < rank(x) - 2",
              "shape(x)[:-2] == shape(a)[:-2]", "shape(y)[:-2] == shape(b)[:-2]", "dim(x, -1) == dim(y, -1)"),
    ),
)  # fmt: skip
