"""ONNX in, cleaned ONNX out: checked, static, and free of what is known before the model runs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from google.protobuf.message import EncodeError
from onnx import inliner

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.affine import fold_affine
from rlflow_tvm.frontend.expand import claim_operators
from rlflow_tvm.frontend.fold import fold_constants, infer_types
from rlflow_tvm.frontend.functions import inline_operators
from rlflow_tvm.frontend.graph import Graph, attributes, inputs_of, rename_inputs, spell_out_defaults, split, subgraphs
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.frontend.opset import OLDEST_OPSET, convert, spell_out_rounding
from rlflow_tvm.frontend.padding import resolve_padding

Shapes = Mapping[str, tuple[int, ...]]

_LISTS = {onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS, onnx.AttributeProto.STRINGS}
_SCALARS = {onnx.AttributeProto.FLOAT: "f", onnx.AttributeProto.INT: "i", onnx.AttributeProto.STRING: "s"}
_MAY_BE_EMPTY = frozenset({"activation_alpha", "activation_beta", "activations"})
"""Of recurrent layers: as if left out."""
_MOST_EXTENT = 2**63 - 1  # of a dimension in an ONNX file, and in TVM


def clean(model: onnx.ModelProto, label: str, shapes: Shapes | None = None) -> Graph:
    """Check `model`, fix its input shapes and remove all that need not be computed at run time.

    In this order: local functions inlined, operator sets below 11 converted, initialisers no longer inputs, input
    shapes set, shapes and constants folded, control flow unrolled that hangs on them and ONNX Runtime's operators
    expanded, operators inlined that ONNX defines by others, `Identity` and inference `Dropout` removed, `auto_pad`
    written out, batch normalisation folded.

    Raises:
        FrontendError: the model is invalid, an input has a dynamic dimension without an entry in `shapes`, or
            `shapes` does not fit the inputs.
    """
    graph = split(model, label)
    if model.functions:
        _inline(graph)
    if graph.model.graph.sparse_initializer:
        raise FrontendError(f"{label}: sparse weights are not supported: store them as dense tensors")
    claim_operators(graph)
    _check(graph)
    _spell_out_zeros(graph.model.graph)
    _drop_empty(graph)
    for node in graph.model.graph.node:
        if node.op_type == "MeanVarianceNormalization" and not node.domain:  # its shape is inferred by its definition
            spell_out_defaults(node, graph.opset)
    old = graph.opset < OLDEST_OPSET
    if old:
        _forget_output_shapes(graph)
        convert(graph)
    _set_shapes(graph, shapes or {})
    fold_constants(graph)
    if old:
        spell_out_rounding(graph)
    while inline_operators(graph):
        fold_constants(graph)
    remove_identities(graph)
    resolve_padding(graph)
    fold_affine(graph)
    prune(graph)
    _drop_unread(graph)
    infer_types(graph)
    return graph


def _inline(graph: Graph) -> None:
    skeleton, aside = graph.skeleton()  # the inliner takes no more than 2 GB
    try:
        graph.replace(inliner.inline_local_functions(skeleton), aside)
    except (ValueError, RuntimeError, EncodeError, onnx.checker.ValidationError) as error:
        raise FrontendError(
            f"{graph.label}: its local functions cannot be inlined ({one_line(error)}): export the model without "
            "functions"
        ) from error


def _check(graph: Graph) -> None:
    skeleton, _ = graph.skeleton()
    for info in [*skeleton.graph.input, *skeleton.graph.output]:
        if info.type.HasField("tensor_type"):  # the checker asks for a shape; outputs are inferred, inputs come later
            info.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(skeleton)
    except onnx.checker.ValidationError as error:
        raise FrontendError(
            f"{graph.label}: not a valid ONNX model ({one_line(error)}): export the model again"
        ) from error


def _spell_out_zeros(graph: onnx.GraphProto) -> None:
    """Say that an attribute is 0 where it is not said what it is: other languages' writers leave zeros out, and TVM's
    importer does not read what is not there."""
    for node in graph.node:
        for attribute in node.attribute:
            field = _SCALARS.get(attribute.type)
            if field is not None and not attribute.HasField(field):
                setattr(attribute, field, getattr(attribute, field))
        for sub in subgraphs(node):
            _spell_out_zeros(sub)


def _drop_empty(graph: Graph) -> None:
    """Leave out lists without elements, and padding of no kind, where that says the same: TVM's importer does not read
    the former, and takes the latter for one that it does not know."""
    for node in graph.nodes:
        names = _MAY_BE_EMPTY | ({"axes"} if node.op_type.startswith("Reduce") else set())
        lists = [a for a in node.attribute if a.name in names and a.type in _LISTS]
        empty = [a.name for a in lists if not (a.ints or a.floats or a.strings)]
        empty += [a.name for a in node.attribute if a.name == "auto_pad" and not a.s]
        kept = [a for a in node.attribute if a.name not in empty]
        if len(kept) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(kept)


def _set_shapes(graph: Graph, shapes: Shapes) -> None:
    inputs = {i.name: i for i in graph.model.graph.input}
    for name, shape in shapes.items():
        if name not in inputs:
            raise FrontendError(f"{graph.label}: no input {name!r}: it has the inputs {', '.join(inputs) or 'none'}")
        if any(int(d) != d or not 1 <= d <= _MOST_EXTENT for d in shape):
            raise FrontendError(
                f"{graph.label}: shape {tuple(shape)} of input {name!r}: "
                f"give positive whole numbers, none above {_MOST_EXTENT}"
            )
        _set_shape(graph, inputs[name], tuple(int(d) for d in shape))
    for name, info in inputs.items():
        _require_static(graph, name, info)
    _forget_output_shapes(graph)


def _forget_output_shapes(graph: Graph) -> None:
    """They are inferred anew: the file's may be symbolic, or of another batch size."""
    inputs = {i.name: i for i in graph.model.graph.input}
    for output in graph.model.graph.output:
        if output.name in inputs:  # of two entries inference takes the last
            output.type.CopyFrom(inputs[output.name].type)
        elif output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")


def _set_shape(graph: Graph, info: onnx.ValueInfoProto, shape: tuple[int, ...]) -> None:
    tensor = info.type.tensor_type
    if tensor.HasField("shape"):
        dims = tensor.shape.dim
        if len(dims) != len(shape):
            raise FrontendError(
                f"{graph.label}: shape {shape} for input {info.name!r} has {len(shape)} dimensions, "
                f"the model's input has {len(dims)}: give {len(dims)} numbers"
            )
        for i, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
            if dim.dim_value > 0 and dim.dim_value != extent:
                raise FrontendError(
                    f"{graph.label}: shape {shape} for input {info.name!r}: its dimension {i} is fixed at "
                    f"{dim.dim_value} in the model: give {dim.dim_value} there, or export the model with that "
                    "dimension dynamic"
                )
    tensor.shape.CopyFrom(onnx.TensorShapeProto(dim=[onnx.TensorShapeProto.Dimension(dim_value=d) for d in shape]))


def _require_static(graph: Graph, name: str, info: onnx.ValueInfoProto) -> None:
    if not info.type.HasField("tensor_type"):
        raise FrontendError(f"{graph.label}: input {name!r} is not a tensor: only tensor inputs are supported")
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        raise FrontendError(
            f"{graph.label}: input {name!r} has no shape: give one, for example --shape {name}=1,3,224,224"
        )
    for i, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value == 0:
            raise FrontendError(
                f"{graph.label}: dimension {i} of input {name!r} is 0: inputs without elements are not supported, "
                "export the model without that input, or if it stands for any extent give one with --shape"
            )
        if dim.dim_value <= 0:
            called = f" ({dim.dim_param})" if dim.dim_param else ""
            example = ",".join(str(d.dim_value) if d.dim_value > 0 else "1" for d in tensor.shape.dim)
            raise FrontendError(
                f"{graph.label}: dimension {i}{called} of input {name!r} is dynamic: "
                f"give its shape, for example --shape {name}={example}, or where a command takes several models "
                f"FILE@{name}={example} (in Python: shapes={{{name!r}: ({example},)}})"
            )


def remove_identities(graph: Graph) -> None:
    """Take out `Identity`, inference `Dropout` and a `Split` into one: whoever read their output reads their input.

    Raises:
        FrontendError: a `Dropout` in training mode, or one whose mask is read.
    """
    uses = graph.uses()
    alias: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        passes_on = node.op_type in ("Identity", "Dropout") or (node.op_type == "Split" and len(node.output) == 1)
        if not passes_on or node.domain:
            kept.append(node)
            continue
        if node.op_type == "Dropout":
            _require_inference(graph, node, uses)
        alias[node.output[0]] = alias.get(node.input[0], node.input[0])
    if not alias:
        return
    for node in kept:
        rename_inputs(node, alias)
    graph.nodes = kept
    for output in graph.model.graph.output:
        output.name = alias.get(output.name, output.name)


def _drop_unread(graph: Graph) -> None:
    """Take out, from behind, outputs that nobody reads and an operator need not give, as a pool's indices: TVM's
    importer does not know all of them."""
    uses = graph.uses()
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for node in graph.nodes:
        if not onnx.defs.has(node.op_type, graph.opset, node.domain) or attributes(node).get("training_mode", 0):
            continue
        formal = onnx.defs.get_schema(node.op_type, graph.opset, node.domain).outputs
        while len(node.output) > 1 and not uses[node.output[-1]]:
            if formal[min(len(node.output), len(formal)) - 1].option != optional:
                break
            del node.output[-1]


def _require_inference(graph: Graph, node: onnx.NodeProto, uses: Mapping[str, int]) -> None:
    training = node.input[2] if len(node.input) > 2 else ""
    if training and not (training in graph.constants and not graph.constants[training].any()):
        raise FrontendError(
            f"{graph.label}: node {node.name!r} (Dropout) is in training mode: export the model in inference mode"
        )
    if len(node.output) > 1 and node.output[1] and uses[node.output[1]]:
        raise FrontendError(
            f"{graph.label}: the mask of node {node.name!r} (Dropout) is read: export the model in inference mode"
        )


def prune(graph: Graph) -> None:
    """Drop nodes and constants that no output needs."""
    needed = set(graph.output_names)
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(inputs_of(node))
    graph.nodes = kept[::-1]
    graph.constants = {name: array for name, array in graph.constants.items() if name in needed}
