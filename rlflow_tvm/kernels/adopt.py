"""PrimFuncs that a module brings along, in the form that fusion and scheduling take."""

from __future__ import annotations

import tvm
from tvm import relax, s_tir, tirx

from .loops import is_plain_buffer
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
    if not all(is_plain_buffer(param.ty) for param in func.params if isinstance(param.ty, tirx.BufferType)):
        return func.with_attr(_PATTERN, OPAQUE)
    return relax.transform.AnnotateTIROpPattern()(tvm.IRModule({"func": func}))["func"]
