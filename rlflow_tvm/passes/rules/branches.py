"""Parallel branches of linear operators on one tensor: their sum is one convolution.

Networks that are trained with several branches a block (RepVGG, Ding et al. 2021; MobileOne; RepViT) and exported as
they were trained have convolutions of several sizes, scales (what is left of a batch norm) and the tensor itself added
up. All of these are convolutions with the largest of the kernels.
"""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_LAYOUTS = (
    'k["data_layout"] == "NCHW"',
    'k["kernel_layout"] == "OIHW"',
    'k["out_layout"] == "NCHW"',
    'k["out_dtype"] in [None, dtype(x)]',
)
_WINDOW = (
    "rank(x) == 4",
    "is_weight(w)",
    'k["strides"] == [1, 1]',
    'k["dilation"] == [1, 1]',
    "dim(w, 2) == p[0] + p[2] + 1",
    "dim(w, 3) == p[1] + p[3] + 1",
    *_LAYOUTS,
)
"""Of a convolution whose windows lie around the elements of the tensor, each around one."""
_SCALE = "is_weight(s)", "shape(s) == [1, dim(x, 1), 1, 1]"
_DENSE = ("dim(w, 0) == dim(x, 1)",)
_DEPTHWISE = "g > 1", "g == dim(w, 0)", "g == dim(x, 1)"
_CENTRE = "[0, 0, 0, 0, p[0], p[2], p[1], p[3]]"
_ONES = "broadcast_to(1.0, shape=[dim(x, 1), 1])"


def _into_conv(name: str, branch: str, groups: int | str, kernel: str, when: tuple[str, ...]) -> RewriteRule:
    """`kernel`: that of the branch, without the zeros around it."""
    how = f"padding=p, groups={groups}, **k"
    right, _, where = kernel.partition(" where ")
    return RewriteRule(
        name, "branches",
        f"add(conv2d(x, w, {how}), {branch}) => conv2d(x, add(w, pad({right}, pad_width={_CENTRE})), {how})"
        + (f" where {where}" if where else ""),
        when=(*when, *_WINDOW),
    )  # fmt: skip


def _diagonal(column: str) -> str:
    """A kernel of one element that has this column (C, 1) on its diagonal: C zeros behind each of its numbers, read as
    rows of C, move one to the right from row to row."""
    zeros = f"pad({column}, pad_width=[0, 0, 0, dim(x, 1)])"
    flat = f"reshape({zeros}, shape=[dim(x, 1) * (dim(x, 1) + 1)])"
    square = "reshape(t[0], shape=[dim(x, 1), dim(x, 1), 1, 1])"
    return f"{square} where t = split({flat}, at=[dim(x, 1) * dim(x, 1)], axis=0)"


_CONV = "conv2d(x, w, **k)"
_OTHER = "conv2d(x, v, **l)"

RULES = (
    RewriteRule(
        "smaller_conv_into_larger", "branches",
        "add(conv2d(x, w, padding=p, **k), conv2d(x, v, padding=q, **k)) => conv2d(x, add(w, pad(v, pad_width="
        "[0, 0, 0, 0, p[0] - q[0], p[2] - q[2], p[1] - q[1], p[3] - q[3]])), padding=p, **k)",
        when=("is_weight(w)", "is_weight(v)", 'k["dilation"] == [1, 1]', "shape(w)[:2] == shape(v)[:2]",
              "shape(w) != shape(v)", "p[0] >= q[0]", "p[1] >= q[1]", "p[2] >= q[2]", "p[3] >= q[3]",
              "dim(w, 2) - dim(v, 2) == p[0] + p[2] - q[0] - q[2]",
              "dim(w, 3) - dim(v, 3) == p[1] + p[3] - q[1] - q[3]", *_LAYOUTS),
    ),
    _into_conv("scale_into_branch", "multiply(x, s)", 1, _diagonal("reshape(s, shape=[dim(x, 1), 1])"),
           (*_DENSE, *_SCALE)),
    _into_conv("scale_into_depthwise_branch", "multiply(x, s)", "g", "reshape(s, shape=[dim(x, 1), 1, 1, 1])",
           (*_DEPTHWISE, *_SCALE)),
    _into_conv("shortcut_into_branch", "x", 1, _diagonal(_ONES), _DENSE),
    _into_conv("shortcut_into_depthwise_branch", "x", "g", "broadcast_to(1.0, shape=[dim(x, 1), 1, 1, 1])", _DEPTHWISE),
    RewriteRule(
        "biases_of_conv_branches", "branches",
        f"add(add({_CONV}, a), add({_OTHER}, b)) => add(add({_CONV}, {_OTHER}), add(a, b))",
        when=("is_weight(w)", "is_weight(v)", "is_weight(a)", "is_weight(b)"),
    ),
    RewriteRule(
        "biases_of_conv_and_scale", "branches",
        f"add(add({_CONV}, a), add(multiply(x, s), b)) => add(add({_CONV}, multiply(x, s)), add(a, b))",
        when=("is_weight(w)", "is_weight(s)", "is_weight(a)", "is_weight(b)"),
    ),
    RewriteRule(
        "norm_into_conv", "branches",  # of the sum of branches, which is one convolution by then
        f"add(multiply(add({_CONV}, a), s), b) => add(conv2d(x, multiply(w, reshape(s, shape=[dim(w, 0), 1, 1, 1])), "
        "**k), add(multiply(a, s), b))",
        when=("is_weight(w)", "is_weight(a)", "is_weight(b)", "is_weight(s)", "rank(x) == 4",
              "shape(s) == [1, dim(w, 0), 1, 1]", 'dtype(x) != "float16"', *_LAYOUTS),  # where 1e-5 x 1e-3 is 0
    ),
    RewriteRule(
        "bias_past_conv_branch", "branches",
        f"add(add({_CONV}, a), {_OTHER}) => add(add({_CONV}, {_OTHER}), a)",
        when=("is_weight(w)", "is_weight(v)", "is_weight(a)"),
    ),
    RewriteRule(
        "bias_past_scale", "branches",
        f"add(add({_CONV}, a), multiply(x, s)) => add(add({_CONV}, multiply(x, s)), a)",
        when=("is_weight(w)", "is_weight(s)", "is_weight(a)"),
    ),
    RewriteRule(
        "bias_past_shortcut", "branches",
        f"add(add({_CONV}, a), x) => add(add({_CONV}, x), a)",
        when=("is_weight(w)", "is_weight(a)"),
    ),
)  # fmt: skip

# Each rewrite of the first kind leaves an operation less at run time; the others leave as many or less, and the bias
# that they move stands nearer to the outputs: so they come to an end.
TERMINATING = (
    *(rule.name for rule in RULES if "_into_" in rule.name),
    "conv_factor_kernels",
    *(rule.name for rule in RULES if "_into_" not in rule.name),
)
