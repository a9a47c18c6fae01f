"""Element-wise algebra between tensors that are no weights: association, common factors, order, broadcasting."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_THREE_INPUTS = ("not is_weight(x)", "not is_weight(y)", "not is_weight(z)")
# in which the inverse of a small divisor, and the product of two large ones, are infinite
_IN_RANGE = 'dtype(x) in ["float32", "float64", "bfloat16"]'
# in which products are made in an order in which they are neither infinite nor zero
_IN_ORDER = 'dtype(x) != "float16"'
# in which what (x - mean) / deviation keeps is not lost in x / deviation
_EXACT = 'dtype(x) not in ["float16", "bfloat16"]'
_IN_PLACE = "fits(shape({1}), shape({0}))"


def _associative(name: str, *more: str) -> RewriteRule:
    return RewriteRule(
        f"associate_{name}", "algebra", f"{name}({name}(x, y), z) => {name}(x, {name}(y, z))",
        when=(*_THREE_INPUTS, *more),
    )  # fmt: skip


RULES = (
    _associative("add", _IN_ORDER),  # a row masked by -65504 becomes infinite there
    _associative("multiply", _IN_ORDER),
    _associative("maximum"),
    _associative("minimum"),
    RewriteRule(
        "bias_after_sum", "algebra", "add(add(x, a), y) => add(add(x, y), a)",
        # one number is no bias, but may be what takes a large x back, as in mask * 1e9 - 1e9: y would be lost in x
        when=("is_weight(a)", "prod(shape(a)) > 1", "not is_weight(x)", "not is_weight(y)", _IN_ORDER),
    ),
    RewriteRule(
        "scale_after_product", "algebra", "multiply(multiply(x, a), y) => multiply(multiply(x, y), a)",
        when=("is_weight(a)", "not is_weight(x)", "not is_weight(y)", _IN_ORDER),
    ),
    RewriteRule(
        "distribute_scale", "algebra", "multiply(Linear[f](x, y), s) => Linear[f](multiply(x, s), multiply(y, s))",
        when=("not is_weight(x)", "not is_weight(y)", _EXACT),
    ),
    RewriteRule(
        "factor_scale", "algebra", "Linear[f](multiply(x, s), multiply(y, s)) => multiply(Linear[f](x, y), s)",
        when=(_IN_ORDER,), symmetric=False,
    ),
    RewriteRule("double_to_scale", "algebra", "add(x, x) => multiply(x, 2.0)", symmetric=True),
    RewriteRule("scale_to_double", "algebra", "multiply(x, 2.0) => add(x, x)"),
    RewriteRule("cancel_negatives", "algebra", "negative(negative(x)) => x"),
    RewriteRule("negative_to_scale", "algebra", "negative(x) => multiply(x, -1.0)", when=("is_float(x)",)),
    RewriteRule("scale_to_negative", "algebra", "multiply(x, -1.0) => negative(x)"),
    RewriteRule("subtract_negative", "algebra", "subtract(x, negative(y)) => add(x, y)"),
    RewriteRule("add_negative", "algebra", "add(x, negative(y)) => subtract(x, y)"),
    RewriteRule("negative_of_difference", "algebra", "negative(subtract(x, y)) => subtract(y, x)"),
    RewriteRule(
        "divide_twice", "algebra", "divide(divide(x, a), b) => divide(x, multiply(a, b))",
        when=("is_weight(a)", "is_weight(b)", _IN_RANGE),
    ),
    RewriteRule(
        "scale_then_divide", "algebra", "divide(multiply(x, a), b) => multiply(x, divide(a, b))",
        when=("is_weight(a)", "is_weight(b)", _IN_RANGE),
    ),
    RewriteRule(
        "divide_then_scale", "algebra", "multiply(divide(x, a), b) => multiply(x, divide(b, a))",
        when=("is_weight(a)", "is_weight(b)", _IN_RANGE),
    ),
    RewriteRule(
        "distribute_divide", "algebra", "divide(Linear[f](x, y), s) => Linear[f](divide(x, s), divide(y, s))",
        when=("is_float(x)", _EXACT),
    ),
    RewriteRule(
        "factor_divide", "algebra", "Linear[f](divide(x, s), divide(y, s)) => divide(Linear[f](x, y), s)",
        when=("is_float(x)", _IN_ORDER),
    ),
    RewriteRule(
        "divide_by_number", "algebra", "divide(x, number(c)) => multiply(x, number(1 / c))",
        when=("is_float(x)", "c != 0"),
    ),
    RewriteRule(
        "divide_by_root", "algebra", "divide(x, sqrt(y)) => multiply(x, rsqrt(y))", when=("is_float(x)",),
    ),
    RewriteRule(
        "scale_by_inverse_root", "algebra", "multiply(x, rsqrt(y)) => divide(x, sqrt(y))", when=("is_float(x)",),
    ),
    RewriteRule(
        "inverse_root", "algebra", "divide(1.0, sqrt(y)) => rsqrt(y)", when=("is_float(y)",),
    ),
    RewriteRule(
        "add_zero", "algebra", "add(x, 0.0) => x",
    ),
    RewriteRule(
        "multiply_by_one", "algebra", "multiply(x, 1.0) => x",
    ),
    RewriteRule("divide_by_one", "algebra", "divide(x, 1.0) => x", when=("is_float(x)",)),
    RewriteRule("maximum_of_same", "algebra", "maximum(x, x) => x"),
    RewriteRule("minimum_of_same", "algebra", "minimum(x, x) => x"),
    RewriteRule(
        "maximum_absorbs_minimum", "algebra", "maximum(x, minimum(x, y)) => x", when=(_IN_PLACE.format("x", "y"),),
    ),
    RewriteRule(
        "minimum_absorbs_maximum", "algebra", "minimum(x, maximum(x, y)) => x", when=(_IN_PLACE.format("x", "y"),),
    ),
    RewriteRule(
        "add_after_maximum", "algebra", "maximum(add(x, z), add(y, z)) => add(maximum(x, y), z)", when=("is_float(x)",),
    ),
    RewriteRule(
        "drop_broadcast", "algebra", "Binary[f](broadcast_to(x, shape=s), y) => Binary[f](x, y)",
        when=("broadcast(shape(x), shape(y)) == broadcast(s, shape(y))",),
    ),
    RewriteRule(
        "drop_broadcast_right", "algebra", "Binary[f](y, broadcast_to(x, shape=s)) => Binary[f](y, x)",
        when=("broadcast(shape(x), shape(y)) == broadcast(s, shape(y))",),
    ),
    RewriteRule(
        "identity_broadcast", "algebra", "broadcast_to(x, shape=s) => x", when=("s == shape(x)",),
    ),
    RewriteRule(
        "broadcast_after_unary", "algebra", "Unary[f](broadcast_to(x, shape=s)) => broadcast_to(Unary[f](x), shape=s)",
    ),
    RewriteRule(
        "expand_dims_to_reshape", "algebra", "expand_dims(x, axis=a) => reshape(x, shape=expanded(shape(x), a))",
    ),
    RewriteRule(
        "squeeze_to_reshape", "algebra", "squeeze(x, axis=a) => reshape(x, shape=reduced(shape(x), a, False))",
    ),
)  # fmt: skip
