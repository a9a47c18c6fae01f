"""Convolutions in plain layout: merging parallel ones, enlarging kernels, folding scales, 1x1 as matmul."""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

DEFAULT = {
    "strides": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1,
    "data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "NCHW", "out_dtype": None,
}  # fmt: skip
_SAME = {**DEFAULT, "padding": (1, 1, 1, 1)}
_STRIDED = {**DEFAULT, "strides": (2, 2)}
_PLAIN = 'k["groups"] == 1', 'k["kernel_layout"] == "OIHW"', 'k["data_layout"] == "NCHW"', 'k["out_layout"] == "NCHW"'
_ONE_TYPE = 'k["out_dtype"] in [None, dtype({})]'  # sums and products of int8 weights would not fit into int8
_AB = ("a", "b")
_WIDE = {**DEFAULT, "out_dtype": "float64"}

_TWO_KERNELS = (
    Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (2, 3, 3, 3)}, {"k": _SAME}, _AB),
    Instance({"x": (2, 1, 5, 4), "a": (1, 1, 1, 1), "b": (1, 1, 1, 1)}, {"k": DEFAULT}, _AB),
    Instance({"x": (1, 4, 7, 1), "a": (8, 4, 1, 1), "b": (1, 4, 1, 1)}, {"k": _STRIDED}, _AB),
)

RULES = (
    RewriteRule(
        "merge_convs", "merge",
        "conv2d(x, a, **k), conv2d(x, b, **k) => s[0], s[1] "
        "where s = split(conv2d(x, concat(a, b, axis=0), **k), at=[dim(a, 0)], axis=1)",
        when=(*_PLAIN, "shape(a)[1:] == shape(b)[1:]", "is_weight(a)", "is_weight(b)", "not same(a, b)"),
        symmetric=True, instances=_TWO_KERNELS,
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (4, 3, 1, 1)}, {"k": _SAME}, _AB,
                     reason="shape(a)[1:] == shape(b)[1:]"),
        ),
    ),
    RewriteRule(
        "enlarge_conv_1x1", "enlarge",
        "conv2d(x, w, padding=p, groups=1, **k) => "
        "conv2d(x, pad(w, pad_width=[0, 0, 0, 0, 1, 1, 1, 1]), padding=[p[0] + 1, p[1] + 1, p[2] + 1, p[3] + 1], **k)",
        when=("rank(w) == 4", "shape(w)[2:] == [1, 1]", 'k["dilation"] == [1, 1]', "is_weight(w)",
              'k["kernel_layout"] == "OIHW"', 'k["data_layout"] == "NCHW"'),
        instances=tuple(
            Instance({"x": x, "w": w}, {"p": p, "k": {n: v for n, v in k.items() if n not in ("padding", "groups")}},
                     ("w",))
            for x, w, p, k in [
                ((1, 3, 6, 6), (4, 3, 1, 1), (0, 0, 0, 0), DEFAULT),
                ((2, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0), DEFAULT),
                ((1, 4, 7, 1), (2, 4, 1, 1), (1, 0, 1, 0), _STRIDED),
            ]
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3)},
                     {"p": (1, 1, 1, 1), "k": {n: v for n, v in _SAME.items() if n not in ("padding", "groups")}},
                     ("w",), reason="shape(w)[2:] == [1, 1]"),
        ),
    ),
    RewriteRule(
        "conv_1x1_to_matmul", "conv_matmul",
        "conv2d(x, w) => reshape(matmul(reshape(w, shape=[dim(w, 0), dim(w, 1)]), "
        "reshape(x, shape=[dim(x, 0), dim(x, 1), dim(x, 2) * dim(x, 3)])), "
        "shape=[dim(x, 0), dim(w, 0), dim(x, 2), dim(x, 3)])",
        when=("shape(w)[2:] == [1, 1]",),
        instances=(
            Instance({"x": (1, 3, 6, 5), "w": (4, 3, 1, 1)}),
            Instance({"x": (2, 1, 1, 1), "w": (1, 1, 1, 1)}),
            Instance({"x": (1, 4, 7, 1), "w": (8, 4, 1, 1)}),
        ),
        near_misses=(Instance({"x": (1, 3, 6, 5), "w": (4, 3, 3, 3)}, reason="shape(w)[2:] == [1, 1]"),),
    ),
    RewriteRule(
        "matmul_to_conv_1x1", "conv_matmul",
        "matmul(w, x) => reshape(conv2d(reshape(x, shape=[dim(x, 0), dim(x, 1), dim(x, 2), 1]), "
        "reshape(w, shape=[dim(w, 0), dim(w, 1), 1, 1])), shape=[dim(x, 0), dim(w, 0), dim(x, 2)])",
        when=("rank(w) == 2", "rank(x) == 3", "is_weight(w)"),
        instances=(
            Instance({"w": (4, 3), "x": (2, 3, 5)}, weights=("w",)),
            Instance({"w": (1, 3), "x": (1, 3, 4)}, weights=("w",)),
            Instance({"w": (1, 1), "x": (1, 1, 1)}, weights=("w",)),
        ),
        near_misses=(Instance({"w": (4, 3), "x": (3, 5)}, weights=("w",), reason="rank(x) == 3"),),
    ),
    RewriteRule(
        "fold_scale_into_conv", "fold",
        "multiply(conv2d(x, w, **k), s) => conv2d(x, multiply(w, reshape(s, shape=[dim(w, 0), 1, 1, 1])), **k)",
        when=("is_weight(w)", "is_weight(s)", 'k["kernel_layout"] == "OIHW"', 'k["out_layout"] == "NCHW"',
              "shape(s) == [1, dim(w, 0), 1, 1]", _ONE_TYPE.format("w")),
        instances=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3), "s": (1, 4, 1, 1)}, {"k": _SAME}, ("w", "s")),
            Instance({"x": (2, 1, 5, 4), "w": (1, 1, 1, 1), "s": (1, 1, 1, 1)}, {"k": DEFAULT}, ("w", "s")),
            Instance({"x": (1, 4, 7, 1), "w": (4, 1, 1, 1), "s": (1, 4, 1, 1)},
                     {"k": {**DEFAULT, "groups": 4}}, ("w", "s")),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "w": (4, 3, 3, 3), "s": (1, 1, 6, 6)}, {"k": _SAME}, ("w", "s"),
                     reason="shape(s)"),
        ),
    ),
    RewriteRule(
        "conv_factor_kernels", "conv_algebra",
        "add(conv2d(x, a, **k), conv2d(x, b, **k)) => conv2d(x, add(a, b), **k)",
        when=("shape(a) == shape(b)", _ONE_TYPE.format("a")), symmetric=True,
        instances=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (4, 3, 3, 3)}, {"k": _SAME}),
            Instance({"x": (2, 1, 5, 4), "a": (1, 1, 1, 1), "b": (1, 1, 1, 1)}, {"k": DEFAULT}),
            Instance({"x": (1, 4, 7, 1), "a": (2, 4, 1, 1), "b": (2, 4, 1, 1)}, {"k": _STRIDED}),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (4, 3, 1, 1)},
                     {"k": _SAME, "j": DEFAULT}, left="add(conv2d(x, a, **k), conv2d(x, b, **j))",
                     reason="k would stand for two different things"),
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (4, 3, 3, 3)}, {"k": _WIDE}, reason="dtype(a)"),
        ),
    ),
    RewriteRule(
        "conv_sum_to_concat", "conv_algebra",
        "add(conv2d(x, a, **k), conv2d(y, b, **k)) => conv2d(concat(x, y, axis=1), concat(a, b, axis=1), **k)",
        when=(*_PLAIN, "shape(a)[2:] == shape(b)[2:]", "is_weight(a)", "is_weight(b)", "dim(x, 0) == dim(y, 0)",
              "shape(x)[2:] == shape(y)[2:]", "dim(a, 0) == dim(b, 0)"),
        symmetric=True,
        instances=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "y": (1, 2, 6, 6), "b": (4, 2, 3, 3)}, {"k": _SAME}, _AB),
            Instance({"x": (2, 1, 5, 4), "a": (1, 1, 1, 1), "y": (2, 1, 5, 4), "b": (1, 1, 1, 1)}, {"k": DEFAULT}, _AB),
            Instance({"x": (1, 4, 7, 1), "a": (2, 4, 1, 1), "y": (1, 8, 7, 1), "b": (2, 8, 1, 1)},
                     {"k": _STRIDED}, _AB),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "y": (1, 3, 4, 4), "b": (4, 3, 1, 1)}, {"k": _SAME}, _AB,
                     reason="shape(a)[2:] == shape(b)[2:]"),
        ),
    ),
    RewriteRule(
        "conv_of_concat", "conv_algebra",
        "conv2d(concat(x, y, axis=1), w, **k) => add(conv2d(x, s[0], **k), conv2d(y, s[1], **k)) "
        "where s = split(w, at=[dim(x, 1)], axis=1)",
        when=(*_PLAIN, "is_weight(w)"),
        instances=(
            Instance({"x": (1, 3, 6, 6), "y": (1, 2, 6, 6), "w": (4, 5, 3, 3)}, {"k": _SAME}, ("w",)),
            Instance({"x": (2, 1, 5, 4), "y": (2, 1, 5, 4), "w": (1, 2, 1, 1)}, {"k": DEFAULT}, ("w",)),
            Instance({"x": (1, 4, 7, 1), "y": (1, 8, 7, 1), "w": (2, 12, 1, 1)}, {"k": _STRIDED}, ("w",)),
        ),
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "y": (1, 3, 6, 6), "w": (6, 1, 3, 3)}, {"k": {**_SAME, "groups": 6}}, ("w",),
                     reason='k["groups"] == 1'),
        ),
    ),
    RewriteRule(
        "concat_convs", "merge",
        "concat(conv2d(x, a, **k), conv2d(x, b, **k), axis=1) => conv2d(x, concat(a, b, axis=0), **k)",
        when=(*_PLAIN, "shape(a)[1:] == shape(b)[1:]", "is_weight(a)", "is_weight(b)"),
        instances=_TWO_KERNELS,
        near_misses=(
            Instance({"x": (1, 3, 6, 6), "a": (4, 3, 3, 3), "b": (4, 3, 1, 1)}, {"k": _SAME, "j": DEFAULT}, _AB,
                     left="concat(conv2d(x, a, **k), conv2d(x, b, **j), axis=1)",
                     reason="k would stand for two different things"),
        ),
    ),
)  # fmt: skip
