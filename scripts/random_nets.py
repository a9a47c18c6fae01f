"""Nets of common building blocks, drawn at random: imported, rewritten at random, built in every way, run, compared.

    python scripts/random_nets.py --count 100 --seed 0 --keep runs/wrong

Each net goes through PyTorch's exporter and the import; its graph and one that random rewrites make of it are built
with the implementations that shapes decide on, with each named one wherever it takes the call, and with random ones.
Outputs are held against ONNX Runtime's on the same inputs. What the models of `--models` elsewhere do not have comes
about here: gates that are stretched over images, odd extents, operators that are read twice.

A line for each net; exit code 1 if any was wrong or could not be built. With --keep the ONNX file and the plan of each
of those are left in a folder. Needs the extras [agents,onnxruntime].
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from trajectories import walked

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import progress_bar
from rlflow_tvm.differences import TOLERANCE, range_error
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs
from rlflow_tvm.kernels import BY_SHAPE, Choice, Choices, as_target, vector_lanes
from rlflow_tvm.kernels.llvm.implementations import IMPLEMENTATIONS
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.verify import run_module

Draw = random.Random
Block = tuple[nn.Module, int]
"""A part of a net, and how many channels it gives."""


class Residual(nn.Sequential):
    """x + f(x)"""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Gate(nn.Sequential):
    """x * f(x): squeeze and excitation, or one along an axis; f(x) may be smaller."""

    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x)


class Branches(nn.ModuleList):
    """Concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class Reduced(nn.Module):
    """Mean or maximum along axes, which stay."""

    def __init__(self, *axes: int, largest: bool = False) -> None:
        super().__init__()
        self.axes, self.largest = axes, largest

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(self.axes, keepdim=True) if self.largest else x.mean(self.axes, keepdim=True)


class Outer(nn.Module):
    """(n, c, h, 1) + (n, c, 1, w)"""

    def __init__(self, rows: nn.Module, columns: nn.Module) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.amax(3, keepdim=True)) + self.columns(x.mean(2, keepdim=True))


class Scaled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.randn(channels, 1, 1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.offset) / 2.0 - 0.5


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channels)
        self.read, self.write = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        q, k, v = self.read(tokens).reshape(n, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5).softmax(-1) @ v
        return x + self.write(mixed.transpose(1, 2).reshape(n, h * w, c)).transpose(1, 2).reshape(n, c, h, w)


class Tokens(nn.Sequential):
    """x + f(x) with channels last"""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def activation(draw: Draw) -> nn.Module:
    return draw.choice([nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Sigmoid, nn.LeakyReLU, nn.Identity])()


def squeeze(draw: Draw, channels: int) -> nn.Module:
    """A gate that is one number, a row or a column for each channel."""
    inner, kernel = max(1, channels // draw.choice([2, 4])), draw.choice([1, 1, 3])
    axes = draw.choice([(2, 3), (2, 3), (2,), (3,)])
    gate = draw.choice([nn.Sigmoid, nn.Hardsigmoid, nn.Tanh])()
    return Gate(
        Reduced(*axes), nn.Conv2d(channels, inner, 1), activation(draw),
        nn.Conv2d(inner, channels, kernel, padding="same"), gate,
    )  # fmt: skip


def convolution(draw: Draw, channels: int) -> Block:
    kind = draw.choice(["square", "pointwise", "wide", "depthwise", "groups"])
    if kind == "square":
        dilation = draw.choice([1, 1, 2])
        return nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation), channels
    if kind == "pointwise":
        out = draw.choice([channels, 2 * channels, channels + 3])
        return nn.Conv2d(channels, out, 1, bias=draw.random() < 0.5), out
    if kind == "wide":
        return nn.Conv2d(channels, channels, (1, 5), padding=(0, 2)), channels
    groups = channels if kind == "depthwise" else 2 - channels % 2
    return nn.Conv2d(channels, channels, draw.choice([3, 5]), padding="same", groups=groups), channels


def normalisation(draw: Draw, channels: int) -> nn.Module:
    if draw.random() < 0.5:
        return nn.GroupNorm(1, channels)
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def block(draw: Draw, channels: int) -> Block:
    """One of them, for any image of at least one pixel."""
    c = channels
    kind = draw.randrange(12)
    if kind < 3:
        module, out = convolution(draw, c)
        return nn.Sequential(module, activation(draw)), out
    if kind == 3:
        return squeeze(draw, c), c
    if kind == 4:
        inside = (nn.Conv2d(c, c, draw.choice([1, 3]), padding="same"), activation(draw), nn.Conv2d(c, c, 3, padding=1))
        return Residual(*inside), c
    if kind == 5:
        branch = nn.Sequential(nn.Conv2d(c, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))
        return Branches([nn.Conv2d(c, c, 1), branch]), c + 8
    if kind == 6:
        return (Attention(c, 2) if c % 2 == 0 else Scaled(c)), c
    if kind == 7:
        return Tokens(nn.Linear(c, 2 * c), draw.choice([nn.GELU, nn.ReLU])(), nn.Linear(2 * c, c)), c
    if kind == 8:
        return Outer(nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1)), c
    if kind == 9:
        return draw.choice([nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True), nn.Upsample(scale_factor=2)]), c
    if kind == 10:
        return (nn.PixelShuffle(2), c // 4) if c % 4 == 0 and c > 8 else (Scaled(c), c)
    return normalisation(draw, c), c


def net(draw: Draw) -> tuple[nn.Module, tuple[int, ...]]:
    """A net, and the shape of its input."""
    channels, size = draw.choice([4, 8, 12, 16, 24]), draw.choice([6, 8, 9, 12, 17])
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=draw.choice([1, 2]), padding=1)]
    for _ in range(draw.randint(3, 7)):
        part, channels = block(draw, channels)
        parts.append(part)
    if draw.random() < 0.5:
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 7)]
    return nn.Sequential(*parts).eval(), (draw.choice([1, 1, 2]), 3, size, size)


def exported(seed: int, path: Path) -> None:
    """The net of a seed as an ONNX file."""
    torch.manual_seed(seed)
    model, shape = net(random.Random(seed))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(shape),), str(path), dynamo=False)


def ways(seed: int) -> Iterator[tuple[str, Choices]]:
    """All that a kernel may be chosen by."""
    yield "by shape", BY_SHAPE
    draw = random.Random(seed)
    yield "at random", Choices(lambda choice: draw.choice(choice.options).name)
    for name in dict.fromkeys(option.name for options in IMPLEMENTATIONS.values() for option in options):

        def named(choice: Choice, name: str = name) -> str:
            return name if name in {option.name for option in choice.options} else choice.options[0].name

        yield name, Choices(named)


def told(problem: Exception) -> str:
    """What failed, in one line."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or ['no message'])[-1]}"


def wrong(path: Path, seed: int, steps: int, plan: Path) -> list[str]:
    """What is wrong with the net of a file; `plan` is written before what is rewritten is built."""
    target = as_target(None)
    mod = from_onnx(path)
    inputs = random_inputs(mod, seed)
    expected = onnxruntime_outputs(str(path), inputs)
    start = GraphState.from_module(mod, default_rules(vector_lanes(target)))
    state, _ = walked(start, steps, np.random.default_rng(seed))
    state.plan.save(plan)
    found = []
    for what, each in (("imported", start), (f"after {len(state.actions)} rewrites", state)):
        for name, choices in ways(seed):
            try:
                error = range_error(run_module(each.bound(), target, list(inputs.values()), choices), expected)
            except Exception as problem:  # noqa: BLE001 - whatever fails is the net's result; the others still run
                found.append(f"{what}, kernels {name}: {told(problem)}")
                continue
            if not error <= TOLERANCE:
                found.append(f"{what}, kernels {name}: outputs differ by {error:.1e} of their range")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="nets")
    parser.add_argument("--seed", type=int, default=0, help="of the first net; the others' follow")
    parser.add_argument("--steps", type=int, default=10, help="random rewrites")
    parser.add_argument("--keep", type=Path, help="folder for the ONNX file and the plan of each net that is wrong")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch, progress_bar("nets") as bar:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(range(options.seed, options.seed + options.count), 1):
            path, plan = folder / f"net{seed}.onnx", folder / f"net{seed}.plan.json"
            began = time.monotonic()
            try:
                exported(seed, path)
                problems = wrong(path, seed, options.steps, plan)
            except Exception as problem:  # noqa: BLE001 - whatever fails is the net's result; the other nets follow
                problems = [f"not exported, imported or rewritten: {told(problem)}"]
            failures += bool(problems)
            if not problems:
                path.unlink()
                plan.unlink()
            for problem in problems or ["right"]:
                print(f"net {seed}: {problem} ({time.monotonic() - began:.0f} s)", flush=True)
            bar(number, options.count, f"{failures} wrong")
    print(f"{options.count - failures} of {options.count} nets compute what ONNX Runtime computes")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
