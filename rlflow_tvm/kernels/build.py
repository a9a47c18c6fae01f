"""Code generation of a module's PrimFuncs in several threads, which TVM does in one.

Most of a build's time goes into LLVM, kernel by kernel. TVM's lowering and LLVM run outside Python's lock, so threads
share the work: the kernels are dealt out into modules of about equal size, and each thread compiles one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import tvm
from tvm import relax, s_tir, tirx
from tvm.target import Target

from .target import usable_processors

_EXTERNAL_MODS = "external_mods"  # attribute in which `tvm.compile` looks for compiled code to link
_LEAST = 2  # kernels for which a thread is worth starting


def compile_kernels(mod: tvm.IRModule, target: Target, threads: int | None = None) -> tvm.IRModule:
    """`mod` with its PrimFuncs compiled and linked to it, all but the smallest one, which `tvm.compile` still sees.

    (It makes a C source file where it finds none, and needs a C compiler then.) `threads`: as many as there are
    processors usable here, if not given. The configuration of the current `PassContext` holds in all of them.
    """
    threads = usable_processors() if threads is None else threads
    funcs = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    parts = deal([_size(func) for func in funcs.values()], min(threads, len(funcs) // _LEAST))
    if len(parts) < 2:
        return mod
    variables = list(funcs)
    left = min(variables, key=lambda var: (_size(funcs[var]), var.name_hint))
    modules = [
        tvm.IRModule({variables[i]: funcs[variables[i]] for i in part if not variables[i].same_as(left)})
        for part in parts
    ]
    outer = tvm.transform.PassContext.current()

    def build(part: tvm.IRModule) -> tvm.runtime.Module:
        inner = tvm.transform.PassContext(
            opt_level=outer.opt_level,
            required_pass=list(outer.required_pass),
            disabled_pass=list(outer.disabled_pass),
            config=dict(outer.config),
        )
        with inner:
            return tvm.tirx.build(part, target=target, pipeline="default")

    with ThreadPoolExecutor(len(modules)) as pool:
        built = list(pool.map(build, modules))
    linked = {
        var: relax.ExternFunc(str(func.attrs["global_symbol"])) if var in funcs and not var.same_as(left) else func
        for var, func in mod.functions_items()
    }
    known = list(mod.attrs[_EXTERNAL_MODS]) if mod.attrs and _EXTERNAL_MODS in mod.attrs else []
    return tvm.IRModule(linked, attrs=mod.attrs).with_attr(_EXTERNAL_MODS, [*known, *built])


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The positions in `sizes` in at most `parts` groups of about equal sum: the greatest first, to the least group."""
    groups: list[list[int]] = [[] for _ in range(max(1, parts))]
    sums = [0] * len(groups)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = sums.index(min(sums))
        groups[least].append(i)
        sums[least] += sizes[i]
    return [sorted(group) for group in groups if group]


def _size(func: tirx.PrimFunc) -> int:
    """Statements that code is generated for, about: each store as often as the unrolled loops around it repeat it."""
    return _statements(func.body)


def _statements(stmt: tirx.stmt.Stmt) -> int:
    if isinstance(stmt, tirx.For):
        unrolled = stmt.kind == tirx.ForKind.UNROLLED and isinstance(stmt.extent, tirx.IntImm)
        return (int(stmt.extent) if unrolled else 1) * _statements(stmt.body)
    if isinstance(stmt, tirx.SeqStmt):
        return sum(_statements(child) for child in stmt.seq)
    if isinstance(stmt, tirx.IfThenElse):
        return _statements(stmt.then_case) + (0 if stmt.else_case is None else _statements(stmt.else_case))
    if isinstance(stmt, s_tir.SBlockRealize):
        return _statements(stmt.block.body) + (0 if stmt.block.init is None else _statements(stmt.block.init))
    return 1
