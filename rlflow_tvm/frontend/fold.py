"""Folding in ONNX: shapes become constants, and whatever hangs on constants alone is evaluated, with numpy."""

from __future__ import annotations

import contextlib
import math

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.control_flow import CONTROL_FLOW, unrolled
from rlflow_tvm.frontend.expand import expanded
from rlflow_tvm.frontend.graph import Graph, attributes, is_short, static_shape, subgraphs
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.frontend.padding import resolve_ceil_mode
from rlflow_tvm.frontend.sequences import taken_apart

_RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"})
_MOST_ELEMENTS = 2**30
MOST_REPEATED = 2**24
"""Bytes of a repeated constant that is kept as one."""
_MOST_PROPAGATED = 2**16
"""Elements of a `Range` up to which ONNX's inference may propagate it: each is a dimension there, of tens of bytes."""
_HIDDEN = "rlflow.hidden"
"""A domain of whose operators ONNX's inference knows nothing."""
_OLDEST_KNOWN = {"DequantizeLinear": 19}
"""The operator set from which on ONNX's reference knows an operator, whose earlier forms mean the same."""

_MISREAD = {
    **dict.fromkeys(("Hardmax", "Softmax"), 13),
    "BatchNormalization": 14,
    **dict.fromkeys(("AveragePool", "ConvTranspose", "GridSample", "GroupNormalization"), math.inf),
    **dict.fromkeys(("GRU", "LRN", "LSTM", "LpNormalization", "LpPool", "MaxPool", "RNN"), math.inf),
    **dict.fromkeys(("OneHot", "ReduceLogSumExp"), math.inf),  # of infinities
    "LogSoftmax": math.inf,  # the logarithm of a softmax, which is 0 a hundred below the largest
    "DynamicQuantizeLinear": math.inf,  # of zeros: ONNX Runtime's scale of them is 1
}
"""The operator set below which ONNX's reference (1.23) gives an operator other values than the standard does, or
refuses what that allows: TVM computes it."""

_HALVES = frozenset({np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)})
_SUMMING = frozenset(
    {
        *("Conv", "CumSum", "Einsum", "Gemm", "GlobalAveragePool", "InstanceNormalization", "LayerNormalization"),
        *("LogSoftmax", "MatMul", "RMSNormalization", "Softmax"),
    }
)
"""Besides reductions: ONNX's reference adds halves as halves, of which the sum of 4096 ones is 2048. They are widened
for it, as ONNX Runtime does, and TVM's kernels do here."""


def infer_types(graph: Graph) -> None:
    """Fill `graph.types` by ONNX shape inference (with data propagation), and rewrite the pools that it gets wrong.

    Raises:
        FrontendError: the shapes of the graph contradict each other.
    """
    while True:
        try:
            _infer(graph, strict=True)
        except onnx.shape_inference.InferenceError as error:
            with contextlib.suppress(onnx.shape_inference.InferenceError):
                _infer(graph, strict=False)  # as far as it goes: a pool's wrong shape may be what is contradicted
            if not resolve_ceil_mode(graph):
                raise FrontendError(
                    f"{graph.label}: shape inference failed ({one_line(error)}): "
                    "check the model, and the shapes given for its inputs"
                ) from error
        else:
            if not resolve_ceil_mode(graph):
                return


def _infer(graph: Graph, strict: bool) -> None:
    propagate = _longest_range(graph) <= _MOST_PROPAGATED
    model, aside = graph.skeleton()
    _hide_control_flow(model)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=strict, data_prop=propagate)
    infos = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    graph.types = {i.name: i.type.tensor_type for i in infos if i.name not in aside and i.type.HasField("tensor_type")}


def _hide_control_flow(model: onnx.ModelProto) -> None:
    """A branch that is not taken may be wrong for the shapes that there are: nothing is inferred of it."""
    hidden = [node for node in model.graph.node if node.op_type in CONTROL_FLOW and not node.domain]
    for node in hidden:
        node.domain = _HIDDEN
        del node.attribute[:]
    if hidden:
        model.opset_import.append(helper.make_opsetid(_HIDDEN, 1))


def _longest_range(graph: Graph) -> float:
    """Number of elements of the longest `Range` whose inputs are constant, or given by `Constant`."""
    nodes = graph.nodes
    ranges = [node for node in nodes if node.op_type == "Range"]
    makers = {node.output[0]: node for node in nodes if node.op_type == "Constant"} if ranges else {}
    longest = 0.0
    for node in ranges:
        given = [graph.constants.get(name) for name in node.input]
        for i, name in enumerate(node.input):
            if name in makers and (values := evaluate(graph, makers[name])) is not None:
                given[i] = values[0]
        bounds = [float(array.item()) for array in given if array is not None and array.size == 1]
        if len(bounds) == 3 and bounds[2]:
            longest = max(longest, (bounds[1] - bounds[0]) / bounds[2])
            if longest > _MOST_ELEMENTS:
                raise _too_large(graph, node, (int(min(longest, 2.0**63)),))
    return longest


def fold_constants(graph: Graph) -> None:
    """Evaluate all that is known before the model runs, until nothing more is found.

    A round infers shapes, turns `Shape`, `Size` and `EyeLike` of a static value (and a constant's `CastLike` one) into
    constants and evaluates the nodes whose inputs are all constant; what these leave open is inferred node by node, and
    by the next round's inference. Control flow that depends on no data is unrolled, sequences of known
    tensors are taken apart, what ONNX Runtime's tools write is expanded. Random nodes stay.
    """
    while True:
        infer_types(graph)
        kept, folded = [], 0
        ahead = graph.nodes[::-1]
        while ahead:
            node = ahead.pop()
            nodes = unrolled(graph, node)
            if nodes is None:
                nodes = taken_apart(graph, node)
            if nodes is None:
                nodes = expanded(graph, node)
            if nodes is not None:
                ahead += reversed(nodes)
                folded += 1
                continue
            values = _value(graph, node)
            if values is None:
                kept.append(node)
                _infer_node(graph, node)
                continue
            folded += 1
            for name, value in zip(node.output, values, strict=False):
                if name:
                    graph.constants[name] = value
        if not folded:
            return
        graph.nodes = kept


def _infer_node(graph: Graph, node: onnx.NodeProto) -> None:
    """Add the types of a node's outputs to `graph.types` where they follow from what is known by now: a round for each
    layer would be one of the whole model. Pools that `infer_types` may have to rewrite are left to it, and what is
    contradicted."""
    if all(graph.shape(name) is not None for name in node.output if name):
        return
    given = attributes(node)
    if given.get("ceil_mode", 0) or subgraphs(node):
        return
    names = {name for name in node.input if name}
    version = 0 if node.domain else graph.opset
    known = all(name in graph.constants or name in graph.types for name in names)
    if not known or not onnx.defs.has(node.op_type, version, node.domain):
        return
    with contextlib.suppress(onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version, node.domain),
            node,
            {name: graph.type_of(name) for name in names},
            {n: numpy_helper.from_array(graph.constants[n], n) for n in names if is_short(graph.constants.get(n))},
            opset_imports=list(graph.model.opset_import),
            ir_version=graph.model.ir_version,
        )
        tensors = {name: ty.tensor_type for name, ty in found.items() if ty.HasField("tensor_type")}
        graph.types |= {name: tensor for name, tensor in tensors.items() if static_shape(tensor) is not None}


def _value(graph: Graph, node: onnx.NodeProto) -> list[np.ndarray] | None:
    if node.domain or node.op_type in _RANDOM:
        return None
    if node.op_type in ("Shape", "Size"):
        shape = graph.shape(node.input[0])
        return None if shape is None else [_shape_value(node, shape)]
    if node.op_type == "EyeLike":
        shape = graph.shape(node.input[0])
        return None if shape is None else [_identity_matrix(graph, node, shape)]
    if node.op_type == "CastLike" and node.input[0] in graph.constants and (like := graph.types.get(node.input[1])):
        return [graph.constants[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(like.elem_type))]
    if subgraphs(node):
        return None
    if not all(graph.is_constant(name) for name in node.input) or _is_misread(graph, node):
        return None
    _infer_node(graph, node)  # how large it is, before it is made
    return evaluate(graph, node)


def _is_misread(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the reference must not be asked for the value of a node of constants."""
    given = [graph.constants.get(name) for name in node.input]
    if node.op_type == "Dropout":  # in training: zeros drawn at random. It is refused where identities are removed
        return len(given) > 2 and given[2] is not None and bool(given[2].any())
    if node.op_type == "QuantizeLinear":  # by way of 32 bits
        x, scale = given[:2]
        return (
            x is not None and scale is not None and np.abs(x).max(initial=0.0) >= 2.0**31 * float(np.abs(scale).min())
        )
    if node.op_type == "Resize":  # divides by the scale in 64 bits: of the nearest, the one beside it
        return attributes(node).get("mode", b"nearest") == b"nearest"
    if node.op_type == "Pad":
        return len(given) > 1 and given[1] is not None and bool((given[1] < 0).any())
    return graph.opset < _MISREAD.get(node.op_type, 0)


def _shape_value(node: onnx.NodeProto, shape: tuple[int, ...]) -> np.ndarray:
    if node.op_type == "Size":
        return np.array(int(np.prod(shape, dtype=np.int64)), np.int64)
    attrs = attributes(node)
    return np.array(shape[attrs.get("start", 0) : attrs.get("end", len(shape))], np.int64)


def _identity_matrix(graph: Graph, node: onnx.NodeProto, shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(shape) > _MOST_ELEMENTS:
        raise _too_large(graph, node, shape)
    attrs = attributes(node)
    elem_type = attrs.get("dtype") or graph.type_of(node.input[0]).tensor_type.elem_type
    rows, columns = shape  # ONNX's inference has looked
    return np.eye(rows, columns, attrs.get("k", 0), dtype=helper.tensor_dtype_to_np_dtype(elem_type))


def _too_large(graph: Graph, node: onnx.NodeProto, shape: tuple[int, ...]) -> FrontendError:
    return FrontendError(
        f"{graph.label}: node {node.name!r} ({node.op_type}) makes a constant of shape {shape}: "
        f"more than {_MOST_ELEMENTS} elements are refused, check the model"
    )


def evaluate(graph: Graph, node: onnx.NodeProto) -> list[np.ndarray] | None:
    """The outputs of a node whose inputs are all constant; None where ONNX's reference does not know the operator or
    refuses what that allows, or gives another shape or type than is inferred, or where a constant is repeated to a very
    large one: TVM computes it.

    Raises:
        FrontendError: the node's inputs are out of bounds, or the result would fill the memory.
    """
    for name in node.output:
        shape = graph.shape(name)
        if shape is not None and np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
            raise _too_large(graph, node, shape)
    if _grows(graph, node):
        return None
    if node.op_type == "ConstantOfShape":  # the one operator that old files hold by the hundred
        return [_filled(graph, node)]
    names = list(dict.fromkeys(name for name in node.input if name))
    model = helper.make_model(
        helper.make_graph(
            [node],
            "constant",
            [helper.make_value_info(name, onnx.TypeProto()) for name in names],
            [helper.make_value_info(name, onnx.TypeProto()) for name in node.output if name],
        ),
        opset_imports=[helper.make_opsetid(node.domain, max(graph.opset, _OLDEST_KNOWN.get(node.op_type, 1)))],
        ir_version=graph.model.ir_version,
    )
    try:
        if node.op_type == "GatherElements":  # the reference: of 32 elements at most
            data, indices = (graph.constants[name] for name in node.input)
            return [_gather_elements(data, indices, attributes(node).get("axis", 0))]
        if node.op_type == "Unique" and not attributes(node).get("sorted", 1):  # the reference: sorted all the same
            return _unique(graph.constants[node.input[0]], attributes(node).get("axis"))[: len(node.output)]
        given = {name: graph.constants[name] for name in names}
        narrow = next((each.dtype for each in given.values() if each.dtype in _HALVES), None)
        if narrow is not None and (node.op_type in _SUMMING or node.op_type.startswith("Reduce")):
            given = {name: a.astype(np.float32) if a.dtype in _HALVES else a for name, a in given.items()}
        found = ReferenceEvaluator(model).run(None, given)
    except np.exceptions.AxisError:  # also an IndexError: axes that are not in order
        return None
    except (IndexError, ArithmeticError) as error:  # TVM would read whatever is there, or wrap around
        raise FrontendError(
            f"{graph.label}: node {node.name!r} ({node.op_type}) of constants cannot be evaluated "
            f"({one_line(error)}): check the model with onnx.checker"
        ) from error
    except Exception:  # noqa: BLE001  whatever fits the reference's 200 operators, also for what they merely lack
        return None
    rest = iter(found)
    values = [np.empty(0) if not name else next(rest) for name in node.output]
    if any(isinstance(value, list) for value in values):  # a sequence
        return None
    arrays = [np.asarray(value) for value in values]
    if narrow is not None:
        arrays = [_narrowed(graph, name, a, narrow) for name, a in zip(node.output, arrays, strict=True)]
    agree = all(_is_as_inferred(graph, name, a) for name, a in zip(node.output, arrays, strict=True) if name)
    return arrays if agree else None


def _narrowed(graph: Graph, name: str, array: np.ndarray, narrow: np.dtype) -> np.ndarray:
    """What was computed of widened halves, in the type that is inferred for it; if none is, halves again."""
    if array.dtype != np.float32:
        return array
    elem_type = graph.types[name].elem_type if name in graph.types else onnx.TensorProto.UNDEFINED
    with np.errstate(over="ignore"):
        return array.astype(helper.tensor_dtype_to_np_dtype(elem_type) if elem_type else narrow)


def _grows(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a constant is repeated to more than is worth keeping: it is repeated where it is read."""
    shape = graph.shape(node.output[0])
    if node.op_type not in ("Expand", "Tile") or shape is None:
        return False
    array = graph.constants[node.input[0]]
    return math.prod(shape) * array.itemsize > max(MOST_REPEATED, array.nbytes)


def _filled(graph: Graph, node: onnx.NodeProto) -> np.ndarray:
    """The value of a `ConstantOfShape`, whose shape inference may not know."""
    value = attributes(node).get("value")
    fill = numpy_helper.to_array(value) if value is not None else np.float32(0)
    if fill.size != 1:
        raise FrontendError(
            f"{graph.label}: node {node.name!r} is to fill a tensor with {fill.size} values: check the model"
        )
    shape = tuple(graph.constants[node.input[0]].reshape(-1).tolist())
    if any(extent < 0 for extent in shape):
        raise FrontendError(f"{graph.label}: node {node.name!r} is to fill a tensor of shape {shape}: check the model")
    if math.prod(shape) > _MOST_ELEMENTS:
        raise _too_large(graph, node, shape)
    return np.full(shape, fill.reshape(()))


def _is_as_inferred(graph: Graph, name: str, array: np.ndarray) -> bool:
    """Whether it has the shape and the type of the value, as far as these are known."""
    elem_type = graph.types[name].elem_type if name in graph.types else onnx.TensorProto.UNDEFINED
    if elem_type and helper.tensor_dtype_to_np_dtype(elem_type) != array.dtype:
        return False
    return graph.shape(name) in (None, array.shape)


def _gather_elements(data: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    """`data` along `axis` at the indices, which may be fewer than its elements along the other axes."""
    kept = [slice(None) if i == axis % data.ndim else slice(n) for i, n in enumerate(indices.shape)]
    return np.take_along_axis(data[tuple(kept)], indices, axis)


def _unique(data: np.ndarray, axis: int | None) -> list[np.ndarray]:
    """Each element (or slice along `axis`) once, in the order in which they come first; where that is, which of them
    each is, and how often there is one."""
    values, first, inverse, counts = np.unique(
        data, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    order = np.argsort(first)
    place = np.argsort(order)
    return [np.take(values, order, axis or 0), first[order], place[inverse.reshape(-1)], counts[order]]
