"""Transformers of random sizes, over tokens or over the patches of an image."""

from __future__ import annotations

import numpy as np
import onnx

from rlflow_tvm.frontend.net import Net, Shape

_LAYERS = 2
_TOKENS = (16, 260)
_HEADS = (2, 3, 4, 6, 8, 12, 16)
_HEAD_WIDTHS = (16, 32, 40, 48, 64, 80, 96)
_MOST_HIDDEN = 1024
_WORDS = (500, 30000)
_EXPANSIONS = (2, 3, 4)
_PATCHES = (8, 14, 16)
_MOST_PATCHES = 16  # along a side
_ERF_SCALE = 0.5**0.5


def transformer(net: Net, rng: np.random.Generator) -> onnx.ModelProto:
    """Two layers, each with its own number of heads and its own expansion; normalised before or after its parts."""
    width = int(rng.choice(_HEAD_WIDTHS))
    heads = int(rng.choice([count for count in _HEADS if count * width <= _MOST_HIDDEN]))
    hidden = heads * width
    layers = _Layers(net, rng, hidden)
    inputs: dict[str, tuple[int, Shape]]
    if rng.random() < 0.5:
        tokens = int(rng.integers(*_TOKENS))
        inputs = {"tokens": (onnx.TensorProto.INT64, (1, tokens))}
        x = layers.embedded("tokens", tokens, int(rng.integers(*_WORDS)))
    else:
        patch, side = int(rng.choice(_PATCHES)), int(rng.integers(4, _MOST_PATCHES + 1))
        tokens = side * side + 1
        inputs = {"image": (onnx.TensorProto.FLOAT, (1, 3, patch * side, patch * side))}
        x = layers.patched("image", patch, side)
    mask = ""
    if rng.random() < 0.5:
        mask = "mask"
        inputs[mask] = (onnx.TensorProto.FLOAT, (1, 1, 1, tokens))
    for _ in range(_LAYERS):
        divisors = [count for count in _HEADS if hidden % count == 0]
        x = layers.layer(x, tokens, int(rng.choice(divisors)), hidden * int(rng.choice(_EXPANSIONS)), mask)
    layers.normed(x, "hidden")
    return net.model("random transformer", inputs, {"hidden": (1, tokens, hidden)})


class _Layers:
    def __init__(self, net: Net, rng: np.random.Generator, hidden: int) -> None:
        self._net = net
        self._hidden = hidden
        self._first = bool(rng.random() < 0.5)  # normalised before attention and multilayer perceptron, or after
        self._activation = str(rng.choice(["gelu", "relu", "silu", "tanh"]))

    def embedded(self, tokens: str, count: int, words: int) -> str:
        table = self._net.weight("words", (words, self._hidden), 0.5)
        places = self._net.weight("places", (1, count, self._hidden), 0.5)
        return self.normed(self._net.node("Add", [self._net.node("Gather", [table, tokens]), places]))

    def patched(self, image: str, patch: int, side: int) -> str:
        """A patch's convolution, one token each, and one more in front."""
        weight = self._net.weight("patches", (self._hidden, 3, patch, patch), (3 * patch * patch) ** -0.5)
        bias = self._net.weight("patches.bias", (self._hidden,), 0.1)
        x = self._net.node("Conv", [image, weight, bias], kernel_shape=[patch, patch], strides=[patch, patch])
        x = self._net.node("Transpose", [self._net.reshape(x, (1, self._hidden, side * side))], perm=[0, 2, 1])
        first = self._net.weight("first", (1, 1, self._hidden), 0.5)
        places = self._net.weight("places", (1, side * side + 1, self._hidden), 0.5)
        return self._net.node("Add", [self._net.node("Concat", [first, x], axis=1), places])

    def layer(self, x: str, tokens: int, heads: int, wide: int, mask: str) -> str:
        node = self._net.node
        if self._first:
            x = node("Add", [self._attention(self.normed(x), tokens, heads, mask), x])
            return node("Add", [self._perceptron(self.normed(x), wide), x])
        x = self.normed(node("Add", [self._attention(x, tokens, heads, mask), x]))
        return self.normed(node("Add", [self._perceptron(x, wide), x]))

    def normed(self, x: str, output: str = "") -> str:
        name = self._net.unused("norm")
        scale = self._net.weight(f"{name}.scale", (self._hidden,), 1.0)
        bias = self._net.weight(f"{name}.bias", (self._hidden,), 0.1)
        return self._net.node("LayerNormalization", [x, scale, bias], output, axis=-1, epsilon=1e-5)

    def _attention(self, x: str, tokens: int, heads: int, mask: str) -> str:
        node, reshape, width = self._net.node, self._net.reshape, self._hidden // heads
        apart = (1, tokens, heads, width)
        query, value = (
            node("Transpose", [reshape(self._linear(x, self._hidden, self._hidden), apart)], perm=[0, 2, 1, 3])
            for _ in range(2)
        )
        key = node("Transpose", [reshape(self._linear(x, self._hidden, self._hidden), apart)], perm=[0, 2, 3, 1])
        scores = node("Mul", [node("MatMul", [query, key]), self._scalar(width**-0.5)])
        if mask:
            scores = node("Add", [scores, mask])
        mixed = node("MatMul", [node("Softmax", [scores], axis=-1), value])
        joined = reshape(node("Transpose", [mixed], perm=[0, 2, 1, 3]), (1, tokens, self._hidden))
        return self._linear(joined, self._hidden, self._hidden)

    def _perceptron(self, x: str, wide: int) -> str:
        return self._linear(self._active(self._linear(x, self._hidden, wide)), wide, self._hidden)

    def _active(self, x: str) -> str:
        node = self._net.node
        if self._activation == "gelu":
            error = node("Erf", [node("Mul", [x, self._scalar(_ERF_SCALE)])])
            return node("Mul", [node("Mul", [x, self._scalar(0.5)]), node("Add", [error, self._scalar(1.0)])])
        if self._activation == "silu":
            return node("Mul", [x, node("Sigmoid", [x])])
        return node({"relu": "Relu", "tanh": "Tanh"}[self._activation], [x])

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        name = self._net.unused("linear")
        weight = self._net.weight(f"{name}.weight", (inputs, outputs), inputs**-0.5)
        bias = self._net.weight(f"{name}.bias", (outputs,), 0.1)
        return self._net.node("Add", [self._net.node("MatMul", [x, weight]), bias])

    def _scalar(self, value: float) -> str:
        return self._net.constant(self._net.unused("scalar"), np.array(value, "float32"))
