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
_LINE_BYTES, _PAGE_BYTES = 64, 4096
_KERNEL_ATTR = "compute_scope"  # TVM's, on what becomes a function of its own in machine code
_NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))
_LEAVE_ATTR = "disable_lower_builtin"  # TVM's: an allocation that has it becomes the code generator's own, on the stack


@tirx.transform.prim_func_pass(opt_level=0, name="rlflow.StackBuffers")
def stack_buffers(func: tirx.PrimFunc, _module: tvm.IRModule, _context: tvm.transform.PassContext) -> tirx.PrimFunc:
    """`func` (lowered, for the host) with its buffers of up to two kilobytes on the stack, aligned there."""

    def moved(alloc: tirx.AllocBuffer) -> tirx.AllocBuffer:
        if _bytes_on_stack(alloc) == 0:
            return alloc
        return tirx.AllocBuffer(alloc.buffer, {**dict(alloc.annotations), _LEAVE_ATTR: tirx.IntImm("bool", 1)})

    changes = [(tirx.AllocBuffer, moved), (tirx.For, _aligned_loop), (tirx.AttrStmt, _aligned_scope)]
    return func.with_body(tvm_ffi.structural_map(func.body, changes))


def _bytes_on_stack(alloc: tirx.AllocBuffer) -> int:
    """0 for a buffer that does not go there."""
    if not all(isinstance(extent, tirx.IntImm) for extent in alloc.buffer.shape):
        return 0
    size = math.prod(int(extent) for extent in alloc.buffer.shape) * tvm.DataType(str(alloc.buffer.dtype)).itemsize
    return size if size <= _STACK_BYTES else 0


def _on_stack(stmt: tirx.Stmt) -> list[tirx.AllocBuffer]:
    found: list[tirx.AllocBuffer] = []
    tvm_ffi.structural_walk(stmt, (tirx.AllocBuffer, found.append))
    return [alloc for alloc in found if _bytes_on_stack(alloc)]


def _is_parallel(loop: tirx.For) -> bool:
    return loop.kind == tirx.ForKind.PARALLEL


def _aligned_scope(scope: tirx.AttrStmt) -> tirx.AttrStmt:
    """The kernel itself, without the tests of its arguments, where it has buffers on its stack."""
    if scope.attr_key != _KERNEL_ATTR:
        return scope
    own = tvm_ffi.structural_map(scope.body, (tirx.For, lambda loop: _NOTHING if _is_parallel(loop) else loop))
    if not _on_stack(own):
        return scope
    return tirx.AttrStmt(scope.node, scope.attr_key, scope.value, _anchored(scope.body, own))


def _aligned_loop(loop: tirx.For) -> tirx.For:
    """A parallel loop, which is a function of its own in machine code with a stack of its own."""
    if not _is_parallel(loop):
        return loop
    body = _anchored(loop.body, loop.body)
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )


def _anchored(body: tirx.Stmt, own: tirx.Stmt) -> tirx.Stmt:
    """A function's body of which nothing on the stack lies across the end of a page, and no vector across two lines.

    LLVM aligns to sixteen bytes what has no alignment of its own, buffers of floats and vectors that find no register:
    where these lie in a page is the stack's chance, another one in each thread and each process. Where the end of one
    is in an inner loop's way, the kernel takes two to three times as long (a max pool with rows of 208 bytes at 3 of
    the 64 lines that its stack may begin with). Where something on the stack has to begin with a line, LLVM aligns the
    vectors too; where it has to begin with twice the floats' bytes, these cannot reach a page's end. Nothing but a
    prefetch uses it, as what is not used at all is dropped. `own`: the part of the body that has its buffers there.
    """
    plain = [alloc for alloc in _on_stack(own) if tvm.DataType(str(alloc.buffer.dtype)).lanes == 1]
    scalars = sum(map(_bytes_on_stack, plain))
    alignment = min(max(1 << (2 * scalars - 1).bit_length(), _LINE_BYTES), _PAGE_BYTES)
    anchor = tirx.decl_buffer((1,), f"float32x{alignment // 4}", name="anchor")
    use = tirx.call_intrin("void", "tirx.prefetch", tirx.address_of(anchor[0]), 0, 3, 1)
    return tirx.SeqStmt([tirx.AllocBuffer(anchor, {_LEAVE_ATTR: tirx.IntImm("bool", 1)}), tirx.Evaluate(use), body])


def _pipeline() -> tuple[tvm.transform.Pass, object, object]:
    lower, finalize_host, finalize_device = get_tir_pipeline("default")

    def finalize() -> tvm.transform.Pass:
        return tvm.transform.Sequential([stack_buffers, finalize_host()])

    return lower, finalize, finalize_device


register_tir_pipeline(TIR_PIPELINE, _pipeline)
