"""Operators of ONNX Runtime's and what they are expanded to, both by ONNX Runtime: no TVM in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rlflow_tvm.frontend import onnxruntime_outputs
from rlflow_tvm.frontend.clean import clean


def microsoft(operator: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attrs) -> onnx.NodeProto:
    """A node of ONNX Runtime's domain."""
    return helper.make_node(operator, inputs, outputs, domain="com.microsoft", **attrs)


def small_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    opset: int = 17,
    types: Mapping[str, type | np.dtype] | None = None,
) -> onnx.ModelProto:
    """A model that takes arrays like `inputs` and gives all that its last node does, of the first floats' type where
    `types` does not say another."""
    usual = next((a.dtype for a in inputs.values() if a.dtype.kind == "f"), np.dtype(np.float32))
    given = {name: np.dtype((types or {}).get(name, usual)) for name in nodes[-1].output if name}
    graph = helper.make_graph(
        nodes,
        "small",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in inputs.items()
        ],
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)
            for name, dtype in given.items()
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def standard(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` cleaned, of standard operators alone."""
    graph = clean(model, "small")
    assert not {node.domain for node in graph.nodes} - {""}
    written = onnx.ModelProto()
    written.CopyFrom(graph.model)
    written.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in graph.constants.items())
    for output in written.graph.output:
        output.type.CopyFrom(graph.type_of(output.name))
    onnx.checker.check_model(written, full_check=True)
    return written


def both(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each output of the cleaned model, and of the model as it was; of the same shape and type."""
    found, expected = (onnxruntime_outputs(each, inputs) for each in (standard(model), model))
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert np.isfinite(b).all()
    return list(zip(found, expected, strict=True))
