"""`python -m rlflow_tvm.optimize`: search for a faster equal graph, save the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlflow_tvm import cli


@cli.reports_errors
def main(
    model: Annotated[str, typer.Argument(help="An ONNX file, or zoo:NAME for an evaluation model.")],
    search: Annotated[str, typer.Option(help="greedy, family or random.")] = "greedy",
    agent: Annotated[Path | None, typer.Option(help="A trained agent's checkpoint, used in place of --search.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    target: Annotated[str, typer.Option(help="llvm (this machine) or a TVM target as JSON.")] = "llvm",
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Find substitutions that make MODEL faster, check that its outputs stay the same, and save them as a plan."""
    for path in (plan, json):
        cli.check_writable(path)
    tvm_target, shapes = cli.parse_target(target), cli.parse_shapes(shape or [])
    from rlflow_tvm.cost import CostModel, KernelDatabase, default_path
    from rlflow_tvm.frontend import from_onnx
    from rlflow_tvm.search import make_search
    from rlflow_tvm.superoptimize import agent_search, optimize

    method = make_search(search, seed) if agent is None else agent_search(agent, seed)
    mod = from_onnx(cli.model_path(model), shapes)
    with (
        KernelDatabase(default_path()) as database,
        CostModel(tvm_target, database) as cost_model,
        cli.progress_bar("searching") as bar,
    ):
        result = optimize(
            mod, method, cost_model, progress=lambda done, total, best: bar(done, total, cli.milliseconds(best))
        )
    if plan is not None:
        result.plan.save(plan)
    figures: dict[str, Any] = {
        "model": model,
        "target": str(tvm_target),
        "method": search if agent is None else f"agent {agent}",
        "seed": seed,
        "env_steps": result.env_steps,
        "kernels_measured": result.kernels_measured,
        "wall_secs": result.wall_secs,
        "run_secs_before": result.run_secs_before,
        "run_secs_after": result.run_secs_after,
        "plan_length": len(result.plan),
        "curve": [list(point) for point in result.curve],
    }
    cli.write_json(json, figures)
    print(
        f"{model}: {cli.milliseconds(result.run_secs_before)} -> {cli.milliseconds(result.run_secs_after)} "
        f"by {len(result.plan)} rewrites ({result.env_steps} steps, {result.kernels_measured} kernels measured, "
        f"{result.wall_secs:.0f} s){'; outputs checked' if len(result.plan) else ''}"
    )
    if plan is not None:
        print(f"plan written to {plan}")


if __name__ == "__main__":
    cli.run(main)
