"""GPT-2, BERT and ResNet in sizes drawn at random, written as exporters write them: what orders of passes learn from.

Normalisation, GELU and causal masks stand in single steps, masks anew in each layer, dense layers between two
reshapes, no-operations where training had dropout: as TorchScript's exporter leaves them without its optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from rlflow_tvm.frontend.net import Net, Shape

_FLOAT, _INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
Inputs = dict[str, tuple[int, Shape]]

_WORDS = 97
_CLASSES = 10
_MASKED = -1e4


def gpt2(rng: np.random.Generator, training: bool) -> onnx.ModelProto:
    """A decoder (Radford et al. 2019): normalised before its parts, one product for query, key and value."""
    t = _Transformer(rng, int(rng.integers(1, 4)), "tanh", training)
    padded = bool(rng.random() < 0.5)
    inputs: Inputs = {"tokens": (_INT, (1, t.tokens))}
    if padded:
        inputs["attention_mask"] = (_INT, (1, t.tokens))
    x = t.dropped(t.node("Add", [t.gathered("wte", _WORDS, "tokens"), t.gathered("wpe", t.tokens, t.positions())]))
    mask = t.padding("attention_mask") if padded else ""
    for _ in range(t.layers):
        x = t.node("Add", [x, t.causal_attention(t.normed(x), mask)])
        x = t.node("Add", [x, t.perceptron(t.normed(x), t.wrapped)])
    x = t.normed(x)
    if rng.random() < 0.6 or training:
        words = t.linear(x, t.hidden, _WORDS, bias=False)
        return _finished(t, "gpt2", inputs, words, (1, t.tokens, _WORDS), training)
    return _finished(t, "gpt2", inputs, x, (1, t.tokens, t.hidden), training)


def bert(rng: np.random.Generator, training: bool) -> onnx.ModelProto:
    """An encoder (Devlin et al. 2018): normalised after its parts, query, key and value each of its own product."""
    activation = "tanh" if training else str(rng.choice(["erf", "tanh", "relu"]))
    t = _Transformer(rng, int(rng.integers(1, 4)), activation, training)
    padded, typed = bool(rng.random() < 0.6), bool(rng.random() < 0.5)
    inputs: Inputs = {"tokens": (_INT, (1, t.tokens))}
    if padded:
        inputs["attention_mask"] = (_INT, (1, t.tokens))
    x = t.gathered("words", _WORDS, "tokens")
    if typed:
        inputs["token_types"] = (_INT, (1, t.tokens))
        x = t.node("Add", [x, t.gathered("types", 2, "token_types")])
    x = t.dropped(t.normed(t.node("Add", [x, t.gathered("positions", t.tokens, t.positions())])))
    mask = t.padding("attention_mask") if padded else ""
    for _ in range(t.layers):
        x = t.normed(t.node("Add", [t.attention(x, mask), x]))
        x = t.normed(t.node("Add", [t.perceptron(x, t.linear), x]))
    head = str(rng.choice(["hidden", "pooled", "words"]))
    if head == "words" or training:
        x = t.normed(t.active(t.linear(x, t.hidden, t.hidden)))
        return _finished(t, "bert", inputs, t.linear(x, t.hidden, _WORDS), (1, t.tokens, _WORDS), training)
    if head == "pooled":
        first = t.node("Gather", [x, t.integer(0)], axis=1)
        pooled = t.node("Tanh", [t.dense(first, t.hidden, t.hidden)])
        return _finished(t, "bert", inputs, pooled, (1, t.hidden), training)
    return _finished(t, "bert", inputs, x, (1, t.tokens, t.hidden), training)


def resnet(rng: np.random.Generator, training: bool) -> onnx.ModelProto:
    """A residual network (He et al. 2015), of basic or bottleneck blocks; trained ones normalise by their batch."""
    net = _Residual(rng, training)
    stages = [int(count) for count in rng.integers(1, 3, int(rng.integers(2, 5)))]
    width, size = int(rng.choice([4, 8])), 16 * int(rng.integers(1, 3))
    bottleneck = bool(rng.random() < 0.5)
    x, channels = net.entry(width, bool(rng.random() < 0.5)), width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x, channels = net.block(x, channels, width * 2**stage, stride, bottleneck)
    x = net.node("ReduceMean", [x], axes=[2, 3], keepdims=1) if training else net.node("GlobalAveragePool", [x])
    x = net.dense(net.node("Flatten", [x], axis=1), channels, _CLASSES)
    inputs: Inputs = {"image": (_FLOAT, (net.batch, 3, size, size))}
    return _finished(net, "resnet", inputs, x, (net.batch, _CLASSES), training)


FAMILIES = {"gpt2": gpt2, "bert": bert, "resnet": resnet}
"""By name: a draw, and whether it ends in a loss rather than in what the model tells."""


def _finished(
    net: Net,
    name: str,
    inputs: Inputs,
    x: str,
    shape: tuple[int, ...],
    training: bool,
) -> onnx.ModelProto:
    """The model; for training with the cross entropy of a target distribution as its output."""
    if not training:
        net.node("Identity", [x], "output")
        return net.model(name, inputs, {"output": shape})
    inputs = inputs | {"target": (_FLOAT, shape)}
    likelihood = net.node("Mul", [net.node("LogSoftmax", [x], axis=-1), "target"])
    net.node("Neg", [net.node("ReduceSum", [likelihood], keepdims=0)], "output")
    return net.model(name, inputs, {"output": ()})


class _Transformer(Net):
    """Parts of GPT-2 and BERT; `tokens` positions of `hidden` numbers."""

    def __init__(self, rng: np.random.Generator, layers: int, activation: str, training: bool) -> None:
        super().__init__(int(rng.integers(2**31)))
        self.layers, self._activation, self._training = layers, activation, training
        self._heads, self._head_width = int(rng.choice([1, 2, 4])), int(rng.choice([4, 8]))
        self.hidden = self._heads * self._head_width
        self.tokens = int(rng.integers(5, 17))
        self._wide = self.hidden * int(rng.choice([2, 3, 4]))
        self._dropout = bool(rng.random() < 0.3)

    def scalar(self, value: float) -> str:
        return self.constant(f"scalar.{len(self._weights)}", np.array(value, np.float32))

    def integer(self, value: int) -> str:
        return self.constant(f"index.{len(self._weights)}", np.array(value, np.int64))

    def positions(self) -> str:
        return self.constant("position_ids", np.arange(self.tokens, dtype=np.int64)[None])

    def gathered(self, name: str, rows: int, indices: str) -> str:
        """A table's rows; in training by indices of one axis, as TVM can lower the gradient of no other."""
        table = self.weight(name, (rows, self.hidden), 0.5)
        if not self._training:
            return self.node("Gather", [table, indices])
        found = self.node("Gather", [table, self.reshape(indices, (self.tokens,))])
        return self.reshape(found, (1, self.tokens, self.hidden))

    def dropped(self, x: str) -> str:
        """Where training had dropout."""
        return self.node("Identity", [x]) if self._dropout else x

    def padding(self, mask: str) -> str:
        """0 where there is a token, a large negative number elsewhere: (1, 1, 1, tokens)."""
        axes = self.constant("mask_axes", np.array([1, 2], np.int64))
        told = self.node("Cast", [self.node("Unsqueeze", [mask, axes])], to=_FLOAT)
        return self.node("Mul", [self.node("Sub", [self.scalar(1.0), told]), self.scalar(_MASKED)])

    def normed(self, x: str) -> str:
        name = self.unused("norm")
        centred = self.node("Sub", [x, self.node("ReduceMean", [x], axes=[-1], keepdims=1)])
        variance = self.node("ReduceMean", [self.node("Pow", [centred, self.scalar(2.0)])], axes=[-1], keepdims=1)
        deviation = self.node("Sqrt", [self.node("Add", [variance, self.scalar(1e-5)])])
        scaled = self.node(
            "Mul", [self.node("Div", [centred, deviation]), self.weight(f"{name}.scale", (self.hidden,), 1.0)]
        )
        return self.node("Add", [scaled, self.weight(f"{name}.bias", (self.hidden,), 0.1)])

    def linear(self, x: str, inputs: int, outputs: int, bias: bool = True) -> str:
        """A product of three axes by two, as torch's Linear is written."""
        name = self.unused("linear")
        product = self.node("MatMul", [x, self.weight(f"{name}.weight", (inputs, outputs), inputs**-0.5)])
        return self.node("Add", [self.weight(f"{name}.bias", (outputs,), 0.1), product]) if bias else product

    def wrapped(self, x: str, inputs: int, outputs: int) -> str:
        """A dense layer between two reshapes, as GPT-2's Conv1D is written."""
        rows = self.dense(self.reshape(x, (-1, inputs)), inputs, outputs)
        return self.reshape(rows, (1, self.tokens, outputs))

    def attention(self, x: str, mask: str) -> str:
        heads = [self._apart(self.linear(x, self.hidden, self.hidden), swap) for swap in (False, True, False)]
        return self.dropped(self.linear(self._attended(heads, mask, causal=False), self.hidden, self.hidden))

    def causal_attention(self, x: str, mask: str) -> str:
        joined = self.wrapped(x, self.hidden, 3 * self.hidden)
        parts = self.several("Split", [joined], [f"{self.unused('split')}.{i}" for i in range(3)], axis=-1)
        heads = [self._apart(part, swap) for part, swap in zip(parts, (False, True, False), strict=True)]
        return self.dropped(self.wrapped(self._attended(heads, mask, causal=True), self.hidden, self.hidden))

    def _apart(self, x: str, swap: bool) -> str:
        """(1, heads, tokens, width of a head), or with the last two swapped by a transposition of its own."""
        apart = self.node(
            "Transpose", [self.reshape(x, (1, self.tokens, self._heads, self._head_width))], perm=[0, 2, 1, 3]
        )
        return self.node("Transpose", [apart], perm=[0, 1, 3, 2]) if swap else apart

    def _attended(self, heads: Sequence[str], mask: str, *, causal: bool) -> str:
        query, key, value = heads
        scores = self.node("Div", [self.node("MatMul", [query, key]), self.scalar(self._head_width**0.5)])
        if causal:
            lower = np.tril(np.ones((1, 1, self.tokens, self.tokens), bool))
            allowed = self.constant(self.unused("bias"), lower)
            scores = self.node("Where", [allowed, scores, self.scalar(_MASKED)])
        if mask:
            scores = self.node("Add", [scores, mask])
        mixed = self.node("MatMul", [self.dropped(self.node("Softmax", [scores], axis=-1)), value])
        return self.reshape(self.node("Transpose", [mixed], perm=[0, 2, 1, 3]), (1, self.tokens, self.hidden))

    def perceptron(self, x: str, layer: Callable[[str, int, int], str]) -> str:
        return self.dropped(layer(self.active(layer(x, self.hidden, self._wide)), self._wide, self.hidden))

    def active(self, x: str) -> str:
        """ReLU, or GELU by the error function or by the hyperbolic tangent, in single steps."""
        if self._activation == "relu":
            return self.node("Relu", [x])
        if self._activation == "erf":
            error = self.node("Erf", [self.node("Div", [x, self.scalar(2.0**0.5)])])
            weighted = self.node("Mul", [x, self.node("Add", [error, self.scalar(1.0)])])
            return self.node("Mul", [weighted, self.scalar(0.5)])
        cube = self.node("Mul", [self.scalar(0.044715), self.node("Pow", [x, self.scalar(3.0)])])
        inner = self.node("Mul", [self.scalar((2 / np.pi) ** 0.5), self.node("Add", [x, cube])])
        outer = self.node("Add", [self.scalar(1.0), self.node("Tanh", [inner])])
        return self.node("Mul", [self.node("Mul", [self.scalar(0.5), x]), outer])

    def several(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Sequence[str]:
        """A node of several outputs."""
        self._nodes.append(onnx.helper.make_node(op, list(inputs), list(outputs), name=outputs[0], **attributes))
        return outputs


class _Residual(Net):
    def __init__(self, rng: np.random.Generator, training: bool) -> None:
        super().__init__(int(rng.integers(2**31)))
        self._training = training
        self.batch = 2 if training else 1

    def normed(self, x: str, channels: int) -> str:
        """Batch normalisation: by known moments, or in training by the batch's, in single steps."""
        name = self.unused("bn")
        if not self._training:
            moments = [
                self.weight(f"{name}.scale", (channels,), 1.0),
                self.weight(f"{name}.bias", (channels,), 0.1),
                self.weight(f"{name}.mean", (channels,), 0.1),
                self.constant(f"{name}.var", np.linspace(0.5, 1.5, channels, dtype=np.float32)),
            ]
            return self.node("BatchNormalization", [x, *moments], epsilon=1e-5)
        per_channel = (1, channels, 1, 1)
        centred = self.node("Sub", [x, self.node("ReduceMean", [x], axes=[0, 2, 3], keepdims=1)])
        variance = self.node("ReduceMean", [self.node("Mul", [centred, centred])], axes=[0, 2, 3], keepdims=1)
        epsilon = self.constant(f"{name}.epsilon", np.array(1e-5, np.float32))
        scaled = self.node("Div", [centred, self.node("Sqrt", [self.node("Add", [variance, epsilon])])])
        scaled = self.node("Mul", [scaled, self.weight(f"{name}.scale", per_channel, 1.0)])
        return self.node("Add", [scaled, self.weight(f"{name}.bias", per_channel, 0.1)])

    def convolved(self, x: str, inputs: int, outputs: int, kernel: int, stride: int = 1) -> str:
        """Without bias, normalised."""
        fan_in = inputs * kernel * kernel
        weight = self.weight(f"{self.unused('conv')}.weight", (outputs, inputs, kernel, kernel), (2 / fan_in) ** 0.5)
        edge = kernel // 2
        x = self.node("Conv", [x, weight], kernel_shape=[kernel, kernel], pads=[edge] * 4, strides=[stride, stride])
        return self.normed(x, outputs)

    def entry(self, width: int, pooled: bool) -> str:
        x = self.node("Relu", [self.convolved("image", 3, width, 3)])
        return self.max_pool(x) if pooled else x

    def block(self, x: str, inputs: int, width: int, stride: int, bottleneck: bool) -> tuple[str, int]:
        outputs = 2 * width if bottleneck else width
        if bottleneck:
            body = self.node("Relu", [self.convolved(x, inputs, width, 1)])
            body = self.node("Relu", [self.convolved(body, width, width, 3, stride)])
            body = self.convolved(body, width, outputs, 1)
        else:
            body = self.node("Relu", [self.convolved(x, inputs, width, 3, stride)])
            body = self.convolved(body, width, outputs, 3)
        beside = x if inputs == outputs and stride == 1 else self.convolved(x, inputs, outputs, 1, stride)
        return self.node("Relu", [self.node("Add", [body, beside])]), outputs
