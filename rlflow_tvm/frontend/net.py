"""Writing a network as an ONNX model, node by node, with random weights; onnx is all it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_OPSET = 17
_IR_VERSION = 8
Shape = tuple[int, ...]


class Net:
    """Collects nodes and weights; each method that adds a node returns the name of its output.

    Channels are told rather than inferred: what is built is known to be right before anything imports it.
    """

    def __init__(self, seed: int) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def weight(self, name: str, shape: Shape, spread: float) -> str:
        """Normally distributed, with the standard deviation `spread`."""
        array = self._rng.standard_normal(shape, np.float32) * np.float32(spread)
        return self.constant(name, array)

    def constant(self, name: str, array: np.ndarray) -> str:
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        name = self.unused(op.lower())
        self._nodes.append(helper.make_node(op, list(inputs), [output or name], name=name, **attributes))
        return output or name

    def unused(self, stem: str) -> str:
        """A name that no node has."""
        return f"{stem}{len(self._nodes)}"

    def conv(
        self,
        x: str,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        pads: tuple[int, int] | None = None,
        groups: int = 1,
    ) -> str:
        """With bias; padded so that the extents stay as they are, but for the stride, unless `pads` says otherwise."""
        name = self.unused("conv")
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        fan_in = inputs // groups * height * width
        weight = self.weight(f"{name}.weight", (outputs, inputs // groups, height, width), (2 / fan_in) ** 0.5)
        bias = self.weight(f"{name}.bias", (outputs,), 0.1)
        top, left = (height // 2, width // 2) if pads is None else pads
        return self.node(
            "Conv",
            [x, weight, bias],
            kernel_shape=[height, width],
            pads=[top, left, top, left],
            strides=[stride, stride],
            group=groups,
        )

    def conv_relu(self, x: str, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1) -> str:
        return self.node("Relu", [self.conv(x, inputs, outputs, kernel, stride)])

    def fire(self, x: str, inputs: int, squeeze: int, expand: int) -> str:
        """SqueezeNet's: `2 * expand` channels, 1x1 and 3x3 convolutions of the same squeezed input."""
        squeezed = self.conv_relu(x, inputs, squeeze, 1)
        parts = [self.conv_relu(squeezed, squeeze, expand, kernel) for kernel in (1, 3)]
        return self.node("Concat", parts, axis=1)

    def residual(self, x: str, channels: int) -> str:
        """ResNet's: two 3x3 convolutions beside the identity."""
        body = self.conv(self.conv_relu(x, channels, channels, 3), channels, channels, 3)
        return self.node("Relu", [self.node("Add", [body, x])])

    def max_pool(self, x: str, kernel: int = 2) -> str:
        return self.node("MaxPool", [x], kernel_shape=[kernel, kernel], strides=[2, 2])

    def reshape(self, x: str, shape: Shape) -> str:
        name = self.unused("shape")
        return self.node("Reshape", [x, self.constant(name, np.array(shape, np.int64))])

    def dense(self, x: str, inputs: int, outputs: int, output: str = "") -> str:
        """A dense layer with bias over rows of `inputs`."""
        name = self.unused("dense")
        weight = self.weight(f"{name}.weight", (inputs, outputs), inputs**-0.5)
        bias = self.weight(f"{name}.bias", (outputs,), 0.1)
        return self.node("Gemm", [x, weight, bias], output)

    def global_average(self, x: str) -> str:
        """Each channel's mean, one row per image."""
        return self.node("Flatten", [self.node("GlobalAveragePool", [x])], axis=1)

    def model(self, name: str, inputs: dict[str, tuple[int, Shape]], outputs: dict[str, Shape]) -> onnx.ModelProto:
        """The model; `inputs`: element type (onnx.TensorProto's) and shape by name, `outputs`: shapes of floats."""
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info(key, kind, shape) for key, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(key, onnx.TensorProto.FLOAT, shape) for key, shape in outputs.items()],
            self._weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
