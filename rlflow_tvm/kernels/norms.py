"""Group and instance normalisation in two passes, for any target: means first, then those of squared differences.

TVM sums x and x² side by side, in one block with two results, which no schedule rule but the last takes, and has the
variance as a difference, E[x²] - E[x]²: of numbers that are far from zero for their deviation nothing is left in
float32, or less than that, which is NaN. Here all that is summed is the difference to one of the numbers: where they
are all the same it is exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm
from tvm import relax, te, tirx

from rlflow_tvm.ir import known_shape

from .choice import LegalizeFunc


def _normalised(
    data: te.Tensor,
    gamma: te.Tensor,
    beta: te.Tensor,
    axes: Sequence[int],
    channel_axis: int,
    width: int,
    epsilon: float,
) -> te.Tensor:
    """`data` less its mean, over its deviation; by channel times `gamma`, plus `beta`.

    `axes`: what the mean is over, besides `width` channels that lie side by side.
    """
    shape = [int(extent) for extent in data.shape]
    groups = shape[channel_axis] // width
    kept = [i for i in range(len(shape)) if i not in axes and (i != channel_axis or groups > 1)]
    extents = [groups if i == channel_axis else shape[i] for i in kept]
    if math.prod(extents) == 1:  # schedules know no tensor without axes, and take an axis that is read for one of rows
        kept, extents = [], [1]
    summed = [i for i in range(len(shape)) if i in axes or (i == channel_axis and width > 1)]
    number = math.prod(width if i == channel_axis else shape[i] for i in summed)
    count = tirx.const(max(number, 1), data.dtype)  # of nothing there is no mean, and nobody to read it

    def element(group: Sequence[tirx.Expr], inside: Sequence[tirx.Expr]) -> list[tvm.ir.Expr]:
        """The place in the data of an element of a group."""
        place: list[tvm.ir.Expr] = [tirx.const(0, "int64")] * len(shape)
        for i, index in zip(kept, group, strict=False):
            place[i] = index
        for i, index in zip(summed, inside, strict=True):
            place[i] = place[i] * width + index if i == channel_axis and groups > 1 else index
        return place

    def group_of(place: Sequence[tirx.Var]) -> list[tvm.ir.Expr]:
        own = [place[i] // width if i == channel_axis and width > 1 else place[i] for i in kept]
        return own or [tirx.const(0, "int64")]

    def sum_of(value: Callable[[Sequence[tirx.Expr], Sequence[tirx.Expr]], tirx.Expr], name: str) -> te.Tensor:
        inside = [te.reduce_axis((0, width if i == channel_axis else shape[i]), f"k{i}") for i in summed]
        return te.compute(extents, lambda *group: te.sum(value(group, inside), axis=inside), name=name)

    start = [tirx.const(0, "int64")] * len(summed)
    first = te.compute(extents, lambda *group: data(*element(group, start)), name="first")
    total = sum_of(lambda group, inside: data(*element(group, inside)) - first(*group), "total")
    mean = te.compute(extents, lambda *group: total(*group) / count, name="mean")

    def square(group: Sequence[tirx.Expr], inside: Sequence[tirx.Expr]) -> tirx.Expr:
        difference = data(*element(group, inside)) - first(*group) - mean(*group)
        return difference * difference

    squares = sum_of(square, "squares")
    added = tirx.const(epsilon, data.dtype)
    inverse = te.compute(extents, lambda *group: tirx.rsqrt(squares(*group) / count + added), name="inverse_deviation")

    def result(*place: tirx.Var) -> tirx.Expr:
        group, channel = group_of(place), place[channel_axis]
        normal = (data(*place) - first(*group) - mean(*group)) * inverse(*group)
        return normal * gamma(channel) + beta(channel)

    return te.compute(shape, result, name="T_norm")


def _norm(name: str, width_of: Callable[[relax.Call, int], int]) -> LegalizeFunc:
    """Legalise a norm of static shape; `width_of`: how many of its so many channels have a mean in common."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        shape, attrs = known_shape(call.ty), call.attrs
        if shape is None:
            return call.op.get_attr("FLegalize")(builder, call)
        channel_axis, axes = int(attrs.channel_axis) % len(shape), [int(axis) % len(shape) for axis in attrs.axes]
        width = width_of(call, shape[channel_axis])
        return builder.call_te(
            _normalised, *call.args, axes, channel_axis, width, float(attrs.epsilon), primfunc_name_hint=name
        )

    return legalize


NORMS: dict[str, LegalizeFunc] = {
    "relax.nn.group_norm": _norm("group_norm", lambda call, channels: channels // int(call.attrs.num_groups)),
    "relax.nn.instance_norm": _norm("instance_norm", lambda _call, _channels: 1),
}
