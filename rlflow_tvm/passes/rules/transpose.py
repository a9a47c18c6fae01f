"""permute_dims and reshape: cancel, compose, move through element-wise operators."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

RULES = (
    RewriteRule(
        "compose_permutes", "transpose",
        "permute_dims(permute_dims(x, axes=p), axes=q) => permute_dims(x, axes=compose(p, q))",
        when=("compose(p, q) != range(rank(x))",),
    ),
    RewriteRule(
        "cancel_permutes", "transpose",
        "permute_dims(permute_dims(x, axes=p), axes=q) => x",
        when=("compose(p, q) == range(rank(x))",),
    ),
    RewriteRule(
        "identity_permute", "transpose",
        "permute_dims(x, axes=p) => x",
        when=("p == range(rank(x))",),
    ),
    RewriteRule(
        "permute_of_units_to_reshape", "transpose",
        "permute_dims(x, axes=p) => reshape(x, shape=permuted(shape(x), p))",
        when=("moves_only_units(shape(x), p)", "p != range(rank(x))"),
    ),
    RewriteRule(
        "compose_reshapes", "transpose",
        "reshape(reshape(x, shape=s), shape=t) => reshape(x, shape=t)",
    ),
    RewriteRule(
        "identity_reshape", "transpose",
        "reshape(x, shape=s) => x",
        when=("s == shape(x)",),
    ),
    RewriteRule(
        "permute_after_unary", "transpose",
        "Unary[f](permute_dims(x, axes=p)) => permute_dims(Unary[f](x), axes=p)",
    ),
    RewriteRule(
        "permute_before_unary", "transpose",
        "permute_dims(Unary[f](x), axes=p) => Unary[f](permute_dims(x, axes=p))",
    ),
    RewriteRule(
        "reshape_after_unary", "transpose",
        "Unary[f](reshape(x, shape=s)) => reshape(Unary[f](x), shape=s)",
    ),
    RewriteRule(
        "reshape_before_unary", "transpose",
        "reshape(Unary[f](x), shape=s) => Unary[f](reshape(x, shape=s))",
    ),
    RewriteRule(
        "permute_after_binary", "transpose",
        "Binary[f](permute_dims(x, axes=p), permute_dims(y, axes=p)) => permute_dims(Binary[f](x, y), axes=p)",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "permute_after_weight", "transpose",
        "Commutative[f](permute_dims(x, axes=p), w) => permute_dims(Commutative[f](x, permute_dims(reshape(w, "
        "shape=[1] * (rank(x) - rank(w)) + shape(w)), axes=inverse(p))), axes=p)",
        when=("is_weight(w)", "not is_weight(x)", "rank(w) >= 1", "fits(shape(w), permuted(shape(x), p))"),
    ),
)  # fmt: skip

# A permutation only sinks: each rewrite leaves an element-wise operator, or a permutation, less behind the permutations
# of what is computed at run time, or as many there and one less behind those of weights. So they come to an end.
TERMINATING = (
    "cancel_permutes",
    "identity_permute",
    "compose_permutes",
    "permute_of_units_to_reshape",
    "permute_after_unary",
    "permute_after_binary",
    "permute_after_weight",
    "scalar_before_permute",
)
