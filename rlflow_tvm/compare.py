"""`python -m rlflow_tvm.compare`: what searches found, timed against other ways to run the model."""

from __future__ import annotations

import logging
import shlex
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rlflow_tvm import cli

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tvm

    from rlflow_tvm.comparison_methods import Method
    from rlflow_tvm.cost import CostModel
    from rlflow_tvm.passes import GraphState, Plan, RewriteRule

log = logging.getLogger("rlflow_tvm")

AGAINST = ("tvm-default", "onnxruntime", "onnxruntime-export", "torch")
"""As in `rlflow_tvm.comparison`, which takes seconds to import."""
LISTS: dict[str, cli.Recognise] = {
    "--against": AGAINST.__contains__,
    "--search": cli.SEARCHES.__contains__,
    "--plan": lambda argument: argument.endswith(".json"),
    "--agent": lambda argument: argument.endswith(".safetensors"),
}
"""The options that several values may follow."""


@cli.reports_errors
def main(
    model: Annotated[str, typer.Argument(help="An ONNX file, maybe with @NAME=1,3,224,224 behind, or zoo:NAME.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="tvm-default, onnxruntime, onnxruntime-export (ONNX Runtime on unsearched and searched graphs), "
            "torch (torch.compile; evaluation models made by torch only). Several may follow one --against.",
            show_default="tvm-default onnxruntime",
        ),
    ] = None,
    plan: Annotated[list[Path] | None, typer.Option(help="Replay these plans.")] = None,
    agent: Annotated[list[Path] | None, typer.Option(help="Let these trained agents search.")] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{cli.SEARCH_HELP} Several may follow one --search, as behind --plan and --agent.",
            show_default=f"{cli.DEFAULT_SEARCH}, without --plan and --agent",
        ),
    ] = None,
    target: Annotated[str, typer.Option(help="llvm (this machine) or a TVM target as JSON.")] = "llvm",
    rpc: cli.RpcOption = None,
    rpc_key: cli.RpcKeyOption = None,
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    budget: cli.BudgetOption = None,
    rules: cli.RulesOption = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; 95 % intervals of ratios need at least 6.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    plans: Annotated[
        Path | None,
        typer.Option(
            help="Write the plan of each search and agent into this folder, as NAME.plan.json, as soon as it is found "
            "(else it is kept beside the database)."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this Markdown file.")] = None,
) -> None:
    """Time MODEL as each search, agent or plan leaves it, unsearched, and as others run it; outputs compared; the
    gains of graphs and of kernels apart; with what each takes to compile and in memory.

    --budget and --seed are those of each search and agent.
    """
    name, shapes = cli.name_and_shapes(model, shape or [])
    cli.check_writable(json, markdown, inputs=[Path(name), *(plan or []), *(agent or []), rules])
    tvm_target, remote = cli.parse_target(target), cli.parse_rpc(rpc, rpc_key)
    from rlflow_tvm import comparison, comparison_tables
    from rlflow_tvm.comparison_methods import methods
    from rlflow_tvm.cost import CostModel, KernelDatabase, cpu_model, default_path
    from rlflow_tvm.errors import UsageError
    from rlflow_tvm.exporting import check_original
    from rlflow_tvm.frontend import from_onnx, to_onnx
    from rlflow_tvm.kernels import num_cores, vector_lanes
    from rlflow_tvm.passes import own_rules
    from rlflow_tvm.search import Budget
    from rlflow_tvm.superoptimize import check_agent_rules

    names = list(against if against is not None else comparison.BY_DEFAULT)
    zoo_name = model.removeprefix(cli.ZOO_PREFIX) if model.startswith(cli.ZOO_PREFIX) else None
    comparison.check(names, tvm_target, zoo_name)
    own = own_rules(rules or ())
    check_agent_rules(agent, rules)
    spend = None if budget is None else Budget.parse(budget)
    ways = methods(plan or [], agent or [], search or [], seed, spend)
    finding = [way for way in ways if way.plan_name is not None]
    if not finding and (budget is not None or plans is not None):
        given = "--budget" if plans is None else "--plans"
        raise UsageError(f"{given}: is for searches and agents, and there are plans alone; leave it out")
    if spend is not None and isfinite(spend.secs) and len(finding) > 1:
        log.warning(
            "what one search measures the next ones know, which get further in the same time: to compare methods, give "
            "--budget in moves, or run this again once all kernels are known"
        )
    if plans is not None:
        cli.check_folder(plans, *(way.plan_name for way in finding if way.plan_name is not None), inputs=plan or [])
    file = cli.model_path(name)
    mod = from_onnx(file, shapes)
    if comparison.ONNXRUNTIME_EXPORT in names:
        to_onnx(mod)  # what cannot be exported is told now, not after the searches
    if {comparison.ONNXRUNTIME, comparison.ONNXRUNTIME_EXPORT} & set(names):
        check_original(mod, file, seed)
    plain = comparison.unsearched(mod, vector_lanes(tvm_target))  # which may fail too
    with KernelDatabase(default_path()) as database, CostModel(tvm_target, database, remote=remote) as cost_model:
        states = {way.label: _found(way, mod, cost_model, own, plans) for way in ways}
        cost_model.on_progress = None
        with cli.progress_bar("comparing") as bar:
            result = comparison.compare(
                mod, {label: state.bound() for label, state in states.items()}, file, tvm_target, names,
                zoo_name=zoo_name, choices=cost_model.choices, rounds=rounds, seed=seed, progress=bar, plain=plain,
                turn=cost_model.timer.in_turn(),
            )  # fmt: skip
    lengths = [len(state.actions) for state in states.values()]
    found = ", ".join(f"{way.described} ({n} rewrites)" for way, n in zip(ways, lengths, strict=True))
    console = Console()
    for table in comparison_tables.tables(f"{model}: {found}; {rounds} interleaved rounds", result):
        console.print(table)
    for line in (*comparison_tables.lines(result), *comparison_tables.NOTES):
        console.print(line, highlight=False, markup=False, soft_wrap=True)  # a gain is one line
    facts = {"target": str(tvm_target), "cpu": cpu_model(), "threads": num_cores(tvm_target), "seed": seed,
             "rounds": rounds}  # fmt: skip
    told = [{"method": way.described, "plan_length": n} for way, n in zip(ways, lengths, strict=True)]
    figures = result.to_json()
    figures["searches"] = [{**each, **own} for each, own in zip(figures["searches"], told, strict=True)]
    cli.write_json(json, {"model": model, "rpc_key": rpc_key, **facts, **told[0], **figures})
    command = f"python -m rlflow_tvm.compare {shlex.join(sys.argv[1:])}"
    about = {name: str(value) for name, value in facts.items()} | {"searched by": found}
    cli.write_text(markdown, comparison_tables.markdown(model, about, command, result))
    result.check()


def _found(
    way: Method, mod: tvm.IRModule, cost_model: CostModel, rules: Sequence[RewriteRule], plans: Path | None
) -> GraphState:
    """What it makes of the model; its plan is written at once, for what comes behind may fail or be ended: into
    `plans`, or else beside the database."""
    from rlflow_tvm.superoptimize import keep_plan, save_plan, unchecked_kept

    def write(plan: Plan) -> Path | None:
        if way.plan_name is None:  # it is from a file
            return None
        if plans is None and not plan.actions:  # which takes no place of what a longer search has found
            return None
        if plans is None:
            return keep_plan(plan, way.plan_name.removesuffix(".plan.json"))
        return save_plan(plan, plans / way.plan_name)

    with cli.progress_bar(way.described) as bar, unchecked_kept(write) as on_plan:
        cost_model.on_progress = cli.kernels_told(bar)
        state = way.find(
            mod, cost_model, rules, lambda done, total, best: bar(done, total, cli.milliseconds(best)), on_plan
        )
    if (path := write(state.plan)) is not None:
        print(f"plan {'kept in' if plans is None else 'written to'} {path}")
    return state


if __name__ == "__main__":
    cli.run(main, LISTS)
