"""permute_dims and reshape: cancel, compose, move through element-wise operators."""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

_UNARY_PERMUTE = (
    Instance({"x": (2, 3, 4)}, {"f": "relu", "p": (0, 2, 1)}),
    Instance({"x": (1, 5)}, {"f": "tanh", "p": (1, 0)}),
    Instance({"x": (1, 1, 2, 1)}, {"f": ("leaky_relu", {"alpha": 0.1}), "p": (0, 2, 3, 1)}),
)
_UNARY_RESHAPE = (
    Instance({"x": (2, 3, 4)}, {"f": "relu", "s": (6, 4)}),
    Instance({"x": (1, 5)}, {"f": "tanh", "s": (5,)}),
    Instance({"x": (1, 1, 1)}, {"f": "sigmoid", "s": (1,)}),
)

RULES = (
    RewriteRule(
        "compose_permutes", "transpose",
        "permute_dims(permute_dims(x, axes=p), axes=q) => permute_dims(x, axes=compose(p, q))",
        when=("compose(p, q) != range(rank(x))",),
        instances=(
            Instance({"x": (2, 3, 4)}, {"p": (1, 0, 2), "q": (0, 2, 1)}),
            Instance({"x": (1, 3, 4)}, {"p": (2, 0, 1), "q": (2, 0, 1)}),
            Instance({"x": (1, 1, 2, 1)}, {"p": (3, 2, 1, 0), "q": (1, 0, 2, 3)}),
        ),
        near_misses=(Instance({"x": (2, 3)}, {"p": (1, 0), "q": (1, 0)}, reason="compose(p, q)"),),
    ),
    RewriteRule(
        "cancel_permutes", "transpose",
        "permute_dims(permute_dims(x, axes=p), axes=q) => x",
        when=("compose(p, q) == range(rank(x))",),
        instances=(
            Instance({"x": (2, 3, 4)}, {"p": (2, 0, 1), "q": (1, 2, 0)}),
            Instance({"x": (1, 3)}, {"p": (1, 0), "q": (1, 0)}),
            Instance({"x": (1, 1, 1)}, {"p": (0, 2, 1), "q": (0, 2, 1)}),
        ),
        near_misses=(Instance({"x": (2, 3, 4)}, {"p": (1, 2, 0), "q": (1, 2, 0)}, reason="compose(p, q)"),),
    ),
    RewriteRule(
        "identity_permute", "transpose",
        "permute_dims(x, axes=p) => x",
        when=("p == range(rank(x))",),
        instances=(
            Instance({"x": (2, 3, 4)}, {"p": (0, 1, 2)}),
            Instance({"x": (1, 3)}, {"p": (0, 1)}),
            Instance({"x": (1,)}, {"p": (0,)}),
        ),
        near_misses=(Instance({"x": (2, 3)}, {"p": (1, 0)}, reason="p == range(rank(x))"),),
    ),
    RewriteRule(
        "permute_of_units_to_reshape", "transpose",
        "permute_dims(x, axes=p) => reshape(x, shape=permuted(shape(x), p))",
        when=("moves_only_units(shape(x), p)", "p != range(rank(x))"),
        instances=(
            Instance({"x": (1, 3, 4)}, {"p": (1, 0, 2)}),
            Instance({"x": (5, 1)}, {"p": (1, 0)}),
            Instance({"x": (1, 1, 1)}, {"p": (2, 1, 0)}),
        ),
        near_misses=(Instance({"x": (2, 3)}, {"p": (1, 0)}, reason="moves_only_units"),),
    ),
    RewriteRule(
        "compose_reshapes", "transpose",
        "reshape(reshape(x, shape=s), shape=t) => reshape(x, shape=t)",
        instances=(
            Instance({"x": (2, 3, 4)}, {"s": (6, 4), "t": (24,)}),
            Instance({"x": (1, 5)}, {"s": (5,), "t": (5, 1)}),
            Instance({"x": (1,)}, {"s": (1, 1), "t": (1, 1, 1)}),
        ),
        near_misses=(
            Instance({"x": (2, 3)}, {"s": (6,), "t": (3, 2)}, left="reshape(tanh(x), shape=t)",
                     reason="reshape is needed, not tanh"),
        ),
    ),
    RewriteRule(
        "identity_reshape", "transpose",
        "reshape(x, shape=s) => x",
        when=("s == shape(x)",),
        instances=(
            Instance({"x": (2, 3)}, {"s": (2, 3)}),
            Instance({"x": (1,)}, {"s": (1,)}),
            Instance({"x": (1, 16, 1)}, {"s": (1, 16, 1)}),
        ),
        near_misses=(Instance({"x": (2, 3)}, {"s": (3, 2)}, reason="s == shape(x)"),),
    ),
    RewriteRule(
        "permute_after_unary", "transpose",
        "Unary[f](permute_dims(x, axes=p)) => permute_dims(Unary[f](x), axes=p)",
        instances=_UNARY_PERMUTE,
        near_misses=(
            Instance({"x": (2, 3)}, {"f": "relu", "s": (6,)}, left="Unary[f](reshape(x, shape=s))",
                     reason="permute_dims is needed, not reshape"),
        ),
    ),
    RewriteRule(
        "permute_before_unary", "transpose",
        "permute_dims(Unary[f](x), axes=p) => Unary[f](permute_dims(x, axes=p))",
        instances=_UNARY_PERMUTE,
        near_misses=(
            Instance({"x": (2, 3)}, {"p": (1, 0), "k": -1}, left="permute_dims(softmax(x, axis=k), axes=p)",
                     reason="Unary is needed, not nn.softmax"),
        ),
    ),
    RewriteRule(
        "reshape_after_unary", "transpose",
        "Unary[f](reshape(x, shape=s)) => reshape(Unary[f](x), shape=s)",
        instances=_UNARY_RESHAPE,
        near_misses=(
            Instance({"x": (2, 3)}, {"f": "relu", "p": (1, 0)}, left="Unary[f](permute_dims(x, axes=p))",
                     reason="reshape is needed, not permute_dims"),
        ),
    ),
    RewriteRule(
        "reshape_before_unary", "transpose",
        "reshape(Unary[f](x), shape=s) => Unary[f](reshape(x, shape=s))",
        instances=_UNARY_RESHAPE,
        near_misses=(
            Instance({"x": (2, 3)}, {"s": (6,), "k": -1}, left="reshape(softmax(x, axis=k), shape=s)",
                     reason="Unary is needed, not nn.softmax"),
        ),
    ),
    RewriteRule(
        "permute_after_binary", "transpose",
        "Binary[f](permute_dims(x, axes=p), permute_dims(y, axes=p)) => permute_dims(Binary[f](x, y), axes=p)",
        when=("shape(x) == shape(y)",),
        instances=(
            Instance({"x": (2, 3, 4), "y": (2, 3, 4)}, {"f": "add", "p": (0, 2, 1)}),
            Instance({"x": (1, 3), "y": (1, 3)}, {"f": "subtract", "p": (1, 0)}),
            Instance({"x": (1, 1, 1), "y": (1, 1, 1)}, {"f": "multiply", "p": (2, 1, 0)}),
        ),
        near_misses=(
            Instance({"x": (2, 3), "y": (3, 3)}, {"f": "add", "p": (1, 0), "q": (0, 1)},
                     left="Binary[f](permute_dims(y, axes=p), permute_dims(y, axes=q))",
                     reason="axes = (0, 1), not p = (1, 0)"),
        ),
    ),
)  # fmt: skip
