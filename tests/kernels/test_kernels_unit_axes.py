"""A batch of one is no part of a kernel: the same key, the same instructions, the same numbers as without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from cuda_checks import TARGETS
from kernel_checks import TARGET, assert_close, graph, random_arrays, run
from tvm import relax, s_tir, te, tirx

from rlflow_tvm.kernels import RULE_ATTR, Kernel, extract_kernels, schedule_kernel
from rlflow_tvm.kernels.llvm.codegen import TIR_PIPELINE
from rlflow_tvm.kernels.tuned import apply_trace, workload
from rlflow_tvm.kernels.unit_axes import without_unit_axes

Build = Callable[..., relax.Expr]


def dense(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return relax.op.nn.gelu(relax.op.add(relax.op.matmul(x, w), b))


def attend(q: relax.Expr, k: relax.Expr) -> relax.Expr:
    return relax.op.matmul(q, relax.op.permute_dims(k, [*range(len(k.ty.shape) - 2), -1, -2]))


def norm(x: relax.Expr, scale: relax.Expr, shift: relax.Expr) -> relax.Expr:
    return relax.op.nn.layer_norm(x, scale, shift, [-1])


def sums(x: relax.Expr, y: relax.Expr) -> relax.Expr:
    return relax.op.add(relax.op.add(x, y), x)


GRAPHS: list[tuple[Build, list[tuple[int, ...]], int]] = [
    (dense, [(40, 24), (24, 72), (72,)], 2),
    (dense, [(40, 24), (24, 72), (72,)], 0),
    (attend, [(3, 20, 16), (3, 24, 16)], 0),
    (norm, [(30, 64), (64,), (64,)], 2),
    (sums, [(50, 33), (50, 33)], 0),
    (lambda x: relax.op.permute_dims(x, [*range(len(x.ty.shape) - 2), -1, -2]), [(33, 50)], 0),
    (lambda x, y: relax.op.concat([x, y], -2), [(4, 24), (5, 24)], 0),
    (lambda x: relax.op.sum(x, [-2]), [(30, 20, 40)], 0),
]

SOFTMAX = (lambda x: relax.op.nn.softmax(x, -1), [(6, 12, 50)], 0)
"""Its last block carries the number of its axis, so that it has another key (no rule takes a softmax's batch away)."""


def batched(shapes: Sequence[tuple[int, ...]], weights: int, units: int) -> list[tuple[int, ...]]:
    """Unit axes before the inputs, none before weights."""
    inputs = len(shapes) - weights
    return [(*[1] * units, *shape) if i < inputs else shape for i, shape in enumerate(shapes)]


def kernels(build: Build, shapes: Sequence[tuple[int, ...]], weights: int) -> list[Kernel]:
    return extract_kernels(graph(build, shapes, weights), TARGET)


def instructions(func: tirx.PrimFunc) -> list[str]:
    """The machine code of a scheduled kernel, without directives, labels and tests of its arguments."""
    alone = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        text = tvm.tirx.build(alone, target=TARGET, pipeline=TIR_PIPELINE).inspect_source("asm")
    return [line for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t.")]


@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize(("build", "shapes", "weights"), GRAPHS)
def test_it_is_the_same_kernel(build: Build, shapes: list[tuple[int, ...]], weights: int, units: int) -> None:
    plain, unit = kernels(build, shapes, weights), kernels(build, batched(shapes, weights, units), weights)
    assert [kernel.key for kernel in unit] == [kernel.key for kernel in plain]
    for mine, theirs in zip(unit, plain, strict=True):
        assert len(mine.func.params[-1].ty.shape) == len(theirs.func.params[-1].ty.shape) + units
        scheduled = schedule_kernel(mine.func, TARGET), schedule_kernel(theirs.func, TARGET)
        assert instructions(scheduled[0]) == instructions(scheduled[1])
        on_gpu = [schedule_kernel(func, TARGETS["sm_90"]).attrs[RULE_ATTR] for func in (mine.func, theirs.func)]
        assert on_gpu[0] == on_gpu[1]


@pytest.mark.parametrize(("build", "shapes", "weights"), [*GRAPHS, SOFTMAX])
def test_it_computes_the_same(build: Build, shapes: list[tuple[int, ...]], weights: int) -> None:
    arrays = random_arrays(shapes)
    inputs = len(shapes) - weights
    (expected,) = run(graph(build, shapes, weights), arrays, weights).values
    unit = [array[None] if i < inputs else array for i, array in enumerate(arrays)]
    (found,) = run(graph(build, batched(shapes, weights, 1), weights), unit, weights).values
    assert found.shape == (1, *expected.shape)
    assert np.array_equal(found[0], expected)


def test_both_in_one_model() -> None:
    """One key, but a function for each: a caller sees the axes."""

    def build(x: relax.Expr, y: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.Tuple([dense(x, w, b), dense(y, w, b)])

    shapes = [(1, 40, 24), (40, 24), (24, 72), (72,)]
    mod = graph(build, shapes, 2)
    assert [kernel.count for kernel in extract_kernels(mod, TARGET)] == [2]
    x, y, w, b = random_arrays(shapes)
    found = run(mod, [x, y, w, b], 2).values
    expected = [run(graph(dense, shapes[1:], 2), [each, w, b], 2).values[0] for each in (x[0], y)]
    assert [array.shape for array in found] == [(1, 40, 72), (40, 72)]
    assert np.array_equal(found[0][0], expected[0])
    assert np.array_equal(found[1], expected[1])


def test_another_batch_is_another_kernel() -> None:
    shapes = [(40, 24), (24, 72), (72,)]
    (one,), (two,) = kernels(dense, shapes, 2), kernels(dense, [(2, *shapes[0]), *shapes[1:]], 2)
    assert one.key != two.key


def test_one_row_is_no_batch() -> None:
    """A product of one row has one: the schedules of products know rows by their place."""
    (one,) = kernels(dense, [(1, 24), (24, 72), (72,)], 2)
    assert without_unit_axes(one.func).same_as(one.func)


def test_convolutions_keep_their_axes() -> None:
    """Their schedules know images, channels and lines by their place."""
    (conv,) = kernels(lambda x, w: relax.op.nn.conv2d(x, w, padding=1), [(1, 8, 10, 10), (8, 8, 3, 3)], 1)
    assert without_unit_axes(conv.func).same_as(conv.func)


def as_relax_makes(compute: Callable[[te.Tensor], te.Tensor]) -> tirx.PrimFunc:
    """What `compute` makes of (1, 8, 8), as a PrimFunc such as legalisation makes."""
    x = relax.Var("x", relax.TensorType((1, 8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit_te(compute, x, primfunc_name_hint="computed"))
    return builder.finalize()["computed"]


def plus_one(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda *i: x[i] + tirx.const(1, "float32"))


def test_what_a_call_is_given_stays_what_it_is() -> None:
    """The buffer itself, not what is loaded from it."""

    def compute(x: te.Tensor) -> te.Tensor:
        read, written = (tirx.decl_buffer(x.shape, "float32", name, layout=None) for name in ("read", "written"))
        call = te.extern(
            x.shape,
            [x],
            lambda ins, outs: tirx.call_packed("nothing", ins[0], outs[0]),
            dtype="float32",
            in_buffers=[read],
            out_buffers=[written],
        )
        return plus_one(call)

    func = as_relax_makes(compute)
    assert without_unit_axes(func).same_as(func)


def test_another_view_of_a_buffer_keeps_its_axes() -> None:
    func = as_relax_makes(plus_one)
    assert not without_unit_axes(func).same_as(func)
    view = tirx.decl_buffer((1, 8, 8), "float32", "view", layout=None)
    whole = tirx.BufferRegion(func.params[0], [tvm.ir.Range(0, extent) for extent in (1, 8, 8)])

    def viewed(block: s_tir.SBlock) -> s_tir.SBlock:
        matched = [] if block.name_hint == "root" else [s_tir.MatchBufferRegion(view, whole)]
        return s_tir.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, block.alloc_buffers,
            matched, block.annotations,
        )  # fmt: skip

    other = func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlock, viewed)))
    assert without_unit_axes(other).same_as(other)


@pytest.mark.parametrize("weights", [0, 1])
def test_products_of_no_rows(weights: int) -> None:
    shapes = [(2, 0, 8), (8, 16)]
    (found,) = run(graph(relax.op.matmul, shapes, weights), random_arrays(shapes), weights).values
    assert found.shape == (2, 0, 16)


def test_a_tuned_schedule_is_for_both() -> None:
    """What tuning found for one of two equal kernels, the other is built by too."""
    shapes = [(48, 32), (48, 32)]
    (plain,), (unit,) = kernels(sums, shapes, 0), kernels(sums, batched(shapes, 0, 1), 0)
    sch = s_tir.Schedule(workload(plain.func, TARGET))
    first, second = sch.get_sblock("block1"), sch.get_sblock("block2")
    sch.compute_inline(first)
    sch.reorder(*reversed(sch.get_loops(second)))
    trace = s_tir.schedule.Trace.as_json(sch.trace)
    x, y = random_arrays(shapes)
    for func, lead in ((plain.func, ()), (unit.func, (1,))):
        tuned = apply_trace(func, TARGET, trace)
        built = tvm.compile(tvm.IRModule({"main": tuned.with_attr("global_symbol", "main")}), target=TARGET)
        result = tvm.runtime.tensor(np.zeros((*lead, *x.shape), "float32"))
        built.jit()["main"](*(tvm.runtime.tensor(array.reshape(result.shape)) for array in (x, y)), result)
        assert_close(result.numpy().reshape(x.shape), x + y + x)
