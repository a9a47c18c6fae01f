"""From scheduled PrimFuncs to machine code: TVM's own lowering, with the sums of register tiles on an aligned stack.

TVM takes every buffer of a kilobyte and more from its pool of workspaces, and the sums of most register tiles are
larger: two calls a tile, a few hundred cycles, where a tile takes a few thousand.
"""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.compilation_pipeline import get_tir_pipeline, register_tir_pipeline

TIR_PIPELINE = "rlflow_llvm"
_STACK_BYTES = 2048  # the sums of a register tile; larger buffers want the alignment that only the pool gives
_LINE = "float32x16"  # of 64 bytes: the largest vector there is
_LEAVE_ATTR = "disable_lower_builtin"  # TVM's: an allocation that has it becomes the code generator's own, on the stack


@tirx.transform.prim_func_pass(opt_level=0, name="rlflow.StackBuffers")
def stack_buffers(func: tirx.PrimFunc, _module: tvm.IRModule, _context: tvm.transform.PassContext) -> tirx.PrimFunc:
    """`func` (lowered, for the host) with its buffers of up to two kilobytes on the stack, vectors aligned there."""

    def moved(alloc: tirx.AllocBuffer) -> tirx.AllocBuffer:
        buffer = alloc.buffer
        if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            return alloc
        size = math.prod(int(extent) for extent in buffer.shape) * tvm.DataType(str(buffer.dtype)).itemsize
        if size > _STACK_BYTES:
            return alloc
        return tirx.AllocBuffer(buffer, {**dict(alloc.annotations), _LEAVE_ATTR: tirx.IntImm("bool", 1)})

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.AllocBuffer, moved), (tirx.For, _on_lines)]))


def _on_lines(loop: tirx.For) -> tirx.For:
    """A parallel loop with a cache line on its stack.

    LLVM keeps vectors that find no register on a stack that is aligned to sixteen bytes, across two lines or two pages,
    as it happens: one such vector in the inner loop can treble a kernel's time in one thread and cost nothing in
    another. Where something on the stack has to begin with a line, LLVM aligns the others too. Nothing but a prefetch
    uses it, as what is not used at all is dropped.
    """
    if loop.kind != tirx.ForKind.PARALLEL:
        return loop
    line = tirx.decl_buffer((1,), _LINE, name="line")
    use = tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(line[0]), 0, 3, 1)
    body = tirx.SeqStmt([tirx.AllocBuffer(line, {_LEAVE_ATTR: tirx.IntImm("bool", 1)}), tirx.Evaluate(use), loop.body])
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )


def _pipeline() -> tuple[tvm.transform.Pass, object, object]:
    lower, finalize_host, finalize_device = get_tir_pipeline("default")

    def finalize() -> tvm.transform.Pass:
        return tvm.transform.Sequential([stack_buffers, finalize_host()])

    return lower, finalize, finalize_device


register_tir_pipeline(TIR_PIPELINE, _pipeline)
