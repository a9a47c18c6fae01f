"""What a training leaves beside its agent: the best plan of each model, when it was found, and what whole runs took."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import UsageError
from rlflow_tvm.frontend import split_shapes
from rlflow_tvm.jsonl import append_line, keep_lines
from rlflow_tvm.passes import Plan

if TYPE_CHECKING:
    from rlflow_tvm.agents import Episode

log = logging.getLogger("rlflow_tvm")


@dataclass(frozen=True)
class ModelOutcome:
    """Cost of one model's graph before and after its best plan so far, in seconds."""

    model: str
    run_secs_before: float
    run_secs_after: float
    plan: Path
    plan_length: int


class BestPlans:
    """Each model's best plan, kept on disk as soon as it is found, and found again when a training goes on: as a line
    of `best.jsonl`, then as a file, which is made of that line where a kill came between."""

    def __init__(self, out: Path, problems: Mapping[str, RewriteProblem]) -> None:
        self._problems, self._curve = problems, out / "best.jsonl"
        self.paths = plan_paths(out, problems)
        last = {line["model"]: Plan.of(line["plan"]) for line in keep_lines(self._curve) if "plan" in line}
        self._best = {model: self._known(model, last.get(model)) for model in problems}

    def _known(self, model: str, plan: Plan | None) -> tuple[float, int]:
        path = self.paths[model]
        if plan is not None:
            plan.save(path)
        elif path.exists():
            plan = Plan.load(path)
        else:
            return self._problems[model].start_secs, 0
        secs, start_secs = self._priced(model, plan), self._problems[model].start_secs
        if secs < start_secs or not len(plan):
            return secs, len(plan)
        log.warning(
            "%s: %s: what is cheaper than the model takes its place",
            model,
            "its best plan gains nothing by today's times" if isfinite(secs) else "a kernel of its best plan fails now",
        )
        self._problems[model].start.plan.save(path)  # the line stays, should prices change again
        return start_secs, 0

    def offer(self, model: str, plan: Plan, run_secs: float, env_steps: int) -> None:
        """Take a plan over if its graph is cheaper than the best so far, by our own prices too: `run_secs` may have
        been reckoned from another machine's. `best.jsonl` tells what was best after how many environment steps; the
        last episodes of a training may take it some beyond those that it was given. (Of several workers' steps those
        count too that were taken meanwhile.)"""
        if run_secs >= self._best[model][0] or not len(plan):
            return
        own_secs = self._priced(model, plan)
        if own_secs < self._best[model][0]:
            line = {"env_steps": env_steps, "model": model, "run_secs": own_secs, "plan": dataclasses.asdict(plan)}
            append_line(self._curve, line)
            plan.save(self.paths[model])
            self._best[model] = own_secs, len(plan)

    def _priced(self, model: str, plan: Plan) -> float:
        problem = self._problems[model]
        return problem.surest_cost(problem.replay(plan)).run_secs

    def outcomes(self) -> tuple[ModelOutcome, ...]:
        return tuple(
            ModelOutcome(model, self._problems[model].start_secs, secs, self.paths[model], length)
            for model, (secs, length) in self._best.items()
        )

    def finish(self) -> None:
        """Leave a plan file for every model, an empty plan where nothing better than the start was found."""
        for model, path in self.paths.items():
            if not path.exists():
                self._problems[model].start.plan.save(path)

    @property
    def best_ratio(self) -> float:
        """Geometric mean over the models of (best cost / cost at the start); 0 where one of them has become free."""
        return mean_ratio(self._best[m][0] / p.start_secs for m, p in self._problems.items())


def by_our_prices(summary: dict[str, Any], problem: RewriteProblem) -> None:
    """Reckon an episode's seconds, `run_secs`, to what the model costs here, in place: a worker on another machine may
    be slower by more than anything gains. Of this machine's they stay what they are."""
    theirs = summary.pop("start_secs")
    if theirs > 0:  # else all of it is for nothing, everywhere
        summary["run_secs"] *= problem.start_secs / theirs


def mean_ratio(ratios: Iterable[float]) -> float:
    """Their geometric mean; 0 where one of them is."""
    listed = list(ratios)
    return geometric_mean(listed) if all(listed) else 0.0


class EndToEndLog:
    """What a graph costs as the sum of its kernels and as a whole, each time that a reward had it run: a line each in
    `end_to_end.jsonl`. Lines from after the checkpoint in the folder, or where episodes are kept from after those, come
    again: they are dropped."""

    def __init__(self, out: Path) -> None:
        from rlflow_tvm.agents.checkpoint import FILE_NAME, load_checkpoint
        from rlflow_tvm.agents.world.rollouts import Rollouts

        self._path = out / "end_to_end.jsonl"
        counts = load_checkpoint(out / FILE_NAME, prefix="none")[1]["counts"]
        if "env_steps" in counts:
            self._env_steps = int(counts["env_steps"])
        else:  # a world model's counts none
            kept = Rollouts(out / "rollouts")
            kept.load()
            self._env_steps = kept.steps
        keep_lines(self._path, lambda line: bool(line["env_steps"] <= self._env_steps))

    def add(self, model: str, episode: Episode) -> None:
        """Take in the next episode."""
        self._env_steps += len(episode)
        for run_secs, whole in episode.end_to_end:
            line = {"env_steps": self._env_steps, "model": model, "run_secs": run_secs, "end_to_end_secs": whole}
            append_line(self._path, {**line, "discrepancy": run_secs / whole - 1.0})


def model_name(model: str) -> str:
    """What a model is called in the names of files: as in the zoo, or as its file without the suffix, with the shapes
    that it is to have."""
    if model.startswith("zoo:"):
        return model.removeprefix("zoo:")
    file, shapes = split_shapes(model)
    told = "@".join([Path(file).stem, *(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())])
    return told.replace("/", "_")


def plan_paths(out: Path, models: Iterable[str]) -> dict[str, Path]:
    """Model -> the file of its best plan; UsageError if two models would share one."""
    names = {model: model_name(model) for model in models}
    if len(set(names.values())) < len(names):
        raise UsageError("two models have the same file name: their plans would overwrite each other; rename one")
    if len(names) == 1:
        return dict.fromkeys(names, out / "best.plan.json")
    return {model: out / f"best.{name}.plan.json" for model, name in names.items()}
