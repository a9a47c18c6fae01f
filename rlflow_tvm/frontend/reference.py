"""ONNX Runtime as the reference: what the original file computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from google.protobuf.message import EncodeError

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.frontend.names import parameter_names


def onnxruntime_outputs(
    model: onnx.ModelProto | str, inputs: Mapping[str, np.ndarray], threads: int = 1
) -> list[np.ndarray]:
    """The outputs of `model` (a loaded model or a path), in order, by ONNX Runtime on the CPU, of its graph as it is:
    of a quantised one its optimised kernels round otherwise than the file says.

    `inputs` go by the model's input names, or by those of the imported module's parameters.

    Raises:
        FrontendError: onnxruntime is not installed, or refuses the model or the inputs.
    """
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise FrontendError(
            "onnxruntime is not installed: install it with pip install 'rlflow_tvm[onnxruntime]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3  # errors only: old files have ONNX Runtime warn of every initialiser
    try:
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        names = parameter_names(i.name for i in session.get_inputs())
        by_input = {name: inputs[parameter] for name, parameter in names.items() if parameter in inputs}
        return session.run(None, by_input | {name: inputs[name] for name in names if name in inputs})
    except (
        EncodeError,  # of a model above 2 GiB
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
        RuntimeError,  # of inputs in a type that it cannot be given, as bfloat16
        ValueError,
    ) as error:
        called = "the model" if isinstance(model, onnx.ModelProto) else model
        raise FrontendError(
            f"ONNX Runtime cannot run {called} ({one_line(error)}): check it with onnx.checker, and the inputs"
        ) from error
