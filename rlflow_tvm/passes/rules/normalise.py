"""Softmax, layer norm and RMS norm: recognised in their parts, affine parts folded, what they do not see dropped."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_MEAN = "mean({}, axis=a, keepdims=True)"
_CENTRED = f"subtract(x, {_MEAN.format('x')})"
_VARIANCE = f"add({_MEAN.format(f'multiply({_CENTRED}, {_CENTRED})')}, number(e))"
_POWER = f"add({_MEAN.format('multiply(x, x)')}, number(e))"
# of float64 TVM has no layer norm, and its RMS norm computes in float32
_LAST = (
    'dtype(x) in ["float16", "bfloat16", "float32"]',
    "rank(x) >= 2",
    "normal(a, rank(x)) == [rank(x) - 1]",
    "e > 0",
)
_ALONG = "shape({}) == [dim(x, rank(x) - 1)]"


def _recognised(norm: str, above: str, below: str, operands: str, weights: tuple[str, ...]) -> tuple[RewriteRule, ...]:
    """The quotient written with a root, and with an inverse root."""
    shift = "add({}, b)" if "b" in weights else "{}"
    when = (*_LAST, *(_ALONG.format(name) for name in weights))
    quotients = {"": f"divide({above}, sqrt({below}))", "_inverse": f"multiply({above}, rsqrt({below}))"}
    return tuple(
        RewriteRule(
            f"{norm}_from_root{suffix}", "normalise",
            f"{shift.format(f'multiply({quotient}, g)')} => {norm}({operands}, axes=[-1], epsilon=e)", when=when,
        )
        for suffix, quotient in quotients.items()
    )  # fmt: skip


RULES = (
    *_recognised("layer_norm", _CENTRED, _VARIANCE, "x, g, b", ("g", "b")),
    *_recognised("rms_norm", "x", _POWER, "x, g", ("g",)),
    RewriteRule(
        "scale_into_layer_norm", "normalise",
        "multiply(layer_norm(x, g, b, **k), s) => layer_norm(x, multiply(g, s), multiply(b, s), **k)",
        when=("shape(s) == shape(g) or shape(s) == []",),
    ),
    RewriteRule(
        "bias_into_layer_norm", "normalise",
        "add(layer_norm(x, g, b, **k), c) => layer_norm(x, g, add(b, c), **k)",
        when=("shape(c) == shape(b) or shape(c) == []",),
    ),
    RewriteRule(
        "scale_into_rms_norm", "normalise",
        "multiply(rms_norm(x, g, **k), s) => rms_norm(x, multiply(g, s), **k)",
        when=("shape(s) == shape(g) or shape(s) == []",),
    ),
    RewriteRule(
        "layer_norm_to_rms_norm", "normalise",
        "layer_norm(x, g, b, axes=a, **k) => "
        'add(rms_norm(subtract(x, mean(x, axis=a, keepdims=True)), g, axes=a, epsilon=k["epsilon"]), b)',
        when=("rank(x) > len(a)", 'dtype(x) == "float32"'),  # a mean that is rounded to halves is far from the mean
    ),
    RewriteRule(
        "layer_norm_ignores_shift", "normalise",
        "layer_norm(add(x, c), g, b, axes=a, **k) => layer_norm(x, g, b, axes=a, **k)",
        when=("is_weight(c)", "fits(shape(c), shape(x))", "constant_along(shape(c), a, rank(x))"),
    ),
    RewriteRule(
        "softmax_ignores_shift", "normalise",
        "softmax(add(x, c), axis=k) => softmax(x, axis=k)",
        # of a row that a mask moves by -1e9, as a whole, only the mask is left
        when=("is_weight(c)", "fits(shape(c), shape(x))", "constant_along(shape(c), k, rank(x))"),
    ),
    RewriteRule(
        "softmax_ignores_subtraction", "normalise",
        "softmax(subtract(x, c), axis=k) => softmax(x, axis=k)",
        when=("is_weight(c)", "fits(shape(c), shape(x))", "constant_along(shape(c), k, rank(x))"),
    ),
    RewriteRule(
        "softmax_from_exp", "normalise",
        "divide(exp(x), sum(exp(x), axis=a, keepdims=True)) => softmax(x, axis=normal(a, rank(x))[0])",
        when=("is_float(x)", "len(normal(a, rank(x))) == 1"),
    ),
    RewriteRule(
        "softmax_after_reshape", "normalise",
        "softmax(reshape(x, shape=s), axis=k) => reshape(softmax(x, axis=-1), shape=s)",
        when=("k in [-1, len(s) - 1]", "rank(x) >= 1", "s[-1:] == shape(x)[-1:]"),
    ),
    RewriteRule(
        "softmax_before_reshape", "normalise",
        "reshape(softmax(x, axis=k), shape=s) => softmax(reshape(x, shape=s), axis=-1)",
        when=("k in [-1, rank(x) - 1]", "len(s) >= 1", "s[-1:] == shape(x)[-1:]"),
    ),
    RewriteRule(
        "softmax_after_permute", "normalise",
        "softmax(permute_dims(x, axes=p), axis=k) => permute_dims(softmax(x, axis=p[k]), axes=p)",
    ),
    RewriteRule(
        "softmax_before_permute", "normalise",
        "permute_dims(softmax(x, axis=k), axes=p) => "
        "softmax(permute_dims(x, axes=p), axis=places(normal(k, rank(x)), p)[0])",
    ),
    RewriteRule(
        "layer_norm_after_reshape", "normalise",
        "layer_norm(reshape(x, shape=s), g, b, axes=a, **k) => "
        "reshape(layer_norm(x, g, b, axes=[-1], **k), shape=s)",
        when=("rank(x) >= 1", "normal(a, len(s)) == [len(s) - 1]", "s[-1:] == shape(x)[-1:]"),
    ),
    RewriteRule(
        "layer_norm_before_reshape", "normalise",
        "reshape(layer_norm(x, g, b, axes=a, **k), shape=s) => "
        "layer_norm(reshape(x, shape=s), g, b, axes=[-1], **k)",
        when=("len(s) >= 1", "normal(a, rank(x)) == [rank(x) - 1]", "s[-1:] == shape(x)[-1:]"),
    ),
    RewriteRule(
        "layer_norm_after_concat", "normalise",
        "concat(layer_norm(x, g, b, axes=a, **k), layer_norm(y, g, b, axes=a, **k), axis=c) => "
        "layer_norm(concat(x, y, axis=c), g, b, axes=[-1], **k)",
        when=("normal(a, rank(x)) == [rank(x) - 1]", "c < rank(x) - 1"),
    ),
)  # fmt: skip
