"""Searches and agents on models, at the same number of environment steps each.

    python scripts/agents.py --models zoo:squeezenet1.1 zoo:bert-base --methods greedy random ppo --seeds 5 --out runs/a
    python scripts/agents_report.py runs/a
    python scripts/paper.py rlflow-table2 runs/a

Each run has a process of its own and leaves OUT/MODEL/METHOD.STEPS.SEED.json; what is there is not run again, and a
training that was interrupted goes on. Called twice at once (`taskset -c 0`, `-c 1`), one call leaves to the other
what that is doing; both take turns at measuring, but one may compute meanwhile: on cores that share little. All share
one kernel database, so that equal kernels cost the same in every run, and a model's results are of one machine:
kernels measured and seconds are those that a run needed after the ones before it. Searches that draw nothing are run
once. A run's curve tells the cheapest graph, all of its kernels measured, after so many environment steps: moves
tried by a search, steps of an agent's training, of which the last episodes may take a few more: what those find is
not counted, nor are the rewrites of a family that family search, `random-restarts` and agents begin with; `metrics` are
kernels, FLOPs, bytes moved and memory of the first graph and of the cheapest. Trained agents are then asked for plans
(`asked`: an episode of likeliest actions, then sampled ones). `ppo-after-greedy` and `ppo-after-family` train from such
a search's plan, `ppo-for-relative` for another reward than the usual one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents_results import locked, read_json

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import AGENTS
from rlflow_tvm.cli import model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, PredictionPolicy, default_path
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.envs.rewards import REWARDS
from rlflow_tvm.errors import RlflowError, UsageError
from rlflow_tvm.jsonl import read_lines
from rlflow_tvm.passes import GraphState, Plan
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search import SEARCHES, Budget, SearchResult, make_search
from rlflow_tvm.superoptimize import agent_search
from rlflow_tvm.training import REWARD, train_on_models
from rlflow_tvm.training_files import model_name

AFTER, FOR = "-after-", "-for-"
METHODS = [
    *SEARCHES,
    *AGENTS,
    *(f"{agent}{AFTER}{search}" for agent in AGENTS for search in ("greedy", "family")),
    *(f"ppo{FOR}{reward}" for reward in REWARDS if reward != REWARD),  # dreams pay improvement alone
]
DRAWN = set(METHODS) - {"greedy", "backtracking", "beam", "family", "variable-depth"}
"""Methods that depend on the seed."""
EPISODES = 16
BEGUN = f"settled: {' then '.join(TERMINATING_FAMILIES)}"
"""Where family search, episodes of agents, and walks from no remembered graph begin: said in their results, as those of
former versions began elsewhere."""
METRICS = ("run_secs", "launch_secs", "kernels", "flops", "bytes_moved", "peak_bytes")
"""Of a graph's cost, what is kept of the first and of the cheapest graph."""


@dataclass(frozen=True)
class Run:
    """One of them, and all that decides its result beside the database."""

    model: str
    method: str
    seed: int
    steps: int
    horizon: int
    predict: float
    target: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the agent, where they are not its usual ones."""
    episodes: int = EPISODES
    """In which a trained agent is asked for plans."""

    def path(self, out: Path) -> Path:
        """Of its result."""
        return out / model_name(self.model) / f"{self.method}.{self.steps}.{self.seed}.json"


@contextmanager
def problem_of(run: Run) -> Iterator[RewriteProblem]:
    """The run's model and prices."""
    with (
        KernelDatabase(default_path()) as database,
        CostModel(parse_target(run.target), database, policy=PredictionPolicy(share=run.predict)) as cost_model,
    ):
        yield RewriteProblem(from_onnx(model_path(run.model)), cost_model)


def searched(run: Run, search: Any) -> tuple[SearchResult, dict[str, Any]]:
    """What a search finds, and what is told of it."""
    with problem_of(run) as problem:
        result: SearchResult = search.run(problem)
        row = {
            "start_secs": result.run_secs_before,
            "best_secs": result.run_secs_after,
            "env_steps": result.env_steps,
            "curve": [list(point) for point in result.curve],
            "kernels_measured": result.kernels_measured,
            "wall_secs": result.wall_secs,
            **told_of_plan(result.plan),
            "metrics": metrics(problem, result.state),
        }
        return result, row


def told_of_plan(plan: Plan) -> dict[str, Any]:
    """Its actions, and besides them what `Plan` needs to be sure that they are replayed on the same graph."""
    fields = dataclasses.asdict(plan)
    return {"actions": list(fields.pop("actions")), "plan": fields}


def metrics(problem: RewriteProblem, best: GraphState) -> dict[str, dict[str, float]]:
    """Of the first graph and of `best`; all kernels of both have been measured."""
    costs = {"before": problem.surest_cost(problem.start), "after": problem.surest_cost(best)}
    return {when: {name: getattr(cost, name) for name in METRICS} for when, cost in costs.items()}


def metrics_of_plan(run: Run, plan: Plan) -> dict[str, dict[str, float]]:
    """Of the first graph and of what the plan makes of it."""
    with problem_of(run) as problem:
        return metrics(problem, problem.start.replay(plan))


def search_run(run: Run) -> dict[str, Any]:
    return searched(run, make_search(run.method, run.seed, Budget(run.steps)))[1]


def started(run: Run, search: str, folder: Path) -> dict[str, Any]:
    """What the search before a training found. It stands in the training's folder: to a run that goes on after an
    interruption, the same search would find something else, as more kernels are in the database by then."""
    path = folder / "start.json"
    made = {"predict": run.predict, "prices": prices(run.target)}
    row = read_json(path) if path.exists() else {}
    if row.get("made") != made and (folder / "agent.safetensors").exists():
        raise UsageError(f"{folder}: a training began there after a search made by {row.get('made')}, this is {made}")
    if row.get("made") != made:
        folder.mkdir(parents=True, exist_ok=True)
        row = {**searched(run, make_search(search, run.seed, Budget(run.steps // 2)))[1], "made": made}
        write_json(path, row)
    return row


def agent_run(run: Run, folder: Path) -> dict[str, Any]:
    """A training: after a search, which is paid for out of the same steps, or for another reward than the usual one,
    where the method says so."""
    method, _, reward = run.method.partition(FOR)
    agent, _, search = method.partition(AFTER)
    spent, wall_secs, curve, starts = 0, 0.0, [], {}
    if search:
        row = started(run, search, folder)
        spent, wall_secs, curve = row["env_steps"], row["wall_secs"], list(row["curve"])
        starts[run.model] = folder / "start.plan.json"
        Plan.of({**row["plan"], "actions": row["actions"]}).save(starts[run.model])
    outcome = train_on_models(
        {run.model: model_path(run.model)}, agent, parse_target(run.target), steps=run.steps - spent, seed=run.seed,
        out=folder, resume=(folder / "agent.safetensors").exists(), horizon=run.horizon, predict=run.predict,
        starts=starts, reward=reward or REWARD, settings=run.settings,
    )  # fmt: skip
    (trained,) = outcome.models
    found = [{"env_steps": 0, "run_secs": trained.run_secs_before}] if not search else []
    found += read_lines(folder / "best.jsonl")  # there is none where nothing better than the start was found
    within = [each for each in found if spent + each["env_steps"] <= run.steps]
    curve += [[spent + each["env_steps"], each["run_secs"]] for each in within]
    plan = plan_of(within[-1] if within else {}, starts.get(run.model), Plan.load(trained.plan))
    asked = searched(run, agent_search(outcome.checkpoint, run.seed, Budget(run.episodes * run.horizon)))[1]
    return {
        "start_secs": trained.run_secs_before,
        "best_secs": curve[-1][1],
        "env_steps": spent + outcome.env_steps,
        "curve": curve,
        "wall_secs": wall_secs + outcome.wall_secs,
        **told_of_plan(plan),
        "metrics": metrics_of_plan(run, plan),
        "log": read_lines(folder / "progress.jsonl"),
        "asked": asked,
    }


def plan_of(best: Mapping[str, Any], start: Path | None, last: Plan) -> Plan:
    """Of what was best within a run's steps: its own, else that which the training began with, or none. `last` may have
    been found by the episodes that took a training beyond them; it is of the same graph."""
    if "plan" in best:
        return Plan.of(best["plan"])
    return dataclasses.replace(last, actions=(), end_hash=last.start_hash) if start is None else Plan.load(start)


def done(run: Run, out: Path) -> None:
    """Do one run, in a process of its own."""
    path = run.path(out)
    try:
        row = search_run(run) if run.method in SEARCHES else agent_run(run, path.with_suffix(""))
    except RlflowError as error:  # as where a process that another call began still trains there
        print(f"  error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    begun = {"begun": BEGUN} if _settles(run) else {}
    write_json(path, {**dataclasses.asdict(run), "prices": prices(run.target), **begun, **row})


def _settles(run: Run) -> bool:
    """Whether the method begins at the cheapest of a problem's `beginnings`."""
    return run.method not in SEARCHES or run.method in ("family", "random-restarts")


@contextmanager
def claimed(run: Run, out: Path) -> Iterator[bool]:
    """Whether the run is to be done, here: no other process does it, or has done it; none begins it meanwhile."""
    path = run.path(out)
    with locked(path.with_suffix(".lock")) as ours:
        yield ours and not path.exists()


def do(run: Run, out: Path) -> int:
    """Have the run done by a process of its own; its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=done, args=(run, out))
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # where this one is told to end; what was not finished is gone on with another time
    return process.exitcode or 0


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """All of them, the first seeds of all first."""
    for seed in range(options.seeds):
        for model in options.models:
            for method in options.methods:
                if seed == 0 or method in DRAWN:
                    agent = method.partition(FOR)[0].partition(AFTER)[0]
                    yield Run(
                        model, method, seed, options.steps, options.horizon, options.predict, options.target,
                        options.settings.get(agent, {}), options.episodes,
                    )  # fmt: skip


def parse_settings(text: str) -> dict[str, dict[str, Any]]:
    """Agent -> its settings, of a JSON object; ArgumentTypeError where it is something else."""
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON ({error})") from None
    if not isinstance(settings, dict) or not all(isinstance(each, dict) for each in settings.values()):
        raise argparse.ArgumentTypeError('an object of objects is expected, such as {"ppo": {"n_epochs": 4}}')
    unknown = sorted(set(settings) - set(AGENTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no agent {unknown[0]}; there are {', '.join(AGENTS)}")
    return settings


def prices(target: str) -> str:
    """Machine, kernels and way of measuring: what two runs must have in common to be held against each other."""
    with KernelTimer(parse_target(target)) as timer:
        return f"{timer.target_key}; {timer.graph_version}"


def check_names(models: Sequence[str]) -> None:
    """UsageError where the results of two models would go to one folder."""
    known: dict[str, str] = {}
    for model in models:
        if (other := known.setdefault(model_name(model), model)) != model:
            raise UsageError(f"{other} and {model}: are called the same; give each an --out of its own")


def check_prices(folder: Path, target: str) -> None:
    """UsageError where a result in a model's folder is of another machine or of other kernels."""
    ours = prices(target)
    for path in sorted(folder.glob("*.json")):
        theirs = read_json(path).get("prices", "an earlier version of this script")
        if theirs != ours:
            raise UsageError(f"{path}: is of {theirs}, this is {ours}; give another --out, or go on there")


def check_options(run: Run, out: Path) -> None:
    """UsageError where there is a result of this run that was made with other options than this one."""
    path = run.path(out)
    if not path.exists():
        return
    row = read_json(path)
    if row["model"] != run.model:
        raise UsageError(f"{path}: is of {row['model']}, a model of the same name; give another --out")
    if _settles(run) and row.get("begun") != BEGUN:
        raise UsageError(f"{path}: is of a version of this script whose runs began elsewhere; give another --out")
    # an episode's steps are nothing to a search; earlier versions told no settings where they were the usual ones
    usual = {"settings": {}, "episodes": EPISODES}
    for name in ("settings", "predict") + (() if run.method in SEARCHES else ("horizon", "episodes")):
        if row.get(name, usual.get(name)) != getattr(run, name):
            raise UsageError(f"{path}: was made with another --{name}; give that, or another --out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:demo"], help="ONNX files or zoo:NAME")
    parser.add_argument(
        "--methods", nargs="+", default=["greedy", "random", "ppo"], choices=METHODS, metavar="METHOD",
        help=f"of {', '.join(METHODS)}",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps of each run")
    parser.add_argument("--horizon", type=int, default=60, help="steps of an agent's episode")
    parser.add_argument(
        "--episodes", type=int, default=EPISODES, help="episodes in which a trained agent is then asked for plans"
    )
    parser.add_argument(
        "--predict", type=float, default=0.3, help="of a graph's time, what may be predicted on the way"
    )
    parser.add_argument(
        "--settings", type=parse_settings, default={}, metavar="JSON",
        help='of agents, where they are not the usual ones: \'{"world-model": {"iterations": 2}}\'',
    )  # fmt: skip
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_names(options.models)
        for model in options.models:
            check_prices(options.out / model_name(model), options.target)
        for run in runs(options):
            check_options(run, options.out)
    except RlflowError as error:  # as for a target that cannot be measured here
        parser.error(str(error))
    failed = 0
    wanted = [run for run in runs(options) if not run.path(options.out).exists()]
    for number, run in enumerate(wanted, 1):
        print(f"{time.strftime('%H:%M:%S')} {number} of {len(wanted)}: {run.model} {run.method} {run.seed}", flush=True)
        with claimed(run, options.out) as ours:
            exitcode = do(run, options.out) if ours else 0
        if not ours:
            print("  another process does it", flush=True)
            continue
        if exitcode:
            failed += 1
            print(f"  failed (exit code {exitcode}); the others go on", flush=True)
            continue
        row = read_json(run.path(options.out))
        print(
            f"  {1e3 * row['start_secs']:.3f} -> {1e3 * row['best_secs']:.3f} ms "
            f"({row['start_secs'] / row['best_secs']:.3f}x, {row['env_steps']} steps, {row['wall_secs']:.0f} s)",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
