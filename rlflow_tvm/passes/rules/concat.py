"""concat and split: cancellation and motion."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule


def _split_of_concat(item: int, name: str) -> RewriteRule:
    return RewriteRule(
        f"split_of_concat_{item}", "concat",
        f"split(concat(x, y, axis=k), at=p, axis=k)[{item}] => {name}",
        when=("p == [dim(x, k)]",),
    )  # fmt: skip


RULES = (
    _split_of_concat(0, "x"),
    _split_of_concat(1, "y"),
    RewriteRule(
        "concat_of_split", "concat",
        "concat(split(x, at=p, axis=k)[0], split(x, at=p, axis=k)[1], axis=k) => x",
        when=("len(p) == 1",),
    ),
    RewriteRule(
        "concat_after_unary", "concat",
        "concat(Unary[f](x), Unary[f](y), axis=k) => Unary[f](concat(x, y, axis=k))",
    ),
    RewriteRule(
        "unary_before_concat", "concat",
        "Unary[f](concat(x, y, axis=k)) => concat(Unary[f](x), Unary[f](y), axis=k)",
    ),
    RewriteRule(
        "concat_after_linear", "concat",
        "concat(Linear[f](x, a), Linear[f](y, b), axis=k) => Linear[f](concat(x, y, axis=k), concat(a, b, axis=k))",
        when=("rank(a) == rank(x)", "rank(b) == rank(y)", "dim(a, k) == dim(x, k)", "dim(b, k) == dim(y, k)",
              "shape(a)[:k] == shape(b)[:k]", "shape(a)[k + 1:] == shape(b)[k + 1:]",
              "shape(x)[:k] == shape(y)[:k]", "shape(x)[k + 1:] == shape(y)[k + 1:]"),
    ),
    RewriteRule(
        "unary_after_split", "concat",
        "Unary[f](split(x, at=p, axis=k)[0]), Unary[f](split(x, at=p, axis=k)[1]) => s[0], s[1] "
        "where s = split(Unary[f](x), at=p, axis=k)",
        when=("len(p) == 1",),
    ),
    RewriteRule(
        "flatten_concat", "concat",
        "concat(concat(x, y, axis=k), z, axis=k) => concat(x, y, z, axis=k)",
    ),
)  # fmt: skip
