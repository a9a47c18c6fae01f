"""Operators that TVM's importer does not know, or takes for others, and that ONNX defines as functions of simpler ones:
these stand in their place."""

from __future__ import annotations

import onnx
from onnx import helper, inliner

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.graph import Graph, spell_out_defaults
from rlflow_tvm.frontend.load import one_line

_INLINED = frozenset(
    {
        "Attention",
        "CausalConvWithState",
        "Celu",
        "CenterCropPad",
        "NegativeLogLikelihoodLoss",
        "RotaryEmbedding",
        "SoftmaxCrossEntropyLoss",
        "SwiGLU",
        "Swish",
    }
)


def inline_operators(graph: Graph) -> bool:
    """Put their definitions in the place of such operators (needs `graph.types`: some are defined by their inputs'
    types), which may hold others of them; whether there were any.

    Raises:
        FrontendError: ONNX cannot, as a type is not known or the operator set has no definition.
    """
    there = _inlined(graph.model)
    if not there:
        return False
    skeleton, aside = graph.skeleton()
    for node in skeleton.graph.node:
        if node.op_type in there and not node.domain:
            spell_out_defaults(node, graph.opset)
    given = {info.name for info in (*skeleton.graph.input, *skeleton.graph.output)}
    types = {name: onnx.TypeProto(tensor_type=tensor) for name, tensor in graph.types.items()}
    types |= {tensor.name: graph.type_of(tensor.name) for tensor in skeleton.graph.initializer}
    types[""] = onnx.TypeProto()  # of an input that is left out: the inliner (1.23) asks for that too
    skeleton.graph.value_info.extend(
        helper.make_value_info(name, ty) for name, ty in types.items() if name not in given
    )
    try:
        inlined = inliner.inline_selected_functions(
            skeleton, [("", operator) for operator in there], inline_schema_functions=True
        )
        left = [operator for operator in there if operator in _inlined(inlined)]
        if left:
            raise ValueError(f"operator set {graph.opset} does not define {left[0]} by others")
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise FrontendError(
            f"{graph.label}: {', '.join(there)} cannot be inlined ({one_line(error)}): export the model with simpler "
            "operators"
        ) from error
    graph.replace(inlined, aside)
    return True


def _inlined(model: onnx.ModelProto) -> list[str]:
    return sorted({node.op_type for node in model.graph.node if node.op_type in _INLINED and not node.domain})
