"""What is computed from constants before the model runs: the numbers that ONNX Runtime gives."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from small_weights import drawn

node = helper.make_node


@pytest.mark.parametrize("opset", [10, 13, 18, 19, 21])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int32"])
def test_quantised_weights_are_dequantised(kind: str, opset: int, make_model, assert_imports_right, operators) -> None:
    by_channel = opset >= 13
    scale, zero = (np.array([0.1, 0.2, 0.3], np.float32), np.array([3, 1, 2], kind))
    weights = {"w": (50 * drawn(4, 3)).astype(kind), "s": scale, "z": zero * (kind != "int32")}
    if not by_channel:
        weights |= {"s": scale[0], "z": weights["z"][0]}
    nodes = [node("DequantizeLinear", ["w", "s", "z"], ["d"]), node("Mul", ["x", "d"], ["y"])]
    mod = assert_imports_right(make_model(nodes, {"x": (4, 3)}, ["y"], weights, opset))
    assert operators(mod) == ["multiply"]
