"""What the whole catalogue is worth beside the rules that the project began with: sites, greedy gain, and detours.

    python scripts/catalogue_gain.py --models zoo:squeezenet1.1 model.onnx --json gain.json

For each model the same search runs with both rule sets, on one database, so that equal kernels cost the same; gains are
graph gains (the same kernels before and after). Detours are stretches of the whole catalogue's plan whose first step
raises the cost and that end below where they began, with the cost after each step: `--search variable-depth` looks
for them where descent is stuck.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, PredictionPolicy, default_path
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.kernels import vector_lanes
from rlflow_tvm.passes import CATALOGUE, RuleSet
from rlflow_tvm.passes.rules import concat, convolution, elementwise, layout, matmul, transpose
from rlflow_tvm.search import SEARCHES, SearchResult, make_search
from rlflow_tvm.superoptimize import optimize

FIRST = tuple(
    rule for room in (elementwise, matmul, convolution, transpose, concat, layout) for rule in room.RULES
)  # fmt: skip
"""The rules of the project's first version."""


def costs_along(problem: RewriteProblem, result: SearchResult) -> list[float]:
    """Seconds of the start and after each step of the plan."""
    state, costs = problem.start, [problem.start_secs]
    for action in result.state.actions:
        state = state.apply(action)
        costs.append(problem.cost(state, confirmed=True).run_secs)
    return costs


def detours(actions: list[str], costs: list[float]) -> list[dict[str, Any]]:
    """Stretches that begin with a step that costs more and end at the first cost below the one before that step."""
    found, step = [], 0
    while step < len(actions):
        end = next((k for k in range(step + 1, len(costs)) if costs[k] < costs[step]), None)
        if costs[step + 1] > costs[step] and end is not None:
            found.append({"actions": actions[step:end], "cost_secs": costs[step : end + 1]})
            step = end
        else:
            step += 1
    return found


def compared(name: str, search: str, predict: float, database: KernelDatabase, target: Any) -> dict[str, Any]:
    mod = from_onnx(model_path(name))
    row: dict[str, Any] = {"model": name, "search": search, "predict": predict}
    for kind, rules in (("first", FIRST), ("whole", CATALOGUE)):
        ruleset = RuleSet(tuple(rules), vector_lanes(target))
        with CostModel(target, database, policy=PredictionPolicy(share=predict)) as cost_model:
            result = optimize(mod, make_search(search), cost_model, ruleset)
            problem = RewriteProblem(mod, cost_model, ruleset)
            costs = costs_along(problem, result)
            sites = {rule: len(found) for rule, found in problem.start.sites.items() if found}
        actions = [str(action) for action in result.state.actions]
        row[kind] = {
            "sites": sites,
            "env_steps": result.env_steps,
            "kernels_measured": result.kernels_measured,
            "wall_secs": result.wall_secs,
            "run_secs_before": result.run_secs_before,
            "run_secs_after": result.run_secs_after,
            "actions": actions,
            "cost_secs": costs,
            "detours": detours(actions, costs),
        }
    return row


def lines(row: dict[str, Any]) -> str:
    told = [f"{row['model']} ({row['search']})"]
    for kind in ("first", "whole"):
        found = row[kind]
        gain = found["run_secs_before"] / found["run_secs_after"]
        told.append(
            f"  {kind}: {sum(found['sites'].values())} sites of {len(found['sites'])} rules; graph gain {gain:.3f}x by "
            f"{len(found['actions'])} rewrites ({found['env_steps']} steps, {found['wall_secs']:.0f} s)"
        )
    for detour in row["whole"]["detours"]:
        costs = " ".join(f"{1e3 * cost:.4f}" for cost in detour["cost_secs"])
        told.append(f"  detour: {', '.join(detour['actions'])}: {costs} ms")
    return "\n".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:demo"], help="ONNX files or zoo:NAME")
    parser.add_argument("--search", default="greedy", choices=list(SEARCHES), help="by default greedy")
    parser.add_argument(
        "--predict", type=float, default=0.0, help="how much of a graph's time the search may predict, 0 to 1"
    )
    parser.add_argument("--target", default="llvm", help="llvm: this machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with errors_of(parser):
        check_writable(options.json)
        target = parse_target(options.target)
        with KernelDatabase(default_path()) as database:
            for name in options.models:
                rows.append(compared(name, options.search, options.predict, database, target))
                print(lines(rows[-1]), flush=True)
                write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
