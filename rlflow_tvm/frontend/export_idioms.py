"""Operators that Relax takes apart, written as one again: for each of them a runtime has a kernel, or fuses it.

Only in float32: in other types runtimes have fewer kernels for the whole than for its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from rlflow_tvm.frontend.affine import fold_affine
from rlflow_tvm.frontend.graph import Graph, attributes

_SYMMETRIC = frozenset({"Add", "Max", "Min", "Mul"})
_ROUNDING = 1e-6  # of numbers that are products of constants in float32


def put_together(graph: Graph) -> None:
    """Put together what stands in several nodes (needs `graph.types`): additions and multiplications by channel go into
    the convolution before them, or become one batch normalisation; `Clip`, `HardSigmoid`, `HardSwish`, `LRN` and
    `GlobalAveragePool` are written for what they compute."""
    for idiom in (_clip, _hard_swish, _hard_sigmoid, _local_response, _image_mean):
        view = _View.of(graph)
        nodes: list[onnx.NodeProto] = []
        for node in graph.nodes:
            whole = idiom(view, node) if view.is_single(node.output[0]) else None
            nodes += [node] if whole is None else whole  # what only the parts read is pruned
        graph.nodes = nodes
    fold_affine(graph, as_norm=True)


@dataclass(frozen=True)
class _View:
    """A graph, and who makes its values."""

    graph: Graph
    made_by: dict[str, onnx.NodeProto]

    @classmethod
    def of(cls, graph: Graph) -> _View:
        return cls(graph, {name: node for node in graph.nodes for name in node.output})

    def is_single(self, name: str) -> bool:
        ty = self.graph.types.get(name)
        return ty is not None and ty.elem_type == TensorProto.FLOAT

    def maker(self, name: str, op: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it is of this operator."""
        node = self.made_by.get(name)
        return node if node is not None and node.op_type == op else None

    def number(self, name: str) -> float | None:
        """The value of a scalar constant."""
        array = self.graph.constants.get(name)
        return float(array) if array is not None and array.ndim == 0 else None

    def split(self, node: onnx.NodeProto) -> tuple[str, float] | None:
        """The other operand, and the number, of a node that computes with one; the number is the second where the order
        counts."""
        first, second = node.input
        if (number := self.number(second)) is not None:
            return first, number
        if node.op_type in _SYMMETRIC and (number := self.number(first)) is not None:
            return second, number
        return None

    def scaled(self, name: str) -> tuple[float, str]:
        """A value as a number times another value."""
        factor = 1.0
        while (node := self.made_by.get(name)) is not None and node.op_type in ("Mul", "Div"):
            parts = self.split(node)
            if parts is None or not parts[1]:
                break
            name = parts[0]
            factor = factor * parts[1] if node.op_type == "Mul" else factor / parts[1]
        return factor, name

    def hard_sigmoid(self, name: str, factor: float = 1.0) -> tuple[str, float, float] | None:
        """x, alpha and beta, where `factor` times the value is max(0, min(1, alpha x + beta))."""
        scale, inner = self.scaled(name)
        factor *= scale
        clip = self.maker(inner, "Clip")
        if clip is None or len(clip.input) < 3 or factor <= 0:
            return None
        low, high = (self.number(bound) for bound in clip.input[1:])
        if low != 0 or high is None or not isclose(factor * high, 1, rel_tol=_ROUNDING):
            return None
        add = self.maker(clip.input[0], "Add")
        parts = None if add is None else self.split(add)
        if parts is None:
            return None
        slope, x = self.scaled(parts[0])
        return x, factor * slope, factor * parts[1]


_Whole = list[onnx.NodeProto] | None
"""What makes the value of the last node of some parts; None where they are not that."""


def _whole(node: onnx.NodeProto, op: str, *inputs: str, **attrs: Any) -> list[onnx.NodeProto]:
    return [helper.make_node(op, inputs, list(node.output), name=f"{node.name}.{op}", **attrs)]


def _clip(view: _View, node: onnx.NodeProto) -> _Whole:
    """A maximum with one number and a minimum with another; what comes last rules."""
    outer = _bound(view, node)
    inner = None if outer is None else _bound(view, view.made_by.get(outer.value))
    if outer is None or inner is None or {outer.op, inner.op} != {"Max", "Min"}:
        return None
    low, high = (outer, inner) if outer.op == "Max" else (inner, outer)
    if low.number > high.number:
        return None
    bounds = [low.name, high.name]
    if not low.name:
        bounds[0] = view.graph.fresh_name(f"{node.output[0]}.low")
        view.graph.constants[bounds[0]] = np.zeros((), np.float32)
    return _whole(node, "Clip", inner.value, *bounds)


@dataclass(frozen=True)
class _Bound:
    """A bound of a value: `op` is Max or Min, `name` the constant's, empty for the zero of a Relu."""

    op: str
    value: str
    number: float
    name: str


def _bound(view: _View, node: onnx.NodeProto | None) -> _Bound | None:
    if node is not None and node.op_type == "Relu":
        return _Bound("Max", node.input[0], 0.0, "")
    if node is None or node.op_type not in ("Max", "Min") or len(node.input) != 2:
        return None
    parts = view.split(node)
    if parts is None:
        return None
    (name,) = (each for each in node.input if each != parts[0])
    return _Bound(node.op_type, *parts, name)


def _hard_swish(view: _View, node: onnx.NodeProto) -> _Whole:
    """x max(0, min(1, x / 6 + 1 / 2)) (Howard et al. 2019), wherever in it the division by 6 stands."""
    factor, product = view.scaled(node.output[0])
    mul = view.maker(product, "Mul")
    if mul is None:
        return None
    for side, gate in (tuple(mul.input), tuple(mul.input)[::-1]):
        for scale, x in ((1.0, side), view.scaled(side)):
            found = view.hard_sigmoid(gate, factor * scale)
            if found is not None and found[0] == x and _are_close(found[1:], (1 / 6, 0.5)):
                return _whole(node, "HardSwish", x)
    return None


def _hard_sigmoid(view: _View, node: onnx.NodeProto) -> _Whole:
    found = view.hard_sigmoid(node.output[0])
    return None if found is None else _whole(node, "HardSigmoid", found[0], alpha=found[1], beta=found[2])


def _local_response(view: _View, node: onnx.NodeProto) -> _Whole:
    """x / (bias + alpha m)^beta, m the mean square of as many channels around it as `size` (Krizhevsky et al. 2012)."""
    if node.op_type != "Div":
        return None
    x, root = node.input
    numbers = []
    for op in ("Pow", "Add", "Mul"):
        step = view.maker(root, op)
        parts = None if step is None else view.split(step)
        if parts is None:
            return None
        root = parts[0]
        numbers.append(parts[1])
    beta, bias, alpha = numbers
    size = _channels_averaged(view, root, x)
    return None if size is None else _whole(node, "LRN", x, size=size, alpha=alpha, beta=beta, bias=bias)


def _channels_averaged(view: _View, name: str, x: str) -> int | None:
    """Of how many channels a value is the mean square of `x` around each."""
    squeeze = view.maker(name, "Squeeze")
    pool = None if squeeze is None else view.maker(squeeze.input[0], "AveragePool")
    unsqueeze = None if pool is None else view.maker(pool.input[0], "Unsqueeze")
    square = None if unsqueeze is None else view.maker(unsqueeze.input[0], "Mul")
    if squeeze is None or pool is None or unsqueeze is None or square is None or list(square.input) != [x, x]:
        return None
    if any(len(n.input) < 2 or view.graph.constants[n.input[1]].tolist() != [1] for n in (squeeze, unsqueeze)):
        return None
    given = attributes(pool)
    size, *others = given["kernel_shape"]
    pads = [size // 2, 0, 0] * 2
    if others != [1, 1] or size % 2 == 0 or given.get("pads", [0] * 6) != pads:  # runtimes norm batches of images only
        return None
    same = all(n == 1 for name in ("strides", "dilations") for n in given.get(name, [1]))
    return size if same and (given.get("count_include_pad", 0) or size == 1) else None


def _image_mean(view: _View, node: onnx.NodeProto) -> _Whole:
    """The mean of a whole image, by the pool that runtimes have in the layout that they convolve in."""
    if node.op_type != "ReduceMean" or len(node.input) < 2 or not node.input[1]:
        return None
    graph, image = view.graph, node.input[0]
    shape = graph.shape(image)
    if shape is None or len(shape) < 4:
        return None
    axes = graph.constants[node.input[1]] % len(shape)
    if sorted(axes.tolist()) != list(range(2, len(shape))):
        return None
    if attributes(node).get("keepdims", 1):
        return _whole(node, "GlobalAveragePool", image)
    pooled, extents = (graph.fresh_name(f"{node.output[0]}.{part}") for part in ("pooled", "shape"))
    graph.constants[extents] = np.array(shape[:2], np.int64)
    pool = helper.make_node("GlobalAveragePool", [image], [pooled], name=f"{node.name}.GlobalAveragePool")
    return [pool, *_whole(node, "Reshape", pooled, extents)]


def _are_close(found: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    return all(isclose(a, b, rel_tol=_ROUNDING) for a, b in zip(found, wanted, strict=True))
