"""The GPU's kernels on a GPU, against ONNX Runtime and numpy; skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cuda_checks import model
from kernel_checks import graph, random_arrays
from tvm import relax

from rlflow_tvm.cost import KernelTimer
from rlflow_tvm.differences import range_error
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.kernels import as_target, extract_kernels, pipeline
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.verify import flatten

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda().exist, reason="there is no GPU")]


def run(mod: tvm.IRModule, *runs: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Outputs of `mod` on the GPU for each list of inputs, each from tensors of its own."""
    target, device = as_target("cuda"), tvm.cuda()
    machine = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=pipeline(target)), device)
    tensors = [[tvm.runtime.tensor(array, device) for array in arrays] for arrays in runs]
    results = [machine["main"](*inputs) for inputs in tensors]
    return [[tensor.numpy() for tensor in flatten(result)] for result in results]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("name", ["demo", "squeezenet-tiny", "bert-tiny", "light_squeezenet", "light_shufflenet"])
def test_models(name: str, dtype: str, tolerance: float) -> None:
    mod = model(name, dtype)
    inputs = random_inputs(mod, 0)
    (found,) = run(mod, list(inputs.values()))
    assert range_error(found, onnxruntime_outputs(zoo.path(name), inputs)) < tolerance


@pytest.mark.parametrize("name", ["demo", "bert-tiny", "light_squeezenet"])
def test_cuda_graphs(name: str) -> None:
    """A graph that was captured with one input gives the outputs of others, and those given before stay."""
    mod = model(name)
    inputs = [random_inputs(mod, seed) for seed in (0, 1, 2)]
    found = run(mod, *(list(arrays.values()) for arrays in inputs))
    for arrays, outputs in zip(inputs, found, strict=True):
        assert range_error(outputs, onnxruntime_outputs(zoo.path(name), arrays)) < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("shape", [(1, 96, 50), (40, 96, 50), (197, 64, 33), (1024, 512, 1024)])
def test_products(shape: tuple[int, int, int], dtype: str, tolerance: float) -> None:
    rows, depth, columns = shape
    arrays = random_arrays([(rows, depth), (depth, columns)])
    mod = graph(relax.op.matmul, [(rows, depth), (depth, columns)])
    mod = mod if dtype == "float32" else to_half(mod, dtype)
    (found,) = run(mod, arrays)
    assert range_error(found, [arrays[0] @ arrays[1]]) < tolerance


def test_kernels_are_timed() -> None:
    target = as_target("cuda")
    kernels = extract_kernels(model("demo"), target)
    with KernelTimer(target) as timer:
        assert all(measurement.ok for measurement in timer.measure(kernels))
        assert timer.launch_secs() > 0
