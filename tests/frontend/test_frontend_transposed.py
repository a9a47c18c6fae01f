"""Transposed convolutions whose padding is to be found out: of `output_shape`, of `auto_pad`, of both."""

from __future__ import annotations

import pytest
from onnx.helper import make_node as node
from small_weights import drawn

_CASES = {
    "shape": ((5, 6), {"strides": [2, 2], "output_shape": [10, 12]}),
    "shape-odd": ((5, 6), {"strides": [2, 3], "output_shape": [10, 17]}),
    "shape-beyond": ((5, 6), {"strides": [3, 2], "output_shape": [16, 13]}),  # the last lines are of no input
    "shape-upper": ((5, 6), {"strides": [2, 2], "output_shape": [10, 12], "auto_pad": "SAME_UPPER"}),
    "shape-lower": ((5, 6), {"strides": [2, 2], "output_shape": [10, 12], "auto_pad": "SAME_LOWER"}),
    "shape-and-padding-behind": ((5, 6), {"strides": [2, 2], "output_shape": [10, 11], "output_padding": [1, 0]}),
    "shape-dilated": ((5, 6), {"dilations": [2, 1], "output_shape": [6, 6]}),
    "shape-1d": ((7,), {"strides": [4], "output_shape": [28]}),
    "shape-3d": ((2, 3, 4), {"strides": [2, 2, 1], "output_shape": [4, 6, 5]}),
    "upper": ((5, 6), {"strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    "lower": ((5, 6), {"strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    "valid": ((5, 6), {"strides": [2, 1], "auto_pad": "VALID"}),
}


@pytest.mark.parametrize("name", sorted(_CASES))
def test_padding_is_found_out(name: str, make_model, assert_imports_right) -> None:
    extents, attributes = _CASES[name]
    weights = {"w": drawn(4, 3, *[3] * len(extents))}
    assert_imports_right(make_model([node("ConvTranspose", ["x", "w"], ["y"], **attributes)], {"x": (2, 4, *extents)},
                                    ["y"], weights, 18))  # fmt: skip
