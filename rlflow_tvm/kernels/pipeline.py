"""The build pipeline: a Relax module with bound weights, down to what TVM's code generators take."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.errors import RlflowError
from rlflow_tvm.ir import num_inputs

from .build import compile_kernels, copy_context, link_kernels
from .choice import BY_SHAPE, Choices
from .entries import bystanders, entry_modules
from .extract import KernelNames, Lowered, Lowering
from .schedule import schedule_kernel
from .target import as_target, current_target, default_target

PIPELINE_NAME = "rlflow"
CUDA_GRAPH = "relax.backend.use_cuda_graph"


def pipeline(target: Target | str | dict | None = None, choices: Choices = BY_SHAPE) -> tvm.transform.Pass:
    """The whole pipeline as one pass, for `tvm.compile(mod, target, relax_pipeline=pipeline(target))`.

    `mod["main"]` has static shapes and its weights bound as constants (or given as parameters: then all of them are
    inputs), and so has every other Relax function that is an entry of `mod` (not private): all of them are compiled,
    equal kernels once. Other functions and the attributes of `mod` are kept. Work on weights alone is done here, once,
    on this machine. `choices` decides where an operator has several implementations, or a kernel several schedules; the
    default looks at shapes alone. UsageError for a target without schedule rules and for a function that is no graph,
    KernelError for an operator that cannot be lowered and for shapes that are not known.
    """
    fixed = None if target is None else as_target(target)

    @tvm.transform.module_pass(opt_level=0, name="rlflow.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = fixed or current_target()
        with chosen:
            beside = tvm.IRModule(bystanders(mod, chosen), attrs=mod.attrs)
            parts = _parts(mod, beside, Lowering(chosen, choices.implementation))
            if chosen.kind.name == "llvm":
                return _compiled(parts, beside, chosen, choices)
            # for another kind of target `tvm.compile` divides the code between host and device itself
            return finalize(_joined(map(bind_weights, parts), beside), chosen, choices)

    return run


def _parts(mod: tvm.IRModule, beside: tvm.IRModule, lowering: Lowering) -> list[Lowered]:
    """The graphs of `mod`, lowered; their kernels have names that none in `mod` or `beside` has."""
    entries = entry_modules(mod)
    names = KernelNames([*entries, *(var.name_hint for var in beside.get_global_vars())])
    parts = []
    for entry, alone in entries.items():
        try:
            parts.append(lowering.lower(_all_inputs(alone), entry, names))
        except RlflowError as error:
            if entry == "main":
                raise
            raise type(error)(f"function {entry}, as the main of a module of its own: {error}") from error
    return parts


def _joined(mods: Iterable[tvm.IRModule], beside: tvm.IRModule) -> tvm.IRModule:
    """The functions of `mods` and `beside`, with the attributes of `beside`, which are those of the module compiled."""
    functions = {var: func for mod in (*mods, beside) for var, func in mod.functions_items()}
    return tvm.IRModule(functions, attrs=beside.attrs)


def _compiled(parts: list[Lowered], beside: tvm.IRModule, target: Target, choices: Choices) -> tvm.IRModule:
    """The module with its kernels compiled; the weights are worked on while they are."""
    parts = [replace(part, mod=relax.transform.RewriteDataflowReshape()(part.mod)) for part in parts]
    context = copy_context(tvm.transform.PassContext.current(), {})

    def weights() -> list[dict[relax.Var, tvm.runtime.Tensor]]:
        with context:
            return [_derived(part) for part in parts]

    with ThreadPoolExecutor(1) as pool:
        derived = pool.submit(weights)
        whole = _joined((part.mod for part in parts), beside)
        libraries = compile_kernels(whole, target, lambda func: schedule_kernel(func, target, choices))
        mod = _joined(map(_bind, parts, derived.result()), beside)
    return link_kernels(_to_virtual_machine(mod, target), libraries)


def _all_inputs(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with every parameter of `main` an input: what has no value now cannot be worked on now."""
    main = mod["main"]
    if num_inputs(main) == len(main.params):
        return mod
    out = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    out["main"] = main.with_attr("num_input", len(main.params))
    return out


def bind_weights(lowered: Lowered) -> tvm.IRModule:
    """`lowered.mod` with its weights as constants, those computed from other weights being computed now."""
    return _bind(lowered, _derived(lowered))


def _derived(lowered: Lowered) -> dict[relax.Var, tvm.runtime.Tensor]:
    """The parameters of `lowered.mod` that are computed from weights, and their values."""
    if lowered.weight_only is None:
        return {}
    params = lowered.weight_only["main"].params
    host = default_target()
    with host:
        executable = tvm.compile(finalize(lowered.weight_only, host), host, relax_pipeline=None)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    results = machine["main"](*(lowered.weights[param.name] for param in params))
    # by position: two variables of a function may have the same name
    return dict(zip(lowered.function.params[-len(lowered.derived) :], results, strict=True))


def _bind(lowered: Lowered, derived: dict[relax.Var, tvm.runtime.Tensor]) -> tvm.IRModule:
    main, values = lowered.function, lowered.weights
    direct = {param: values[param.name] for param in main.params if param not in derived and param.name in values}
    mod = tvm.IRModule(dict(lowered.mod.functions_items()), attrs=lowered.mod.attrs)
    mod[lowered.entry] = main.bind_params({**direct, **derived})
    return mod


def finalize(mod: tvm.IRModule, target: Target, choices: Choices = BY_SHAPE) -> tvm.IRModule:
    """Schedule every PrimFunc of a lowered module and lower its Relax part to virtual machine calls."""
    scheduled = {
        global_var: schedule_kernel(func, target, choices) if isinstance(func, tirx.PrimFunc) else func
        for global_var, func in mod.functions_items()
    }
    plain = tvm.IRModule(scheduled, attrs=mod.attrs)
    return _to_virtual_machine(relax.transform.RewriteDataflowReshape()(plain), target)


@tvm.transform.module_pass(opt_level=0, name="rlflow.cuda_graphs")
def _cuda_graphs(mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
    """The launches between inputs and outputs as CUDA graphs, 2 to 15 % of a model's time on an H100.

    TVM's option `CUDA_GRAPH`, which turns this on in TVM's own pipelines, turns it off here where it is False.
    """
    with copy_context(context, {CUDA_GRAPH: context.config.get(CUDA_GRAPH, True)}):
        return relax.transform.RewriteCUDAGraph()(mod)


def _to_virtual_machine(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    passes = [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        *([_cuda_graphs] if target.kind.name == "cuda" else []),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    return tvm.transform.Sequential(passes)(mod)
