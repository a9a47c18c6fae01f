"""Cleaned ONNX -> Relax, through TVM's importer."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from rlflow_tvm import ir
from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.bake import bake_constants
from rlflow_tvm.frontend.clean import Shapes, clean
from rlflow_tvm.frontend.control_flow import CONTROL_FLOW
from rlflow_tvm.frontend.converters import CONVERTERS
from rlflow_tvm.frontend.expand import MICROSOFT
from rlflow_tvm.frontend.graph import Graph, attributes
from rlflow_tvm.frontend.load import load_onnx, one_line
from rlflow_tvm.frontend.names import Names, parameter_names, with_names

_BLOCKED = "com.microsoft.nchwc"
_HARMLESS = frozenset({"num_outputs", "seed", "storage_order", "tvm_custom"})
"""Attributes that add nothing: Split's outputs are counted, and MaxPool's indices, whose layout this is, refused."""
_REFUSED = frozenset(
    {
        "Attention",  # TVM reads Microsoft's operator of that name, not the standard's
        "ConcatFromSequence",  # sequences
        "NonMaxSuppression",  # TVM pads its output, whose size depends on data
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SplitToSequence",
    }
)
"""What TVM's importer takes, and gives other results for than the standard says."""
_PACKED = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
_ONE_OUTPUT = frozenset({"LayerNormalization", "MaxPool", "RMSNormalization"})
"""Operators whose other outputs TVM's importer leaves out, or fills with zeros."""


def from_onnx(path_or_model: str | Path | onnx.ModelProto, shapes: Shapes | None = None) -> tvm.IRModule:
    """Import an ONNX model: one dataflow block in `main`, static shapes, weights bound as constants.

    `main` takes the model's inputs, in order and under their names (see `names.parameter_names` for those that are no
    identifiers); attribute `num_input` counts them. It returns a tensor for one output, a tuple for several.

    Args:
        path_or_model: the file, or a loaded model (left as it is).
        shapes: input name -> shape, needed for inputs with dynamic dimensions.

    Raises:
        FrontendError: the file cannot be read, is no valid ONNX model, has dynamic dimensions that `shapes` does not
            fix or a shape that depends on data, or holds an operator that TVM cannot import.
    """
    with _names_are_text(path_or_model):
        model, label = _loaded(path_or_model)
        return import_graph(clean(model, label, shapes))


@contextlib.contextmanager
def _names_are_text(path_or_model: str | Path | onnx.ModelProto) -> Iterator[None]:
    """FrontendError where they are not: they are decoded where they are first read, which may be anywhere inside."""
    try:
        yield
    except UnicodeDecodeError as error:
        called = "the model" if isinstance(path_or_model, onnx.ModelProto) else path_or_model
        raise FrontendError(
            f"{called}: a name in it is no text ({one_line(error)}): the file is damaged, export or download it again"
        ) from error


def input_names(path: str | Path) -> list[str]:
    """Of an ONNX file's graph; FrontendError as in `from_onnx`."""
    with _names_are_text(path):
        return _input_names(_loaded(path)[0])


def _input_names(model: onnx.ModelProto) -> list[str]:
    weights = {tensor.name for tensor in model.graph.initializer}  # before IR version 4 these are listed as inputs too
    return [info.name for info in model.graph.input if info.name not in weights]


def _loaded(path_or_model: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """As `load_onnx`; UnicodeDecodeError for a name that protobuf gives as bytes, as it is no text."""
    model, label = load_onnx(path_or_model)
    graph = model.graph
    names = [each.name for each in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        names += [*node.input, *node.output]
    for name in names:
        if isinstance(name, bytes):
            name.decode()
    return model, label


def split_shapes(model: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """FILE[@NAME=1,3,224,224]...: the file, and the shapes of inputs that it is to have; FrontendError where these are
    written otherwise. `zoo:NAME` and the names of files that there are stay as they are."""
    file, *texts = model.split("@")
    if not texts or model.startswith("zoo:") or os.path.exists(model):
        return model, {}
    try:
        return file, dict(map(parse_shape, texts))
    except ValueError as error:
        raise FrontendError(f"{model}: no such file, and FILE@{error}") from None


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """NAME=1,3,224,224; ValueError says what is expected instead of anything else."""
    name, equals, extents = text.rpartition("=")
    if not equals or not name or not all(extent.strip().isdecimal() for extent in extents.split(",") if extents):
        raise ValueError("NAME=EXTENT,EXTENT,... is expected, as input=1,3,224,224")
    return name, tuple(int(extent) for extent in extents.split(",") if extents)


def import_models(paths: Mapping[str, str | Path], shapes: Shapes) -> dict[str, tvm.IRModule]:
    """Import several models, each with those of `shapes` that are of its inputs, and the shapes in its own name
    (`split_shapes`).

    FrontendError as in `from_onnx`, and for a name in `shapes` that is no model's input.
    """
    loaded = {}
    for path in dict.fromkeys(paths.values()):
        with _names_are_text(path):
            loaded[path] = _loaded(path)
    inputs = {name: _input_names(loaded[path][0]) for name, path in paths.items()}
    unknown = next((name for name in shapes if not any(name in known for known in inputs.values())), None)
    if unknown is not None:
        listed = "; ".join(f"{name} has the inputs {', '.join(known) or 'none'}" for name, known in inputs.items())
        raise FrontendError(f"no input {unknown!r}: {listed}")
    wanted = {n: {i: shapes[i] for i in inputs[n] if i in shapes} | split_shapes(n)[1] for n in paths}
    found = {}
    for name, path in paths.items():
        with _names_are_text(path):
            found[name] = import_graph(clean(*loaded[path], wanted[name]))
    return found


def import_graph(graph: Graph) -> tvm.IRModule:
    """Import a cleaned graph (see `clean.clean`)."""
    _check_operators(graph)
    skeleton, aside = graph.skeleton()
    count = len(graph.model.graph.input)
    importer = _Importer(graph)
    try:
        # The importer prints the operator before it raises, and warns of each name: the error says both.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            mod = importer.from_onnx(skeleton.graph, graph.opset)
        func = mod["main"]
        weights = {p: tvm.runtime.tensor(np.ascontiguousarray(aside[p.name])) for p in func.params[count:]}
    except (ValueError, AssertionError) as error:  # outputs that are not tensors, a missing output of an operator
        raise FrontendError(f"{graph.label}: TVM cannot import it ({one_line(error)})") from error
    out = tvm.IRModule(dict(mod.functions_items()))
    out["main"] = func.bind_params(weights).with_attr("num_input", count)
    names = Names(tuple(i.name for i in graph.model.graph.input), graph.called)
    return with_names(_tidy(out, graph), names)


def _tidy(mod: tvm.IRModule, graph: Graph) -> tvm.IRModule:
    mod = relax.transform.DecomposeOpsForInference()(mod)
    mod["main"] = bake_constants(mod["main"])
    # With the weights taken out these passes never read them.
    detached = ir.detach(mod)
    passes = tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )
    tidied = passes(detached.mod)
    tidied["main"] = _with_block(tidied["main"])
    _check_body(tidied["main"], graph)
    _check_outputs(tidied["main"], graph)
    return detached.bind(tidied)


def _with_block(func: relax.Function) -> relax.Function:
    """`func` with its dataflow block, which the passes drop where outputs are mere inputs or constants."""
    if func.body.blocks:
        return func
    builder = relax.BlockBuilder()
    with builder.function("main", func.params, dict(func.attrs)):
        with builder.dataflow():
            output = builder.emit_output(func.body.body)
        builder.emit_func_output(output)
    return builder.get()["main"]


def _check_operators(graph: Graph) -> None:
    known = onnx_frontend._get_convert_map()
    uses = graph.uses()
    for node in graph.nodes:
        where = f"{graph.label}: node {node.name!r} uses the operator {node.domain + '.' if node.domain else ''}"
        if node.op_type in CONTROL_FLOW:
            raise FrontendError(
                f"{where}{node.op_type}, control flow that depends on data: export the model with that branch or "
                "loop unrolled"
            )
        if node.domain == _BLOCKED:
            raise FrontendError(
                f"{where}{node.op_type}, in blocks for the CPU that ONNX Runtime optimised it on: give the model as it "
                "was before, or optimised with graph_optimization_level=ORT_ENABLE_EXTENDED at most"
            )
        if not node.domain:
            supported = node.op_type in known.keys() | CONVERTERS and node.op_type not in _REFUSED
        else:
            supported = node.domain == MICROSOFT and node.op_type == "MatMulInteger16"
        if not supported:
            raise FrontendError(
                f"{where}{node.op_type}, which TVM cannot import: export the model without it, or written with "
                "standard operators"
            )
        _check_inputs(graph, node, where)
        types = {name: graph.constants[name].dtype.name for name in node.input if name in graph.constants}
        packed = next((name for name, dtype in types.items() if dtype in _PACKED), None)
        if packed is not None:
            raise FrontendError(
                f"{where}{node.op_type} with {packed!r} of {types[packed]}, of which TVM holds several in a byte and "
                "cannot be given any: export the model with weights of 8 bits"
            )
        if attributes(node).get("training_mode", 0):
            raise FrontendError(f"{where}{node.op_type} in training mode: export the model in inference mode")
        unread = next((o for o in node.output[1:] if uses[o]), None) if node.op_type in _ONE_OUTPUT else None
        if unread is not None:
            raise FrontendError(
                f"{where}{node.op_type}, of which TVM gives only the first output: export the model so that "
                f"{unread!r} is not read"
            )


def _check_inputs(graph: Graph, node: onnx.NodeProto, where: str) -> None:
    """An input may be left out only where the operator says so: TVM's importer does not look, and may crash."""
    if all(node.input) or not onnx.defs.has(node.op_type, graph.opset, node.domain):
        return
    formal = onnx.defs.get_schema(node.op_type, graph.opset, node.domain).inputs
    for i, name in enumerate(node.input):
        if not name and formal[min(i, len(formal) - 1)].option != onnx.defs.OpSchema.FormalParameterOption.Optional:
            raise FrontendError(f"{where}{node.op_type} without its input {i}: the model is damaged, export it again")


def _check_outputs(func: relax.Function, graph: Graph) -> None:
    """Hold shapes and types of the outputs against what the ONNX standard says they are, where it says so."""
    ret = func.ret_ty
    found = list(ret.fields) if isinstance(ret, relax.TupleType) else [ret]
    for name, ty in zip(graph.output_names, found, strict=True):
        tensor = graph.types.get(name)
        if tensor is None or not tensor.elem_type:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        shape = graph.shape(name)
        ours = ir.known_shape(ty)
        if ours is None or str(ty.dtype.dtype) != dtype or shape not in (None, ours):
            raise FrontendError(
                f"{graph.label}: TVM imports the output {name!r} as {'x'.join(map(str, ours or '?'))} of "
                f"{getattr(ty, 'dtype', ty)}, ONNX says {'x'.join(map(str, shape or '?'))} of {dtype}: "
                "an operator before it is read wrongly, export the model without it"
            )


def _check_body(func: relax.Function, graph: Graph) -> None:
    for binding in ir.single_block(func):
        if isinstance(binding.var.ty, relax.TensorType | relax.TupleType) and ir.is_static(binding.var.ty):
            continue
        culprit = next((n for n in graph.nodes if any(graph.shape(o) is None for o in n.output if o)), None)
        where = f"node {culprit.name!r} ({culprit.op_type})" if culprit is not None else f"value {binding.var.name!r}"
        raise FrontendError(
            f"{graph.label}: the shape of {where} is known only at run time: only static shapes are supported, "
            "export the model without operators whose output size depends on data"
        )


class _Attributes(dict):
    """A node's attributes, which remember the ones that were asked for."""

    def __init__(self, attrs: Mapping[str, object]) -> None:
        super().__init__(attrs)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: object = None) -> object:
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: object) -> object:
        self.read.add(name)
        return super().pop(name, *default)


class _Importer(onnx_frontend.ONNXGraphImporter):
    """TVM's importer with errors that name the node, and with the converters of `converters.py` before its own.

    TVM's converters leave attributes that they do not know unread; one that is not at its default is an error here. So
    is a value of another shape than ONNX says: what follows may hide it from the outputs.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__({}, "float32", sanitize=True)
        self._label = graph.label
        self._parameters = parameter_names(i.name for i in graph.model.graph.input)
        self._graph = graph
        self._read = graph.uses()
        self._ahead = iter(graph.nodes)  # TVM converts them in this order

    def _check_for_unsupported_ops(self, _graph: onnx.GraphProto) -> None:
        """Those of `converters.py` alone are none: `_check_operators` has looked."""

    def _sanitize_name(self, name: str) -> str:
        return self._parameters.get(name, name)  # weights, which are no parameters for long, keep their names

    def _convert_operator(self, op_name: str, inputs: list, attrs: dict, opset: int) -> relax.Expr:
        node = next(self._ahead)
        assert node.op_type == op_name, f"{node.op_type} is not converted in its turn, but {op_name}"
        name = node.name
        watched = _Attributes(attrs)
        try:
            found = CONVERTERS[op_name](self.bb, inputs, watched, opset) if op_name in CONVERTERS else None
            if found is None:
                found = super()._convert_operator(op_name, inputs, watched, opset)
            normalized = self.bb.normalize(found) if isinstance(found, relax.Expr) else found
        except Exception as error:
            # The boundary to TVM's importer: its 200 converters raise whatever fits them.
            raise FrontendError(
                f"{self._label}: TVM cannot import node {name!r} (operator {op_name}): {one_line(error)}"
            ) from error
        ignored = [a for a in attrs if a not in watched.read | _HARMLESS and not _is_default(op_name, a, attrs, opset)]
        if ignored:
            raise FrontendError(
                f"{self._label}: TVM ignores attribute {ignored[0]!r} of node {name!r} (operator {op_name}): "
                "export the model without it"
            )
        self._check_shapes(node, normalized)
        return normalized

    def _check_shapes(self, node: onnx.NodeProto, found: object) -> None:
        if not isinstance(found, relax.Expr):
            return
        fields = list(found.ty.fields) if isinstance(found.ty, relax.TupleType) else [found.ty]
        for output, ty in zip(node.output, fields, strict=False):
            ours, theirs = ir.known_shape(ty), self._graph.shape(output)
            if self._read[output] and ours is not None and theirs is not None and ours != theirs:
                raise FrontendError(
                    f"{self._label}: TVM imports {output!r} of node {node.name!r} (operator {node.op_type}) with the "
                    f"shape {ours}, ONNX says {theirs}: export the model without that operator"
                )


def _is_default(op_name: str, attribute: str, attrs: Mapping[str, object], opset: int) -> bool:
    if not onnx.defs.has(op_name, opset):
        return False
    known = onnx.defs.get_schema(op_name, opset).attributes.get(attribute)
    if known is None or known.default_value.type == onnx.AttributeProto.UNDEFINED:
        return False
    return onnx.helper.get_attribute_value(known.default_value) == attrs[attribute]
