"""The layout of convolutions on a GPU: channels last, over the whole graph.

A convolution is then a matrix product whose reduced axis (window, input channel) lies in memory order in both factors.
TVM's `ConvertLayout` carries the layout through element-wise operators, pools and concatenations; transposes stay at
the graph's ends and round operators that need the channels where they were. Those of weights are weight-only work.
"""

from __future__ import annotations

from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node

_LAYOUTS = {"relax.nn.conv2d": ["NHWC", "OHWI"]}


def channels_last(flow: Dataflow) -> Dataflow:
    """`flow` with its "NCHW" convolutions in "NHWC"; the same object where it has none."""
    if not any(_is_plain_convolution(node) for node in flow.nodes):
        return flow
    return Dataflow.from_module(relax.transform.ConvertLayout(_LAYOUTS)(flow.module))


def _is_plain_convolution(node: Node) -> bool:
    return node.op in _LAYOUTS and node.value.attrs.data_layout == "NCHW"
