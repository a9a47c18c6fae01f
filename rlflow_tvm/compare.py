"""`python -m rlflow_tvm.compare`: what the search found, timed against other ways to run the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlflow_tvm import cli

if TYPE_CHECKING:
    from rlflow_tvm.comparison import Comparison


@cli.reports_errors
def main(
    model: Annotated[str, typer.Argument(help="An ONNX file, or zoo:NAME for an evaluation model.")],
    against: Annotated[
        list[str] | None, typer.Option(help="tvm-default, onnxruntime; several may follow one --against.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Replay this plan.")] = None,
    agent: Annotated[Path | None, typer.Option(help="Let a trained agent search.")] = None,
    search: Annotated[str, typer.Option(help=f"{cli.SEARCH_HELP} Used without --plan and --agent.")] = "greedy",
    target: Annotated[str, typer.Option(help="llvm (this machine) or a TVM target as JSON.")] = "llvm",
    rpc: cli.RpcOption = None,
    rpc_key: cli.RpcKeyOption = None,
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    budget: cli.BudgetOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Time MODEL as searched, unsearched, and as others run it; outputs compared; graph and kernel gain apart."""
    cli.check_writable(json)
    tvm_target, shapes, remote = cli.parse_target(target), cli.parse_shapes(shape or []), cli.parse_rpc(rpc, rpc_key)
    from rlflow_tvm import comparison
    from rlflow_tvm.cost import CostModel, KernelDatabase, default_path
    from rlflow_tvm.errors import UsageError
    from rlflow_tvm.frontend import from_onnx
    from rlflow_tvm.passes import Plan
    from rlflow_tvm.replay import replay
    from rlflow_tvm.search import Budget, make_search
    from rlflow_tvm.superoptimize import agent_search, optimize

    if plan is not None and agent is not None:
        raise UsageError("--plan and --agent: give one of the two")
    names = list(against if against is not None else comparison.AGAINST)
    comparison.check_names(names)
    saved = None if plan is None else Plan.load(plan)
    spend = None if budget is None else Budget.parse(budget)
    method = make_search(search, seed, spend) if agent is None else agent_search(agent, seed, spend)
    path = cli.model_path(model)
    mod = from_onnx(path, shapes)
    with KernelDatabase(default_path()) as database, CostModel(tvm_target, database, remote=remote) as cost_model:
        if saved is not None:
            searched, how = replay(mod, saved), f"plan {plan}"
        else:
            with cli.progress_bar("searching") as bar:
                searched = optimize(
                    mod,
                    method,
                    cost_model,
                    progress=lambda done, total, best: bar(done, total, cli.milliseconds(best)),
                    interruptible=True,
                ).state
            how = f"search {search}" if agent is None else f"agent {agent}"
        with cli.progress_bar("comparing") as bar:
            result = comparison.compare(
                mod, searched.bound(), path, tvm_target, names,
                choices=cost_model.choices, rounds=rounds, seed=seed, progress=bar,
            )  # fmt: skip
    _print(model, how, len(searched.actions), rounds, result)
    cli.write_json(
        json,
        {"model": model, "target": str(tvm_target), "rpc_key": rpc_key, "method": how, "seed": seed, "rounds": rounds,
         "plan_length": len(searched.actions), **result.to_json()},
    )  # fmt: skip
    result.check()


def _print(model: str, how: str, rewrites: int, rounds: int, result: Comparison) -> None:
    table = Table(title=f"{model}: {how}, {rewrites} rewrites; {rounds} interleaved rounds")
    table.add_column("candidate")
    for name in ("median", "quartiles", f"difference from {result.reference}"):
        table.add_column(name, justify="right")
    for row in result.rows:
        low, high = row.quartiles
        error = "-" if row.error is None else f"{row.error:.1e} of range"
        table.add_row(row.name, cli.milliseconds(row.run_secs), f"{low * 1e3:.3f} - {high * 1e3:.3f}", error)
    console = Console()
    console.print(table)
    if result.constant_outputs:
        console.print(f"every output of {result.reference} is one number repeated: that they are equal proves little")
    console.print(f"graph gain (same kernels, against {result.baseline}): {result.graph_gain:.2f}x", highlight=False)
    if result.kernel_gain is not None:
        console.print(f"kernel gain (same graph, against tvm-default): {result.kernel_gain:.1f}x", highlight=False)
    if result.tuning_gain is not None:
        console.print(f"tuning gain (searched graph, tuned kernels): {result.tuning_gain:.2f}x", highlight=False)
    if result.against_onnxruntime is not None:
        console.print(f"ONNX Runtime's time over ours: {result.against_onnxruntime:.2f}", highlight=False)


if __name__ == "__main__":
    cli.run(main, {"--against": ("tvm-default", "onnxruntime")})
