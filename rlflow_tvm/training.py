"""Training an agent on models: environments, the best plan of each model, what the command prints."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm

from rlflow_tvm.cost import KernelDatabase, RpcDevices, default_path, target_key
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.envs.rewards import REWARDS, ShapedReward
from rlflow_tvm.errors import AgentError, UsageError
from rlflow_tvm.frontend import import_models
from rlflow_tvm.passes import GraphState, Plan, RuleSet
from rlflow_tvm.rollouts import FACTORY, description, make_env, make_problems, open_prices, store_rows, structures
from rlflow_tvm.search import Beginning, beginnings, check_seed
from rlflow_tvm.training_files import BestPlans, EndToEndLog, ModelOutcome, by_our_prices, plan_paths

if TYPE_CHECKING:
    from rlflow_tvm.agents import Episode

REWARD = "improvement"
"""Agents are trained to find cheap graphs and to stop there; see `envs.rewards`."""
_LOCK = "lock"


@dataclass(frozen=True)
class TrainingOutcome:
    """What a training left behind; counts are over all runs of the folder."""

    agent: str
    target: str
    seed: int
    checkpoint: Path
    env_steps: int
    episodes: int
    mean_return: float | None
    wall_secs: float
    models: tuple[ModelOutcome, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "target": self.target,
            "seed": self.seed,
            "checkpoint": str(self.checkpoint),
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "mean_return": self.mean_return,
            "wall_secs": self.wall_secs,
            "models": [{**m.__dict__, "plan": str(m.plan)} for m in self.models],
        }

    def lines(self) -> list[str]:
        """The outcome for a person."""
        lines = [
            f"{m.model}: {m.run_secs_before * 1e3:.3f} ms -> {m.run_secs_after * 1e3:.3f} ms "
            f"by {m.plan_length} rewrites, {m.plan}"
            for m in self.models
        ]
        mean = "" if self.mean_return is None else f", mean return {self.mean_return:.2f}"
        return [
            *lines,
            f"agent: {self.checkpoint} "
            f"({self.env_steps} steps, {self.episodes} episodes{mean}, {self.wall_secs:.0f} s)",
        ]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process of this machine trains in the folder inside: two would overwrite each other's agent and plans.
    AgentError while one does, or where the folder cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise AgentError(f"{folder}: cannot be written ({error.strerror}); give another output folder") from error
    with lock:  # closed, it is free again, also where the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AgentError(
                f"{folder}: another process is training in it (and locks {_LOCK} there); wait for it or end it, or "
                "give another output folder"
            ) from error
        except OSError as error:
            raise AgentError(
                f"{folder / _LOCK}: cannot be locked ({error.strerror}); give a folder on a disk of this machine"
            ) from error
        yield


def _check_plans(out: Path, models: Iterable[str], resume: bool) -> None:
    """UsageError where a model's plan cannot be kept in `out`, or is there from another training."""
    for path in plan_paths(out, models).values():
        try:
            there = path.exists()
        except OSError as error:
            raise UsageError(f"{path}: cannot be a plan's file ({error.strerror}); rename the model") from error
        if there and not resume:
            raise UsageError(f"{path}: is a plan of another training; move it away, or give another output folder")


def beginning_name(begin: Beginning) -> str:
    """A graph to begin at, as a checkpoint names it."""
    return f"{begin.state.structural_hash:016x}"


def _begun(out: Path) -> dict[str, str]:
    """Model -> the graph that the training in a folder begins at."""
    from rlflow_tvm.agents.checkpoint import FILE_NAME, load_checkpoint

    begun = load_checkpoint(out / FILE_NAME, prefix="none")[1]["metadata"].get("begins")
    return begun if isinstance(begun, dict) else {}


def beginning_of(problem: RewriteProblem, begun: str | None) -> Beginning:
    """The cheapest of a problem's beginnings from which there is something to gain, or that which a training has begun
    at: another may be the cheapest when kernels have been measured again."""
    found = [each for each in beginnings(problem) if each.run_secs > 0.0 or not each.state.actions]
    return next((each for each in found if beginning_name(each) == begun), found[0])


def train_on_models(
    models: Mapping[str, Path],
    agent: str,
    target: tvm.target.Target,
    *,
    steps: int,
    seed: int,
    out: Path,
    remote: RpcDevices | None = None,
    resume: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    horizon: int = 200,
    predict: float = 0.0,
    reward: str = REWARD,
    settings: Mapping[str, Any] | None = None,
    starts: Mapping[str, Path] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    workers: int | None = None,
    ray: str | None = None,
) -> TrainingOutcome:
    """Train `agent` on `models` (name -> ONNX file) until `steps` environment steps; see `rlflow_tvm.train`.

    Episodes are collected by `workers` processes of this machine (one, the default: by this one), or with `ray` by as
    many actors of the Ray cluster at that address (by default one for each of its processors). `remote`: the
    machines that kernels are measured on, in place of this one. `predict`: how much of a graph's time may be predicted
    in a step; the best plans are measured. `reward`: one of `envs.rewards.REWARDS`. `settings`: of the agent, by name,
    where they are not to be the defaults. Episodes that begin at no remembered graph begin at the cheapest of a model's
    `beginnings`. `starts`: of some models a plan file, as a search finds it: its graph, where that is cheaper, is
    remembered from the beginning.

    AgentError, UsageError or PlanError, before anything is imported, if `out` or a file of `starts` cannot be used;
    PlanError, before anything is priced, if such a plan is for another module; AgentError while another process trains
    in `out`, or if the training in it was on other modules, for another target or with other settings.
    """
    from rlflow_tvm.agents import Workers, agent_kind

    check_seed(seed)
    kind = agent_kind(agent)
    if reward not in REWARDS:
        raise UsageError(f"no reward is called {reward!r}: there are {', '.join(REWARDS)}")
    if reward == "end-to-end" and remote is not None:
        raise UsageError("reward end-to-end has models run as a whole, which --rpc does not: leave out one of them")
    config = kind.config(settings)
    discount = ShapedReward().gamma
    if reward == "shaped" and getattr(config, "gamma", discount) != discount:  # dreams have a reward of their own
        raise UsageError(
            f"reward shaped is made for gamma = {discount}: leave gamma out of the settings, or take another reward"
        )
    if starts and config.remembered_share == 0.0:
        raise UsageError("no episode begins at a given plan with these settings: leave out --start, or the preset")
    kind.check_folder(out, resume)
    _check_plans(out, models, resume)
    given = {name: Plan.load(path) for name, path in (starts or {}).items()}
    shapes = shapes or {}
    modules = import_models(models, shapes)
    for name, plan in given.items():  # before its graph, and others, are priced
        plan.check_start(GraphState.from_module(modules[name], RuleSet((), 1)).start_hash)
    elsewhere = ray is not None or (workers is not None and workers > 1)
    taken = booked = 0

    def on_work(what: str) -> None:
        if progress is not None:
            progress(min(taken, steps), steps, what)

    database = KernelDatabase(default_path())
    with open_prices(target, database, elsewhere, remote, predict) as prices, ExitStack() as stack:
        prices.cost_model.on_progress = lambda done, total: on_work(f"kernel {done} of {total}")
        problems = make_problems(modules, prices.cost_model)
        begun = _begun(out) if resume else {}
        found = {name: beginning_of(problem, begun.get(name)) for name, problem in problems.items()}
        begins = {name: begin.state.plan for name, begin in found.items() if begin.state.actions}
        env = make_env(problems, horizon, reward, kind.environment, begins)

        priced = {
            name: problems[name].cost(problems[name].replay(plan), confirmed=True).run_secs
            for name, plan in given.items()
        }

        @cache  # at the first step: only then is it known that the plans in the folder are of this training
        def plans() -> BestPlans:
            best = BestPlans(out, problems)
            for name, plan in given.items():
                best.offer(name, plan, priced[name], 0)
            for name, problem in problems.items():
                if problem.settled is not None:  # mostly what episodes begin at
                    best.offer(name, problem.settled.state.plan, problem.settled.run_secs, 0)
            return best

        @cache
        def whole_runs() -> EndToEndLog:
            return EndToEndLog(out)

        ours = target_key(target, None if remote is None else remote.key)

        def on_step(done: int) -> None:
            nonlocal taken
            taken = done
            if progress is not None:
                progress(min(done, steps), steps, f"best {100 * plans().best_ratio:.1f} % of the start's cost")

        def on_episode(episode: Episode) -> None:
            best = episode.summary
            store_rows(database, best.pop("rows", []), ours)
            by_our_prices(best, problems[best["model"]])
            whole_runs().add(best["model"], episode)
            nonlocal booked
            booked = max(booked, taken - len(episode) + best["step"])  # several workers' episodes overlap
            plans().offer(best["model"], Plan.of(best["plan"]), best["run_secs"], booked)

        told = description(models, shapes, target, remote, kind.environment, horizon, reward, predict, problems, begins)
        stack.enter_context(_alone_in(out))
        result = kind.train(
            env,
            config,
            steps,
            seed,
            out,
            resume=resume,
            on_step=on_step,
            on_episode=on_episode,
            on_work=on_work,
            metadata={
                "models": list(models),
                "structures": structures(problems),
                "begins": {name: beginning_name(begin) for name, begin in found.items()},
                # a training that goes on has its own archive: others given then would not be in it
                **({"starts": {name: f"{plan.end_hash:016x}" for name, plan in given.items()}} if given else {}),
                "shapes": {name: list(shape) for name, shape in shapes.items()},
                "target": str(target) if remote is None else f"{target} rpc:{remote.key}",
                "rules": list(env.current.rule_names),
                "horizon": horizon,
                "reward": reward,
                "predict": predict,
            },
            workers=Workers(FACTORY, told, workers, ray) if elsewhere else None,
            starts=[
                {"model": name, "run_secs": priced[name], "plan": dataclasses.asdict(plan)}
                for name, plan in given.items()
                if 0.0 < priced[name] < found[name].run_secs
            ],
        )
        plans().finish()
        return TrainingOutcome(
            agent, str(target), seed, result.checkpoint, result.env_steps, result.episodes, result.mean_return,
            result.wall_secs, plans().outcomes(),
        )  # fmt: skip
