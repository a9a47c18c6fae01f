"""The sums of a register tile stay in registers: no step of the reduction goes by the stack, on processors that have 16
and 32 of them. Of the tile itself: in the shorter one at the end of a row LLVM spills now and then, whatever it is."""

from __future__ import annotations

import re

import pytest
import tvm
from kernel_checks import graph
from tvm import relax, tirx

from rlflow_tvm.cost.roofline import peak_kernel
from rlflow_tvm.kernels import Lowering, schedule_kernel
from rlflow_tvm.kernels.choice import Choice
from rlflow_tvm.kernels.llvm.codegen import TIR_PIPELINE

# implementation, (batch, input channels, height, width), output channels, window
CASES = {
    "pixels, large image": ("pixels", (1, 64, 42, 42), 168, 1),
    "pixels, small image": ("pixels", (1, 336, 16, 16), 336, 1),
    "direct, a row of seven": ("direct", (1, 64, 7, 7), 512, 3),
    "direct, a row of fourteen": ("direct", (1, 64, 14, 14), 256, 3),
    "direct, pointwise": ("direct", (1, 256, 7, 7), 512, 1),
}
MACHINES = ["haswell", "znver3", "skylake-avx512", "znver4"]  # LLVM unrolls loops for the second and the last
SPILL = re.compile(r"\s+vmov\w+\s.*%[yz]mm\d+.*\(%rsp\)|\s+vmov\w+\s.*\(%rsp\).*%[yz]mm\d+")


def assembly(case: str, target: tvm.target.Target) -> str:
    name, data, outputs, window = CASES[case]

    def chosen(choice: Choice) -> str:
        return name if any(option.name == name for option in choice.options) else choice.options[0].name

    def conv(data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return relax.op.nn.relu(relax.op.nn.conv2d(data, weight, padding=window // 2))

    mod = graph(conv, [data, (outputs, data[1], window, window)], 1)
    (kernel,) = [k for k in Lowering(target, chosen).kernels(mod) if "conv2d" in k.name]
    return compiled(schedule_kernel(kernel.func, target), target)


def compiled(func: tirx.PrimFunc, target: tvm.target.Target) -> str:
    """The assembly of a scheduled function."""
    with target:
        module = tvm.tirx.build(
            tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), target=target, pipeline=TIR_PIPELINE
        )
    return str(module.inspect_source("asm"))


def innermost_loops(text: str) -> list[list[str]]:
    """The lines of each loop without another in it."""
    lines = text.splitlines()
    labels = {found[1]: n for n, line in enumerate(lines) if (found := re.match(r"(\.LBB\w+):", line))}
    jumps = [(n, labels[found[1]]) for n, line in enumerate(lines)
             if (found := re.match(r"\s+j\w+\s+(\.LBB\w+)", line)) and found[1] in labels]  # fmt: skip
    back = [(begin, end) for end, begin in jumps if begin < end]
    inner = [(b, e) for b, e in back if not any((b, e) != (c, f) and b <= c and f <= e for c, f in back)]
    return [lines[begin : end + 1] for begin, end in inner]


@pytest.mark.parametrize("mcpu", MACHINES)
@pytest.mark.parametrize("case", CASES)
def test_no_step_goes_by_the_stack(case: str, mcpu: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1})
    check(assembly(case, target))


@pytest.mark.parametrize("mcpu", MACHINES)
def test_the_rate_that_kernels_are_held_against_is_of_registers_alone(mcpu: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1})
    check(compiled(peak_kernel(target), target))


def check(text: str) -> None:
    """The loop with most products does not go by the stack."""
    loops = innermost_loops(text)
    products = [sum("vfmadd" in line for line in loop) for loop in loops]
    assert max(products) >= 8
    for loop, count in zip(loops, products, strict=True):
        if count == max(products):
            assert not [line for line in loop if SPILL.match(line)]
