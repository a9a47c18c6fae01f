"""The layout of convolutions on a GPU: channels last, over the whole graph.

A convolution is then a matrix product whose reduced axis (window, input channel) lies in memory order in both factors.
TVM's `ConvertLayout` carries the layout through element-wise operators, pools and concatenations; transposes stay at
the graph's ends and round operators that need the channels where they were. Those of weights are weight-only work.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.error import InternalError

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.ir import of_tensors

_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "OHWI"]}
_CONV, _SQUEEZE, _PERMUTE = (tvm.ir.Op.get(f"relax.{name}") for name in ("nn.conv2d", "squeeze", "permute_dims"))


def channels_last(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` (working form) with its "NCHW" convolutions in "NHWC"; the same object where it has none, or where
    `ConvertLayout` fails on something else in it: its convolutions are TVM's own then."""
    bindings = (binding for block in mod["main"].body.blocks for binding in block.bindings)
    if not any(_is_plain_convolution(binding.value) for binding in bindings):
        return mod
    mended = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    try:
        mended["main"] = _CountedFromTheFront().visit_expr(mod["main"])
        return relax.transform.ConvertLayout(_LAYOUTS)(mended)
    except (RewriteError, InternalError, IndexError):
        return mod


@relax.expr_functor.mutator
class _CountedFromTheFront(relax.PyExprMutator):
    """Axes that are counted from the end, and bare numbers, as `ConvertLayout` knows them: on either it may end the
    process, whatever they are of."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = of_tensors(super().visit_call_(call))
        if call.op == _SQUEEZE and not isinstance(call.ty, relax.TupleType):
            return relax.op.reshape(call.args[0], call.ty.shape)
        if call.op == _PERMUTE and call.attrs.axes is not None:
            axes = [int(axis) % len(call.attrs.axes) for axis in call.attrs.axes]
            return relax.op.permute_dims(call.args[0], axes)
        return call


def _is_plain_convolution(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op == _CONV and value.attrs.data_layout == "NCHW"
