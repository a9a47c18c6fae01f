"""ONNX in: read, cleaned, imported; ONNX out; the evaluation models; ONNX Runtime as the reference."""

from __future__ import annotations

from rlflow_tvm.frontend.export import to_onnx
from rlflow_tvm.frontend.importer import from_onnx, import_models, input_names, parse_shape, split_shapes
from rlflow_tvm.frontend.inputs import random_inputs
from rlflow_tvm.frontend.load import load_onnx
from rlflow_tvm.frontend.names import parameter_names
from rlflow_tvm.frontend.reference import onnxruntime_outputs
from rlflow_tvm.frontend.save import put_in_place, save_onnx, saved

__all__ = [
    "from_onnx", "import_models", "input_names", "load_onnx", "onnxruntime_outputs", "parameter_names", "parse_shape",
    "put_in_place", "random_inputs", "save_onnx", "saved", "split_shapes", "to_onnx",
]  # fmt: skip
