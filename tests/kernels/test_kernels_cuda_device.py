"""The GPU's kernels on a GPU, against ONNX Runtime and numpy; skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cuda_checks import model
from kernel_checks import graph, random_arrays
from tvm import relax

from rlflow_tvm.cost import KernelTimer
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.kernels import as_target, extract_kernels, pipeline
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.verify import flatten, range_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda().exist, reason="there is no GPU")]


def run(mod: tvm.IRModule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs of `mod` on the GPU."""
    target, device = as_target("cuda"), tvm.cuda()
    machine = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=pipeline(target)), device)
    result = machine["main"](*(tvm.runtime.tensor(array, device) for array in arrays))
    return [tensor.numpy() for tensor in flatten(result)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("name", ["demo", "squeezenet-tiny", "bert-tiny", "light_squeezenet", "light_shufflenet"])
def test_models(name: str, dtype: str, tolerance: float) -> None:
    mod = model(name, dtype)
    inputs = random_inputs(mod, 0)
    assert range_error(run(mod, list(inputs.values())), onnxruntime_outputs(zoo.path(name), inputs)) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("shape", [(1, 96, 50), (40, 96, 50), (197, 64, 33), (1024, 512, 1024)])
def test_products(shape: tuple[int, int, int], dtype: str, tolerance: float) -> None:
    rows, depth, columns = shape
    arrays = random_arrays([(rows, depth), (depth, columns)])
    mod = graph(relax.op.matmul, [(rows, depth), (depth, columns)])
    mod = mod if dtype == "float32" else to_half(mod, dtype)
    assert range_error(run(mod, arrays), [arrays[0] @ arrays[1]]) < tolerance


def test_kernels_are_timed() -> None:
    target = as_target("cuda")
    kernels = extract_kernels(model("demo"), target)
    with KernelTimer(target) as timer:
        assert all(measurement.ok for measurement in timer.measure(kernels))
        assert timer.launch_secs() > 0
