"""Operators that ONNX Runtime's tools write (its optimizer's fusions, its quantizer's 8-bit operators) become standard
ones of floats, before anything is imported."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
from onnx import helper

from rlflow_tvm.frontend.expansion import Expansion
from rlflow_tvm.frontend.fusions import FUSIONS
from rlflow_tvm.frontend.fusions_attention import ATTENTION
from rlflow_tvm.frontend.graph import Graph
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.frontend.quantised import QUANTISED, QUANTISED_PRODUCTS
from rlflow_tvm.frontend.quantised_linear import QUANTISED_LINEAR

MICROSOFT = "com.microsoft"
_EXPANSIONS: dict[str, dict[str, Callable[[Expansion], None]]] = {
    "": QUANTISED,
    MICROSOFT: {**ATTENTION, **FUSIONS, **QUANTISED_LINEAR, **QUANTISED_PRODUCTS},
}
"""Domain -> operator -> how it is expanded. To add one: a function that emits standard nodes, and a line here or in the
dictionary of its family."""
_BEFORE_THEIR_TIME = {"GroupNormalization": 21, "LayerNormalization": 17, "SimplifiedLayerNormalization": math.inf}
"""Operators that ONNX Runtime has in the standard's domain below the operator set that brings them; group normalisation
had another form before, which ONNX's checker (1.23) refuses."""


def expanded(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """The nodes that a node of such an operator comes to; None for others, and while a shape it reads is not known.

    Raises:
        FrontendError: it uses an input, an output or an attribute that is not expanded, or these do not fit each other.
    """
    expand = _EXPANSIONS.get(node.domain, {}).get(node.op_type)
    if expand is None or any(graph.shape(name) is None for name in node.input if name):
        return None
    expansion = Expansion(graph, node)
    try:
        expand(expansion)
    except (ArithmeticError, IndexError, ValueError) as error:  # of shapes that no formula is for
        expansion.refuse(f"with inputs or attributes that do not fit ({one_line(error)})", "check the model")
    return expansion.finish()


def claim_operators(graph: Graph) -> None:
    """Give ONNX Runtime's domain to those of its operators that it keeps in the standard's, which ONNX's checker would
    take for a mistake."""
    claimed = [n for n in graph.model.graph.node if not n.domain and graph.opset < _BEFORE_THEIR_TIME.get(n.op_type, 0)]
    for node in claimed:
        node.domain = MICROSOFT
    if claimed and all(each.domain != MICROSOFT for each in graph.model.opset_import):
        graph.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
