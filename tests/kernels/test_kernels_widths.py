"""Every vector width: what is built for a target uses its vectors; what this machine can run computes the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, random_arrays, run
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.kernels import extract_kernels, schedule_kernel, vector_lanes
from rlflow_tvm.kernels.target import vector_registers

op = relax.op
AVX2 = Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
SSE = Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})
NEON = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 2})


@dataclass(frozen=True)
class Case:
    """A kernel, and the vector instruction that its hot loop must be made of, by architecture."""

    build: Callable[..., relax.Expr]
    shapes: tuple[tuple[int, ...], ...]
    x86: str
    arm: str
    weights: int = 0


FMA = (r"\bvfn?madd\w*ps\b.*%ymm", r"\bfmla\s+v\d+\.4s")
ADD = (r"\bvaddps\b.*%ymm", r"\bfadd\s+v\d+\.4s")
CASES = {
    "conv2d": Case(
        lambda x, w: op.nn.relu(op.nn.conv2d(x, w, padding=1, strides=2)),  # with a stride of 1 it may be Winograd's
        ((1, 32, 27, 25), (40, 32, 3, 3)), *FMA, weights=1,
    ),
    "matmul": Case(op.matmul, ((33, 48), (48, 50)), *FMA, weights=1),
    "pool2d": Case(
        lambda x: op.nn.avg_pool2d(x, (3, 3), strides=(1, 1), padding=(1, 1), layout="NCHW16c"),
        ((1, 2, 9, 9, 16),), *ADD,
    ),
    "reduction": Case(lambda x: op.sum(x, axis=-1), ((37, 200),), *ADD),
    "elementwise": Case(op.add, ((37, 65), (37, 65)), *ADD),
}  # fmt: skip


def assembly(case: Case, target: Target) -> tuple[str, str]:
    """The rule and the assembly of the case's only kernel."""
    (kernel,) = extract_kernels(graph(case.build, case.shapes, case.weights), target)
    scheduled = schedule_kernel(kernel.func, target)
    module = tvm.tirx.build(tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")}), target=target)
    return str(scheduled.attrs["rlflow.schedule_rule"]), module.inspect_source("asm")


@pytest.mark.parametrize(("target", "lanes"), [(AVX2, 8), (SSE, 4), (NEON, 4)])
def test_lanes(target: Target, lanes: int) -> None:
    assert vector_lanes(target) == lanes


@pytest.mark.parametrize(
    ("attributes", "registers"),
    [
        ({"mcpu": "x86-64"}, 16),
        ({"mcpu": "core2"}, 16),
        ({"mtriple": "i686-linux-gnu"}, 16),
        ({"mcpu": "haswell"}, 16),
        ({"mcpu": "znver4"}, 32),
        ({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}, 32),
        ({"mtriple": "armv7-linux-gnueabihf", "mcpu": "cortex-a9"}, 16),
        ({"mtriple": "riscv64-linux-gnu"}, 32),
    ],
)
def test_registers(attributes: dict[str, str], registers: int) -> None:
    assert vector_registers(Target({"kind": "llvm", **attributes})) == registers


@pytest.mark.parametrize("name", CASES)
def test_avx2_instructions(name: str) -> None:
    rule, text = assembly(CASES[name], AVX2)
    assert rule == name
    assert re.search(CASES[name].x86, text)
    assert "%zmm" not in text


@pytest.mark.parametrize("name", CASES)
def test_neon_instructions(name: str) -> None:
    rule, text = assembly(CASES[name], NEON)
    assert rule == name
    assert re.search(CASES[name].arm, text)


@pytest.mark.parametrize("name", ["conv2d", "matmul"])
def test_neon_products_are_vectors(name: str) -> None:
    """No product of the hot loop is a scalar one: `fmla v0.4s, ...`, never `fmadd s0, ...`."""
    _, text = assembly(CASES[name], NEON)
    assert len(re.findall(r"\bfmla\s+v\d+\.4s", text)) >= 8
    assert not re.search(r"\bfmadd\s+s\d+", text)


def runs_avx2() -> bool:
    return vector_lanes(TARGET) >= vector_lanes(AVX2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", [AVX2, SSE], ids=["avx2", "sse"])
def test_narrow_vectors_compute_the_same(name: str, target: Target) -> None:
    if target is AVX2 and not runs_avx2():
        pytest.skip("this processor has no AVX2")
    case = CASES[name]
    arrays = random_arrays(case.shapes)
    narrow = run(graph(case.build, case.shapes, case.weights), arrays, case.weights, target)
    here = run(graph(case.build, case.shapes, case.weights), arrays, case.weights)
    assert narrow.rules == here.rules
    np.testing.assert_allclose(narrow.values[0], here.values[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_vector_loops_have_the_targets_width(name: str) -> None:
    """Some vector loop fills a register."""
    case = CASES[name]
    for target in (AVX2, NEON):
        (kernel,) = extract_kernels(graph(case.build, case.shapes, case.weights), target)
        widths: list[int] = []

        def note(loop: tirx.For, widths: list[int] = widths) -> None:
            if loop.kind == tirx.ForKind.VECTORIZED:
                widths.append(int(loop.extent))

        tvm_ffi.structural_walk(schedule_kernel(kernel.func, target).body, (tirx.For, note))
        assert widths
        assert max(widths) >= vector_lanes(target)


@pytest.mark.parametrize("channels", [24, 40])
@pytest.mark.parametrize("target", [AVX2, SSE], ids=["avx2", "sse"])
def test_a_convolution_of_weights_alone_is_worked_out_here(target: Target, channels: int) -> None:
    """Whatever vectors the module is for: Winograd's nest is written for one width, and would leave channels out."""
    if target is AVX2 and not runs_avx2():
        pytest.skip("this processor has no AVX2")
    arrays = random_arrays([(1, channels, 28, 28), (1, 64, 28, 28), (channels, 64, 3, 3)])
    shapes = [array.shape for array in arrays]
    added = graph(lambda x, data, kernel: op.add(x, op.nn.conv2d(data, kernel, padding=1)), shapes, 2)
    here = run(graph(lambda data, kernel: op.nn.conv2d(data, kernel, padding=1), shapes[1:], 1), arrays[1:], 1)
    found = run(added, arrays, 2, target)
    np.testing.assert_allclose(found.values[0], arrays[0] + here.values[0], rtol=1e-4, atol=1e-3)
