"""How long a step of the environment takes where every kernel's time is known.

Walks random trajectories once, which measures what the default database does not hold yet, then again with the kernels
known but not the graphs, and prints milliseconds of `GraphRewriteEnv.step`. The parts are timed one by one along the
same trajectories: rewriting with matching, lowering to kernels, looking up their times by structure, observing. Then
`CandidateEnv.step` along them, the graphs priced by now: what it takes to show all graphs that are one rewrite away.
With `--training` its steps in a whole training besides, in which kernels are known and graphs are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from agents_results import read_number
from rich.console import Console
from rich.table import Table

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import AGENTS
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement, default_path
from rlflow_tvm.envs import CandidateEnv, GraphRewriteEnv, ManyModelsEnv, RewriteProblem
from rlflow_tvm.envs.episode import StepResult
from rlflow_tvm.envs.observation import observe
from rlflow_tvm.errors import UsageError
from rlflow_tvm.kernels import Kernel
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search import beginnings

PARTS = ("rewrite, match", "lower", "hash, look up", "observe")

T = TypeVar("T")
Moves = list[tuple[np.ndarray, RewriteAction]]


def walked(env: GraphRewriteEnv, steps: int, rng: np.random.Generator, done: Callable[[], None]) -> Moves:
    """The moves of an episode of at most `steps` random steps, those that are refused left out."""
    observation, _ = env.reset(seed=0)
    moves: Moves = []
    over = False
    while not over and len(moves) < steps:
        rules = np.flatnonzero(observation["rule_mask"][: env.stop])
        if not len(rules):
            break
        rule = rng.choice(rules)
        choice = np.array([rule, rng.choice(np.flatnonzero(observation["location_mask"][rule]))])
        action = env.action_of(*choice)
        assert action is not None, "the masks allow it"
        observation, _, terminated, truncated, info = env.step(choice)
        over = terminated or truncated
        if "refused" not in info:
            moves.append((choice, action))
        done()
    return moves


def timed(seconds: list[float], call: Callable[[], T]) -> T:
    """The call's result; how long it took is added to `seconds`."""
    started = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - started)
    return result


def parts(start: GraphState, moves: Moves, model: CostModel, reach: int, seconds: dict[str, list[float]]) -> None:
    """What `step` does along a trajectory, part by part."""
    state = start
    for _, action in moves:
        state = timed(seconds[PARTS[0]], lambda state=state, action=action: state.apply(action))
        kernels = timed(seconds[PARTS[1]], lambda state=state: model.kernels(state.graph, reach))
        timed(seconds[PARTS[2]], lambda state=state, found=kernels: (state.structural_hash, known(model.timer, found)))
        timed(seconds[PARTS[3]], lambda state=state: observe(state))


def known(timer: KernelTimer, kernels: list[Kernel]) -> list[Measurement | None]:
    """What a step asks for where all has been measured."""
    return [timer.lookup(kernel, in_graph=True) for kernel in kernels]


def candidate_steps(env: CandidateEnv, trajectories: list[Moves]) -> tuple[list[float], list[int]]:
    """Seconds of each step along the trajectories, and how many candidates it showed."""
    seconds: list[float] = []
    shown: list[int] = []
    for moves in trajectories:
        env.reset(seed=0)
        for _, action in moves:
            numbers = [number for number, each in enumerate(env.candidates) if each.action == action]
            if not numbers:  # another rewrite makes the same graph, and was shown in its stead
                break
            timed(seconds, lambda number=numbers[0]: env.step(number))
            shown.append(len(env.candidates))
    return seconds, shown


class TimedEnv(CandidateEnv):
    """Tells in `took` how long each of its steps did, and how many candidates it showed, in `shown`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.took: list[float] = []
        self.shown: list[int] = []
        super().__init__(*args, **options)

    def step(self, action: int) -> StepResult:
        step = super().step
        result = timed(self.took, lambda: step(action))
        self.shown.append(len(self.candidates))
        return result


def training_steps(problem: RewriteProblem, cost_model: CostModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the environment's steps take in a training of X-RLflow's agent: in the second of two equal ones, as the
    first has the kernels measured."""
    kind, begin = AGENTS["candidate"], beginnings(problem)[0].state.plan
    config = kind.config()
    config = replace(config, steps_per_update=min(config.steps_per_update, arguments.training))
    for number in (1, 2):
        cost_model._graphs.clear()
        measured, env = cost_model.timer.measured, TimedEnv(problem=problem, horizon=arguments.steps, begin=begin)
        with TemporaryDirectory() as folder, progress_bar(f"training {number} of 2") as bar:
            kind.train(
                ManyModelsEnv({"": env}), config, arguments.training, arguments.seed, folder,
                on_step=lambda done, bar=bar: bar(min(done, arguments.training), arguments.training),
            )  # fmt: skip
    return {
        "steps": len(env.took),
        "measured": cost_model.timer.measured - measured,
        "candidates": float(np.mean(env.shown)),
        "most_candidates": max(env.shown),
        "mean_secs": float(np.mean(env.took)),
        "median_secs": float(np.median(env.took)),
        "percentile95_secs": float(np.percentile(env.took, 95)),
        "worst_secs": max(env.took),
    }


def bench(model: str, arguments: argparse.Namespace, timer: KernelTimer) -> dict[str, Any]:
    """One model's figures."""
    mod = from_onnx(model_path(model))
    target = parse_target(arguments.target)
    horizon = arguments.steps + 1  # so that the last step is like the others
    rng = np.random.default_rng(arguments.seed)
    cost_model = CostModel(target, timer=timer)
    env = GraphRewriteEnv(mod, cost_model, horizon=horizon, limit=float("inf"))
    with progress_bar(f"{model}: measuring kernels") as bar:
        number, total = count(1), arguments.steps * arguments.episodes
        trajectories = [
            walked(env, arguments.steps, rng, lambda: bar(next(number), total)) for _ in range(arguments.episodes)
        ]
    if not any(trajectories):
        raise UsageError(
            f"{model}: no step can be made, of {total} that were asked for: no rule fits it, or none is asked"
        )
    reach = cost_model.reach(env.problem.start.graph)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for moves in trajectories:
        parts(env.problem.start, moves, cost_model, reach, seconds)
    cost_model._graphs.clear()  # all graphs are priced anew, as in a search; nothing else has to forget them
    steps: list[float] = []
    misses, measured = cost_model.misses, timer.measured
    for moves in trajectories:
        env.reset(seed=0)
        for choice, _ in moves:
            timed(steps, lambda choice=choice: env.step(choice))
    candidates = CandidateEnv(problem=env.problem, horizon=horizon, limit=float("inf"))
    candidate_secs, shown = candidate_steps(candidates, trajectories)
    new_graphs, measured = cost_model.misses - misses, timer.measured - measured
    training = training_steps(env.problem, cost_model, arguments) if arguments.training else None
    return {
        "model": model,
        "steps": len(steps),
        "new_graphs": new_graphs,
        "measured": measured,
        "median_secs": float(np.median(steps)),
        "percentile95_secs": float(np.percentile(steps, 95)),
        "parts_median_secs": {part: float(np.median(values)) for part, values in seconds.items()},
        "candidates": finite(float(np.mean(shown or [np.nan]))),
        "candidate_mean_secs": finite(float(np.mean(candidate_secs or [np.nan]))),
        "candidate_worst_secs": finite(max(candidate_secs, default=float("nan"))),
        "training": training,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="milliseconds a step")
    last = ("candidates", "with them: mean", "worst")
    for column in ("model", "steps", "new graphs", "median", "95 %", *PARTS, *last):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        secs = (row["median_secs"], row["percentile95_secs"], *row["parts_median_secs"].values())
        counts, shown = (str(row["steps"]), str(row["new_graphs"])), f"{read_number(row['candidates']):.0f}"
        more = (read_number(row["candidate_mean_secs"]), read_number(row["candidate_worst_secs"]))
        milliseconds, others = ([f"{value * 1e3:.2f}" for value in values] for values in (secs, more))
        table.add_row(row["model"].removeprefix("zoo:"), *counts, *milliseconds, shown, *others)
    Console(width=140).print(table)
    show_training([row for row in rows if row["training"]])


def show_training(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(title="X-RLflow's agent, milliseconds a step of a training")
    for column in ("model", "steps", "kernels measured", "candidates", "at most", "mean", "median", "95 %", "worst"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        found = row["training"]
        counts = (found["steps"], found["measured"], round(found["candidates"]), found["most_candidates"])
        secs = (found[f"{name}_secs"] for name in ("mean", "median", "percentile95", "worst"))
        table.add_row(row["model"].removeprefix("zoo:"), *map(str, counts), *(f"{value * 1e3:.2f}" for value in secs))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="ONNX files or zoo:NAME")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--steps", type=int, default=60, help="steps an episode")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--training", type=int, default=0, metavar="STEPS", help="of a training of X-RLflow's agent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with errors_of(parser):
        check_writable(arguments.json)
        with KernelDatabase(default_path()) as database, KernelTimer(parse_target(arguments.target), database) as timer:
            rows = [bench(model, arguments, timer) for model in arguments.models]
        show(rows)
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
