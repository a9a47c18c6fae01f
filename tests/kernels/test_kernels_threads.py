"""Threads: none on one core, none for little work; what is on the stack is aligned with them and without."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from kernel_checks import TARGET, graph, random_arrays, run
from tvm import relax

from rlflow_tvm.kernels import extract_kernels, schedule_kernel, tir_pipeline

op = relax.op
ON_CORES = {
    cores: tvm.target.Target({"kind": "llvm", "mcpu": TARGET.attrs["mcpu"], "num-cores": cores}) for cores in (1, 2)
}


def convolution(**attrs: object) -> Callable[..., relax.Expr]:
    return lambda x, weight: op.nn.relu(op.nn.conv2d(x, weight, **attrs))


def squeezed(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """A gate that is stretched over the image: a loop nest behind the convolution."""
    pooled = op.nn.adaptive_avg_pool2d(x, (1, 1))
    return op.multiply(op.sigmoid(op.nn.conv2d(pooled, weight)), x)


PARALLEL = re.compile(r"T\.parallel\((?:T\.int64\()?(\d+)")
BLOCKED = {"data_layout": "NCHW16c", "kernel_layout": "OIHW16o"}
THREADED = {
    "matmul": (op.matmul, [(19, 24), (24, 13)], [(256, 64), (64, 64)], 0),
    "packed matmul": (op.matmul, [(19, 24), (24, 13)], [(256, 64), (64, 64)], 1),
    "conv2d": (convolution(padding=1, strides=2), [(1, 3, 6, 6), (8, 3, 3, 3)], [(1, 32, 64, 64), (32, 32, 3, 3)], 1),
    "blocked": (convolution(padding=1, **BLOCKED), [(1, 1, 4, 4, 16), (1, 16, 3, 3, 16)],
                [(1, 2, 32, 32, 16), (2, 32, 3, 3, 16)], 1),
    "grouped": (convolution(groups=4, padding=1), [(1, 8, 4, 4), (8, 2, 3, 3)], [(1, 64, 32, 32), (64, 16, 3, 3)], 1),
    "depthwise": (convolution(groups=8, padding=1), [(1, 8, 7, 7), (8, 1, 3, 3)], [(1, 8, 60, 60), (8, 1, 3, 3)], 1),
    "pointwise": (convolution(), [(1, 16, 7, 7), (16, 16, 1, 1)], [(1, 64, 28, 28), (64, 64, 1, 1)], 1),
    "winograd": (convolution(padding=1), [(1, 8, 8, 8), (8, 8, 3, 3)], [(1, 64, 28, 28), (64, 64, 3, 3)], 1),
    "max pool": (lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), [(1, 8, 12, 12)], [(1, 32, 56, 56)], 0),
    "blocked pool": (lambda x: op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), layout="NCHW16c"),
                     [(1, 1, 12, 12, 16)], [(1, 4, 56, 56, 16)], 0),
    "global pool": (lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)), [(1, 32, 7, 7)], [(1, 512, 7, 7)], 0),
    "sum of rows": (lambda x: op.sum(x, [0]), [(30, 40)], [(200, 400)], 0),
    "mean of rows": (lambda x: op.mean(x, [1]), [(1, 30, 40)], [(1, 200, 400)], 0),
    "long row": (op.nn.softmax, [(1, 300)], [(1, 50257)], 0),
    "few rows": (lambda x: op.nn.softmax(x), [(3, 30)], [(3, 20000)], 0),
    "softmax over channels": (lambda x: op.nn.softmax(x, 1), [(1, 5, 8, 9)], [(1, 21, 65, 33)], 0),
    "squeezed": (squeezed, [(1, 16, 7, 7), (16, 16, 1, 1)], [(1, 64, 56, 56), (64, 64, 1, 1)], 1),
}  # fmt: skip
"""Graph, shapes too small for threads, shapes that want them, how many of the last are weights."""


def scripts(name: str, large: bool, cores: int) -> list[str]:
    build, small_shapes, large_shapes, weights = THREADED[name]
    target = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": cores})
    kernels = extract_kernels(graph(build, large_shapes if large else small_shapes, weights), target)
    return [schedule_kernel(kernel.func, target).script() for kernel in kernels]


@pytest.mark.parametrize("name", THREADED)
def test_threads_are_started_where_they_pay(name: str) -> None:
    assert not any("T.parallel" in script for script in scripts(name, large=True, cores=1))
    assert not any("T.parallel" in script for script in scripts(name, large=False, cores=2))
    turns = [int(each) for script in scripts(name, large=True, cores=2) for each in PARALLEL.findall(script)]
    assert max(turns, default=0) > 1


@pytest.mark.parametrize("name", THREADED)
def test_one_core_computes_the_same(name: str) -> None:
    build, _, shapes, weights = THREADED[name]
    arrays, mod = random_arrays(shapes), graph(build, shapes, weights)
    expected = run(mod, arrays, weights, ON_CORES[2]).values[0]
    found = run(mod, arrays, weights, ON_CORES[1]).values[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, float(abs(expected).max())))


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", ["conv2d", "winograd", "max pool"])
def test_buffers_on_the_stack_are_aligned(name: str, cores: int) -> None:
    """In a parallel loop, which is a function of its own, or in the kernel itself where there is none."""
    build, _, shapes, weights = THREADED[name]
    target = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": cores})
    kernels = extract_kernels(graph(build, shapes, weights), target)
    mod = tvm.IRModule({f"k{i}": schedule_kernel(kernel.func, target) for i, kernel in enumerate(kernels)})
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name.name_hint) for name, func in mod.functions_items()})
    code = tvm.tirx.build(mod, target=target, pipeline=tir_pipeline(target)).inspect_source("ll")
    aligned = [part.splitlines()[0] for part in code.split("\ndefine ") if "%anchor" in part]
    assert aligned
    assert all(("parallel_lambda" if cores > 1 else "_compute_") in function for function in aligned)
