"""The convolutional networks of the evaluation, in torch, with random weights (no torchvision: it is not needed)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch normalisation, and ReLU unless `relu` is false."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        relu: bool = True,
        eps: float = 1e-5,
        groups: int = 1,
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs, eps=eps), *([nn.ReLU()] if relu else []))


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where shape or stride changes."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], bottleneck: bool, groups: int = 1, classes: int = 1000) -> nn.Module:
    """ResNet (He et al. 2015, table 1), the stride of a bottleneck in its 3x3 convolution (version 1.5); with 32
    `groups` ResNeXt of 32x4d (Xie et al. 2017, table 1)."""
    layers: list[nn.Module] = [ConvNorm(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        outputs = 4 * width if bottleneck else width
        for i in range(count):
            stride = 2 if stage and not i else 1
            if bottleneck:
                inner = width if groups == 1 else 2 * width
                body = nn.Sequential(
                    ConvNorm(inputs, inner, 1),
                    ConvNorm(inner, inner, 3, stride, 1, groups=groups),
                    ConvNorm(inner, outputs, 1, relu=False),
                )
            else:
                body = nn.Sequential(
                    ConvNorm(inputs, width, 3, stride, 1), ConvNorm(width, outputs, 3, 1, 1, relu=False)
                )
            layers.append(Residual(body, inputs, outputs, stride))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Branches(nn.Module):
    """The channel-wise concatenation of several branches of one input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def fire(inputs: int, squeeze: int, expand: int) -> nn.Module:
    """SqueezeNet's fire module: 1x1 squeeze, then 1x1 and 3x3 expansions side by side."""
    return nn.Sequential(
        nn.Conv2d(inputs, squeeze, 1),
        nn.ReLU(),
        Branches(
            nn.Sequential(nn.Conv2d(squeeze, expand, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), nn.ReLU()),
        ),
    )


def squeezenet(classes: int = 1000) -> nn.Module:
    """SqueezeNet 1.1 (Iandola et al. 2016; the 1.1 release's places of the pools)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(64, 16, 64),
        fire(128, 16, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(128, 32, 128),
        fire(256, 32, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(256, 48, 192),
        fire(384, 48, 192),
        fire(384, 64, 256),
        fire(512, 64, 256),
        nn.Conv2d(512, classes, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def squeezenet_tiny(classes: int = 16) -> nn.Module:
    """A few fire modules for images of 56x56, all channels multiples of 16 (but the image's three)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        fire(32, 16, 32),
        fire(64, 16, 32),
        nn.MaxPool2d(2, 2),
        fire(64, 32, 64),
        nn.Conv2d(128, classes, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _unit(inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding=0) -> nn.Module:
    return ConvNorm(inputs, outputs, kernel, stride, padding, eps=1e-3)


def _pool_branch(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(inputs, outputs, 1))


def _inception_a(inputs: int, pooled: int) -> nn.Module:
    return Branches(
        _unit(inputs, 64, 1),
        nn.Sequential(_unit(inputs, 48, 1), _unit(48, 64, 5, padding=2)),
        nn.Sequential(_unit(inputs, 64, 1), _unit(64, 96, 3, padding=1), _unit(96, 96, 3, padding=1)),
        _pool_branch(inputs, pooled),
    )


def _inception_c(inputs: int, width: int) -> nn.Module:
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    double = [column, row, column, row]
    return Branches(
        _unit(inputs, 192, 1),
        nn.Sequential(
            _unit(inputs, width, 1),
            _unit(width, width, row[0], padding=row[1]),
            _unit(width, 192, column[0], padding=column[1]),
        ),
        nn.Sequential(
            _unit(inputs, width, 1),
            *[
                _unit(width, 192 if i == 3 else width, kernel, padding=padding)
                for i, (kernel, padding) in enumerate(double)
            ],
        ),
        _pool_branch(inputs, 192),
    )


def _inception_e(inputs: int) -> nn.Module:
    def fan(width: int) -> nn.Module:
        return Branches(_unit(width, 384, (1, 3), padding=(0, 1)), _unit(width, 384, (3, 1), padding=(1, 0)))

    return Branches(
        _unit(inputs, 320, 1),
        nn.Sequential(_unit(inputs, 384, 1), fan(384)),
        nn.Sequential(_unit(inputs, 448, 1), _unit(448, 384, 3, padding=1), fan(384)),
        _pool_branch(inputs, 192),
    )


def inception_v3(classes: int = 1000) -> nn.Module:
    """Inception-v3 for 299x299 (Szegedy et al. 2015, table 1 and figures 5 to 7), without the auxiliary head."""
    reduce_35 = Branches(
        _unit(288, 384, 3, 2),
        nn.Sequential(_unit(288, 64, 1), _unit(64, 96, 3, padding=1), _unit(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )
    reduce_17 = Branches(
        nn.Sequential(_unit(768, 192, 1), _unit(192, 320, 3, 2)),
        nn.Sequential(
            _unit(768, 192, 1),
            _unit(192, 192, (1, 7), padding=(0, 3)),
            _unit(192, 192, (7, 1), padding=(3, 0)),
            _unit(192, 192, 3, 2),
        ),
        nn.MaxPool2d(3, 2),
    )
    return nn.Sequential(
        _unit(3, 32, 3, 2),
        _unit(32, 32, 3),
        _unit(32, 64, 3, padding=1),
        nn.MaxPool2d(3, 2),
        _unit(64, 80, 1),
        _unit(80, 192, 3),
        nn.MaxPool2d(3, 2),
        *[_inception_a(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))],
        reduce_35,
        *[_inception_c(768, width) for width in (128, 160, 160, 192)],
        reduce_17,
        *[_inception_e(inputs) for inputs in (1280, 2048)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )


class Summed(nn.Module):
    """relu of the sum of several branches of one input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.branches
        total = first(x)
        for branch in others:
            total = total + branch(x)
        return functional.relu(total)


def _shortcut(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(inputs)] if inputs == outputs and stride == 1 else []


def _stages(block: Callable[[int, int, int], nn.Module], widths: tuple[int, ...], blocks: tuple[int, ...]) -> nn.Module:
    """A stem of the first width, then so many blocks of each of the others, each first one with stride 2."""
    layers, inputs = [block(3, widths[0], 2)], widths[0]
    for outputs, count in zip(widths[1:], blocks, strict=True):
        for i in range(count):
            layers.append(block(inputs, outputs, 1 if i else 2))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def repvgg(widths: tuple[int, ...], blocks: tuple[int, ...]) -> nn.Module:
    """RepVGG (Ding et al. 2021) as it is trained: a 3x3 and a 1x1 convolution and the input, each normalised, added."""

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        convs = [ConvNorm(inputs, outputs, kernel, stride, kernel // 2, relu=False) for kernel in (3, 1)]
        return Summed(*convs, *_shortcut(inputs, outputs, stride))

    return _stages(block, widths, blocks)


def mobileone(widths: tuple[int, ...], blocks: tuple[int, ...], branches: int) -> nn.Module:
    """MobileOne (Vasu et al. 2023) as it is trained: `branches` convolutions of each kind side by side, a depthwise 1x1
    one beside the depthwise ones of 3x3, and the input, each normalised."""

    def several(inputs: int, outputs: int, stride: int, groups: int) -> nn.Module:
        kernels = [1] + branches * [3]
        convs = [ConvNorm(inputs, outputs, k, stride, k // 2, relu=False, groups=groups) for k in kernels]
        return Summed(*_shortcut(inputs, outputs, stride), *convs)

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        if inputs == 3:
            return several(inputs, outputs, stride, 1)
        pointwise = [ConvNorm(inputs, outputs, 1, relu=False) for _ in range(branches)]
        return nn.Sequential(
            several(inputs, inputs, stride, inputs), Summed(*_shortcut(inputs, outputs, 1), *pointwise)
        )

    return _stages(block, widths, blocks)


@torch.no_grad()
def initialise(model: nn.Module, image: Tensor, seed: int) -> nn.Module:
    """Random weights that keep the activations of order one, and batch statistics that fit them.

    Convolutions after He et al. 2015; scales in [0.5, 1.5], shifts normal; the running means and variances are those
    of a training pass over noise like `image` (drawn freely they would blow up or die out over fifty layers).
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1, generator=generator)
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.normal_(0, 0.2, generator=generator)
        norm.momentum = 1.0
    if norms:
        model.train()(torch.randn((2, *image.shape[1:]), generator=generator))
    return model.eval()
