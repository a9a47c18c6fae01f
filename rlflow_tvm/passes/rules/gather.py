"""take: towards the inputs, so that what is dropped afterwards is not computed; and back, past tables of weights."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_ONE = "rank(i) == 0"
_TAKE = "take({}, i, axis=k, mode=m)"

RULES = (
    RewriteRule(
        "take_before_unary", "gather", f"{_TAKE.format('Unary[f](x)')} => Unary[f]({_TAKE.format('x')})",
    ),
    RewriteRule(
        "take_after_unary", "gather", f"Unary[f]({_TAKE.format('x')}) => {_TAKE.format('Unary[f](x)')}",
    ),
    RewriteRule(
        "take_before_binary", "gather",
        f"{_TAKE.format('Binary[f](x, y)')} => Binary[f]({_TAKE.format('x')}, {_TAKE.format('y')})",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "take_before_scalar", "gather", f"{_TAKE.format('Binary[f](x, s)')} => Binary[f]({_TAKE.format('x')}, s)",
        when=("rank(s) == 0",),
    ),
    RewriteRule(
        "take_before_bias", "gather",
        f"{_TAKE.format('Commutative[f](x, b)')} => Commutative[f]({_TAKE.format('x')}, b)",
        when=("k < rank(x) - rank(b)", "fits(shape(b), shape(x))"),
    ),
    RewriteRule(
        "take_before_matmul", "gather", f"{_TAKE.format('matmul(x, w)')} => matmul({_TAKE.format('x')}, w)",
        when=("rank(w) == 2", "rank(x) >= 2", "k < rank(x) - 1"),
    ),
    RewriteRule(
        "take_before_layer_norm", "gather",
        f"{_TAKE.format('layer_norm(x, g, b, axes=a, **n)')} => "
        f"layer_norm({_TAKE.format('x')}, g, b, axes=[-1], **n)",
        when=("normal(a, rank(x)) == [rank(x) - 1]", "k < rank(x) - 1"),
    ),
    RewriteRule(
        "take_before_softmax", "gather",
        f"{_TAKE.format('softmax(x, axis=a)')} => softmax({_TAKE.format('x')}, axis=-1)",
        when=("a in [-1, rank(x) - 1]", "k < rank(x) - 1"),
    ),
    RewriteRule(
        "take_before_permute", "gather",
        f"{_TAKE.format('permute_dims(x, axes=p)')} => permute_dims(take(x, i, axis=p[k], mode=m), axes=p)",
        when=("rank(i) == 1",),
    ),
    RewriteRule(
        "take_one_before_permute", "gather",
        f"{_TAKE.format('permute_dims(x, axes=p)')} => reshape(permute_dims(take(x, reshape(i, shape=[1]), axis=p[k], "
        "mode=m), axes=p), shape=without(permuted(shape(x), p), k))",
        when=(_ONE,),
    ),
    RewriteRule(
        "take_one_as_row", "gather",
        f"{_TAKE.format('x')} => reshape(take(x, reshape(i, shape=[1]), axis=k, mode=m), shape=without(shape(x), k))",
        when=(_ONE,),
    ),
    RewriteRule(
        "take_rows_before_reshape", "gather",
        f"{_TAKE.format('reshape(x, shape=s)')} => "
        "reshape(take(x, i, axis=k, mode=m), shape=replaced(s, k, dim(i, 0)))",
        when=("rank(i) == 1", "rank(x) > k", "s[:k + 1] == shape(x)[:k + 1]"),
    ),
    RewriteRule(
        "take_rows_of_left_operand", "gather",
        f"{_TAKE.format('matmul(x, y)')} => matmul({_TAKE.format('x')}, y)",
        when=("rank(i) == 1", "rank(x) == rank(y)", "rank(y) >= 3", "k == rank(x) - 2",
              "shape(x)[:-2] == shape(y)[:-2]"),
    ),
    RewriteRule(
        "take_before_concat", "gather",
        f"{_TAKE.format('concat(x, y, axis=c)')} => concat({_TAKE.format('x')}, {_TAKE.format('y')}, axis=c)",
        when=("rank(i) == 1", "k != c"),
    ),
    RewriteRule(
        "matmul_of_embedding", "gather",
        "matmul(take(t, i, axis=0, mode=m), w) => take(matmul(t, w), i, axis=0, mode=m)",
        when=("rank(t) == 2", "rank(w) == 2", "is_weight(t)", "is_weight(w)", "rank(i) >= 1"),
    ),
    RewriteRule(
        "bias_of_embedding", "gather",
        "add(take(t, i, axis=0, mode=m), b) => take(add(t, b), i, axis=0, mode=m)",
        when=("rank(t) == 2", "is_weight(t)", "is_weight(b)", "shape(b) == [dim(t, 1)]"),
    ),
)  # fmt: skip

# A take of a row first, as there are rules for rows that there are none of for one number; no other rule makes such a
# take. Those lead a take past one operation that reads nothing else of it: let the height of a tensor be the length of
# the longest way from an input to it, takes not counted and indices not followed. What is above the take stays as high
# as it was, and each take that stands for it now reads something lower; so they come to an end.
TERMINATING = (
    "take_one_as_row",
    *(rule.name for rule in RULES if rule.name.startswith("take_before_")),
    "take_rows_before_reshape",
    "take_rows_of_left_operand",
)
