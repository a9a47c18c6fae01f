"""Element-wise algebra: association, distribution, folding of scales and biases."""

from __future__ import annotations

from rlflow_tvm.passes.rule import Instance, RewriteRule

_BIAS = Instance({"x": (2, 3, 4), "a": (4,), "b": (4,)}, weights=("a", "b"))
_CHANNEL = Instance({"x": (1, 4, 5, 6), "a": (1, 4, 1, 1), "b": (1, 4, 1, 1)}, weights=("a", "b"))
_ONES = Instance({"x": (1, 1), "a": (1, 1), "b": (1,)}, weights=("a", "b"))
_FOLD = (_BIAS, _CHANNEL, _ONES)
_NOT_WEIGHTS = Instance({"x": (2, 3), "a": (3,), "b": (3,)}, reason="is_weight")

RULES = (
    RewriteRule(
        "fold_bias_chain", "fold",
        "add(add(x, a), b) => add(x, add(a, b))",
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)"),
        instances=_FOLD, near_misses=(_NOT_WEIGHTS,),
    ),
    RewriteRule(
        "fold_scale_chain", "fold",
        "multiply(multiply(x, a), b) => multiply(x, multiply(a, b))",
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)"),
        instances=_FOLD, near_misses=(_NOT_WEIGHTS,),
    ),
    RewriteRule(
        "distribute_scale_over_bias", "fold",
        "multiply(add(x, a), b) => add(multiply(x, b), multiply(a, b))",
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)"),
        instances=_FOLD, near_misses=(_NOT_WEIGHTS,),
    ),
    RewriteRule(
        "divide_to_multiply", "fold",
        "divide(x, a) => multiply(x, divide(1.0, a))",
        when=("is_weight(a)", "not is_weight(x)", "is_float(x)"),
        instances=(
            Instance({"x": (2, 3, 4), "a": (4,)}, weights=("a",)),
            Instance({"x": (1, 4, 5, 6), "a": (1, 4, 1, 1)}, weights=("a",)),
            Instance({"x": (1, 1), "a": (1,)}, weights=("a",)),
        ),
        near_misses=(Instance({"x": (2, 3), "a": (3,)}, reason="is_weight"),),
    ),
    RewriteRule(
        "subtract_to_add", "fold",
        "subtract(x, a) => add(x, negative(a))",
        when=("is_weight(a)", "not is_weight(x)"),
        instances=(
            Instance({"x": (2, 3, 4), "a": (4,)}, weights=("a",)),
            Instance({"x": (1, 4, 5, 6), "a": (1, 4, 1, 1)}, weights=("a",)),
            Instance({"x": (1, 1), "a": (1,)}, weights=("a",)),
        ),
        near_misses=(Instance({"x": (2, 3), "a": (3,)}, reason="is_weight"),),
    ),
    RewriteRule(
        "relu_idempotent", "cancel",
        "relu(relu(x)) => relu(x)",
        instances=(Instance({"x": (2, 3)}), Instance({"x": (1, 1, 1)}), Instance({"x": (1, 16, 3, 5)})),
        near_misses=(Instance({"x": (2, 3)}, left="relu(tanh(x))", reason="relu is needed, not tanh"),),
    ),
)  # fmt: skip
