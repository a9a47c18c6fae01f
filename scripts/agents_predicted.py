"""Searches and agents on prices that nobody measures: minutes instead of hours, on any machine, and the same each time.

    python scripts/agents_predicted.py kernels.sqlite --models zoo:inception-v3 --methods greedy ppo --out rows.json

A kernel takes what the database says, or what a cost model learnt from the database predicts; so it is for trying
changes of searches and agents, not for what they are worth: `scripts/agents.py` measures. The database must hold
kernels of this processor and of these kernels' version, some search's on a model like those asked for. For each run the
table and the JSON file tell the gain after so many environment steps, each graph counted at the step that led to it.
Agents are then asked for plans, as by `scripts/agents.py`: the last column is the best of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import parse_settings
from rich.console import Console
from rich.table import Table
from tvm.target import Target

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import AGENTS, agent_kind
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.cli import check_writable, model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement
from rlflow_tvm.cost.estimator import train_model
from rlflow_tvm.cost.known_times import MeasurableKernel, known_as
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import KernelError, RlflowError
from rlflow_tvm.rollouts import make_env
from rlflow_tvm.search import SEARCHES, Beginning, Budget, beginnings, make_search
from rlflow_tvm.superoptimize import agent_search
from rlflow_tvm.training import REWARD, beginning_name

SHARES = (0.05, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the steps, after which gains are told."""
EPISODES = 16

Curve = list[tuple[int, float]]
"""(environment steps, seconds) at each improvement."""


class PredictedTimer(KernelTimer):
    """Gives what a database holds, and what a model learnt from it predicts; measures nothing."""

    def __init__(self, target: Target, database: KernelDatabase) -> None:
        super().__init__(target, database)
        self._model, self._predicted = train_model(self), dict[str, Measurement]()

    def measure(
        self,
        kernels: Sequence[MeasurableKernel],
        on_progress: Callable[[int, int], None] | None = None,
        graph: Callable[[], Any] | None = None,
        *,
        confirmed: bool = False,
    ) -> list[Measurement]:
        return [self._seconds(kernel, in_graph=graph is not None) for kernel in kernels]

    def _seconds(self, kernel: MeasurableKernel, in_graph: bool) -> Measurement:
        known, name = self.lookup(kernel, in_graph=in_graph), known_as(kernel)
        if known is not None:
            return dataclasses.replace(known, confirmed=known.ok)
        if name not in self._predicted:
            self._predicted[name] = self._predict(kernel)
        return self._predicted[name]

    def _predict(self, kernel: MeasurableKernel) -> Measurement:
        try:
            described = self.descriptions.of(kernel)
        except KernelError as error:
            return Measurement(error=str(error), error_kind="build")
        return Measurement(run_secs=self._model.predict([(described, kernel.cold)])[0].run_secs, confirmed=True)


def searched(problem: RewriteProblem, method: str, seed: int, steps: int) -> dict[str, Any]:
    """A search's curve."""
    result = make_search(method, seed, Budget(steps)).run(problem)
    return {"start_secs": result.run_secs_before, "curve": [list(point) for point in result.curve]}


def trained(
    problem: RewriteProblem,
    method: str,
    seed: int,
    steps: int,
    horizon: int,
    *,
    from_model: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """An agent's training, and what it finds when it is asked. `from_model`: episodes begin at the model's graph though
    one in which families of rules are settled is cheaper."""
    kind, curve, taken = agent_kind(method), [(0, problem.start_secs)], 0
    begin = Beginning(problem.start_secs, problem.start) if from_model else beginnings(problem)[0]
    curve.append((0, begin.run_secs))
    env = make_env({"model": problem}, horizon, REWARD, kind.environment, {"model": begin.state.plan})

    def on_episode(episode: Episode) -> None:
        nonlocal taken
        for step, secs in enumerate(episode.run_secs):
            if secs < curve[-1][1]:
                curve.append((taken + step, secs))
        taken += len(episode)

    metadata = {"rules": list(env.current.rule_names), "horizon": horizon}
    if not from_model:
        metadata["begins"] = {"model": beginning_name(begin)}
    config = kind.config(settings)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "agent"
        result = kind.train(env, config, steps, seed, out, on_episode=on_episode, metadata=metadata)
        asked = agent_search(result.checkpoint, seed, Budget(EPISODES * horizon)).run(problem)
    return {
        "start_secs": problem.start_secs,
        "curve": [list(point) for point in curve],
        "asked": {"curve": [list(point) for point in asked.curve]},
    }


def gain(row: Mapping[str, Any], steps: float) -> float:
    """Of the cheapest graph within so many steps."""
    return float(row["start_secs"] / min(secs for step, secs in row["curve"] if step <= steps))


def show(rows: Sequence[Mapping[str, Any]], steps: int) -> None:
    table = Table(title="Gains on predicted prices, by environment steps")
    for column in ("model", "method", "seed", *(f"{share * steps:.0f}" for share in SHARES), "asked"):
        table.add_column(column, justify="right")
    for row in rows:
        told = [f"{gain(row, share * steps):.4f}" for share in SHARES]
        asked = row["start_secs"] / min(secs for _, secs in row["asked"]["curve"]) if "asked" in row else None
        table.add_row(row["model"], row["method"], str(row["seed"]), *told, "" if asked is None else f"{asked:.4f}")
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="of measured kernels; no kernel is added to it")
    parser.add_argument("--models", nargs="+", required=True, help="ONNX files or zoo:NAME")
    parser.add_argument(
        "--methods", nargs="+", default=["greedy", "ppo"], choices=[*SEARCHES, *AGENTS], metavar="METHOD"
    )
    parser.add_argument("--steps", type=int, default=2000, help="environment steps of each run")
    parser.add_argument("--horizon", type=int, default=60, help="steps of an agent's episode")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--from-model", action="store_true", help="agents begin at the model, as in RLFlow")
    parser.add_argument("--settings", type=parse_settings, default={}, help="as of scripts/agents.py")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if not options.database.exists():
        parser.error(f"{options.database}: there is no such database; a search leaves one in $RLFLOW_TVM_HOME")
    target, rows = parse_target("llvm"), list[dict[str, Any]]()
    try:
        check_writable(options.out)
        with KernelDatabase(options.database) as database, PredictedTimer(target, database) as timer:
            for model in options.models:
                problem = RewriteProblem(from_onnx(model_path(model)), CostModel(target, timer=timer))
                for method in options.methods:
                    for seed in range(options.seeds):
                        row = (
                            searched(problem, method, seed, options.steps)
                            if method in SEARCHES
                            else trained(
                                problem,
                                method,
                                seed,
                                options.steps,
                                options.horizon,
                                from_model=options.from_model,
                                settings=options.settings.get(method),
                            )
                        )
                        rows.append({"model": model, "method": method, "seed": seed, **row})
                        write_json(options.out, rows)
                        show(rows[-1:], options.steps)
    except RlflowError as error:
        parser.error(str(error))
    show(rows, options.steps)


if __name__ == "__main__":
    main()
