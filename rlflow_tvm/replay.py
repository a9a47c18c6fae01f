"""What a deployed build needs: repeating a plan and compiling, without measuring, environments or learning."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Choices, as_target, pipeline, vector_lanes
from rlflow_tvm.kernels.target import KINDS
from rlflow_tvm.passes import CATALOGUE, GraphState, Plan, RewriteRule, RuleSet, own_rules

if TYPE_CHECKING:
    from rlflow_tvm.cost import KernelDatabase, KernelTimer

log = logging.getLogger("rlflow_tvm")


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.ApplyPlan")
class ApplyPlan:
    """Repeat the rewrites of a plan: deterministic, without measuring, torch or dgl.

    The log is told where the plan is for processors with other vectors than the target has that TVM is compiling for:
    outputs are the same, but layouts are blocked for those. `rules`: those beside the catalogue that the plan was found
    with, or their file. PlanError at construction if the file is unusable, in the pass if the plan is for another
    module; RewriteError if `rules` are no file of proved ones.
    """

    def __init__(self, plan: Plan | str | Path, rules: str | Path | Iterable[RewriteRule] = ()) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        self.rules = own_rules(rules)

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=True)
        known = target is not None and target.kind.name in KINDS  # others have pipelines of their own
        if known and (lanes := vector_lanes(as_target(target))) != self.plan.lanes:
            log.warning(
                "the plan was found for processors with %d floats a vector, the target has %d: it computes the same, "
                "but a search for this target finds a faster graph",
                self.plan.lanes,
                lanes,
            )
        return replay(mod, self.plan, self.rules).bound()


def replay(mod: tvm.IRModule, plan: Plan, rules: Iterable[RewriteRule] = ()) -> GraphState:
    """The state after `plan`, of the catalogue's rules and of `rules`; PlanError if it is not for `mod`."""
    return GraphState.from_module(mod, RuleSet((*CATALOGUE, *rules), plan.lanes)).replay(plan)


def compile(
    mod: tvm.IRModule, target: Any = None, database: str | Path | None = None, rpc_key: str | None = None
) -> tvm.runtime.Executable:
    """`tvm.compile` with the package's pipeline: weight-only work done once, every kernel scheduled.

    `database`: a file of measured kernels, such as searches leave at `rlflow_tvm.cost.default_path()`. Where an
    operator has several implementations, the times found there decide, and kernels that were tuned with success have
    their tuned schedules; nothing is measured. `rpc_key`: take the times that were measured on RPC
    machines under this key, not those of this machine. Without `database` a heuristic decides; also where it holds no
    times for the target (they are kept by the number of cores too), of which the log is told. CostError where there is
    no such file, or it is no such database, or a GPU's times are asked for that is not here, by whose name they are
    kept.
    """
    target = as_target(target)
    if database is None:
        return tvm.compile(mod, target, relax_pipeline=pipeline(target))
    from rlflow_tvm.cost import KernelDatabase, KernelTimer, MeasuredChoice, RpcDevices, TunedSchedules

    if not Path(database).is_file():  # which opening it would make
        raise CostError(f"{database}: no such kernel database: run a search first, or give the path of one")
    if rpc_key is None and target.kind.name == "cuda" and not tvm.cuda().exist:
        raise CostError(
            f"{database}: which of its times are a GPU's cannot be told where that GPU is not, as they are kept by its "
            "name: compile where it is, leave out database, or give the rpc_key that they were measured under"
        )
    remote = None if rpc_key is None else RpcDevices("", 0, rpc_key)  # never asked
    with KernelDatabase(database) as known, KernelTimer(target, known, remote=remote) as timer:
        _warn_without_times(known, timer)
        choices = Choices(MeasuredChoice(timer, measure=False), TunedSchedules(timer))
        return tvm.compile(mod, target, relax_pipeline=pipeline(target, choices))


def _warn_without_times(database: KernelDatabase, timer: KernelTimer) -> None:
    """Tell the log where `database` has no times for what is compiled: nobody sees it by the module."""
    versions = {timer.version, timer.graph_version}
    targets = {held.target for held in database.holdings() if held.version in versions}
    if timer.target_key in targets:
        return
    held = f"it holds those for {' and '.join(sorted(targets))}" if targets else "it holds none of these kernels at all"
    log.warning(
        "%s holds no times for %s (%s): kernels are chosen by an estimate; compile with as many cores as the search "
        "had, under the same taskset or with num-cores in the target, or search again",
        database.path,
        timer.target_key,
        held,
    )
