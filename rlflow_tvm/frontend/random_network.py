"""Networks of usual parts in sizes drawn at random: what a model of kernels' times learns from, and tests try."""

from __future__ import annotations

from collections.abc import Callable

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


def random_network(seed: int) -> onnx.ModelProto:
    """A convolutional network or a transformer, valid ONNX with random weights; the same for the same seed.

    Convolutional: stages of plain, residual, bottleneck, fire, Inception, separable or dense blocks with pools or
    strides between them. Transformers: two layers over tokens or over patches of an image.
    """
    rng = np.random.default_rng(seed)
    return (_convolutional if rng.random() < 0.6 else transformer)(Net(seed), rng)


def _convolutional(net: Net, rng: np.random.Generator) -> onnx.ModelProto:
    size = int(rng.integers(*_SIZES))
    channels = int(rng.choice([width for width in _WIDTHS if width * size <= _AREA]))
    blocks = _Blocks(net, rng)
    x = blocks.active(net.conv("image", 3, channels, int(rng.choice([3, 5, 7])), stride=2))
    extent = -(-size // 2)
    for stage in range(int(rng.integers(3, 6))):
        if extent < 7:
            break
        if stage or rng.random() < 0.5:
            x, channels, extent = blocks.halved(x, channels, extent)
        kind = blocks.kinds[int(rng.integers(len(blocks.kinds)))]
        for _ in range(int(rng.integers(1, 4))):
            x, channels = kind(x, channels)
    net.classify(x, channels, _CLASSES, "logits")
    return net.model("random convolutional network", {"image": (_FLOAT, (1, 3, size, size))}, {"logits": (1, _CLASSES)})


class _Blocks:
    """Parts of a network; each takes a tensor and its channels, and returns the next tensor and its channels."""

    def __init__(self, net: Net, rng: np.random.Generator) -> None:
        self._net = net
        self._rng = rng
        self._silu = rng.random() < 0.2
        self.kinds: list[Callable[[str, int], tuple[str, int]]] = [
            self.plain, self.residual, self.bottleneck, self.fire, self.inception, self.factored, self.separable,
            self.dense,
        ]  # fmt: skip

    def active(self, x: str) -> str:
        if self._silu:
            return self._net.node("Mul", [x, self._net.node("Sigmoid", [x])])
        return self._net.node("Relu", [x])

    def halved(self, x: str, channels: int, extent: int) -> tuple[str, int, int]:
        """Half the extent: by a pool (without padding) or by a strided convolution that doubles the channels."""
        if self._rng.random() < 0.5:
            kernel = int(self._rng.choice([2, 3]))
            return self._net.max_pool(x, kernel), channels, (extent - kernel) // 2 + 1
        wider = self._some(2 * channels)
        return self._unit(x, channels, wider, 3, stride=2), wider, (extent - 1) // 2 + 1

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
        pooled = self._net.node(
            str(self._rng.choice(["AveragePool", "MaxPool"])), [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4
        )
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

    def dense(self, x: str, channels: int) -> tuple[str, int]:
        """DenseNet's: normalised and active before the convolutions, whose result is appended."""
        growth = self._some(channels // 4)
        name = self._net.unused("norm")
        scale = self._net.weight(f"{name}.scale", (channels, 1, 1), 0.5)
        shift = self._net.weight(f"{name}.shift", (channels, 1, 1), 0.1)
        y = self.active(self._net.node("Add", [self._net.node("Mul", [x, scale]), shift]))
        y = self._net.conv(self._unit(y, channels, 4 * growth, 1), 4 * growth, growth, 3)
        return self._net.node("Concat", [x, y], axis=1), channels + growth

    def _sum(self, x: str, channels: int, width: int, kernel: int) -> str:
        y = self._unit(self._unit(x, channels, width, kernel), width, width, 3)
        return self.active(self._net.node("Add", [self._net.conv(y, width, channels, kernel), x]))

    def _unit(self, x: str, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1) -> str:
        return self.active(self._net.conv(x, inputs, outputs, kernel, stride))

    def _some(self, channels: int) -> int:
        """About as many: usually a multiple of 16, now and then of 8 or 4."""
        step = int(self._rng.choice([16, 16, 16, 8, 4]))
        return min(max(round(channels / step), 1) * step, _MOST_CHANNELS)
