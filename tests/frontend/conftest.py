"""What the frontend's tests share: building small ONNX models, and running an imported module."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, random_inputs
from rlflow_tvm.kernels import as_target, pipeline

_TYPES = {
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "bool": TensorProto.BOOL,
}


def _make_model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple],
    outputs: list[str],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 18,
    dtypes: dict[str, str] | None = None,
    out_dtype: str = "float32",
) -> onnx.ModelProto:
    dtypes = dtypes or {}
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(k, _TYPES[dtypes.get(k, "float32")], v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(name, _TYPES[out_dtype], None) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _run(mod: tvm.IRModule, inputs: dict[str, np.ndarray], ours: bool = False) -> list[np.ndarray]:
    """What TVM computes, by the build pipeline that schedules nothing: slow, and nobody's but TVM's; or by `ours`."""
    target = as_target("llvm") if ours else tvm.target.Target("llvm")
    exe = tvm.compile(mod, target, relax_pipeline=pipeline(target) if ours else relax.get_pipeline("default_build"))
    args = [tvm.runtime.tensor(inputs[p.name]) for p in mod["main"].params]
    found = relax.VirtualMachine(exe, tvm.cpu())["main"](*args)
    return [found.numpy()] if isinstance(found, tvm.runtime.Tensor) else [f.numpy() for f in found]


def _assert_imports_right(
    model: onnx.ModelProto, tolerance: float = 1e-4, seed: int = 0, given: dict[str, np.ndarray] | None = None
) -> tvm.IRModule:
    """Import `model` and hold its outputs, by TVM's pipeline and by ours, against ONNX Runtime's on the original, in
    parts of their range. Inputs that are not `given` are drawn."""
    mod = from_onnx(model)
    inputs = random_inputs(mod, seed) | (given or {})
    expected = onnxruntime_outputs(model, inputs)
    for ours in (False, True):
        found = _run(mod, inputs, ours)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            b = np.asarray(b)
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            spread = float(b.max()) - float(b.min())
            assert spread > 0 or b.size == 1
            assert float(np.abs(a.astype(np.float64) - b).max()) <= tolerance * (spread or 1.0)
    return mod


def _operators(mod: tvm.IRModule) -> list[str]:
    """Names of the operators of main, in order, without the leading `relax.`"""
    calls = [b.value for b in ir.single_block(mod["main"])]
    return [c.op.name.removeprefix("relax.") if isinstance(c, relax.Call) else type(c).__name__ for c in calls]


@pytest.fixture
def make_model() -> Callable[..., onnx.ModelProto]:
    return _make_model


@pytest.fixture
def run() -> Callable[..., list[np.ndarray]]:
    return _run


@pytest.fixture
def assert_imports_right() -> Callable[..., tvm.IRModule]:
    return _assert_imports_right


@pytest.fixture
def operators() -> Callable[[tvm.IRModule], list[str]]:
    return _operators
