"""Shared by the tests of convolutions: one convolution, its arguments, its graph, and what numpy makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from numpy.lib.stride_tricks import sliding_window_view
from tvm import relax


@dataclass(frozen=True)
class Conv:
    """One convolution; a block of 0 is the plain layout."""

    channels: tuple[int, int]
    size: tuple[int, int]
    kernel: tuple[int, int] = (3, 3)
    batch: int = 1
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    blocks: tuple[int, int, int] = (0, 0, 0)  # of data, kernel and output
    # what follows, in order; an active-residual passes a ReLU before it is added, a stretched one is larger in each
    # axis of extent 1
    epilogue: str = "bias relu"


def to_blocks(image: np.ndarray, block: int) -> np.ndarray:
    """NCHW to NCHW{block}c."""
    if not block:
        return image
    n, c, h, w = image.shape
    return np.ascontiguousarray(image.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2))


def kernel_to_blocks(kernel: np.ndarray, block: int) -> np.ndarray:
    """OIHW to OIHW{block}o."""
    if not block:
        return kernel
    o, i, h, w = kernel.shape
    return np.ascontiguousarray(kernel.reshape(o // block, block, i, h, w).transpose(0, 2, 3, 4, 1))


def reference(conv: Conv, data: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The convolution in numpy, in float64."""
    top, left, bottom, right = conv.padding
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    span = [(k - 1) * d + 1 for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    windows = sliding_window_view(padded, span, axis=(2, 3))
    windows = windows[:, :, :: conv.strides[0], :: conv.strides[1], :: conv.dilation[0], :: conv.dilation[1]]
    grouped = windows.reshape(conv.batch, conv.groups, -1, *windows.shape[2:])
    weights = kernel.astype("float64").reshape(conv.groups, -1, *kernel.shape[1:])
    result = np.einsum("ngchwyx,gocyx->ngohw", grouped, weights)
    return result.reshape(conv.batch, -1, *result.shape[3:])


def arrays(conv: Conv) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arguments of the graph, in its layouts, and what it must give."""
    rng = np.random.default_rng(7)
    data = rng.standard_normal((conv.batch, conv.channels[0], *conv.size), dtype="float32")
    kernel = rng.standard_normal((conv.channels[1], conv.channels[0] // conv.groups, *conv.kernel), dtype="float32")
    result = reference(conv, data, kernel)
    extra = {}
    for step in conv.epilogue.split():
        if step == "relu":
            result = np.maximum(result, 0)
        elif step == "silu":
            result = result / (1 + np.exp(-result))
        else:
            name = step.removeprefix("active-")
            extra[name] = rng.standard_normal(_extents(name, result.shape), dtype="float32")
            result = result + (np.maximum(extra[name], 0) if step.startswith("active-") else extra[name])
    data_block, kernel_block, out_block = conv.blocks
    arguments = {"data": to_blocks(data, data_block)}
    arguments |= {name: to_blocks(value, out_block) for name, value in extra.items()}
    arguments["kernel"] = kernel_to_blocks(kernel, kernel_block)
    return arguments, to_blocks(result, out_block)


def _extents(operand: str, shape: tuple[int, ...]) -> list[int]:
    """Of an operand of the epilogue, added to what has this shape."""
    if operand == "bias":
        return [1, shape[1], 1, 1]
    return [6 if extent == 1 and operand == "stretched-residual" else extent for extent in shape]


def graph(conv: Conv, arguments: dict[str, np.ndarray]) -> tvm.IRModule:
    """The Relax module; the kernel is a weight, all else an input."""
    variables = {k: relax.Var(k, relax.TensorType(v.shape, "float32")) for k, v in arguments.items()}
    data_block, kernel_block, out_block = conv.blocks
    builder = relax.BlockBuilder()
    operands: dict[str, relax.Expr] = dict(variables)
    with builder.function("main", list(variables.values()), attrs={"num_input": len(variables) - 1}):
        with builder.dataflow():
            if "active" in conv.epilogue:
                operands["active-residual"] = builder.emit(relax.op.nn.relu(variables["residual"]))
            value = builder.emit(
                relax.op.nn.conv2d(
                    variables["data"],
                    variables["kernel"],
                    strides=conv.strides,
                    padding=conv.padding,
                    dilation=conv.dilation,
                    groups=conv.groups,
                    data_layout=f"NCHW{data_block}c" if data_block else "NCHW",
                    kernel_layout=f"OIHW{kernel_block}o" if kernel_block else "OIHW",
                    out_layout=f"NCHW{out_block}c" if out_block else "NCHW",
                )
            )
            for step in conv.epilogue.split():
                if step in operands:
                    value = builder.emit(relax.op.add(value, operands[step]))
                else:
                    value = builder.emit({"relu": relax.op.nn.relu, "silu": relax.op.nn.silu}[step](value))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()
