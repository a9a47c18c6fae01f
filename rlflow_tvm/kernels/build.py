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

from .llvm.codegen import TIR_PIPELINE
from .schedule import SCHEDULED_ATTR
from .split import all_bindings, variables_of
from .target import usable_processors

_EXTERNAL_MODS = "external_mods"  # attribute in which `tvm.compile` looks for compiled code to link
_NO_TESTS = "tirx.disable_assert"
_NOTHING = "rlflow_nothing"


def tir_pipeline(target: Target) -> str:
    """The name of TVM's pipeline from scheduled PrimFuncs to code for `target`."""
    return TIR_PIPELINE if target.kind.name == "llvm" else "default"


def compile_kernels(mod: tvm.IRModule, target: Target, threads: int | None = None) -> tvm.IRModule:
    """`mod` (lowered to virtual machine calls) with its PrimFuncs compiled and linked to it.

    One that does nothing takes their place: `tvm.compile` makes a C source file where it finds none, and needs a C
    compiler then. Kernels that read no argument of `main` are compiled without TVM's tests of shape, type and strides:
    what they are given is what the module has allocated itself, and the tests are half of the code of a small kernel.
    `threads`: as many as there are processors usable here, if not given. The configuration of the current `PassContext`
    holds in all of them.
    """
    threads = usable_processors() if threads is None else threads
    funcs = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    if not funcs:
        return mod
    variables = list(funcs)
    tested = called_with_arguments(mod["main"])
    context = tvm.transform.PassContext.current()

    def build(part: list[int]) -> list[tvm.runtime.Module]:
        modules = []
        for untested in (False, True):
            chosen = [variables[i] for i in part if (variables[i] in tested) != untested]
            if chosen:
                with _copy(context, {_NO_TESTS: True} if untested else {}):
                    kernels = tvm.IRModule({var: funcs[var] for var in chosen})
                    modules.append(tvm.tirx.build(kernels, target=target, pipeline=TIR_PIPELINE))
        return modules

    parts = deal([_size(funcs[var]) for var in variables], threads)
    with ThreadPoolExecutor(len(parts)) as pool:
        built = [module for modules in pool.map(build, parts) for module in modules]
    linked = {
        var: relax.ExternFunc(str(func.attrs["global_symbol"])) if var in funcs else func
        for var, func in mod.functions_items()
    }
    linked[tvm.ir.GlobalVar(_NOTHING)] = _nothing()
    known = list(mod.attrs[_EXTERNAL_MODS]) if mod.attrs and _EXTERNAL_MODS in mod.attrs else []
    return tvm.IRModule(linked, attrs=mod.attrs).with_attr(_EXTERNAL_MODS, [*known, *built])


def _nothing() -> tirx.PrimFunc:
    func = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", 0)))
    return func.with_attrs({"global_symbol": _NOTHING, SCHEDULED_ATTR: True})


def called_with_arguments(main: relax.Function) -> set[tvm.ir.GlobalVar]:
    """The functions that `main` calls with its own parameters, or with what anything but a function makes of them."""
    given: set[relax.Expr] = set(main.params)
    called: set[tvm.ir.GlobalVar] = set()
    for binding in all_bindings(main):
        if not any(var in given for var in variables_of(binding.value)):
            continue
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.GlobalVar):
            called.add(binding.value.op)
        else:
            given.add(binding.var)
    return called


def _copy(context: tvm.transform.PassContext, config: dict[str, object]) -> tvm.transform.PassContext:
    """`context` for another thread, with more configuration and without instruments, which belong to its own."""
    return tvm.transform.PassContext(
        opt_level=context.opt_level,
        required_pass=list(context.required_pass),
        disabled_pass=list(context.disabled_pass),
        config={**dict(context.config), **config},
    )


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
