"""The build pipeline: a Relax module with bound weights, down to what TVM's code generators take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.ir import num_inputs

from .build import compile_kernels, copy_context, link_kernels
from .choice import BY_SHAPE, Choices
from .extract import Lowered, Lowering
from .schedule import schedule_kernel
from .target import as_target, default_target

PIPELINE_NAME = "rlflow"
CUDA_GRAPH = "relax.backend.use_cuda_graph"


def pipeline(target: Target | str | dict | None = None, choices: Choices = BY_SHAPE) -> tvm.transform.Pass:
    """The whole pipeline as one pass, for `tvm.compile(mod, target, relax_pipeline=pipeline(target))`.

    `mod["main"]` has static shapes and its weights bound as constants (or given as parameters: then all of them are
    inputs). Work on weights alone is done here, once, on this machine. `choices` decides where an operator has several
    implementations, or a kernel several schedules; the default looks at shapes alone. UsageError for a target without
    schedule rules, KernelError for an operator that cannot be lowered.
    """
    fixed = None if target is None else as_target(target)

    @tvm.transform.module_pass(opt_level=0, name="rlflow.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = fixed or Target.current(allow_none=True)
        chosen = default_target() if chosen is None else as_target(chosen)
        with chosen:
            lowered = Lowering(chosen, choices.implementation).lower(_all_inputs(mod))
            if chosen.kind.name == "llvm":
                return _compiled(lowered, chosen, choices)
            # for another kind of target `tvm.compile` divides the code between host and device itself
            return finalize(bind_weights(lowered), chosen, choices)

    return run


def _compiled(lowered: Lowered, target: Target, choices: Choices) -> tvm.IRModule:
    """The module with its kernels compiled; the weights are worked on while they are."""
    lowered = replace(lowered, mod=relax.transform.RewriteDataflowReshape()(lowered.mod))
    context = copy_context(tvm.transform.PassContext.current(), {})

    def weights() -> dict[relax.Var, tvm.runtime.Tensor]:
        with context:
            return _derived(lowered)

    with ThreadPoolExecutor(1) as pool:
        derived = pool.submit(weights)
        libraries = compile_kernels(lowered.mod, target, lambda func: schedule_kernel(func, target, choices))
        mod = _bind(lowered, derived.result())
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
    return dict(zip(lowered.mod["main"].params[-len(lowered.derived) :], results, strict=True))


def _bind(lowered: Lowered, derived: dict[relax.Var, tvm.runtime.Tensor]) -> tvm.IRModule:
    main, values = lowered.mod["main"], lowered.weights
    direct = {param: values[param.name] for param in main.params if param not in derived and param.name in values}
    mod = tvm.IRModule(dict(lowered.mod.functions_items()), attrs=lowered.mod.attrs)
    mod["main"] = main.bind_params({**direct, **derived})
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
