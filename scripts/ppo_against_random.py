"""PPO against greedy search, and against a uniformly random policy over as many environment steps.

For each seed: train on the model, then act with the trained policy (sampled) for some episodes; beside it, a policy
that is uniform over the legal rules (stop is one) and over a rule's sites, for as many steps as the training took.
An episode counts by the graph it ends with, and apart from that by the cheapest graph on its way, which is what a
search with the policy hands out. Greedy search runs once, to its own end. Prints a table and writes JSON; goes on
with what is in --out. Costs are graph costs: sums of measured kernel times, the same for all methods.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import load_agent
from rlflow_tvm.cli import model_path, parse_target, progress_bar, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, default_path
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.search import make_search
from rlflow_tvm.training import train_on_models


def uniform(observation: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    """A legal rule (stop is one), then one of its sites, both uniformly."""
    rule = rng.choice(np.flatnonzero(observation["rule_mask"]))
    return np.array([rule, rng.choice(np.flatnonzero(observation["location_mask"][rule]))])


def run_episodes(env: GraphRewriteEnv, choose: Any, steps: int, seed: int) -> np.ndarray:
    """(episodes, 2): cost of each episode's last and of its cheapest graph, in seconds; at least `steps` steps."""
    rng = np.random.default_rng(seed)
    costs: list[tuple[float, float]] = []
    done = 0
    while done < steps:
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            observation, _, terminated, truncated, _ = env.step(choose(observation, rng))
            done += 1
            over = terminated or truncated
        costs.append((env.cost.run_secs, env.best_cost.run_secs))
    return np.array(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an ONNX file or zoo:NAME")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--horizon", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    target, path = parse_target(arguments.target), model_path(arguments.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with KernelDatabase(default_path()) as database, CostModel(target, database) as cost_model:
        problem = RewriteProblem(from_onnx(path), cost_model)
        greedy = make_search("greedy").run(problem)
        env = GraphRewriteEnv(problem=problem, horizon=arguments.horizon)
        for seed in arguments.seeds:
            folder = arguments.out / f"seed{seed}"
            with progress_bar(f"seed {seed}") as bar:
                outcome = train_on_models(
                    {arguments.model: path}, "ppo", target, steps=arguments.steps, seed=seed, out=folder,
                    resume=(folder / "agent.safetensors").exists(), horizon=arguments.horizon, progress=bar,
                )  # fmt: skip
            agent = load_agent(outcome.checkpoint, env.observation_space)
            trained = run_episodes(env, lambda o, rng, a=agent: a.act(o, deterministic=False, rng=rng), 1000, seed)
            random = run_episodes(env, uniform, outcome.env_steps, seed)
            rows.append(
                {
                    "seed": seed,
                    "start_secs": problem.start_secs,
                    "greedy_secs": greedy.run_secs_after,
                    "greedy_steps": greedy.env_steps,
                    "ppo_best_secs": outcome.models[0].run_secs_after,
                    "ppo_steps": outcome.env_steps,
                    "ppo_last_mean_secs": float(trained[:, 0].mean()),
                    "random_last_mean_secs": float(random[:, 0].mean()),
                    "ppo_lowest_mean_secs": float(trained[:, 1].mean()),
                    "random_lowest_mean_secs": float(random[:, 1].mean()),
                    "random_best_secs": float(random[:, 1].min()),
                    "wall_secs": outcome.wall_secs,
                }
            )
            write_json(arguments.out / "results.json", rows)
    table = Table(title=f"{arguments.model}: graph cost in ms (start {problem.start_secs * 1e3:.3f})")
    columns = {
        "greedy": "greedy",
        "PPO's plan": "ppo_best",
        "PPO, last": "ppo_last_mean",
        "random, last": "random_last_mean",
        "PPO, lowest": "ppo_lowest_mean",
        "random, lowest": "random_lowest_mean",
        "random, best": "random_best",
    }
    for column in ("seed", *columns, "steps"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["seed"]), *(f"{row[f'{n}_secs'] * 1e3:.3f}" for n in columns.values()), str(row["ppo_steps"])
        )
    Console().print(table)
    print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
