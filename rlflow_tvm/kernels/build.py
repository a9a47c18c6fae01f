"""Code generation of a module's PrimFuncs in several threads, which TVM does in one.

Most of a build's time goes into LLVM, kernel by kernel. TVM's lowering and LLVM run outside Python's lock, so threads
share the work: while kernels are being scheduled, which is Python's, those before them are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import tvm
from tvm import relax, s_tir, tirx
from tvm.target import Target

from rlflow_tvm.dataflow import all_bindings, variables_of
from rlflow_tvm.ir import CALL_IN_PLACE, num_inputs
from rlflow_tvm.processors import usable_processors

from .llvm.codegen import TIR_PIPELINE
from .schedule import SCHEDULED_ATTR

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_CALL_IN_PLACE = tvm.ir.Op.get(CALL_IN_PLACE)
_PACKED = tuple(tvm.ir.Op.get(f"relax.call_{how}_packed") for how in ("pure", "inplace"))
"""Calls whose result is a tensor of the function's own."""
_EXTERNAL_MODS = "external_mods"  # attribute in which `tvm.compile` looks for compiled code to link
_NO_TESTS = "tirx.disable_assert"
_NOTHING = "rlflow_nothing"
_PART = 600  # statements that are compiled together: a third of a second, so that no thread waits long for another


def tir_pipeline(target: Target) -> str:
    """The name of TVM's pipeline from scheduled PrimFuncs to code for `target`."""
    return TIR_PIPELINE if target.kind.name == "llvm" else "default"


def compile_kernels(
    mod: tvm.IRModule,
    target: Target,
    schedule: Callable[[tirx.PrimFunc], tirx.PrimFunc],
    threads: int | None = None,
    part: int = _PART,
) -> list[tvm.runtime.Module]:
    """The PrimFuncs of `mod` (lowered) scheduled and compiled, each under its name in `mod`.

    Kernels that read no input of a Relax function are compiled without TVM's tests of shape, type and strides: what
    they are given is what the module has allocated itself, and the tests are half of the code of a small kernel.
    `threads`: as many as there are processors usable here, if not given; `part`: statements that a thread compiles at a
    time. The configuration of the current `PassContext` holds in all of them.
    """
    tested = _called_from_outside(mod)
    context = tvm.transform.PassContext.current()

    def build(funcs: dict[tvm.ir.GlobalVar, tirx.PrimFunc], config: dict[str, object]) -> tvm.runtime.Module:
        with copy_context(context, config):
            return tvm.tirx.build(tvm.IRModule(funcs), target=target, pipeline=TIR_PIPELINE)

    def scheduled(with_tests: bool) -> Iterator[tuple[tvm.ir.GlobalVar, tirx.PrimFunc]]:
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and (var in tested) == with_tests:
                yield var, schedule(func.with_attr("global_symbol", var.name_hint))

    with ThreadPoolExecutor(usable_processors() if threads is None else threads) as pool:
        built = [pool.submit(build, some, {}) for some in _parts(scheduled(True), part)]
        built += [pool.submit(build, some, {_NO_TESTS: True}) for some in _parts(scheduled(False), part)]
        return [future.result() for future in built]


def _parts(
    funcs: Iterator[tuple[tvm.ir.GlobalVar, tirx.PrimFunc]], part: int
) -> Iterator[dict[tvm.ir.GlobalVar, tirx.PrimFunc]]:
    """`funcs` in order, in groups of at least `part` statements; the last one may have fewer."""
    group: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    size = 0
    for var, func in funcs:
        group[var] = func
        size += _statements(func.body)
        if size >= part:
            yield group
            group, size = {}, 0
    if group:
        yield group


def link_kernels(mod: tvm.IRModule, libraries: list[tvm.runtime.Module]) -> tvm.IRModule:
    """`mod` (lowered to virtual machine calls) with compiled code in place of its PrimFuncs.

    One that does nothing stays: `tvm.compile` makes a C source file where it finds none, and needs a C compiler then.
    """
    linked = {
        var: relax.ExternFunc(var.name_hint) if isinstance(func, tirx.PrimFunc) else func
        for var, func in mod.functions_items()
    }
    linked[tvm.ir.GlobalVar(_NOTHING)] = _nothing()
    known = list(mod.attrs[_EXTERNAL_MODS]) if mod.attrs and _EXTERNAL_MODS in mod.attrs else []
    return tvm.IRModule(linked, attrs=mod.attrs).with_attr(_EXTERNAL_MODS, [*known, *libraries])


def _nothing() -> tirx.PrimFunc:
    func = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", 0)))
    return func.with_attrs({"global_symbol": _NOTHING, SCHEDULED_ATTR: True})


def _called_from_outside(mod: tvm.IRModule) -> set[tvm.ir.GlobalVar]:
    """The PrimFuncs of `mod` that get what comes from outside, or that its Relax functions do not call themselves."""
    graphs = [func for func in mod.functions.values() if isinstance(func, relax.Function)]
    inside = {var for graph in graphs for var in relax.analysis.all_global_vars(graph)}
    outside = {var for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc) and var not in inside}
    return outside.union(*map(called_with_inputs, graphs))


def called_with_inputs(main: relax.Function) -> set[tvm.ir.GlobalVar]:
    """The PrimFuncs that `main` calls with its own inputs, with what anything but a PrimFunc makes of them, or with
    what a packed function hands out, of whose shape nobody knows."""
    given: set[relax.Expr] = set(main.params[: num_inputs(main)])
    called: set[tvm.ir.GlobalVar] = set()
    for binding in all_bindings(main):
        value = binding.value
        op = value.op if isinstance(value, relax.Call) else None
        if op in _PACKED or isinstance(op, relax.ExternFunc):
            given.add(binding.var)
        if not any(var in given for var in variables_of(value)):
            continue
        if op in (_CALL_TIR, _CALL_IN_PLACE):
            called.add(value.args[0])
        if op != _CALL_TIR:  # a result written in place is an input again
            given.add(binding.var)
    return called


def copy_context(context: tvm.transform.PassContext, config: dict[str, object]) -> tvm.transform.PassContext:
    """`context` for another thread, with more configuration and without instruments, which belong to its own."""
    return tvm.transform.PassContext(
        opt_level=context.opt_level,
        required_pass=list(context.required_pass),
        disabled_pass=list(context.disabled_pass),
        config={**dict(context.config), **config},
    )


def _statements(stmt: tirx.stmt.Stmt) -> int:
    """Statements that code is generated for, about: each store as often as the unrolled loops around it repeat it."""
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
