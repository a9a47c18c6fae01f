"""Random shapes and attributes for an operator: what is not yet known of a call is drawn so that it usually is legal.

Nothing here decides what is legal: the operator's meaning does, and what it refuses is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from rlflow_tvm.passes.proof.dice import Dice
from rlflow_tvm.passes.proof.domains import Shape, Unfit
from rlflow_tvm.passes.proof.interpolation import COORDINATES, METHODS, ROUNDINGS

Known = list[Shape | None]
Given = Mapping[str, Any]
"""Attributes that are known already."""

BLOCKS = (1, 2, 4)
_MOST_RANK = 4


def _anything(least: int) -> Callable[[Dice, Known, Given], list[Shape]]:
    def operands(dice: Dice, known: Known, given: Given) -> list[Shape]:
        return [shape if shape is not None else dice.shape(least=least) for shape in known]

    return operands


def _beside(dice: Dice, other: Shape) -> Shape:
    """A shape that broadcasts with `other`: the same, a part of it, a scalar's, or a larger one."""
    if dice.chance(0.45):
        return other
    if dice.chance(0.35):
        return other[-1:]
    dropped = int(dice.rng.integers(0, len(other) + 1))
    part = tuple(1 if dice.chance(0.4) else extent for extent in other[dropped:])
    if dice.chance(0.3) and len(other) < _MOST_RANK and part == other:
        return (dice.extent(), *part)
    return part


def _broadcast(dice: Dice, known: Known, given: Given) -> list[Shape]:
    a, b = known
    if a is None:
        a = dice.shape() if not b else _beside(dice, b)
    return [a, _beside(dice, a) if b is None else b]


def _matmul(dice: Dice, known: Known, given: Given) -> list[Shape]:
    a, b = known
    if a is None and b is None:
        a = dice.shape(int(dice.pick([1, 2, 2, 2, 3, 3, 4])))
    if a is None:
        assert b is not None
        if not b:
            raise Unfit("a scalar in a matrix product")
        inner = b[-2] if len(b) > 1 else b[0]
        rows = () if dice.chance(0.1) else (dice.extent(),)
        return [(*(_batch(dice, b[:-2]) if rows else ()), *rows, inner), b]
    if not a:
        raise Unfit("a scalar in a matrix product")
    if b is None:
        columns = () if dice.chance(0.1) else (dice.extent(),)
        b = (*(_batch(dice, a[:-2]) if columns else ()), a[-1], *columns)
    return [a, b]


def _batch(dice: Dice, other: Shape) -> Shape:
    """Axes in front of a matrix, beside those of the other operand."""
    if dice.chance(0.5):
        return ()
    return other if dice.chance(0.7) else _beside(dice, other) if other else dice.shape(1)


def _concat(dice: Dice, known: Known, given: Given) -> list[Shape]:
    found = next((shape for shape in known if shape is not None), None)
    base = found
    if base is None:
        base = _image(dice, None) if dice.chance(0.25) else dice.shape(least=1)
    if not base:
        raise Unfit("scalars are not joined")
    axis = given.get("axis", int(dice.rng.integers(len(base))))
    if not -len(base) <= axis < len(base):
        raise Unfit("no such axis")
    axis %= len(base)
    return [shape if shape is not None else (*base[:axis], dice.extent(), *base[axis + 1 :]) for shape in known]


def _image(dice: Dice, layout: str | None, channels: int | None = None) -> Shape:
    """(N, C, H, W), or (N, C / b, H, W, b) in the layout NCHW{b}c; in either without a layout."""
    block = 0
    if layout is None:
        block = int(dice.pick(BLOCKS)) if dice.chance(0.2) else 0
    elif layout != "NCHW":
        block = int(layout.removeprefix("NCHW").removesuffix("c"))
    if channels is None:
        channels = dice.extent() * (block or 1)
    height, width = (int(dice.rng.integers(1, 6)) for _ in range(2))
    if not block:
        return (int(dice.pick([1, 1, 2])), channels, height, width)
    if channels % block:
        raise Unfit("channels that are not blocked")
    return (int(dice.pick([1, 1, 2])), channels // block, height, width, block)


def _channels(shape: Shape) -> int:
    return shape[1] * (shape[4] if len(shape) == 5 else 1)


def _pooled(dice: Dice, known: Known, given: Given) -> list[Shape]:
    (x,) = known
    return [_image(dice, given.get("layout")) if x is None else x]


def _conv(dice: Dice, known: Known, given: Given) -> list[Shape]:
    x, w = known
    if any(shape is not None and len(shape) not in (4, 5) for shape in known):
        raise Unfit("no image")
    groups = given.get("groups")
    if x is None:
        if w is None:
            count = dice.extent() * (groups or dice.pick([1, 1, 1, 2, 4]))
            if groups is None and dice.chance(0.3):
                count = int(dice.pick([2, 4]))
        else:
            count = w[1] * (groups or dice.pick([1, 1, 1, 2]))
        x = _image(dice, given.get("data_layout"), count)
    if w is None:
        channels = _channels(x)
        if groups is None:
            groups = dice.pick([1, 1, 1, channels, *(g for g in (2, 3) if channels % g == 0)])
        if channels % groups:
            raise Unfit("channels that make no groups")
        layout = given.get("kernel_layout", "OIHW" if dice.chance(0.85) else f"OIHW{dice.pick(BLOCKS)}o")
        block = 0 if layout == "OIHW" else int(layout.removeprefix("OIHW").removesuffix("o"))
        outputs = groups * dice.extent() * (block if block and groups % block else 1)
        size = (1, 1) if dice.chance(0.35) else tuple(int(dice.rng.integers(1, 4)) for _ in range(2))
        if not block:
            w = (outputs, channels // groups, *size)
        else:
            w = (max(outputs // block, 1), channels // groups, *size, block)
    return [x, w]


def _packed(axis: int) -> Callable[[Dice, Known, Given], list[Shape]]:
    def operands(dice: Dice, known: Known, given: Given) -> list[Shape]:
        (x,) = known
        if x is None:
            drawn = list(dice.shape(4))
            drawn[axis] *= given.get("block", 1)
            x = tuple(drawn)
        return [x]

    return operands


def _unpacked(dice: Dice, known: Known, given: Given) -> list[Shape]:
    (x,) = known
    return [(*dice.shape(4), given.get("block", dice.pick(BLOCKS))) if x is None else x]


def _normed(dice: Dice, known: Known, given: Given) -> list[Shape]:
    x = known[0]
    if x is None:
        weight = next((shape for shape in known[1:] if shape is not None), None)
        x = dice.shape(least=1) if weight is None else (*dice.shape(int(dice.pick([0, 1, 1, 2]))), *weight)
    count = len(given["axes"]) if "axes" in given else 1 if dice.chance(0.8) else 2
    return [x, *(x[len(x) - count :] if shape is None else shape for shape in known[1:])]


def _taken(dice: Dice, known: Known, given: Given) -> list[Shape]:
    x, indices = known
    return [dice.shape(least=1) if x is None else x,
            dice.shape(int(dice.pick([0, 0, 1, 1, 2]))) if indices is None else indices]  # fmt: skip


def _with_units(dice: Dice, known: Known, given: Given) -> list[Shape]:
    (x,) = known
    return [tuple(1 if dice.chance(0.4) else e for e in dice.shape()) if x is None else x]


_OPERANDS: dict[str, Callable[[Dice, Known, Given], list[Shape]]] = {
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "maximum", "minimum", "power"), _broadcast),
    **dict.fromkeys(("softmax", "mean", "sum", "max", "min", "split"), _anything(1)),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "resize2d"), _pooled),
    "layer_norm": _normed,
    "rms_norm": _normed,
    "take": _taken,
    "squeeze": _with_units,
    "broadcast_to": _with_units,
    "matmul": _matmul,
    "conv2d": _conv,
    "concat": _concat,
    "pack": _packed(1),
    "pack_kernel": _packed(0),
    "unpack": _unpacked,
}


def draw_operands(name: str, dice: Dice, known: Known, given: Given) -> list[Shape]:
    """Shapes of all operands of a call of which some (not None) and the attributes `given` are known. `Unfit` where
    what is known fits nothing."""
    return _OPERANDS.get(name, _anything(0))(dice, known, given)


def _axes_attribute(dice: Dice, shape: Shape) -> tuple[int, ...] | None:
    """None: all of them, as importers write it."""
    if dice.chance(0.1):
        return None
    count = int(dice.rng.integers(1, len(shape) + 1))
    axes = sorted(dice.permutation(len(shape))[:count])
    return tuple(dice.signed(axis, len(shape)) for axis in axes)


def _split_points(dice: Dice, extent: int) -> tuple[int, ...]:
    count = min(int(dice.pick([1, 1, 1, 2, 3])), extent - 1)
    if count < 1:
        raise Unfit("too short to be split")
    return tuple(sorted(int(i) + 1 for i in dice.rng.choice(extent - 1, count, replace=False)))


def _regrouped(dice: Dice, shape: Shape) -> Shape:
    """Another shape of as many elements: neighbours joined or taken apart, axes of extent one put in."""
    extents = list(shape)
    for _ in range(int(dice.rng.integers(1, 3))):
        if len(extents) > 1 and dice.chance(0.5):
            at = int(dice.rng.integers(len(extents) - 1))
            extents[at : at + 2] = [extents[at] * extents[at + 1]]
        elif len(extents) < 5:
            at = int(dice.rng.integers(len(extents) + 1))
            whole = extents[at] if at < len(extents) else 1
            factor = int(dice.pick([f for f in range(1, whole + 1) if whole % f == 0]))
            extents[at : at + 1] = [factor, whole // factor]
    assert prod(extents) == prod(shape)
    return tuple(extents)


def _window(dice: Dice, name: str, shapes: list[Shape]) -> dict[str, Any]:
    """Attributes of pools and of convolutions but for their sizes."""
    kernel = shapes[1][2:4] if name == "conv2d" else tuple(int(dice.rng.integers(1, 4)) for _ in range(2))
    pads = dice.pick(["none", "none", "same", "any"])
    if pads == "same":
        before = [k // 2 for k in kernel]
        padding = (*before, *before)
    else:
        padding = tuple(dice.small(0, 1, 3) if pads == "any" else 0 for _ in range(4))
    strides = (1, 1) if dice.chance(0.5) else tuple(dice.small(1, 2, 3) for _ in range(2))
    dilation = (1, 1) if dice.chance(0.6) else dice.pick([(2, 1), (1, 2), (2, 3)])
    drawn: dict[str, Any] = {"padding": padding, "strides": strides, "dilation": dilation}
    if name != "conv2d":
        ceil, included = dice.chance(0.25), dice.chance(0.4)
        drawn.update(pool_size=kernel, ceil_mode=ceil, count_include_pad=included)
    return drawn


def _layouts(dice: Dice, name: str, shapes: list[Shape], given: Given) -> dict[str, Any]:
    x = shapes[0]
    layout = f"NCHW{x[4]}c" if len(x) == 5 else "NCHW"
    if name != "conv2d":
        return {"layout": layout, "out_layout": given.get("layout", layout)}
    w = shapes[1]
    outputs = w[0] * (w[4] if len(w) == 5 else 1)
    out = f"NCHW{w[4]}c" if len(w) == 5 else "NCHW"
    if len(w) == 4 and dice.chance(0.15):
        out = f"NCHW{dice.pick([b for b in BLOCKS if outputs % b == 0])}c"
    groups = given.get("groups", max(_channels(x) // w[1], 1))
    return {"data_layout": layout, "kernel_layout": f"OIHW{w[4]}o" if len(w) == 5 else "OIHW", "out_layout": out,
            "groups": groups}  # fmt: skip


def _resizing(dice: Dice) -> dict[str, Any]:
    """Attributes of a resize but for its layout."""
    size = tuple(int(dice.rng.integers(1, 9)) for _ in range(2))
    return {
        "size": size,
        "method": dice.pick([*METHODS]),
        "coordinate_transformation_mode": dice.pick([m for m in COORDINATES if m != "align_corners" or min(size) > 1]),
        "rounding_method": dice.pick(["", *ROUNDINGS]),
        "cubic_alpha": dice.pick([-0.75, -0.5]),
        "cubic_exclude": int(dice.chance(0.3)),
    }


def draw_attributes(name: str, dice: Dice, shapes: list[Shape], given: Given, dtype: str) -> dict[str, Any]:
    """Values of all attributes of a call on operands of these shapes; those `given` stay. `Unfit` where none fit."""
    x = shapes[0]
    drawn: dict[str, Any] = {}
    if not x and name in ("mean", "sum", "max", "min", "softmax", "split", "concat", "take"):
        raise Unfit("a scalar has no axis")
    images = shapes if name == "conv2d" else shapes[:1] if name.endswith(("pool2d", "resize2d")) else []
    if any(len(shape) not in (4, 5) for shape in images):
        raise Unfit("no image, or no kernel")
    if name in ("max_pool2d", "avg_pool2d", "conv2d"):
        drawn = {**_window(dice, name, shapes), **_layouts(dice, name, shapes, given)}
    elif name == "adaptive_avg_pool2d":
        size = (1, 1) if dice.chance(0.5) else tuple(int(dice.rng.integers(1, e + 1)) for e in x[2:4])
        drawn = {**_layouts(dice, name, shapes, given), "output_size": size}
    elif name == "resize2d":
        drawn = {"layout": f"NCHW{x[4]}c" if len(x) == 5 else "NCHW", **_resizing(dice)}
    elif name in ("mean", "sum", "max", "min"):
        drawn = {"axis": _axes_attribute(dice, x), "keepdims": dice.chance(0.5)}
    elif name in ("layer_norm", "rms_norm"):
        count = len(shapes[1])
        axes = tuple(range(len(x) - count, len(x)))
        drawn = {"axes": tuple(a - len(x) for a in axes) if dice.chance(0.5) else axes}
        drawn["epsilon"] = float(dice.pick([2.0**-17, 0.5, 1.0]))
        if name == "layer_norm":
            drawn.update(center=True, scale=True)
    elif name == "take":
        drawn = {"axis": int(dice.rng.integers(len(x))), "mode": dice.pick(["wrap", "clip"])}
    elif name == "broadcast_to":
        more = dice.shape(int(dice.pick([0, 0, 1, 2])))
        drawn = {"shape": (*more, *(dice.extent() if e == 1 else e for e in x))}
    elif name == "expand_dims":
        count = int(dice.pick([1, 1, 2]))
        drawn = {"axis": tuple(sorted(dice.permutation(len(x) + count)[:count]))}
    elif name == "squeeze":
        units = [axis for axis, e in enumerate(x) if e == 1]
        kept = tuple(axis for axis in units if dice.chance(0.7)) or tuple(units[:1])
        drawn = {"axis": kept}
    elif name == "softmax":
        axis = len(x) - 1 if dice.chance(0.6) else int(dice.rng.integers(len(x)))
        drawn = {"axis": dice.signed(axis, len(x))}
    elif name == "pad":
        widths = tuple(dice.small(0, 1, 3) for _ in range(2 * len(x)))
        value = 0.0 if dice.chance(0.7) else float(dice.rng.integers(-2, 3))
        drawn = {"pad_width": widths, "pad_mode": "constant", "pad_value": value}
    elif name == "reshape":
        drawn = {"shape": _regrouped(dice, x)}
    elif name == "permute_dims":
        swap = dice.chance(0.5) and len(x) > 1
        drawn = {"axes": (*range(len(x) - 2), len(x) - 1, len(x) - 2) if swap else dice.permutation(len(x))}
    elif name in ("split", "concat"):
        drawn = {"axis": given.get("axis", int(dice.rng.integers(len(x))))}
        if name == "split" and "at" not in given:
            if not -len(x) <= drawn["axis"] < len(x):
                raise Unfit("no such axis")
            drawn["at"] = _split_points(dice, x[drawn["axis"]])
        if name == "concat":
            drawn["axis"] = given.get("axis", _joined_axis(dice, shapes))
    elif name in ("pack", "pack_kernel"):
        fitting = [b for b in BLOCKS if len(x) == 4 and x[0 if name == "pack_kernel" else 1] % b == 0]
        if not fitting:
            raise Unfit("no image to be blocked")
        drawn = {"block": dice.pick(fitting)}
    elif name == "unpack":
        drawn = {"block": x[-1] if x else 0}
    elif name == "leaky_relu":
        drawn = {"alpha": float(dice.pick([0.5, 0.25, 0.125, 0.0, -0.5, 2.0]))}
    if name in ("matmul", "conv2d"):
        wide = {"float32": "float64", "int32": "int64"}.get(dtype, "int32")
        drawn["out_dtype"] = None if dice.chance(0.8) else dice.pick([dtype, wide])
    return {**drawn, **given}


def _joined_axis(dice: Dice, shapes: list[Shape]) -> int:
    """The axis along which operands differ; any of them where they do not."""
    if len({len(shape) for shape in shapes}) != 1:
        raise Unfit("operands of several ranks")
    differing = [axis for axis in range(len(shapes[0])) if len({shape[axis] for shape in shapes}) > 1]
    if len(differing) > 1:
        raise Unfit("operands that differ along several axes")
    return differing[0] if differing else int(dice.rng.integers(len(shapes[0])))
