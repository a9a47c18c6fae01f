"""The build pipeline: a Relax module with bound weights, down to what TVM's code generators take."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.ir import num_inputs

from .build import compile_kernels
from .choice import BY_SHAPE, Choices
from .extract import Lowered, Lowering
from .schedule import schedule_kernel
from .target import as_target, default_target

PIPELINE_NAME = "rlflow"


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
            final = finalize(bind_weights(lowered), chosen, choices)
            # for another kind of target `tvm.compile` divides the code between host and device itself
            return compile_kernels(final, chosen) if chosen.kind.name == "llvm" else final

    return run


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
    main = lowered.mod["main"]
    values = dict(lowered.weights)
    derived: dict[relax.Var, tvm.runtime.Tensor] = {}
    if lowered.weight_only is not None:
        params = lowered.weight_only["main"].params
        host = default_target()
        with host:
            executable = tvm.compile(finalize(lowered.weight_only, host), host, relax_pipeline=None)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        results = machine["main"](*(values[param.name] for param in params))
        # by position: two variables of a function may have the same name
        derived = dict(zip(main.params[-len(lowered.derived) :], results, strict=True))
    direct = {param: values[param.name] for param in main.params if param not in derived and param.name in values}
    bound = main.bind_params({**direct, **derived})
    mod = tvm.IRModule(dict(lowered.mod.functions_items()), attrs=lowered.mod.attrs)
    mod["main"] = bound
    return mod


def finalize(mod: tvm.IRModule, target: Target, choices: Choices = BY_SHAPE) -> tvm.IRModule:
    """Schedule every PrimFunc of a lowered module and lower its Relax part to virtual machine calls."""
    scheduled = {
        global_var: schedule_kernel(func, target, choices) if isinstance(func, tirx.PrimFunc) else func
        for global_var, func in mod.functions_items()
    }
    passes = [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    return tvm.transform.Sequential(passes)(tvm.IRModule(scheduled, attrs=mod.attrs))
