"""Comparing what searches found with the strongest unsearched graph, TVM's default build, ONNX Runtime and torch.

Three gains are kept apart. *Graph gain*, one for each search: the searched graph against the strongest unsearched one
(TVM's clean-up passes, with and without `ConvertLayout`), all compiled with the same kernels, none of them tuned.
*Kernel gain*: the same, unsearched graph by TVM's default pipeline against ours; *tuning gain*: the searched graph by
the schedule rules against the same with what tuning found (`--tune` of `optimize`). What ONNX Runtime gains by the
searched graph, exported, over the unsearched one, exported too, is a graph gain with its kernels, and stands for
itself: the file may hold what any import would fold, such as batch norms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.comparison_figures import (
    AGAINST,
    CONVERTED,
    EXPORT_UNSEARCHED,
    ONNXRUNTIME,
    ONNXRUNTIME_EXPORT,
    TORCH,
    TVM_DEFAULT,
    UNSEARCHED,
    Comparison,
    export_name,
    reference_of,
    searched_name,
    summary,
    tuned_name,
)
from rlflow_tvm.cost import Candidate, check_linker, export_library, measure_interleaved, scratch_folder
from rlflow_tvm.errors import CostError, FrontendError, RewriteError, UsageError
from rlflow_tvm.exporting import onnxruntime_run, reference_run
from rlflow_tvm.frontend import random_inputs, save_onnx, to_onnx, zoo
from rlflow_tvm.kernels import BY_SHAPE, TUNED_RULE, Choices, Lowering, explain, num_cores, pipeline, vector_lanes
from rlflow_tvm.kernels.target import is_of_this_machine
from rlflow_tvm.passes.mended import convert_layout
from rlflow_tvm.verify import run_executable

log = logging.getLogger("rlflow_tvm")

BY_DEFAULT = (TVM_DEFAULT, ONNXRUNTIME)
_TIMEOUT_SECS = 900.0  # for what a candidate is asked: a large model by TVM's default build takes minutes

Progress = Callable[[int, int, str], None]


def check(against: Sequence[str], target: tvm.target.Target, zoo_name: str | None) -> None:
    """What can be told before any work.

    Raises:
        UsageError: a name that is not in `AGAINST`, or twice there; torch.compile for a file; a target that is no CPU,
            or not this machine's kind of one.
        FrontendError: torch.compile for an evaluation model that is no torch module, or without what builds it.
        CostError: ONNX Runtime is needed and not installed, or there is no C++ compiler.
    """
    for name in against:
        if name not in AGAINST:
            raise UsageError(f"--against {name}: there are {', '.join(AGAINST)}")
        if against.count(name) > 1:
            raise UsageError(f"--against {name}: is given twice; name it once")
    if target.kind.name != "llvm":
        raise UsageError(f"--target {target.kind.name}: models are compared on CPUs; for GPUs use scripts/bench_gpu.py")
    if not is_of_this_machine(target):
        raise UsageError(
            f"--target {target}: models as a whole are timed on this machine, which cannot run code for that one: "
            "rlflow_tvm.optimize prices models by kernels measured there"
        )
    if TORCH in against:
        if zoo_name is None:
            raise UsageError(
                f"--against torch: an ONNX file has no torch module to compile; leave torch out, or compare one of "
                f"{', '.join(f'zoo:{name}' for name in zoo.TORCH_MODELS)}"
            )
        zoo.check_torch(zoo_name)
    if {ONNXRUNTIME, ONNXRUNTIME_EXPORT} & set(against) and find_spec("onnxruntime") is None:
        raise CostError("ONNX Runtime is not installed: pip install onnxruntime, or give --against tvm-default alone")
    check_linker("the modules to be timed")


def unsearched(mod: tvm.IRModule, lanes: int) -> dict[str, tvm.IRModule]:
    """What a user gets of `mod` without a search, by the candidates' names."""
    modules = {UNSEARCHED: cleaned(mod)}
    if _has_convolutions(mod):
        try:
            modules[CONVERTED] = converted_layout(mod, lanes)
        except (tvm.error.InternalError, RewriteError) as error:  # the first as for axes counted from the end
            reason = str(error).strip().splitlines()[-1]
            log.warning("TVM's ConvertLayout fails on this model (%s): it is not compared with", reason)
    return modules


def converted_layout(mod: tvm.IRModule, lanes: int) -> tvm.IRModule:
    """TVM's own blocked-layout pass over `mod`, with its clean-up passes: what a user gets without a search."""
    return cleaned(convert_layout(f"NCHW{lanes}c", f"OIHW{lanes}o")(mod))


def cleaned(mod: tvm.IRModule) -> tvm.IRModule:
    """TVM's clean-up passes."""
    passes = [
        relax.transform.CanonicalizeBindings(),
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(mod)


def compare(
    original: tvm.IRModule,
    searched: Mapping[str, tvm.IRModule],
    onnx_file: Path,
    target: tvm.target.Target,
    against: Sequence[str],
    *,
    zoo_name: str | None = None,
    choices: Choices = BY_SHAPE,
    rounds: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
    plain: Mapping[str, tvm.IRModule] | None = None,
    turn: AbstractContextManager[None] | None = None,
) -> Comparison:
    """Compile and time everything in interleaved rounds, and compare the outputs.

    Args:
        original: the imported model (bound form).
        searched: what each search made of it, by its label; at least one.
        onnx_file: the file all of it came from.
        target: what to compile for; its `num-cores` threads are used by every candidate.
        against: names in `AGAINST`.
        zoo_name: of the evaluation model that the file is, where it is one; the torch module is found by it.
        choices: decides for all our candidates where an operator has several implementations, or a kernel several
            schedules.
        plain: what `unsearched` makes of the model, where that was asked before.
        turn: entered for the rounds (`KernelTimer.in_turn`).

    Raises:
        UsageError, FrontendError, CostError: as `check`.
        FrontendError: a searched graph is to be exported, and ONNX cannot say an operator of it.
        CostError: a candidate cannot be built or run.
    """
    check(against, target, zoo_name)
    plain = unsearched(original, vector_lanes(target)) if plain is None else plain
    inputs = _inputs(original, onnx_file, seed)
    with scratch_folder() as folder:
        candidates = _built(Path(folder), original, searched, plain, target, TVM_DEFAULT in against, choices, progress)
        if ONNXRUNTIME in against:
            candidates[ONNXRUNTIME] = Candidate("onnx", onnx_file)
        if ONNXRUNTIME_EXPORT in against:
            exported = {EXPORT_UNSEARCHED: plain[UNSEARCHED]}
            exported |= {export_name(label): mod for label, mod in searched.items()}
            for number, (name, mod) in enumerate(exported.items()):
                path = Path(folder) / f"{number}.onnx"
                save_onnx(to_onnx(mod), path)
                candidates[name] = Candidate("onnx", path)
        if TORCH in against:
            assert zoo_name is not None, "check has seen to it"
            path = Path(folder) / "program.pt2"
            zoo.save_program(zoo_name, path)
            candidates[TORCH] = Candidate("torch", path)
        with turn or nullcontext():
            measured = measure_interleaved(
                candidates,
                inputs,
                rounds,
                threads=num_cores(target),
                timeout_secs=_TIMEOUT_SECS,
                on_progress=None if progress is None else lambda done, total: progress(done, total, "timing"),
            )
        return summary(measured, candidates, list(searched), inputs, _reference(candidates, original, onnx_file))


def _reference(
    candidates: Mapping[str, Candidate], original: tvm.IRModule, onnx_file: Path
) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """What the others' outputs are held against."""
    if reference_of(candidates) == ONNXRUNTIME:
        return onnxruntime_run(onnx_file, random_inputs(original, 0))
    path = candidates[UNSEARCHED].path
    return lambda arrays: run_executable(tvm.runtime.load_module(str(path)), arrays)


def _inputs(original: tvm.IRModule, onnx_file: Path, seed: int) -> list[np.ndarray]:
    """Random ones, of which ONNX Runtime, where it is there, makes something finite; the log is told where it does not,
    or cannot run the file, which nobody has asked for then: times are compared all the same."""
    try:
        run = reference_run(original, onnx_file, seed)
    except (FrontendError, RewriteError) as error:
        log.warning("%s", error)
        run = None
    return list((random_inputs(original, seed) if run is None else run.inputs()).values())


def _built(
    folder: Path,
    original: tvm.IRModule,
    searched: Mapping[str, tvm.IRModule],
    plain: Mapping[str, tvm.IRModule],
    target: tvm.target.Target,
    by_default: bool,
    choices: Choices,
    progress: Progress | None,
) -> dict[str, Candidate]:
    """What TVM compiles: each searched graph, the unsearched ones, and the original by TVM's default pipeline."""
    untuned = Choices(choices.implementation)
    jobs = {searched_name(label): (mod, untuned) for label, mod in searched.items()}
    jobs |= {name: (mod, untuned) for name, mod in plain.items()}
    for label, mod in searched.items():
        if any(kernel.rule == TUNED_RULE for kernel in explain(mod, target, choices)):
            jobs[tuned_name(label)] = mod, choices
    candidates = {}
    total = len(jobs) + by_default
    for number, (name, (mod, chosen)) in enumerate(jobs.items()):
        if progress is not None:
            progress(number, total, f"building {name}")
        if choices is not BY_SHAPE:
            # what has to be measured to choose an implementation is measured here, not while compiling is timed
            Lowering(target, choices.implementation).kernels(mod)
        candidates[name] = export_library(mod, target, folder / f"{number}.so", pipeline(target, chosen))
    if by_default:
        if progress is not None:
            progress(len(jobs), total, f"building {TVM_DEFAULT}")
        how = relax.get_pipeline("default_build")
        candidates[TVM_DEFAULT] = export_library(original, target, folder / "default.so", how)
    return candidates


def _has_convolutions(mod: tvm.IRModule) -> bool:
    found = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == "relax.nn.conv2d":
            found.append(expr)

    relax.analysis.post_order_visit(mod["main"], visit)
    return bool(found)
