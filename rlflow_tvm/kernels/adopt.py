"""PrimFuncs that a module brings along, in the form that fusion and scheduling take."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from .partition import OPAQUE
from .schedule import SCHEDULED_ATTR

_PATTERN = "op_pattern"
_SYMBOL = "global_symbol"


def adopted(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with its kind for fusion (`op_pattern`), and without a symbol: as a kernel it is called by another name.

    Loops without blocks are what a schedule can get no hold of: they stay as they are, scheduled by their writer. They
    get a root block, without which TVM's passes fail on them.
    """
    if _SYMBOL in func.attrs:
        func = func.without_attr(_SYMBOL)
    if not isinstance(func.body, s_tir.SBlockRealize):
        root = s_tir.SBlock([], [], [], "root", func.body)
        func = func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), root)).with_attr(SCHEDULED_ATTR, True)
    if SCHEDULED_ATTR in func.attrs:  # nothing fuses with it
        return func
    if not all(_is_plain(param.ty) for param in func.params):
        return func.with_attr(_PATTERN, OPAQUE)
    return relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"func": func}))["func"]


def _is_plain(ty: tvm.ir.Type) -> bool:
    """Whether a parameter's type is what Relax makes of a tensor's: `FuseTIR` joins no other buffers.

    TVMScript's have extents of 32 bits where the writer did not ask for 64, or a layout.
    """
    if not isinstance(ty, tirx.BufferType):
        return True
    shape = [tirx.IntImm("int64", int(e)) if isinstance(e, tirx.IntImm) else e for e in ty.shape]
    return tvm_ffi.structural_equal(ty, tirx.decl_buffer(shape, ty.dtype, layout=None).ty)
