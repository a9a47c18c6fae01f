"""The form in which a model is cleaned: nodes in a light ModelProto, tensors beside it as numpy arrays.

ONNX's own tools (checker, shape inference, version converter) serialise the whole model at each call. Keeping the
weights aside makes them cheap for any size, and lifts their limit of 2 GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.load import one_line

_SHORT = 1024  # elements; constants up to here (shapes, axes, bounds) stay readable for ONNX's tools and the importer
_MOST_BYTES = 2**20  # of a constant of integers, which the importer may have to know (indices): beyond they are weights


@dataclass
class Graph:
    """A model under cleaning. `model` has no initialisers; `constants` holds every constant tensor by name."""

    model: onnx.ModelProto
    constants: dict[str, np.ndarray]
    label: str
    types: dict[str, onnx.TypeProto.Tensor] = field(default_factory=dict)
    """Inferred tensor type of each value (filled by `infer_types`)."""
    called: tuple[str, ...] = ()
    """What the file calls the outputs: cleaning may take another value for one."""
    sequences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The tensors that a sequence holds, where these are known (filled by `taken_apart`)."""
    _names: tuple[onnx.ModelProto | None, set[str], Counter[str]] = field(
        default_factory=lambda: (None, set(), Counter()), init=False, repr=False
    )
    """Of a model's values, once one of them was asked for, and how many of each stem have been tried."""

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes in topological order."""
        return list(self.model.graph.node)

    @nodes.setter
    def nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        kept = list(nodes)
        fresh = onnx.GraphProto()
        fresh.node.extend(kept)
        del self.model.graph.node[:]
        self.model.graph.node.extend(fresh.node)

    @property
    def opset(self) -> int:
        """Version of the standard operator set."""
        return next((o.version for o in self.model.opset_import if not o.domain), 1)

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs, in order."""
        return [o.name for o in self.model.graph.output]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Static shape of a value, None when a dimension (or the rank) is not known."""
        if name in self.constants:
            return self.constants[name].shape
        tensor = self.types.get(name)
        return None if tensor is None else static_shape(tensor)

    def rank(self, name: str) -> int | None:
        """Number of dimensions of a value, None when it is not known."""
        if name in self.constants:
            return self.constants[name].ndim
        tensor = self.types.get(name)
        return len(tensor.shape.dim) if tensor is not None and tensor.HasField("shape") else None

    def type_of(self, name: str) -> onnx.TypeProto:
        """The type of a constant, or of a value that it was inferred of."""
        array = self.constants.get(name)
        if array is not None:
            return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        return onnx.TypeProto(tensor_type=self.types[name])

    def uses(self) -> Counter[str]:
        """How often each value is read: by nodes, by nodes of their subgraphs, and as a graph output."""
        count: Counter[str] = Counter(self.output_names)
        for node in self.nodes:
            count.update(inputs_of(node))
        return count

    def fresh_name(self, stem: str) -> str:
        """A name that no value has yet, nor any that was asked for here before."""
        if self._names[0] is not self.model:  # collected once for a model: it may have thousands of nodes
            taken = set(self.constants) | {i.name for i in self.model.graph.input}
            taken.update(_made_in(self.model.graph))
            self._names = self.model, taken, Counter()
        _, taken, tried = self._names
        name = stem
        while name in taken:  # not from the first on: a loop that is unrolled asks for each name a thousand times
            tried[stem] += 1
            name = f"{stem}_{tried[stem]}"
        taken.add(name)
        return name

    def is_constant(self, name: str) -> bool:
        """Whether the value is known now. The empty name (an input left out) counts as known."""
        return not name or name in self.constants

    def skeleton(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """A light copy of the model for ONNX's tools: short constants, and integers unless they are many, as
        initialisers, all others as additional graph inputs behind the real ones, whose arrays are returned."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        aside: dict[str, np.ndarray] = {}
        for name, array in self.constants.items():
            if is_short(array) or (array.dtype.kind not in "fV" and array.nbytes <= _MOST_BYTES):
                model.graph.initializer.append(numpy_helper.from_array(array, name))
            else:
                aside[name] = array
                elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
                model.graph.input.append(helper.make_tensor_value_info(name, elem_type, array.shape))
        return model, aside

    def replace(self, model: onnx.ModelProto, aside: Mapping[str, np.ndarray]) -> None:
        """Go on with what one of ONNX's tools made of the skeleton."""
        fresh = split(model, self.label)
        kept = [i for i in fresh.model.graph.input if i.name not in aside]
        del fresh.model.graph.input[:]
        fresh.model.graph.input.extend(kept)
        self.model = fresh.model
        self.constants = {**fresh.constants, **aside}


def static_shape(tensor: onnx.TypeProto.Tensor) -> tuple[int, ...] | None:
    """None when a dimension (or the rank) is not known."""
    if not tensor.HasField("shape"):
        return None
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    return None if any(d < 0 for d in dims) else tuple(dims)


def is_short(array: np.ndarray | None) -> bool:
    """Whether it is an array that ONNX's tools are to read."""
    return array is not None and array.size <= _SHORT


def split(model: onnx.ModelProto, label: str) -> Graph:
    """Take the weights out of `model` (which is left as it was). Initialisers that are listed as graph inputs
    (files older than IR version 4) are inputs no longer; unnamed nodes get a name, for messages; the domain of standard
    operators is the empty one: ONNX's reference knows it by no other name."""
    light = onnx.ModelProto()
    light.ir_version = max(model.ir_version, 8)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = model.graph
    constants = {t.name: array_of(t, label) for t in graph.initializer}
    light.graph.name = graph.name or "main"
    light.graph.input.extend(i for i in graph.input if i.name not in constants)
    light.graph.output.extend(graph.output)
    light.graph.sparse_initializer.extend(graph.sparse_initializer)
    light.graph.node.extend(graph.node)
    name_nodes(light.graph)
    for opset in light.opset_import:
        opset.domain = _short(opset.domain)
    _shorten_domains(light.graph)
    return Graph(light, constants, label, called=tuple(output.name for output in graph.output))


def array_of(tensor: onnx.TensorProto, label: str) -> np.ndarray:
    """The values of a weight; FrontendError where they cannot be read."""
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        raise FrontendError(
            f"{label}: the weight {tensor.name!r} cannot be read ({one_line(error)}): the file is damaged, "
            "export or download it again"
        ) from error


def _shorten_domains(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.domain = _short(node.domain)
        for sub in subgraphs(node):
            _shorten_domains(sub)


def _short(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every unnamed node a name made of its operator and its place."""
    for i, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{i}"


def inputs_of(node: onnx.NodeProto) -> list[str]:
    """The names a node reads, those read inside its subgraphs included."""
    names = [i for i in node.input if i]
    for sub in subgraphs(node):
        for inner in sub.node:
            names.extend(inputs_of(inner))
        names.extend(o.name for o in sub.output)
    return names


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Have a node read what `names` tells in the place of what it reads, inside its subgraphs too."""
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for sub in subgraphs(node):
        for inner in sub.node:
            rename_inputs(inner, names)
        for output in sub.output:
            output.name = names.get(output.name, output.name)


def _made_in(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of all that nodes make, inside of their subgraphs too."""
    for node in graph.node:
        yield from node.output
        for sub in subgraphs(node):
            yield from _made_in(sub)


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The branches or bodies of a control-flow node."""
    return [sub for a in node.attribute for sub in ([a.g] if a.HasField("g") else a.graphs)]


def spell_out_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Give the node the attributes that are left out: ONNX (1.23) forgets them where it looks into an operator that is
    defined by others."""
    given = {attribute.name for attribute in node.attribute}
    for name, formal in onnx.defs.get_schema(node.op_type, opset).attributes.items():
        if name not in given and formal.default_value.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(formal.default_value)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}
