"""Sums of half precision in float32: a float16 that has reached 2048 grows no more by adding ones, and overflows soon.

Processors compute in float32 anyhow, and on a GPU such sums wait for memory: operands are cast, and the schedule rules
of float32 apply.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.target import Target

_HALVES = frozenset({"float16", "bfloat16"})
_WIDE = "float32"
PRODUCTS = frozenset(
    {
        "relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d", "relax.nn.conv1d_transpose",
        "relax.nn.conv2d_transpose", "relax.nn.conv3d_transpose", "relax.einsum", "relax.nn.attention",
        "relax.nn.attention_bias",
    }
)  # fmt: skip
SUMS = frozenset(
    {
        "relax.sum", "relax.mean", "relax.prod", "relax.variance", "relax.std", "relax.cumsum", "relax.cumprod",
        "relax.nn.avg_pool1d", "relax.nn.avg_pool2d", "relax.nn.avg_pool3d", "relax.nn.adaptive_avg_pool1d",
        "relax.nn.adaptive_avg_pool2d", "relax.nn.adaptive_avg_pool3d", "relax.nn.softmax", "relax.nn.log_softmax",
        "relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.instance_norm", "relax.nn.rms_norm",
    }
)  # fmt: skip
CHANNELS_LAST = ("NHWC", "OHWI", "NHWC")
"""The layouts of data, kernel and result of a convolution on a GPU."""
_OWN = {"cuda": frozenset({"relax.matmul", "relax.nn.conv2d"})}
"""Kind of target -> products whose legalisations there sum in float32 themselves, for tensor cores."""


def is_half_sum(call: relax.Call, target: Target) -> bool:
    """Whether `call` gives a tensor of half precision that sums many terms, in halves unless it is told otherwise."""
    if call.op.name not in SUMS | PRODUCTS or (call.op.name in _OWN.get(target.kind.name, ()) and not _is_left(call)):
        return False
    return isinstance(call.ty, relax.TensorType) and str(call.ty.dtype) in _HALVES


def _is_left(call: relax.Call) -> bool:
    """Whether it is a convolution in a layout that our own legalisations leave to TVM's."""
    return call.op.name == "relax.nn.conv2d" and layouts_of(call) != CHANNELS_LAST


def layouts_of(conv: relax.Call) -> tuple[str, str, str]:
    """The layouts of a convolution's data, kernel and result."""
    attrs = conv.attrs
    return str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or attrs.data_layout)


def sum_in_float32(builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """Emit the casts of the operands of `call`, a half sum, and give the call of those."""
    args = [_widened(builder, arg) for arg in call.args]
    attrs = call.attrs
    if getattr(attrs, "out_dtype", None) is not None or getattr(attrs, "dtype", None) is not None:
        info = type(attrs).__tvm_ffi_type_info__
        fields = {field.name: getattr(attrs, field.name) for field in info.fields}
        # named, as operands that are no halves stay what they are: integers would be summed in their own type
        fields.update({name: tvm.DataType(_WIDE) for name in ("out_dtype", "dtype") if fields.get(name) is not None})
        attrs = tvm.ir.make_node(info.type_key, **fields)
    return builder.normalize(relax.Call(call.op, args, attrs, call.ty_args))


def _widened(builder: relax.BlockBuilder, arg: relax.Expr) -> relax.Expr:
    if isinstance(arg, relax.Tuple):  # einsum's operands
        return relax.Tuple([_widened(builder, field) for field in arg.fields])
    return builder.emit(relax.op.astype(arg, _WIDE)) if _is_half(arg) else arg


def _is_half(arg: relax.Expr) -> bool:
    return isinstance(arg.ty, relax.TensorType) and str(arg.ty.dtype) in _HALVES
