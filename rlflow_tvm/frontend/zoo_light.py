"""The nine `light_*.onnx` networks in the onnx wheel: real architectures whose weights are one number repeated.

With equal weights all channels are equal, and no numeric comparison of two graphs could fail; so random ones of the
same shapes are put in their place.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_VIEWS = ("Unsqueeze", "Reshape")


def light_files() -> dict[str, Path]:
    """Name -> file in the onnx wheel, for example `light_squeezenet`."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return {file.stem: file for file in sorted(folder.glob("light_*.onnx"))}


def with_random_weights(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """`model` with every `ConstantOfShape` of a constant shape replaced by an initialiser of random numbers.

    Kernels and matrices are normal with a spread of 1/sqrt(fan in); scales and variances lie in [0.4, 0.9];
    biases, shifts and means are normal with spread 0.1. (Larger scales saturate the residual networks' softmax.)
    """
    rng = np.random.default_rng(seed)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    readers: dict[str, tuple[onnx.NodeProto, int]] = {}
    for node in model.graph.node:
        readers.update({name: (node, i) for i, name in enumerate(node.input)})
    out = onnx.ModelProto()
    out.CopyFrom(model)
    del out.graph.node[:]
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            out.graph.node.append(node)
            continue
        name = node.output[0]
        array = _draw(rng, tuple(shapes[node.input[0]].tolist()), _positive(name, readers))
        out.graph.initializer.append(numpy_helper.from_array(array, name))
    out.ir_version = max(out.ir_version, 4)  # from here on an initialiser need not be a graph input
    return out


def _positive(name: str, readers: dict[str, tuple[onnx.NodeProto, int]]) -> bool:
    """Whether the tensor is a scale or a variance, by the node that reads it."""
    while name in readers:
        node, place = readers[name]
        if node.op_type in _VIEWS:
            name = node.output[0]
            continue
        return node.op_type == "Mul" or (node.op_type == "BatchNormalization" and place in (1, 4))
    return False


def _draw(rng: np.random.Generator, shape: tuple[int, ...], positive: bool) -> np.ndarray:
    if len(shape) > 1:
        spread = float(np.prod(shape[1:])) ** -0.5
        return rng.standard_normal(shape, np.float32) * np.float32(spread)
    if positive:
        return rng.uniform(0.4, 0.9, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.1)
