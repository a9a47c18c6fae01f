"""Element-wise algebra: association, distribution, folding of scales and biases."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

RULES = (
    RewriteRule(
        "fold_bias_chain", "fold",
        "add(add(x, a), b) => add(x, add(a, b))",
        # the sum of two numbers such as -65504 is infinite there
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)",
              'dtype(x) != "float16" or (prod(shape(a)) > 1 and prod(shape(b)) > 1)'),
    ),
    RewriteRule(
        "fold_scale_chain", "fold",
        "multiply(multiply(x, a), b) => multiply(x, multiply(a, b))",
        # the product of two weights such as 1e-4 is zero there
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)", 'dtype(x) != "float16"'),
    ),
    RewriteRule(
        "distribute_scale_over_bias", "fold",
        "multiply(add(x, a), b) => add(multiply(x, b), multiply(a, b))",
        # halves: both summands may be infinite, and of (x - mean) / deviation little is left
        when=("is_weight(a)", "is_weight(b)", "not is_weight(x)", 'dtype(x) not in ["float16", "bfloat16"]'),
    ),
    RewriteRule(
        "divide_to_multiply", "fold",
        "divide(x, a) => multiply(x, divide(1.0, a))",
        # narrower floats: the inverse of a weight such as 1e-5 is infinite there, and 0 times it no number
        when=("is_weight(a)", "not is_weight(x)", 'dtype(x) in ["float32", "float64", "bfloat16"]'),
    ),
    RewriteRule(
        "subtract_to_add", "fold",
        "subtract(x, a) => add(x, negative(a))",
        when=("is_weight(a)", "not is_weight(x)"),
    ),
    RewriteRule(
        "relu_idempotent", "cancel",
        "relu(relu(x)) => relu(x)",
    ),
)  # fmt: skip
