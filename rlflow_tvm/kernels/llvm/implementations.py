"""Which operators are legalised here and not by TVM, and which of them in several ways."""

from __future__ import annotations

from math import prod

from tvm import relax
from tvm.target import Target

from ..choice import Implementation, LegalizeFunc
from ..target import vector_lanes
from .conv_legalize import CONV_LEGALIZE, conv_shape, legalize_conv2d
from .matmul_legalize import is_packable, make_packed_matmul
from .winograd_legalize import make_winograd

LEGALIZE: dict[str, LegalizeFunc] = {**CONV_LEGALIZE}
"""Operators with one implementation, or whose several do not take the call."""


def _is_static_conv(call: relax.Call, _weight: bool, _target: Target) -> bool:
    return conv_shape(call) is not None


def _conv_cycles(call: relax.Call, target: Target) -> float:
    """Vector multiply-adds of the direct convolution, two a cycle."""
    shape = conv_shape(call)
    assert shape is not None  # `takes` has seen to that
    window = shape.in_channels // shape.groups * prod(shape.kernel)
    return shape.batch * shape.out_channels * prod(shape.out_size) * window / vector_lanes(target) / 2


def _is_packed_product(call: relax.Call, weight: bool, _target: Target) -> bool:
    return weight and is_packable(call)


def _is_winograd(call: relax.Call, weight: bool, _target: Target) -> bool:
    shape = conv_shape(call)
    return (
        weight
        and shape is not None
        and shape.kernel == (3, 3)
        and shape.strides == shape.dilation == (1, 1)
        and shape.groups == 1
    )


def _winograd(size: int) -> Implementation:
    def legalize(target: Target) -> LegalizeFunc:
        return make_winograd(size, vector_lanes(target))

    return Implementation(f"winograd{size}", _is_winograd, legalize, lambda *_: 1e30)


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "relax.nn.conv2d": (
        Implementation("direct", _is_static_conv, lambda _target: legalize_conv2d, _conv_cycles),
        _winograd(2),
        _winograd(4),
    ),
    "relax.matmul": (
        Implementation(
            "packed", _is_packed_product, lambda target: make_packed_matmul(vector_lanes(target)), lambda *_: 0.0
        ),
    ),
}
"""Adding an implementation is one entry here; its `cost` is compared with those of its neighbours only."""
