"""Networks of usual parts in sizes drawn at random: what a model of kernels' times learns from, and tests try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from rlflow_tvm.frontend.net import Net
from rlflow_tvm.frontend.random_transformer import transformer

_FLOAT = onnx.TensorProto.FLOAT
_SIZES = (56, 300)  # of images
_WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 128)  # channels of the first stage
_AREA = 224 * 64  # of image size times width, at most: a run stays within some tens of milliseconds
_MOST_CHANNELS = 1536
_CLASSES = 1000
_HIDDEN = (256, 512, 1000, 1024, 2048, 4096)  # of dense layers behind a flattening
_MOST_DENSE = 2**25  # weights of one of them
_GROUPS = (2, 3, 4, 8)


def random_network(seed: int) -> onnx.ModelProto:
    """A convolutional network or a transformer, valid ONNX with random weights; the same for the same seed.

    Convolutional: stages of plain, residual, bottleneck, fire, Inception, separable, shuffled or dense blocks with
    pools or strides between them; one dense layer behind a global pool, or several behind a flattening.
    Transformers: two layers over tokens or over patches of an image.
    """
    rng = np.random.default_rng(seed)
    return (_convolutional if rng.random() < 0.6 else transformer)(Net(seed), rng)


def _convolutional(net: Net, rng: np.random.Generator) -> onnx.ModelProto:
    size = int(rng.integers(*_SIZES))
    channels = int(rng.choice([width for width in _WIDTHS if width * size <= _AREA]))
    blocks = _Blocks(net, rng, -(-size // 2))
    x = blocks.active(net.conv("image", 3, channels, int(rng.choice([3, 5, 7])), stride=2))
    if rng.random() < 0.25:
        x = net.node("LRN", [x], alpha=1e-4, beta=0.75, size=5)
    for stage in range(int(rng.integers(3, 6))):
        if blocks.extent < 7:
            break
        if stage or rng.random() < 0.5:
            x, channels = blocks.halved(x, channels)
        kind = blocks.kinds[int(rng.integers(len(blocks.kinds)))]
        for _ in range(int(rng.integers(1, 4))):
            x, channels = kind(x, channels)
    if rng.random() < 0.3:
        x, channels = blocks.flattened(x, channels)
    else:
        x = net.global_average(x)
    net.dense(x, channels, _CLASSES, "logits")
    return net.model("random convolutional network", {"image": (_FLOAT, (1, 3, size, size))}, {"logits": (1, _CLASSES)})


class _Blocks:
    """Parts of a network; each takes a tensor and its channels, and returns the next tensor and its channels.

    `extent`: height and width of the latest tensor.
    """

    def __init__(self, net: Net, rng: np.random.Generator, extent: int) -> None:
        self._net = net
        self._rng = rng
        self.extent = extent
        self._silu = rng.random() < 0.2
        self.kinds: list[Callable[[str, int], tuple[str, int]]] = [
            self.plain, self.residual, self.bottleneck, self.fire, self.inception, self.factored, self.separable,
            self.shuffled, self.dense,
        ]  # fmt: skip

    def active(self, x: str) -> str:
        if self._silu:
            return self._net.node("Mul", [x, self._net.node("Sigmoid", [x])])
        return self._net.node("Relu", [x])

    def halved(self, x: str, channels: int) -> tuple[str, int]:
        """Half the extent: by a pool (without padding) or by a strided convolution that doubles the channels."""
        if self._rng.random() < 0.5:
            kernel = int(self._rng.choice([2, 3]))
            self.extent = (self.extent - kernel) // 2 + 1
            return self._pooled(x, kernel, 2, 0), channels
        wider = self._some(2 * channels)
        self.extent = (self.extent - 1) // 2 + 1
        return self._unit(x, channels, wider, 3, stride=2), wider

    def flattened(self, x: str, channels: int) -> tuple[str, int]:
        """Dense layers over every pixel's channels; as far down as one weight is small enough for."""
        while channels * self.extent**2 * _HIDDEN[0] > _MOST_DENSE:
            x, channels = self.halved(x, channels)
        x, width = self._net.node("Flatten", [x], axis=1), channels * self.extent**2
        for _ in range(int(self._rng.integers(1, 3))):
            hidden = int(self._rng.choice([count for count in _HIDDEN if count * width <= _MOST_DENSE]))
            x, width = self.active(self._net.dense(x, width, hidden)), hidden
        return x, width

    def plain(self, x: str, channels: int) -> tuple[str, int]:
        wider = self._some(int(channels * self._rng.uniform(0.8, 1.6)))
        return self._unit(x, channels, wider, int(self._rng.choice([1, 3, 3, 5]))), wider

    def residual(self, x: str, channels: int) -> tuple[str, int]:
        return (self._net.residual(x, channels) if not self._silu else self._sum(x, channels, channels, 3)), channels

    def bottleneck(self, x: str, channels: int) -> tuple[str, int]:
        return self._sum(x, channels, self._some(channels // int(self._rng.choice([2, 4]))), 1), channels

    def fire(self, x: str, channels: int) -> tuple[str, int]:
        expand = self._some(int(channels * self._rng.uniform(0.5, 1.0)))
        return self._net.fire(x, channels, self._some(expand // 4), expand), 2 * expand

    def inception(self, x: str, channels: int) -> tuple[str, int]:
        a, b, c, d = (self._some(int(channels * self._rng.uniform(0.2, 0.6))) for _ in range(4))
        half = self._some(b // 2)
        pooled = self._pooled(x, 3, 1, 1)
        parts = [
            self._unit(x, channels, a, 1),
            self._unit(self._unit(x, channels, half, 1), half, b, 3),
            self._unit(self._unit(x, channels, half, 1), half, c, 5),
            self._unit(pooled, channels, d, 1),
        ]
        return self._net.node("Concat", parts, axis=1), a + b + c + d

    def factored(self, x: str, channels: int) -> tuple[str, int]:
        width, wider = self._some(channels // 2), self._some(channels)
        x = self._unit(x, channels, width, 1)
        return self._unit(self._unit(x, width, width, (1, 7)), width, wider, (7, 1)), wider

    def separable(self, x: str, channels: int) -> tuple[str, int]:
        wider = self._some(int(channels * self._rng.uniform(0.8, 1.6)))
        each = self.active(self._net.conv(x, channels, channels, 3, groups=channels))
        return self._unit(each, channels, wider, 1), wider

    def shuffled(self, x: str, channels: int) -> tuple[str, int]:
        """ShuffleNet's: grouped 1x1 convolutions, between which each group's channels are dealt out to all groups."""
        groups = int(self._rng.choice([count for count in _GROUPS if channels % count == 0]))
        each = max(channels // 4 // groups, 1)
        width = groups * each
        y = self.active(self._net.conv(x, channels, width, 1, groups=groups))
        y = self._net.reshape(y, (1, groups, each, self.extent, self.extent))
        y = self._net.node("Transpose", [y], perm=[0, 2, 1, 3, 4])
        y = self._net.reshape(y, (1, width, self.extent, self.extent))
        y = self._net.conv(self._net.conv(y, width, width, 3, groups=width), width, channels, 1, groups=groups)
        return self.active(self._net.node("Add", [y, x])), channels

    def dense(self, x: str, channels: int) -> tuple[str, int]:
        """DenseNet's: normalised and active before the convolutions, whose result is appended."""
        growth = self._some(channels // 4)
        name = self._net.unused("norm")
        scale = self._net.weight(f"{name}.scale", (channels, 1, 1), 0.5)
        shift = self._net.weight(f"{name}.shift", (channels, 1, 1), 0.1)
        y = self.active(self._net.node("Add", [self._net.node("Mul", [x, scale]), shift]))
        y = self._net.conv(self._unit(y, channels, 4 * growth, 1), 4 * growth, growth, 3)
        return self._net.node("Concat", [x, y], axis=1), channels + growth

    def _pooled(self, x: str, kernel: int, stride: int, pad: int) -> str:
        """By maxima, or by means that count the padding or not."""
        kind = str(self._rng.choice(["AveragePool", "MaxPool"]))
        means: dict[str, Any] = {"count_include_pad": int(self._rng.integers(2))} if kind == "AveragePool" else {}
        return self._net.node(kind, [x], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, **means)

    def _sum(self, x: str, channels: int, width: int, kernel: int) -> str:
        y = self._unit(self._unit(x, channels, width, kernel), width, width, 3)
        return self.active(self._net.node("Add", [self._net.conv(y, width, channels, kernel), x]))

    def _unit(self, x: str, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1) -> str:
        return self.active(self._net.conv(x, inputs, outputs, kernel, stride))

    def _some(self, channels: int) -> int:
        """About as many: usually a multiple of 16, now and then of 8 or 4."""
        step = int(self._rng.choice([16, 16, 16, 8, 4]))
        return min(max(round(channels / step), 1) * step, _MOST_CHANNELS)
