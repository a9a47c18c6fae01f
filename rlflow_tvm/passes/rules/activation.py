"""Activations: written out and recognised, and moved past what keeps order."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_ERF = "add(erf({}), 1.0)"
_GELU = {
    "gelu_from_halved_error": "multiply(x, multiply(0.5, {}))",
    "gelu_from_halved_input": "multiply(multiply(x, 0.5), {})",
    "gelu_from_halved_product": "multiply(multiply(x, {}), 0.5)",
}


def _gelu_rules() -> tuple[RewriteRule, ...]:
    rules = []
    for name, text in _GELU.items():
        for suffix, scaled in (("", "divide(x, 1.4142135623730951)"), ("_scaled", "multiply(x, 0.7071067811865476)")):
            left = text.format(_ERF.format(scaled))
            rules.append(RewriteRule(f"{name}{suffix}", "activation", f"{left} => gelu(x)", when=("is_float(x)",)))
    return tuple(rules)


RULES = (
    *_gelu_rules(),
    RewriteRule(
        "gelu_to_error", "activation",
        f"gelu(x) => multiply(multiply(x, 0.5), {_ERF.format('divide(x, 1.4142135623730951)')})",
    ),
    RewriteRule("silu_from_sigmoid", "activation", "multiply(x, sigmoid(x)) => silu(x)", when=("is_float(x)",)),
    RewriteRule("silu_to_sigmoid", "activation", "silu(x) => multiply(x, sigmoid(x))"),
    RewriteRule(
        "sigmoid_from_exp", "activation", "divide(1.0, add(exp(negative(x)), 1.0)) => sigmoid(x)",
        when=("is_float(x)",),
    ),
    RewriteRule(
        "tanh_to_sigmoid", "activation", "tanh(x) => subtract(multiply(sigmoid(add(x, x)), 2.0), 1.0)",
        when=('dtype(x) in ["float32", "float64"]',),  # near 0 halves keep little of a difference
    ),
    RewriteRule("product_of_exps", "activation", "multiply(exp(x), exp(y)) => exp(add(x, y))"),
    RewriteRule("quotient_of_exps", "activation", "divide(exp(x), exp(y)) => exp(subtract(x, y))"),
    RewriteRule("relu_to_maximum", "activation", "relu(x) => maximum(x, 0.0)"),
    RewriteRule("maximum_to_relu", "activation", "maximum(x, 0.0) => relu(x)"),
    RewriteRule("relu_of_abs", "activation", "relu(abs(x)) => abs(x)", when=("is_float(x)",)),
    RewriteRule("abs_of_relu", "activation", "abs(relu(x)) => relu(x)"),
    RewriteRule("abs_of_negative", "activation", "abs(negative(x)) => abs(x)", when=("is_float(x)",)),
    RewriteRule("relu_of_softmax", "activation", "relu(softmax(x, axis=k)) => softmax(x, axis=k)"),
    RewriteRule("relu_of_maximum", "activation", "relu(maximum(x, y)) => maximum(relu(x), relu(y))"),
    RewriteRule("maximum_of_relus", "activation", "maximum(relu(x), relu(y)) => relu(maximum(x, y))"),
    RewriteRule("relu_difference_to_identity", "activation", "subtract(relu(x), relu(negative(x))) => x",
                when=("is_float(x)",)),
    RewriteRule("abs_from_relus", "activation", "add(relu(x), relu(negative(x))) => abs(x)", when=("is_float(x)",)),
    RewriteRule("relu_after_max_pool", "activation", "max_pool2d(relu(x), **k) => relu(max_pool2d(x, **k))"),
    RewriteRule("relu_before_max_pool", "activation", "relu(max_pool2d(x, **k)) => max_pool2d(relu(x), **k)"),
    RewriteRule(
        "relu_after_max", "activation", "max(relu(x), axis=a, keepdims=d) => relu(max(x, axis=a, keepdims=d))",
    ),
    RewriteRule(
        "relu_after_pad", "activation",
        'pad(relu(x), pad_width=p, pad_mode="constant", pad_value=0.0) => '
        'relu(pad(x, pad_width=p, pad_mode="constant", pad_value=0.0))',
    ),
    RewriteRule(
        "relu_before_pad", "activation",
        'relu(pad(x, pad_width=p, pad_mode="constant", pad_value=0.0)) => '
        'pad(relu(x), pad_width=p, pad_mode="constant", pad_value=0.0)',
    ),
)  # fmt: skip
