"""concat and split: cancellation and motion."""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

_PAIR = tuple(
    Instance({"x": x, "y": y}, {"k": k, "f": f})
    for x, y, k, f in [((2, 3), (2, 5), 1, "relu"), ((1, 4, 1), (2, 4, 1), 0, "tanh"), ((1,), (1,), 0, "sigmoid")]
)


def _split_of_concat(item: int, name: str) -> RewriteRule:
    return RewriteRule(
        f"split_of_concat_{item}", "concat",
        f"split(concat(x, y, axis=k), at=p, axis=k)[{item}] => {name}",
        when=("p == [dim(x, k)]",),
        instances=tuple(
            Instance({"x": x, "y": y}, {"k": k, "p": (x[k],)})
            for x, y, k in [((2, 3), (2, 5), 1), ((1, 4, 1), (2, 4, 1), 0), ((1,), (1,), 0)]
        ),
        near_misses=(Instance({"x": (2, 3), "y": (2, 5)}, {"k": 1, "p": (4,)}, reason="p == [dim(x, k)]"),),
    )  # fmt: skip


RULES = (
    _split_of_concat(0, "x"),
    _split_of_concat(1, "y"),
    RewriteRule(
        "concat_of_split", "concat",
        "concat(split(x, at=p, axis=k)[0], split(x, at=p, axis=k)[1], axis=k) => x",
        when=("len(p) == 1",),
        instances=(
            Instance({"x": (2, 8)}, {"k": 1, "p": (3,)}),
            Instance({"x": (2, 1, 1)}, {"k": 0, "p": (1,)}),
            Instance({"x": (5,)}, {"k": 0, "p": (4,)}),
        ),
        near_misses=(
            Instance({"x": (2, 8)}, {"k": 1, "p": (3,)},
                     left="concat(split(x, at=p, axis=k)[1], split(x, at=p, axis=k)[0], axis=k)",
                     reason="item 0 of a tuple is needed"),
        ),
    ),
    RewriteRule(
        "concat_after_unary", "concat",
        "concat(Unary[f](x), Unary[f](y), axis=k) => Unary[f](concat(x, y, axis=k))",
        instances=_PAIR,
        near_misses=(
            Instance({"x": (2, 3), "y": (2, 5)}, {"k": 1}, left="concat(relu(x), tanh(y), axis=k)",
                     reason="f would stand for two different things"),
        ),
    ),
    RewriteRule(
        "unary_before_concat", "concat",
        "Unary[f](concat(x, y, axis=k)) => concat(Unary[f](x), Unary[f](y), axis=k)",
        instances=_PAIR,
        near_misses=(
            Instance({"x": (2, 3), "y": (2, 3)}, {"f": "relu"}, left="Unary[f](add(x, y))",
                     reason="concat is needed, not add"),
        ),
    ),
    RewriteRule(
        "concat_after_linear", "concat",
        "concat(Linear[f](x, a), Linear[f](y, b), axis=k) => Linear[f](concat(x, y, axis=k), concat(a, b, axis=k))",
        when=("rank(a) == rank(x)", "rank(b) == rank(y)", "dim(a, k) == dim(x, k)", "dim(b, k) == dim(y, k)",
              "shape(a)[:k] == shape(b)[:k]", "shape(a)[k + 1:] == shape(b)[k + 1:]",
              "shape(x)[:k] == shape(y)[:k]", "shape(x)[k + 1:] == shape(y)[k + 1:]"),
        instances=(
            Instance({"x": (2, 3), "a": (1, 3), "y": (2, 5), "b": (1, 5)}, {"k": 1, "f": "add"}),
            Instance({"x": (1, 4, 5, 5), "a": (1, 4, 1, 1), "y": (1, 2, 5, 5), "b": (1, 2, 1, 1)},
                     {"k": 1, "f": "subtract"}, ("a", "b")),
            Instance({"x": (1,), "a": (1,), "y": (1,), "b": (1,)}, {"k": 0, "f": "add"}),
        ),
        near_misses=(
            Instance({"x": (2, 3), "a": (2, 1), "y": (2, 5), "b": (2, 1)}, {"k": 1, "f": "add"},
                     reason="dim(a, k) == dim(x, k)"),
        ),
    ),
    RewriteRule(
        "unary_after_split", "concat",
        "Unary[f](split(x, at=p, axis=k)[0]), Unary[f](split(x, at=p, axis=k)[1]) => s[0], s[1] "
        "where s = split(Unary[f](x), at=p, axis=k)",
        when=("len(p) == 1",),
        instances=(
            Instance({"x": (2, 8)}, {"k": 1, "p": (3,), "f": "relu"}),
            Instance({"x": (2, 1, 1)}, {"k": 0, "p": (1,), "f": "tanh"}),
            Instance({"x": (5,)}, {"k": 0, "p": (4,), "f": "sigmoid"}),
        ),
        near_misses=(Instance({"x": (2, 9)}, {"k": 1, "p": (3, 6), "f": "relu"}, reason="len(p) == 1"),),
    ),
    RewriteRule(
        "flatten_concat", "concat",
        "concat(concat(x, y, axis=k), z, axis=k) => concat(x, y, z, axis=k)",
        instances=(
            Instance({"x": (2, 3), "y": (2, 5), "z": (2, 1)}, {"k": 1}),
            Instance({"x": (1, 4), "y": (1, 4), "z": (3, 4)}, {"k": 0}),
            Instance({"x": (1,), "y": (1,), "z": (1,)}, {"k": 0}),
        ),
        near_misses=(
            Instance({"x": (2, 2), "y": (2, 2), "z": (4, 4)}, {"k": 1, "j": 0},
                     left="concat(concat(x, x, axis=k), concat(y, y, axis=k), axis=j)", reason="axis = 0, not k = 1"),
        ),
    ),
)  # fmt: skip
