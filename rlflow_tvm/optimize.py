"""`python -m rlflow_tvm.optimize`: search for a faster equal graph, save the plan, write it as an ONNX model
or a compiled library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflow_tvm import cli

if TYPE_CHECKING:
    from rlflow_tvm.cost import CostModel, Ratio, Tuned
    from rlflow_tvm.passes import GraphState, Plan
    from rlflow_tvm.search import SearchResult


log = logging.getLogger("rlflow_tvm")


@cli.reports_errors
def main(
    model: Annotated[str, typer.Argument(help="An ONNX file, maybe with @NAME=1,3,224,224 behind, or zoo:NAME.")],
    search: Annotated[
        str | None, typer.Option(help=cli.SEARCH_HELP, show_default=f"{cli.DEFAULT_SEARCH}, without --agent")
    ] = None,
    agent: Annotated[Path | None, typer.Option(help="A trained agent's checkpoint, used in place of --search.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Write the plan to this JSON file (else it is kept beside the database).")
    ] = None,
    onnx: Annotated[Path | None, typer.Option(help="Write the optimised model to this ONNX file.")] = None,
    library: Annotated[
        Path | None, typer.Option(help="Compile the optimised model into this shared library, for TVM's runtime alone.")
    ] = None,
    target: Annotated[str, typer.Option(help=cli.TARGET_HELP)] = "llvm",
    rpc: cli.RpcOption = None,
    rpc_key: cli.RpcKeyOption = None,
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    predict: cli.PredictOption = 0.0,
    tune: Annotated[
        int,
        typer.Option(min=0, help="Then try so many MetaSchedule schedules (16 or more) for the heaviest kernels."),
    ] = 0,
    budget: cli.BudgetOption = None,
    rules: cli.RulesOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Find substitutions that make MODEL faster, check that its outputs stay the same, and save them as a plan
    or the whole as an ONNX model or a compiled library."""
    name, shapes = cli.name_and_shapes(model, shape or [])
    cli.check_writable(plan, onnx, library, json, inputs=[Path(name), agent, rules])
    tvm_target, remote = cli.parse_target(target), cli.parse_rpc(rpc, rpc_key)
    from rlflow_tvm.cost import (
        LEAST_TRIALS,
        CostModel,
        KernelDatabase,
        PredictionPolicy,
        check_linker,
        default_path,
        ratio_json,
    )
    from rlflow_tvm.errors import UsageError
    from rlflow_tvm.exporting import check_library_name, export, reference_run, save_library
    from rlflow_tvm.frontend import from_onnx, to_onnx
    from rlflow_tvm.kernels import vector_lanes
    from rlflow_tvm.passes import default_rules
    from rlflow_tvm.replay import compile
    from rlflow_tvm.search import Budget, make_search
    from rlflow_tvm.superoptimize import (
        agent_search,
        check_agent_rules,
        keep_given_up,
        keep_if_not_slower,
        optimize,
        unchecked_kept,
    )

    if 0 < tune < LEAST_TRIALS:
        raise UsageError(f"--tune {tune}: give at least {LEAST_TRIALS}, or 0 for none")
    if agent is not None and search is not None:
        raise UsageError(f"--search {search} --agent {agent}: an agent is a search of its own; give one of them")
    search = search or cli.DEFAULT_SEARCH
    ruleset = default_rules(vector_lanes(tvm_target), rules or ())
    check_agent_rules(agent, rules)
    policy = PredictionPolicy(share=predict)
    spend = None if budget is None else Budget.parse(budget)
    method = make_search(search, seed, spend) if agent is None else agent_search(agent, seed, spend)
    file = cli.model_path(name)
    mod = from_onnx(file, shapes)
    # what cannot be exported, linked or compared is told now, not after the search
    if onnx is not None:
        to_onnx(mod)
    if library is not None:
        check_library_name(library)
        check_linker(library)
    runs_here = remote is None and tvm_target.kind.name == "llvm"
    if onnx is not None or (library is not None and runs_here):
        reference_run(mod, file, seed)
    with (
        KernelDatabase(default_path()) as database,
        CostModel(tvm_target, database, policy=policy, remote=remote) as cost_model,
        cli.progress_bar("searching") as bar,
    ):
        cost_model.on_progress = cli.kernels_told(bar)
        save, started = _Saving(plan), time.monotonic()
        with unchecked_kept(save) as on_plan:
            result = optimize(
                mod,
                method,
                cost_model,
                ruleset,
                progress=lambda done, total, best: bar(done, total, cli.milliseconds(best)),
                interruptible=True,
                on_plan=on_plan,
            )
        # before the modules are timed and written: neither Ctrl-C nor what fails there shall lose it
        found, wall_secs, measured = result.plan, time.monotonic() - started, cost_model.measured
        # that nothing was found takes no place of what a longer search has found
        kept, gain = save(found) if found.actions or plan is not None else None, None
        tuned: list[Tuned] = []
        with (
            _goes_on("whether the new module is faster as a whole was not measured"),
            cli.progress_bar("timing") as timing,
        ):
            result, gain = keep_if_not_slower(result, cost_model, timing)
        given_up = bool(found.actions) and not result.plan.actions  # and the gain is that of nothing handed out
        if result.plan != found:
            keep_given_up(found)
            save(result.plan)
        if tune:
            with _goes_on("kernels are as they were, but for those tuned by then"):
                tuned = _tune(cost_model, result.state, tune, seed, tuned.append)
    figures: dict[str, Any] = {
        "model": model,
        "target": str(tvm_target),
        "rpc_key": rpc_key,
        "method": search if agent is None else f"agent {agent}",
        "seed": seed,
        "env_steps": result.env_steps,
        "kernels_measured": measured,  # to price the model too
        "kernels_predicted": result.kernels_predicted,
        "wall_secs": wall_secs,
        "run_secs_before": result.run_secs_before,
        "run_secs_after": result.run_secs_after,
        "plan_length": len(result.plan),
        **ratio_json("measured_gain", gain),
        "given_up": given_up,
        "tuned_kernels": [
            {
                "kernel": each.kernel.name,
                "key": each.kernel.key,
                "count": each.kernel.count,
                "used": each.used,
                "rule_secs": each.row.rule_secs,
                "tuned_secs": each.row.run_secs,
                "trials": each.row.trials,
            }
            for each in tuned
        ],
        "curve": [list(point) for point in result.curve],
    }
    cli.write_json(json, figures)
    print(
        f"{model}: {cli.milliseconds(result.run_secs_before)} -> {cli.milliseconds(result.run_secs_after)} "
        f"by {len(result.plan)} rewrites ({result.env_steps} steps, {_kernels(measured, result)}, "
        f"{wall_secs:.0f} s){'; outputs checked' if len(result.plan) else ''}"
    )
    if gain is not None:
        print(f"whole modules timed in turns: {_gain(gain)}{'; it was given up' if given_up else ''}")
    for each in tuned:
        print(_tuned_line(each))
    if any(each.used for each in tuned):
        where = "" if rpc_key is None else f", rpc_key={rpc_key!r}"
        print(f"rlflow_tvm.compile(mod, target, database={str(default_path())!r}{where}) uses the faster schedules")
    if kept is not None:
        print(f"plan {'kept in' if plan is None else 'written to'} {kept}")
    if onnx is not None:
        error = export(result.state.bound(), onnx, file, seed)
        print(f"model written to {onnx} ({_differ(error)})")
    if library is not None:
        new = result.state.bound()
        executable = compile(new, tvm_target, default_path(), rpc_key)
        error = save_library(executable, new, library, file if runs_here else None, seed)
        checked = _differ(error) if runs_here else "not run: only those for this machine's processor are"
        print(f"library written to {library} ({checked})")


class _Saving:
    """Writes plans to `path`, or where nobody asked for that beside the database, if that can be; what is in their
    place from before is kept, as a search may find less than a former one did."""

    def __init__(self, path: Path | None) -> None:
        from rlflow_tvm.superoptimize import plan_in

        self._path, self._former = path, None if path is None else plan_in(path)
        self._own: Plan | None = None

    def __call__(self, plan: Plan) -> Path | None:
        """Where the plan is."""
        from rlflow_tvm.superoptimize import keep_plan, save_plan

        if self._path is None:
            own, self._own = self._own, plan
            return keep_plan(plan, own=own)
        former, self._former = self._former, None
        if former is not None and former.actions != plan.actions:
            # where there is no place beside the database there is one beside the file, or that cannot be written either
            beside = self._path.with_name(f"former.{self._path.name}")
            kept = keep_plan(former, "former") or save_plan(former, beside)
            log.warning("the plan that %s held is kept in %s", self._path, kept)
        return save_plan(plan, self._path)


@contextmanager
def _goes_on(told: str) -> Iterator[None]:
    """What the search found is written all the same where what is inside fails, or Ctrl-C ends it."""
    from rlflow_tvm.errors import CostError

    try:
        yield
    except (CostError, KeyboardInterrupt) as error:
        log.warning("%s: %s", "interrupted" if isinstance(error, KeyboardInterrupt) else error, told)


def _differ(error: float | None) -> str:
    return "not run: onnxruntime is not installed" if error is None else f"outputs differ by {error:.1e} of range"


def _kernels(measured: int, result: SearchResult) -> str:
    predicted = f" and {result.kernels_predicted} times predicted" if result.kernels_predicted else ""
    return f"{measured} kernels measured{predicted}"


def _gain(gain: Ratio) -> str:
    assert gain.interval is not None, "of enough rounds"
    low, high = gain.interval
    return f"the model's takes {gain.median:.2f} times as long as the new one's ({low:.2f} to {high:.2f} by round)"


def _tune(
    cost_model: CostModel, state: GraphState, trials: int, seed: int, on_tuned: Callable[[Tuned], None]
) -> list[Tuned]:
    from rlflow_tvm import cost

    with cli.progress_bar("tuning") as bar:
        kernels = cost_model.kernels(state.mod)
        return cost.tune(kernels, cost_model.timer, trials, seed, bar, on_tuned)


def _tuned_line(tuned: Tuned) -> str:
    row, kernel = tuned.row, tuned.kernel
    if row.run_secs is None or row.rule_secs is None:
        return f"{kernel.name} x{kernel.count}: no schedule that can be run in {row.trials} trials"
    times = f"{cli.milliseconds(row.rule_secs)} by the schedule rules, {cli.milliseconds(row.run_secs)} tuned"
    return f"{kernel.name} x{kernel.count}: {times} ({row.trials} trials){'' if tuned.used else ', not used'}"


if __name__ == "__main__":
    cli.run(main)
