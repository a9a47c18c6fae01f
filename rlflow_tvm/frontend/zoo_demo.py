"""The bundled demonstration model: small, needs onnx alone, and holds what the rewriting rules look for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def demo_model(seed: int) -> onnx.ModelProto:
    """A convolutional classifier of 16 classes for one 32x32 image: input `image` (1, 3, 32, 32), output `logits`.

    A stem, a fire-like pair of parallel convolutions joined by a concatenation, a residual block, a pool between
    them and one dense layer; every convolution has a bias, and all channels but the image's are multiples of 16.
    """
    net = _Net(seed)
    x = net.pool(net.conv_relu("image", 3, 32, 3))
    x = net.fire(x, 32, 16, 32)
    x = net.residual(x, 64)
    x = net.pool(x)
    x = net.fire(x, 64, 32, 32)
    x = net.residual(x, 64)
    net.head(x, 64, 16)
    graph = helper.make_graph(
        net.nodes,
        "demo",
        [helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, 32, 32])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [1, 16])],
        net.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class _Net:
    """Collects nodes and weights; each method returns the name of its output."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def _weight(self, name: str, shape: tuple[int, ...], spread: float) -> str:
        array = self._rng.standard_normal(shape, np.float32) * np.float32(spread)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def _node(self, op: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output or name], name=name, **attributes))
        return output or name

    def conv(self, x: str, inputs: int, outputs: int, kernel: int) -> str:
        name = f"conv{len(self.nodes)}"
        fan_in = inputs * kernel * kernel
        weight = self._weight(f"{name}.weight", (outputs, inputs, kernel, kernel), (2 / fan_in) ** 0.5)
        bias = self._weight(f"{name}.bias", (outputs,), 0.1)
        pad = kernel // 2
        return self._node("Conv", [x, weight, bias], kernel_shape=[kernel, kernel], pads=[pad] * 4)

    def conv_relu(self, x: str, inputs: int, outputs: int, kernel: int) -> str:
        return self._node("Relu", [self.conv(x, inputs, outputs, kernel)])

    def fire(self, x: str, inputs: int, squeeze: int, expand: int) -> str:
        """`2 * expand` channels: 1x1 and 3x3 convolutions of the same squeezed input."""
        squeezed = self.conv_relu(x, inputs, squeeze, 1)
        parts = [self.conv_relu(squeezed, squeeze, expand, kernel) for kernel in (1, 3)]
        return self._node("Concat", parts, axis=1)

    def residual(self, x: str, channels: int) -> str:
        body = self.conv(self.conv_relu(x, channels, channels, 3), channels, channels, 3)
        return self._node("Relu", [self._node("Add", [body, x])])

    def pool(self, x: str) -> str:
        return self._node("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2])

    def head(self, x: str, channels: int, classes: int) -> None:
        flat = self._node("Flatten", [self._node("GlobalAveragePool", [x])], axis=1)
        weight = self._weight("head.weight", (channels, classes), channels**-0.5)
        bias = self._weight("head.bias", (classes,), 0.1)
        self._node("Gemm", [flat, weight, bias], "logits")
