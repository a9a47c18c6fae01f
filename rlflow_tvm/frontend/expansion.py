"""One node's replacement by standard operators, in the making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.graph import Graph, attributes


class Expansion:
    """Collects the nodes that stand in the place of `node`, and sees to it that all of it is taken along: what is not
    read of its inputs and attributes, or not given of its outputs, is an error at the end."""

    def __init__(self, graph: Graph, node: onnx.NodeProto) -> None:
        self.graph = graph
        self.node = node
        self.nodes: list[onnx.NodeProto] = []
        self._attributes = attributes(node)
        self._unread: set[str | int] = {*self._attributes, *(i for i, name in enumerate(node.input) if name)}
        self._given: set[int] = set()

    # What the node is given.

    def input(self, place: int) -> str:
        """Name of an input, empty where it is left out."""
        self._unread.discard(place)
        return self.node.input[place] if place < len(self.node.input) else ""

    def required(self, place: int) -> str:
        """Name of an input; FrontendError where it is left out."""
        name = self.input(place)
        if not name:
            self.refuse(f"without its input {place}", "the model is damaged, export it again")
        return name

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, text as str."""
        self._unread.discard(name)
        value = self._attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def needed(self, name: str) -> Any:
        """Value of an attribute; FrontendError where it is left out."""
        if name not in self._attributes:
            self.refuse(f"without the attribute {name!r}", "the model is damaged, export it again")
        return self.attribute(name)

    def passed(self, *names: str) -> dict[str, Any]:
        """Those of these attributes that there are."""
        return {name: self.attribute(name) for name in names if name in self._attributes}

    def wants(self, place: int) -> bool:
        """Whether an output is named: whether it is read is not known before all is expanded."""
        return place < len(self.node.output) and bool(self.node.output[place])

    def shape(self, name: str) -> tuple[int, ...]:
        """Static shape of an input; `expanded` has seen that it is known."""
        shape = self.graph.shape(name)
        assert shape is not None, name
        return shape

    def dtype(self, name: str) -> np.dtype:
        """Type of an input's elements."""
        array = self.graph.constants.get(name)
        return helper.tensor_dtype_to_np_dtype(self.graph.types[name].elem_type) if array is None else array.dtype

    def constant(self, name: str) -> np.ndarray | None:
        """Value of an input that is known now."""
        return self.graph.constants.get(name)

    # What stands in its place.

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        """Append a node of a standard operator; the name of its output, or of its outputs where there are several."""
        stem = f"{self.node.name}.{operator}"
        names = [self.graph.fresh_name(stem) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=names[0], **attrs))
        return names[0] if outputs == 1 else names

    def tensor(self, values: Any, dtype: Any) -> str:
        """Name of a new constant."""
        name = self.graph.fresh_name(f"{self.node.name}.constant")
        self.graph.constants[name] = np.asarray(values, dtype)
        return name

    def cast(self, x: str, dtype: Any) -> str:
        """`x` in another type."""
        return self.add("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """The elements of `x` in another shape, of which one extent may be -1."""
        return self.add("Reshape", x, self.tensor(shape, np.int64))

    def slice(self, x: str, axis: int, begin: int, end: int) -> str:
        """`x` from `begin` to before `end` along one axis."""
        bounds = (self.tensor([value], np.int64) for value in (begin, end, axis))
        return self.add("Slice", x, *bounds)

    def split(self, x: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """`x` in parts of these sizes along one axis."""
        if self.graph.opset < 13:
            found = self.add("Split", x, outputs=len(sizes), axis=axis, split=list(sizes))
        else:
            found = self.add("Split", x, self.tensor(sizes, np.int64), outputs=len(sizes), axis=axis)
        return [found] if len(sizes) == 1 else found

    def squeeze(self, x: str, axis: int) -> str:
        """`x` without an axis of 1."""
        return self._of_axis("Squeeze", x, axis)

    def unsqueeze(self, x: str, axis: int) -> str:
        """`x` with an axis of 1 more."""
        return self._of_axis("Unsqueeze", x, axis)

    def _of_axis(self, operator: str, x: str, axis: int) -> str:
        if self.graph.opset < 13:
            return self.add(operator, x, axes=[axis])
        return self.add(operator, x, self.tensor([axis], np.int64))

    def mean(self, x: str, axes: Sequence[int]) -> str:
        """The mean over some axes, which stay as 1."""
        if self.graph.opset < 18:
            return self.add("ReduceMean", x, axes=list(axes), keepdims=1)
        return self.add("ReduceMean", x, self.tensor(axes, np.int64), keepdims=1)

    def sum(self, x: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """The sum over some axes, which stay as 1 or go."""
        if self.graph.opset < 13:
            return self.add("ReduceSum", x, axes=list(axes), keepdims=int(keepdims))
        return self.add("ReduceSum", x, self.tensor(axes, np.int64), keepdims=int(keepdims))

    # How it ends.

    def give(self, place: int, name: str) -> None:
        """Make `name` the node's output at `place`."""
        output = self.node.output[place]
        self._given.add(place)
        self.nodes.append(helper.make_node("Identity", [name], [output], name=f"{self.node.name}.{place}"))

    def refuse(self, what: str, remedy: str = "") -> NoReturn:
        """FrontendError naming node and operator, `what` of it is not supported, and the remedy."""
        called = f"{self.node.domain}.{self.node.op_type}".lstrip(".")
        remedy = remedy or "give the model as it was before ONNX Runtime optimised it, or export it without that"
        raise FrontendError(f"{self.graph.label}: node {self.node.name!r} uses the operator {called} {what}: {remedy}")

    def finish(self) -> list[onnx.NodeProto]:
        """The nodes; FrontendError where something of the node was not taken along."""
        for left in sorted(self._unread, key=str):
            self.refuse(f"with its input {left}" if isinstance(left, int) else f"with the attribute {left!r}")
        for place, name in enumerate(self.node.output):
            if name and place not in self._given:
                self.refuse(f"with its output {place}, {name!r}")
        return self.nodes
