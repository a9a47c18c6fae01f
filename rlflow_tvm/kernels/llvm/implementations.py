"""Which operators are legalised here and not by TVM, and which of them in several ways."""

from __future__ import annotations

from tvm import relax
from tvm.target import Target

from ..choice import Implementation, LegalizeFunc
from ..target import num_cores, vector_lanes
from .conv_cost import plain_pointwise_cycles, window_cycles
from .conv_legalize import CONV_LEGALIZE, conv_shape, legalize_conv2d
from .matmul_legalize import has_rows_apart, is_packable, legalize_rows, make_packed_matmul
from .pixel_conv import is_pixel_conv, make_pixel_conv, pixel_cycles
from .window_pixels import is_window_pixels, make_window_pixels, window_pixels_cycles
from .winograd_legalize import make_winograd, takes_winograd
from .winograd_plan import make_plan, plan_cycles

LEGALIZE: dict[str, LegalizeFunc] = {**CONV_LEGALIZE}
"""Operators with one implementation, or whose several do not take the call."""

_WINOGRAD_MARGIN = 1.1  # its estimate is the rougher one


def _is_static_conv(call: relax.Call, _weight: bool, _target: Target) -> bool:
    return conv_shape(call) is not None


def _conv_cycles(call: relax.Call, target: Target) -> float:
    """Of the direct convolution: one model where the pixel convolution competes, another where Winograd's does or that
    of windows with pixels in the lanes."""
    shape = conv_shape(call)
    assert shape is not None  # `takes` has seen to that
    if is_pixel_conv(call, True, target):
        return plain_pointwise_cycles(shape, target)
    return window_cycles(shape, target)


def _pixel_cycles(call: relax.Call, target: Target) -> float:
    shape = conv_shape(call)
    assert shape is not None
    return pixel_cycles(shape, target)


def _window_pixels_cycles(call: relax.Call, target: Target) -> float:
    shape = conv_shape(call)
    assert shape is not None
    return window_pixels_cycles(shape, target)


def _is_packed_product(call: relax.Call, weight: bool, _target: Target) -> bool:
    return weight and is_packable(call)


def _is_product_of_rows(call: relax.Call, weight: bool, _target: Target) -> bool:
    return not weight and has_rows_apart(call)


def _is_winograd(call: relax.Call, weight: bool, _target: Target) -> bool:
    shape = conv_shape(call)
    return weight and shape is not None and takes_winograd(call, shape)


def _winograd(size: int) -> Implementation:
    def legalize(target: Target) -> LegalizeFunc:
        return make_winograd(size, target)

    def cycles(call: relax.Call, target: Target) -> float:
        shape = conv_shape(call)
        assert shape is not None  # `takes` has seen to that
        lanes, cores = vector_lanes(target), num_cores(target)
        return _WINOGRAD_MARGIN * cores * plan_cycles(shape, make_plan(shape, size, target), lanes, cores)

    return Implementation(f"winograd{size}", _is_winograd, legalize, cycles)


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "relax.nn.conv2d": (
        Implementation("direct", _is_static_conv, lambda _target: legalize_conv2d, _conv_cycles),
        Implementation("pixels", is_pixel_conv, make_pixel_conv, _pixel_cycles),
        Implementation("window_pixels", is_window_pixels, make_window_pixels, _window_pixels_cycles),
        _winograd(2),
        _winograd(4),
    ),
    "relax.matmul": (
        Implementation("rows", _is_product_of_rows, lambda _target: legalize_rows, lambda *_: 0.0),
        Implementation("packed", _is_packed_product, make_packed_matmul, lambda *_: 0.0),
    ),
}
"""Adding an implementation is one entry here; its `cost` is compared with those of its neighbours only."""
