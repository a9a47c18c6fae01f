"""Resizes: linear work on each pixel is led past them, to where the pixels are fewer.

Interpolation adds up elements of one channel, with weights that are the same for all channels and sum up to one. So a
1x1 convolution, a scale of each channel and a bias commute with it. Heads of networks that tell of each pixel what it
shows (SegFormer, Xie et al. 2021; HRNet, Wang et al. 2019; DeepLabV3, Chen et al. 2017) enlarge small feature maps,
join them to a large one and convolve that, most of it for nothing.
"""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule

_RESIZE = 'resize2d({}, size=n, layout="NCHW", **r)'
_ENLARGES = "n[0] * n[1] > dim(x, 2) * dim(x, 3)"
_POINT = "shape(w)[2:] == [1, 1]"
_IN_RANGE = 'dtype(x) != "float16"'  # in which parts of a sum, or products of weights, may be infinite
_CHANNELS = ("rank(x) == 4", "rank({0}) == 0 or shape({0}) == [1, dim(x, 1), 1, 1]")
_NCHW = 'data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW"'
_WEIGHT = "reshape({}, shape=[dim({}, 0), dim({}, 1)])"


def _channelwise(operator: str, name: str) -> tuple[RewriteRule, RewriteRule]:
    """A scale or a bias before a resize, and behind it."""
    before, behind = _RESIZE.format(f"{operator}(x, s)"), f"{operator}({_RESIZE.format('x')}, s)"
    when = tuple(condition.format("s") for condition in _CHANNELS)
    return (
        RewriteRule(f"{name}_before_resize", "resize", f"{behind} => {before}", when=when),
        RewriteRule(f"{name}_after_resize", "resize", f"{before} => {behind}", when=when),
    )


def _part(count: int, place: int) -> RewriteRule:
    """Of `count` tensors that are joined and convolved, the one in that place was enlarged: it is convolved before."""
    names = [f"y{i}" for i in range(count - 1)]
    before, behind = names[:place], names[place:]
    begin = " + ".join(f"dim({name}, 1)" for name in before)
    end = " + ".join(f"dim({name}, 1)" for name in (*before, "x"))
    at = ", ".join([begin] * bool(before) + [end] * bool(behind))
    others = names[0] if count == 2 else f"concat({', '.join(names)}, axis=1)"
    kernel = "concat(t[0], t[2], axis=1)" if before and behind else "t[0]" if before else "t[1]"
    part = _RESIZE.format(f"conv2d(x, t[{int(bool(before))}])")
    return RewriteRule(
        f"resized_part_{place + 1}_of_{count}", "resize",
        f"conv2d(concat({', '.join([*before, _RESIZE.format('x'), *behind])}, axis=1), w) => "
        f"add(conv2d({others}, {kernel}), {part}) where t = split(w, at=[{at}], axis=1)",
        when=("is_weight(w)", _POINT, _ENLARGES, _IN_RANGE),
    )  # fmt: skip


_PIXELS = "permute_dims(reshape(x, shape=r), axes=[0, 2, 1])"
_IMAGE = "reshape(permute_dims({}, axes=[0, 2, 1]), shape=s)"
_LINEAR = "conv2d(x, reshape(permute_dims(w, axes=[1, 0]), shape=[dim(w, 1), dim(w, 0), 1, 1]))"
_OF_PIXELS = (
    "rank(x) == 4",
    "r == [dim(x, 0), dim(x, 1), dim(x, 2) * dim(x, 3)]",
    "rank(w) == 2",
    "s == [dim(x, 0), dim(w, 1), dim(x, 2), dim(x, 3)]",
    "is_weight(w)",
)

PARTS = tuple(_part(count, place) for count in range(2, 6) for place in range(count))

RULES = (
    RewriteRule(
        "pointwise_before_resize", "resize",
        f"conv2d({_RESIZE.format('x')}, w) => {_RESIZE.format('conv2d(x, w)')}", when=(_POINT, _ENLARGES),
    ),
    RewriteRule(
        "pointwise_after_resize", "resize",
        f"{_RESIZE.format('conv2d(x, w)')} => conv2d({_RESIZE.format('x')}, w)",
        when=(_POINT, "n[0] * n[1] < dim(x, 2) * dim(x, 3) or dim(w, 0) > dim(x, 1)"),
    ),
    *PARTS,
    *_channelwise("multiply", "scale"),
    *_channelwise("add", "bias"),
    RewriteRule(
        "sum_of_resizes", "resize", "Linear[f](resize2d(x, **r), resize2d(y, **r)) => resize2d(Linear[f](x, y), **r)",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "resize_of_sum", "resize", "resize2d(Linear[f](x, y), **r) => Linear[f](resize2d(x, **r), resize2d(y, **r))",
        when=("shape(x) == shape(y)",),
    ),
    RewriteRule(
        "concat_of_resizes", "resize",
        "concat(resize2d(x, **r), resize2d(y, **r), axis=1) => resize2d(concat(x, y, axis=1), **r)",
        when=("shape(x)[2:] == shape(y)[2:]",),
    ),
    RewriteRule(
        "resize_of_concat", "resize",
        "resize2d(concat(x, y, axis=1), **r) => concat(resize2d(x, **r), resize2d(y, **r), axis=1)",
    ),
    RewriteRule(
        "resize_to_same_size", "resize",
        "resize2d(x, size=n, coordinate_transformation_mode=c, **r) => x",
        when=("n == shape(x)[2:4]", 'c != "tf_half_pixel_for_nn"'),
    ),
    RewriteRule(
        "resize_of_one_pixel", "resize",
        f"{_RESIZE.format('x')} => broadcast_to(x, shape=[dim(x, 0), dim(x, 1), n[0], n[1]])",
        when=("shape(x)[2:] == [1, 1]",),
    ),
    RewriteRule(
        "pixel_for_its_resize", "resize",
        f"Commutative[f]({_RESIZE.format('x')}, y) => Commutative[f](x, y)",
        when=("shape(x)[2:] == [1, 1]", "shape(y) == [dim(x, 0), dim(x, 1), n[0], n[1]]"),
    ),
    RewriteRule(
        "linear_of_pixels", "resize", f"{_IMAGE.format(f'matmul({_PIXELS}, w)')} => {_LINEAR}", when=_OF_PIXELS,
    ),
    RewriteRule(
        "biased_linear_of_pixels", "resize",
        f"{_IMAGE.format(f'add(matmul({_PIXELS}, w), b)')} => add({_LINEAR}, reshape(b, shape=[1, dim(w, 1), 1, 1]))",
        when=(*_OF_PIXELS, "shape(b) == [dim(w, 1)]"),
    ),
    RewriteRule(
        "widening_conv_into_pointwise", "resize",  # where that takes fewer multiplications
        f"conv2d(add(conv2d(x, a, groups=1, {_NCHW}, **k), b), w) => add(conv2d(x, reshape(matmul("
        f"{_WEIGHT.format('w', 'w', 'w')}, reshape(a, shape=[dim(a, 0), prod(shape(a)[1:])])), "
        f"shape=replaced(shape(a), 0, dim(w, 0))), groups=1, {_NCHW}, **k), conv2d(b, w))",
        when=("is_weight(a)", "is_weight(b)", "is_weight(w)", _POINT, "shape(b) == [1, dim(a, 0), 1, 1]",
              'k["out_dtype"] in [None, dtype(x)]', "is_float(x)", _IN_RANGE,
              "prod(shape(a)[1:]) * dim(w, 0) < prod(shape(a)) + dim(w, 0) * dim(w, 1)"),
    ),
)  # fmt: skip

# Each of these leaves fewer multiplications in products and convolutions, or as many of those and fewer operations: so
# they come to an end.
TERMINATING = (
    "resize_to_same_size",
    "pixel_for_its_resize",
    "linear_of_pixels",
    "biased_linear_of_pixels",
    "widening_conv_into_pointwise",
    "sum_of_resizes",
    "pointwise_before_resize",
    *(rule.name for rule in PARTS),
)
