"""Sums of half precision in float32: a float16 that has reached 2048 grows no more by adding ones, and overflows soon.

Processors of this kind compute in float32 anyhow, so operands are cast, and the schedule rules of float32 apply.
"""

from __future__ import annotations

import tvm
from tvm import relax

_HALVES = frozenset({"float16", "bfloat16"})
_WIDE = "float32"
PRODUCTS = frozenset(
    {
        "relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d", "relax.nn.conv1d_transpose",
        "relax.nn.conv2d_transpose", "relax.nn.conv3d_transpose",
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


def is_half_sum(call: relax.Call) -> bool:
    """Whether `call` gives a tensor of half precision that sums many terms."""
    return call.op.name in SUMS | PRODUCTS and isinstance(call.ty, relax.TensorType) and str(call.ty.dtype) in _HALVES


def sum_in_float32(builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """Emit the casts of the operands of `call`, a half sum, and give the call of those."""
    args = [builder.emit(relax.op.astype(arg, _WIDE)) if _is_half(arg) else arg for arg in call.args]
    attrs = call.attrs
    if getattr(attrs, "out_dtype", None) is not None or getattr(attrs, "dtype", None) is not None:
        info = type(attrs).__tvm_ffi_type_info__
        fields = {field.name: getattr(attrs, field.name) for field in info.fields}
        fields.update({name: None for name in ("out_dtype", "dtype") if name in fields})
        attrs = tvm.ir.make_node(info.type_key, **fields)
    return builder.normalize(relax.Call(call.op, args, attrs, call.ty_args))


def _is_half(arg: relax.Expr) -> bool:
    return isinstance(arg.ty, relax.TensorType) and str(arg.ty.dtype) in _HALVES
