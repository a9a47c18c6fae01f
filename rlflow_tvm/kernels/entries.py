"""The functions of a module that are called from outside: each is a graph of its own, `main` being one of them."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.errors import KernelError, UsageError

from .adopt import adopted
from .schedule import SCHEDULED_ATTR, symbolic_extents

_SYMBOL = "global_symbol"


def entry_modules(mod: tvm.IRModule) -> dict[str, tvm.IRModule]:
    """By name, `main` first: each Relax function that `mod` shows to the outside, as `main` of a module.

    Beside it is what else `mod` has. UsageError where there is no such function.
    """
    functions = {var.name_hint: func for var, func in mod.functions_items() if isinstance(func, relax.Function)}
    others = [name for name, func in functions.items() if name != "main" and _SYMBOL in func.attrs]
    if not others and "main" not in functions:
        raise UsageError(
            "the module has no function main, nor another Relax function that is public: rename the entry to main"
        )
    found = {"main": mod} if "main" in functions else {}
    for name in others:
        beside = {var: func for var, func in mod.functions_items() if var.name_hint not in ("main", name)}
        found[name] = tvm.IRModule(beside, attrs=mod.attrs)
        found[name]["main"] = functions[name].with_attr(_SYMBOL, "main")
    return found


def bystanders(mod: tvm.IRModule, target: Target) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc | relax.ExternFunc]:
    """The functions of `mod` that are no graphs, but can be called by their names.

    No schedule rule takes a PrimFunc of symbolic extents: it stays as it was written. KernelError where that is nothing
    a GPU can run.
    """
    found = {}
    for var, func in mod.functions_items():
        if isinstance(func, relax.ExternFunc):
            found[var] = func
        elif isinstance(func, tirx.PrimFunc) and _SYMBOL in func.attrs:
            kept = adopted(func)
            if symbolic_extents(func):
                kept = kept.with_attr(SCHEDULED_ATTR, True)
            if target.kind.name != "llvm" and SCHEDULED_ATTR in kept.attrs and SCHEDULED_ATTR not in func.attrs:
                raise KernelError(
                    f"the PrimFunc {var.name_hint} has symbolic extents or loops without blocks, and no threads of a "
                    "GPU: schedule it and mark it as tirx.is_scheduled, or make it private"
                )
            found[var] = kept
    return found
