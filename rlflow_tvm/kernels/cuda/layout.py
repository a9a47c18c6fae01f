"""The layout of convolutions on a GPU: channels last, over the whole graph.

A convolution is then a matrix product whose reduced axis (window, input channel) lies in memory order in both factors.
TVM's `ConvertLayout` carries the layout through element-wise operators, pools and concatenations; transposes stay at
the graph's ends and round operators that need the channels where they were. Those of weights are weight-only work.
"""

from __future__ import annotations

import tvm
from tvm import relax

_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "OHWI"]}
_CONV = tvm.ir.Op.get("relax.nn.conv2d")


def channels_last(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` (working form) with its "NCHW" convolutions in "NHWC"; the same object where it has none."""
    bindings = (binding for block in mod["main"].body.blocks for binding in block.bindings)
    if not any(_is_plain_convolution(binding.value) for binding in bindings):
        return mod
    return relax.transform.ConvertLayout(_LAYOUTS)(mod)


def _is_plain_convolution(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op == _CONV and value.attrs.data_layout == "NCHW"
