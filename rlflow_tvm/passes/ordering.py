"""Relax's target-independent passes, and our families of rules, by name; orders of them as a pass of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import transform

from rlflow_tvm import ir
from rlflow_tvm.errors import PlanError, RewriteError, RlflowError
from rlflow_tvm.passes.family_pass import Family
from rlflow_tvm.passes.files import read_whole, write_whole
from rlflow_tvm.passes.mended import ForInference, OnConstants, ScalarsAsTensors, convert_layout
from rlflow_tvm.passes.rules import FAMILIES, TERMINATING_FAMILIES

log = logging.getLogger("rlflow_tvm")

FORMAT = 1


def _one_after_another(*passes: Callable[[], tvm.transform.Pass]) -> tvm.transform.Pass:
    return tvm.transform.Sequential([each() for each in passes])


PASSES: dict[str, Callable[[], tvm.transform.Pass]] = {
    "AdjustMatmulOrder": transform.AdjustMatmulOrder,
    "CanonicalizeBindings": transform.CanonicalizeBindings,
    "CombineParallelMatmul": transform.CombineParallelMatmul,
    "ComputePrimValue": transform.ComputePrimValue,
    "ConvertLayoutNCHW": partial(convert_layout, "NCHW", "OIHW"),
    "ConvertLayoutNHWC": partial(convert_layout, "NHWC", "OHWI"),
    "ConvertToDataflow": transform.ConvertToDataflow,
    "DeadCodeElimination": transform.DeadCodeElimination,
    "DecomposeOpsForInference": lambda: ForInference(transform.DecomposeOpsForInference()),
    "EliminateCommonSubexpr": transform.EliminateCommonSubexpr,
    "ExpandMatmulOfSum": transform.ExpandMatmulOfSum,
    "ExpandTupleArguments": transform.ExpandTupleArguments,
    "FoldBatchnormToConv2D": lambda: ForInference(
        _one_after_another(lambda: OnConstants(transform.FoldBatchnormToConv2D()), ScalarsAsTensors)
    ),
    "FoldConstant": transform.FoldConstant,
    # it leaves the functions that it fused behind, unused
    "FuseTransposeMatmul": partial(_one_after_another, transform.FuseTransposeMatmul, transform.DeadCodeElimination),
    "InlinePrivateFunctions": transform.InlinePrivateFunctions,
    "LambdaLift": transform.LambdaLift,
    "Normalize": transform.Normalize,
    "NormalizeGlobalVar": transform.NormalizeGlobalVar,
    "OptimizeLayoutTransform": transform.OptimizeLayoutTransform,
    "RealizeVDevice": transform.RealizeVDevice,
    "RemoveRedundantReshape": transform.RemoveRedundantReshape,
    "RemoveUnusedOutputs": transform.RemoveUnusedOutputs,
    "RemoveUnusedParameters": transform.RemoveUnusedParameters,
    "ReorderPermuteDimsAfterConcat": transform.ReorderPermuteDimsAfterConcat,
    "ReorderTakeAfterMatmul": transform.ReorderTakeAfterMatmul,
    "RewriteDataflowReshape": transform.RewriteDataflowReshape,
    "TopologicalSort": transform.TopologicalSort,
    **{f"rules:{name}": partial(Family, name) for name in FAMILIES if name not in TERMINATING_FAMILIES},
}
"""Name -> a pass that makes an equal Relax module of one.

Left out: what lowers (`LegalizeOps` and all that needs it), is of a target or device, or changes what `main` takes,
gives (`LiftTransformParams`, `Gradient`) or computes (`FastMathTransform`, `ToMixedPrecision`); and
`DecomposeOpsForTraining`, which takes a batch normalisation's moments from the batch.
"""

DOCUMENTED_ORDER = ("DecomposeOpsForInference", "CanonicalizeBindings", "FoldConstant")
"""What TVM's own pipelines do before and beside lowering (`relax.pipeline.static_shape_tuning_pipeline`, which holds
`zero_pipeline`): of their passes those that are in `PASSES`."""

CLEANING_ORDER = (
    "DecomposeOpsForInference",
    "CanonicalizeBindings",
    "FoldConstant",
    "EliminateCommonSubexpr",
    "RemoveRedundantReshape",
    "CanonicalizeBindings",
    "DeadCodeElimination",
)
"""A stronger default than TVM has: all of its clean-ups, each after what makes work for it."""


def apply_pass(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """`mod` (best in the working form, see `rlflow_tvm.ir`) after the pass.

    RewriteError if there is no such pass, if it fails, or if what it makes is not well-formed or is no graph any more
    (one dataflow block whose shapes are static).
    """
    if name not in PASSES:
        raise RewriteError(f"no pass is called {name!r}: there are {', '.join(PASSES)}")
    try:
        made = PASSES[name]()(mod)
        if tvm_ffi.structural_equal(made, mod):  # as mostly: there is nothing to check, which takes longer than a pass
            return mod
        relax.analysis.well_formed(made)
        ir.check_static(made["main"])
    except RlflowError as error:
        raise RewriteError(f"pass {name}: {error}") from error
    except Exception as error:  # TVM's passes raise whatever fits them, InternalError of C++ included
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise RewriteError(f"pass {name} fails: {told[-1]}") from error
    if _interface(made["main"]) != _interface(mod["main"]):
        raise RewriteError(f"pass {name} changes what main takes or gives")
    return made


def _interface(func: relax.Function) -> tuple[object, ...]:
    return ir.num_inputs(func), str(func.ret_ty), *((param.name, str(param.ty)) for param in func.params)


def applied(order: Sequence[str], mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` (bound or in the working form) after the passes, but for those that fail on it, which is logged."""
    start = ir.detach(mod)  # passes are quick where no weights are hashed and compared
    made = start.mod
    for name in order:
        try:
            made = apply_pass(made, name)
        except RewriteError as error:
            log.warning("%s; it is left out", error)
    return start.bind(made)


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.OrderedPasses")
class OrderedPasses:
    """Passes of `PASSES`, one after another, as one pass for any TVM pipeline. One that fails on a module is left out
    there, with a warning.

    PlanError for a name that is no pass's. `OrderedPasses.load(path)` reads what `save` wrote; PlanError names the file
    and what is wrong with it.
    """

    def __init__(self, order: Sequence[str]) -> None:
        unknown = [name for name in order if name not in PASSES]
        if unknown:
            raise PlanError(f"no pass is called {unknown[0]!r}: there are {', '.join(PASSES)}")
        self.order = tuple(order)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return applied(self.order, mod)

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically; PlanError where that cannot be."""
        write_whole(Path(path), FORMAT, {"passes": list(self.order)}, "pass order")


def _load(path: str | Path) -> OrderedPasses:
    """Read what `OrderedPasses.save` wrote; PlanError names the file and what is wrong with it."""
    order = read_whole(Path(path), FORMAT, "pass order", "train again").get("passes")
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise PlanError(f"{path}: damaged pass order file (passes is no list of texts)")
    try:
        return OrderedPasses(order)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


# the decorator makes a class that has the instance's methods alone
OrderedPasses.load = staticmethod(_load)  # type: ignore[attr-defined]
