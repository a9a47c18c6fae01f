"""An ONNX graph being written: nodes, constants, names. And what of a Relax expression its writer asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.inputs import numpy_dtype

_COMPARED = 64  # elements; constants up to here are shared where they are equal, others where they are one object

Turn = tuple[str, str]
"""From a layout to a layout (see `layouts`)."""


class Writer:
    """Collects nodes and constants; whatever adds a node returns the name of its output.

    `opset`: the version of the standard operator set. `taken`: names that no value may get. `at`: what errors and nodes
    are called by, set by the caller as it goes on.
    """

    def __init__(self, opset: int, taken: Iterable[str]) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.at = ""
        self._taken = set(taken)
        self._by_value: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._by_object: dict[tvm.ir.GenericConst, str] = {}
        self._turned: dict[tuple[str, Turn], str] = {}
        self._unblocked: dict[str, tuple[str, Turn]] = {}

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node of one output; an input left out is the empty name, an attribute that is None is left out."""
        return self.node_of(op, inputs, 1, **attributes)[0]

    def node_of(self, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> tuple[str, ...]:
        """A node of several outputs."""
        if not all(isinstance(name, str) for name in inputs):
            raise self.refusal("it takes a bare number where only a tensor can be exported: write that as a constant")
        stem = f"{self.at}.{op}"
        names = tuple(self.fresh(stem if outputs == 1 else f"{stem}.{i}") for i in range(outputs))
        given = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op, list(inputs), list(names), name=names[0], **given))
        return names

    def fresh(self, stem: str) -> str:
        """A name that no value has, taken from now on."""
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def constant(self, array: np.ndarray) -> str:
        """An initialiser; equal small ones are one."""
        key = (str(array.dtype), array.shape, array.tobytes()) if array.size <= _COMPARED else None
        if key is not None and key in self._by_value:
            return self._by_value[key]
        name = self.fresh(f"constant{len(self.constants)}")
        self.constants[name] = array
        if key is not None:
            self._by_value[key] = name
        return name

    def weight(self, const: tvm.ir.GenericConst) -> str:
        """The initialiser of a Relax constant: one, however often it is read."""
        if const not in self._by_object:
            self._by_object[const] = self.constant(const.value.numpy())
        return self._by_object[const]

    def number(self, value: float, dtype: str) -> str:
        """A scalar."""
        return self.constant(np.array(value, numpy_dtype(dtype)))

    def ints(self, values: Iterable[int]) -> str:
        """A vector of int64: a shape, axes."""
        return self.constant(np.array([int(value) for value in values], np.int64))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        # with allowzero an extent of 0 is that, and not the input's
        return self.node("Reshape", x, self.ints(shape), allowzero=1 if 0 in shape else None)

    def cast(self, x: str, dtype: str) -> str:
        return self.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype)))

    def turned(self, x: str, way: Turn) -> str | None:
        """What `x` is in another layout, where it was brought there or came from there."""
        return self._turned.get((x, way))

    def remember(self, x: str, way: Turn, result: str, back: Turn) -> None:
        """That `x` is `result` in another layout, and `back` the way from there."""
        for begin, there, end in ((x, way, result), (result, back, x)):
            self._turned[begin, there] = end
            if not there[1].isupper():
                self._unblocked[end] = begin, there

    def unblocked(self, x: str) -> tuple[str, Turn] | None:
        """Of a value in a blocked layout: the same in the plain one, and the way from there, where they are known."""
        return self._unblocked.get(x)

    def refusal(self, why: str) -> FrontendError:
        """To be raised for what ONNX cannot say."""
        return FrontendError(f"{self.at} cannot be exported to ONNX: {why}")


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """The static shape of a tensor."""
    return tuple(int(extent) for extent in expr.ty.shape.values)


def dtype_of(expr: relax.Expr) -> str:
    """The element type of a tensor, as "float32"."""
    return str(expr.ty.dtype)


def axes_of(given: Any, rank: int) -> list[int]:
    """An attribute of axes (None for all, a number, a list) as a list counted from the front."""
    if given is None:
        return list(range(rank))
    return [int(axis) % rank for axis in (given if hasattr(given, "__iter__") else [given])]
