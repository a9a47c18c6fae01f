"""The operators a term can name, each with how its attributes are read from and written to a Relax call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError

REQUIRED = object()  # an attribute without a default: a rule has to name it or hold it in **rest
Reader = Callable[[relax.Call], dict[str, Any] | None]
Builder = Callable[..., relax.Expr]


@dataclass(frozen=True)
class Operator:
    """One operator of the term language.

    `arity` counts tensor operands, None where they stand in one tuple operand (concat). `attributes` maps names to
    defaults: a term that does not name an attribute means its default. `read` gives a call's attributes, or None
    where the call is another operator under the same Relax name (layout_transform), or a use of it of which the proofs
    of rules know nothing (a pad that crops).
    """

    name: str
    relax_name: str
    build: Builder
    arity: int | None = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    read: Reader | None = None

    def attributes_of(self, call: relax.Call) -> dict[str, Any] | None:
        if self.name in NOT_FOR_INTEGERS and not all(map(_is_of_floats, call.args[: self.arity])):
            return None
        if self.name in _OF_NUMBERS and any(map(_is_of_bools, call.args[: self.arity])):
            return None
        return self.read(call) if self.read is not None else _as_written(call, self.attributes)

    def operands(self, call: relax.Call) -> Sequence[relax.Expr] | None:
        """Tensor operands of `call`; None for a tuple operand that is not written out."""
        if self.arity is not None:
            return call.args[: self.arity]
        return call.args[0].fields if isinstance(call.args[0], relax.Tuple) else None

    def make(self, operands: Sequence[relax.Expr], attributes: dict[str, Any]) -> relax.Expr:
        """A call on `operands`; attributes that are not given take their defaults."""
        values = {**self.attributes, **attributes}
        missing = [name for name, value in values.items() if value is REQUIRED]
        if missing:
            raise RewriteError(f"operator {self.name} needs the attribute {missing[0]}: name it on the right side")
        return self.build(list(operands), **values) if self.arity is None else self.build(*operands, **values)

    def check_form(self, operands: int, names: Sequence[str], rule: str) -> None:
        """RewriteError unless a term of `operands` operands naming the attributes `names` can be this operator."""
        if operands != self.arity if self.arity is not None else operands == 0:
            needed = "at least 1" if self.arity is None else self.arity
            raise RewriteError(f"rule text {rule!r}: {self.name} takes {needed} operands, not {operands}")
        unknown = [name for name in names if name not in self.attributes]
        if unknown:
            raise RewriteError(
                f"rule text {rule!r}: {self.name} has no attribute {unknown[0]!r}; "
                f"it has {', '.join(self.attributes) or 'none'}"
            )


def plain(value: Any) -> Any:
    """A TVM attribute value as Python's int, str, bool, float, None or tuple of these."""
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    if isinstance(value, tvm_ffi.Array | tuple | list):
        return tuple(plain(item) for item in value)
    return str(value) if isinstance(value, str) else value


def _as_written(call: relax.Call, names: Iterable[str]) -> dict[str, Any]:
    return {name: plain(getattr(call.attrs, name)) for name in names}


_IMAGE = re.compile(r"NCHW(\d+c)?")
_LAYOUTS = {"layout": _IMAGE, "data_layout": _IMAGE, "out_layout": _IMAGE, "kernel_layout": re.compile(r"OIHW(\d+o)?")}


def _laid_out(call: relax.Call, names: Iterable[str]) -> dict[str, Any] | None:
    """In other layouts axes stand elsewhere, channels last say: no rule is proved for them."""
    attributes = _as_written(call, names)
    known = all(layout.fullmatch(attributes[name]) for name, layout in _LAYOUTS.items() if name in attributes)
    return attributes if known else None


def _is_of_floats(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and "float" in str(expr.ty.dtype)


def _is_of_bools(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) == "bool"


def _extents(expr: relax.Expr) -> tuple[int, ...] | None:
    if not isinstance(expr, relax.ShapeExpr):
        return None
    return tuple(int(value) for value in expr.values)


def _read_shape(call: relax.Call) -> dict[str, Any] | None:
    extents = _extents(call.args[1])
    return None if extents is None else {"shape": extents}


def _read_permute(call: relax.Call) -> dict[str, Any]:
    axes = call.attrs.axes
    rank = len(call.ty.shape.values)
    return {"axes": tuple(reversed(range(rank))) if axes is None else tuple(int(a) % rank for a in axes)}


def _read_expand(call: relax.Call) -> dict[str, Any]:
    rank = len(call.ty.shape.values)
    return {"axis": tuple(int(axis) % rank for axis in call.attrs.axis)}


def _read_squeeze(call: relax.Call) -> dict[str, Any]:
    extents = call.args[0].ty.shape.values
    axes = call.attrs.axis
    units = [axis for axis, extent in enumerate(extents) if int(extent) == 1]
    return {"axis": tuple(units) if axes is None else tuple(int(axis) % len(extents) for axis in axes)}


def _product_reader(names: Iterable[str]) -> Reader:
    """The type of the result is an attribute where it is not that of the operands."""

    def read(call: relax.Call) -> dict[str, Any] | None:
        attributes = _laid_out(call, names)
        if attributes is None:
            return None
        usual = {str(operand.ty.dtype) for operand in call.args}
        return {**attributes, "out_dtype": None} if usual == {str(attributes["out_dtype"])} else attributes

    return read


def _read_take(call: relax.Call) -> dict[str, Any] | None:
    """What is NaN beyond the edge is a number again behind some functions: no rule is proved for that."""
    if call.attrs.axis is None or not isinstance(call.args[1].ty, relax.TensorType) or call.attrs.mode == "nan":
        return None
    return {"axis": int(call.attrs.axis) % len(call.args[0].ty.shape.values), "mode": str(call.attrs.mode)}


def _read_split(call: relax.Call) -> dict[str, Any] | None:
    indices = plain(call.attrs.indices_or_sections)
    axis, shape = int(call.attrs.axis), call.args[0].ty.shape.values
    axis %= len(shape)
    if isinstance(indices, int):  # equal sections
        step = -(-int(shape[axis]) // indices)
        indices = tuple(step * i for i in range(1, indices))
    return {"at": indices, "axis": axis}


def _read_pad(call: relax.Call) -> dict[str, Any] | None:
    """Negative widths crop, and not all modes pad with a constant: no rule is proved for them."""
    attributes = _as_written(call, _PAD)
    plain_pad = attributes["pad_mode"] == "constant" and all(width >= 0 for width in attributes["pad_width"])
    return attributes if plain_pad else None


def has_empty_window(extent: int, count: int, size: int, stride: int, dilation: int, pads: tuple[int, int]) -> bool:
    """Whether one of `count` windows along an axis, padded by `pads` before and after it, holds no element."""
    if max(pads) >= size:
        return True
    for first in range(-pads[0], -pads[0] + count * stride, stride):
        inside = first + max(0, -(first // dilation)) * dilation  # the first tap that is not before the axis
        if inside >= extent or (inside - first) // dilation >= size:
            return True
    return False


def _read_pool(call: relax.Call) -> dict[str, Any] | None:
    """Of a window that lies in the padding TVM has the least number, or no mean: no rule is proved for it."""
    attributes = _laid_out(call, _POOL)
    if attributes is None:
        return None
    extents = [
        [int(ty.shape.values[layout.index(axis)]) for axis in "HW"]
        for ty, layout in ((call.args[0].ty, attributes["layout"]), (call.ty, attributes["out_layout"]))
    ]
    top, left, bottom, right = attributes["padding"]
    along = zip(*extents, *(attributes[name] for name in ("pool_size", "strides", "dilation")),
                ((top, bottom), (left, right)), strict=True)  # fmt: skip
    return None if any(has_empty_window(*each) for each in along) else attributes


def _read_resize(call: relax.Call) -> dict[str, Any] | None:
    """Beyond the region that is cropped TVM has a number, and of one element of `align_corners` a quotient by zero; it
    knows no other type than the operand's: no rule is proved for these."""
    attributes = _laid_out(call, [name for name in _RESIZE if name != "size"])
    size = _extents(call.args[1])
    if attributes is None or size is None or str(call.ty.dtype) != str(call.args[0].ty.dtype):
        return None
    mode = attributes["coordinate_transformation_mode"]
    if mode == "tf_crop_and_resize" or (mode == "align_corners" and 1 in size):
        return None
    return {"size": size, **attributes}


def _norm_reader(names: Iterable[str]) -> Reader:
    """Of what normalises over the last axes, in order: weights and biases of other axes lie along other axes than
    what is broadcast to the result."""

    def read(call: relax.Call) -> dict[str, Any] | None:
        rank, attributes = len(call.args[0].ty.shape.values), _as_written(call, names)
        axes = [axis % rank for axis in attributes["axes"]]
        return attributes if axes and axes == list(range(rank - len(axes), rank)) else None

    return read


def _read_concat(call: relax.Call) -> dict[str, Any] | None:
    axis = call.attrs.axis
    return None if axis is None else {"axis": int(axis) % len(call.ty.shape.values)}


@lru_cache(maxsize=64)
def _index_map(name: str, block: int) -> tirx.IndexMap:
    maps = {
        "pack": lambda n, c, h, w: (n, c // block, h, w, c % block),
        "unpack": lambda n, co, h, w, ci: (n, co * block + ci, h, w),
        "pack_kernel": lambda o, i, h, w: (o // block, i, h, w, o % block),
    }
    return tirx.IndexMap.from_func(maps[name], index_dtype="int64")


def _layout_reader(name: str) -> Reader:
    rank = 5 if name == "unpack" else 4

    def read(call: relax.Call) -> dict[str, Any] | None:
        if len(call.args[0].ty.shape.values) != rank or call.attrs.pad_value is not None:
            return None
        blocked = call.args[0] if name == "unpack" else call
        block = int(blocked.ty.shape.values[-1])
        return {"block": block} if tvm_ffi.structural_equal(call.attrs.index_map, _index_map(name, block)) else None

    return read


def _layout_builder(name: str) -> Builder:
    def build(data: relax.Expr, block: int) -> relax.Expr:
        axis = {"pack": 1, "pack_kernel": 0}.get(name)
        if axis is not None and int(data.ty.shape.values[axis]) % block != 0:
            raise RewriteError(f"{name} by {block}: axis {axis} of {data.ty} is no multiple of it")
        return rx.layout_transform(data, _index_map(name, block))

    return build


_MATMUL = dict(out_dtype=None)
_CONV = dict(
    strides=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1,
    data_layout="NCHW", kernel_layout="OIHW", out_layout="NCHW", out_dtype=None,
)  # fmt: skip
_POOL = dict(
    pool_size=REQUIRED, strides=REQUIRED, dilation=(1, 1), padding=(0, 0, 0, 0),
    ceil_mode=False, count_include_pad=False, layout="NCHW", out_layout="NCHW",
)  # fmt: skip
_ADAPTIVE_POOL = dict(output_size=REQUIRED, layout="NCHW", out_layout="NCHW")
_RESIZE = dict(
    size=REQUIRED, layout="NCHW", method="linear", coordinate_transformation_mode="half_pixel",
    rounding_method="round", cubic_alpha=-0.75, cubic_exclude=0,
)  # fmt: skip
_REDUCE = dict(axis=REQUIRED, keepdims=False)
_LAYER_NORM = dict(axes=REQUIRED, epsilon=REQUIRED, center=True, scale=True)
_RMS_NORM = dict(axes=REQUIRED, epsilon=REQUIRED)
_PAD = dict(pad_width=REQUIRED, pad_mode="constant", pad_value=0.0)


def _elementwise(arity: int, **builders: Builder) -> list[Operator]:
    return [Operator(name, f"relax.{name}", build, arity) for name, build in builders.items()]


_ALL = [
    *_elementwise(2, add=rx.add, subtract=rx.subtract, multiply=rx.multiply, divide=rx.divide,
                  maximum=rx.maximum, minimum=rx.minimum, power=rx.power),
    *_elementwise(1, tanh=rx.tanh, sigmoid=rx.sigmoid, exp=rx.exp, erf=rx.erf, sqrt=rx.sqrt, rsqrt=rx.rsqrt,
                  negative=rx.negative, abs=rx.abs),
    Operator("relu", "relax.nn.relu", rx.nn.relu),
    Operator("gelu", "relax.nn.gelu", rx.nn.gelu),
    Operator("silu", "relax.nn.silu", rx.nn.silu),
    Operator("gelu_tanh", "relax.nn.gelu_tanh", rx.nn.gelu_tanh),
    Operator("leaky_relu", "relax.nn.leakyrelu", rx.nn.leakyrelu, attributes=dict(alpha=REQUIRED)),
    Operator("matmul", "relax.matmul", rx.matmul, 2, _MATMUL, _product_reader(_MATMUL)),
    Operator("conv2d", "relax.nn.conv2d", rx.nn.conv2d, 2, _CONV, _product_reader(_CONV)),
    Operator("max_pool2d", "relax.nn.max_pool2d", rx.nn.max_pool2d, attributes=_POOL, read=_read_pool),
    Operator("avg_pool2d", "relax.nn.avg_pool2d", rx.nn.avg_pool2d, attributes=_POOL, read=_read_pool),
    Operator("adaptive_avg_pool2d", "relax.nn.adaptive_avg_pool2d", rx.nn.adaptive_avg_pool2d,
             attributes=_ADAPTIVE_POOL, read=lambda call: _laid_out(call, _ADAPTIVE_POOL)),
    Operator("mean", "relax.mean", rx.mean, attributes=_REDUCE),
    Operator("sum", "relax.sum", rx.sum, attributes=_REDUCE),
    Operator("max", "relax.max", rx.max, attributes=_REDUCE),
    Operator("min", "relax.min", rx.min, attributes=_REDUCE),
    Operator("layer_norm", "relax.nn.layer_norm", rx.nn.layer_norm, 3, _LAYER_NORM, _norm_reader(_LAYER_NORM)),
    Operator("rms_norm", "relax.nn.rms_norm", rx.nn.rms_norm, 2, _RMS_NORM, _norm_reader(_RMS_NORM)),
    Operator("softmax", "relax.nn.softmax", rx.nn.softmax, attributes=dict(axis=-1)),
    Operator("pad", "relax.nn.pad", rx.nn.pad, attributes=_PAD, read=_read_pad),
    Operator("reshape", "relax.reshape", rx.reshape, attributes=dict(shape=REQUIRED), read=_read_shape),
    Operator("broadcast_to", "relax.broadcast_to", rx.broadcast_to, attributes=dict(shape=REQUIRED), read=_read_shape),
    Operator("expand_dims", "relax.expand_dims", rx.expand_dims, attributes=dict(axis=REQUIRED), read=_read_expand),
    Operator("squeeze", "relax.squeeze", rx.squeeze, attributes=dict(axis=REQUIRED), read=_read_squeeze),
    Operator("take", "relax.take", lambda data, indices, axis, mode: rx.take(data, indices, axis, mode), 2,
             dict(axis=REQUIRED, mode="fast"), _read_take),
    Operator("permute_dims", "relax.permute_dims", rx.permute_dims, attributes=dict(axes=REQUIRED), read=_read_permute),
    Operator("split", "relax.split", lambda data, at, axis: rx.split(data, list(at), axis),
             attributes=dict(at=REQUIRED, axis=REQUIRED), read=_read_split),
    Operator("concat", "relax.concat", rx.concat, None, dict(axis=REQUIRED), _read_concat),
    *(Operator(name, "relax.layout_transform", _layout_builder(name), attributes=dict(block=REQUIRED),
               read=_layout_reader(name)) for name in ("pack", "unpack", "pack_kernel")),
    Operator("resize2d", "relax.image.resize2d", rx.image.resize2d, attributes=_RESIZE, read=_read_resize),
]  # fmt: skip

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _ALL}

BY_RELAX_NAME: dict[str, tuple[Operator, ...]] = {
    name: tuple(operator for operator in _ALL if operator.relax_name == name)
    for name in dict.fromkeys(operator.relax_name for operator in _ALL)
}

# Classes of operators that a rule can range over with `Class[f](...)`.
CLASSES: dict[str, tuple[str, ...]] = {
    "Unary": (
        "relu",
        "gelu",
        "gelu_tanh",
        "silu",
        "leaky_relu",
        "tanh",
        "sigmoid",
        "exp",
        "erf",
        "sqrt",
        "rsqrt",
        "negative",
        "abs",
    ),
    "Binary": ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power"),
    "Linear": ("add", "subtract"),
    "Commutative": ("add", "multiply", "maximum", "minimum"),
}
COMMUTATIVE = frozenset({"Commutative", *CLASSES["Commutative"]})

SEVERAL = frozenset({"split"})
"""Operators that give several tensors."""

NOT_FOR_INTEGERS = frozenset({
    "gelu", "silu", "tanh", "sigmoid", "exp", "erf", "sqrt", "rsqrt", "divide", "leaky_relu", "mean", "softmax",
    "avg_pool2d", "adaptive_avg_pool2d", "gelu_tanh", "power", "layer_norm", "rms_norm", "resize2d",
})  # fmt: skip
"""Operators that rules are proved for in floats only, and that are matched in floats only: what they divide or round
is another number in integers."""

_OF_NUMBERS = frozenset({
    "add", "subtract", "multiply", "maximum", "minimum", "negative", "abs", "relu", "matmul", "conv2d", "max_pool2d",
    "sum", "max", "min",
})  # fmt: skip
"""Other operators that are not matched in truth values, of which TVM's sum is whether any is true: no proof draws
them."""
