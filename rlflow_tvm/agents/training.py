"""The training loop: collect whole episodes, update, log, checkpoint; and resume exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

from rlflow_tvm.agents import checkpoint, progress
from rlflow_tvm.agents.act import check_sizes
from rlflow_tvm.agents.archive import Archive
from rlflow_tvm.agents.collect import Quota, collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.designs import DESIGNS, Design
from rlflow_tvm.agents.graph_policy import Acting
from rlflow_tvm.agents.opening import Opening
from rlflow_tvm.agents.pool import Workers, open_pool
from rlflow_tvm.agents.ppo import PPO, policy_tensors
from rlflow_tvm.agents.progress import ProgressLog
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.torch_settings import torch_settings
from rlflow_tvm.errors import AgentError

_LEFT_BEHIND = (checkpoint.FILE_NAME, progress.FILE_NAME, "rollouts", "best.jsonl", "end_to_end.jsonl")
"""By trainings, those of a world model and those on models too. A new one would add to what it finds."""

_SELDOM = 8
"""Times as rare as the setting has them likeliest episodes become at most."""

OnStep = Callable[[int], None]
OnWork = Callable[[str], None]
OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True)
class TrainingResult:
    """Where a training stands; counts are over all its runs."""

    checkpoint: Path
    env_steps: int
    episodes: int
    updates: int
    mean_return: float | None  # of the last update's episodes from the beginning, drawn, or that judge a world model's
    mean_length: float | None  # of all episodes of the last update
    best_return: float | None
    best_run_secs: float | None
    wall_secs: float


@dataclass
class _Counts:
    """What a checkpoint remembers of the loop."""

    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    mean_return: float | None = None
    mean_length: float | None = None
    longest: int | None = None  # steps of the longest episode
    likeliest_every: int = 0  # as the setting, or as long as such episodes find nothing up to _SELDOM times that
    cheapest: dict[str, float] = field(default_factory=dict)  # model -> seconds, by what episodes told of themselves
    best_return: float | None = None
    best_run_secs: float | None = None
    wall_secs: float = 0.0

    def add(self, episodes: list[Episode]) -> None:
        """Take in one update's episodes."""
        # from a remembered graph less is to be gained than from the beginning
        begun = [episode for episode in episodes if not episode.remembered]
        returns = [episode.total_reward for episode in begun]
        drawn = [episode.total_reward for episode in begun if not episode.likeliest]
        times = [episode.best_run_secs for episode in episodes] + [self.best_run_secs]
        steps = sum(len(episode) for episode in episodes)
        self.env_steps += steps
        self.episodes += len(episodes)
        self.updates += 1
        self.mean_return = math.fsum(drawn) / len(drawn) if drawn else self.mean_return
        self.mean_length = steps / len(episodes)
        self.longest = max([*map(len, episodes), self.longest or 0])
        self.best_return = max([*returns, *([] if self.best_return is None else [self.best_return])], default=None)
        self.best_run_secs = min((secs for secs in times if secs is not None), default=None)

    def reschedule_likeliest(self, episodes: list[Episode], every: int) -> None:
        """Say how often likeliest actions are taken from now on: as the setting has it, `every`, if an episode of such
        ones has found a graph cheaper than those of all updates before, else half as often, if there was one."""
        before, found = dict(self.cheapest), list[bool]()
        for episode in episodes:
            secs, model = episode.summary.get("run_secs", math.inf), episode.summary.get("model", "")
            if secs < self.cheapest.get(model, math.inf):  # never infinite: JSON has no word for that
                self.cheapest[model] = secs
            if episode.likeliest:
                found.append(secs < before.get(model, math.inf))
        if found:
            self.likeliest_every = every if any(found) else min(2 * self.likeliest_every, _SELDOM * every)


def train(
    env: gymnasium.Env,
    config: PPOConfig,
    total_steps: int,
    seed: int,
    out_dir: str | Path,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_episode: OnEpisode | None = None,
    on_work: OnWork | None = None,
    metadata: Mapping[str, Any] | None = None,
    checkpoint_secs: float = 5.0,
    workers: Workers | None = None,
    starts: Sequence[Mapping[str, Any]] = (),
    policy: str = "ppo",
) -> TrainingResult:
    """Train with PPO until `total_steps` environment steps, counted over all runs, and leave the agent in `out_dir`.

    A rollout is whole episodes, and a training ends between updates: it overshoots by up to one rollout. One episode in
    `config.likeliest_every` takes the policy's likeliest actions, which PPO does not learn from; where these find
    nothing better they become more seldom. Each episode is determined by `seed`, its number, the policy and what was
    found before its update, and begins with `env.reset(seed=...)`. So a training that was interrupted and resumed, or
    whose episodes were collected by any number of workers, is bit for bit the same as one that was never interrupted in
    one process; only state that environments carry across `reset` would differ. torch's threads and random state are
    those of `config` and `seed` inside, and the caller's again afterwards.

    Args:
        env: a rewriting environment; it is not closed. With `workers` only its observation space and the names
            of its `models` are looked at.
        config: settings.
        total_steps: environment steps.
        seed: of everything random.
        out_dir: gets `agent.safetensors`, `progress.jsonl` and TensorBoard's event files.
        resume: go on from the checkpoint in `out_dir`; with the same config, seed, spaces and metadata the result is
            bit for bit the one of an uninterrupted training.
        on_step: called with the environment steps so far: after each step, with `workers` after each episode.
        on_episode: called with each episode, in their order; without `workers` at its end, before the next reset.
        on_work: told in words what is done besides stepping.
        metadata: JSON to be stored with the agent, for example the rules' names; `Agent.metadata` has it again.
        checkpoint_secs: least time between checkpoints; they are written between updates, and at the end.
        workers: collect the episodes there, several at once.
        starts: graphs remembered from the beginning, as the environment tells them of episodes; a resumed training has
            its own.
        policy: what is trained, one of `designs.DESIGNS`.

    Raises:
        AgentError: `out_dir` holds a training and `resume` is off, or holds none and it is on; or it was trained with
            another config, seed, environment or metadata; or the workers cannot work.
    """
    folder = Path(out_dir)
    if total_steps < 1 or not 0 <= seed < 2**64:
        raise AgentError(f"train: total_steps {total_steps} must be at least 1, seed {seed} at least 0 and below 2^64")
    check_folder(folder, resume)
    design = DESIGNS[policy]
    sizes = design.from_space(env.observation_space)
    # through JSON, so that it compares equal to what is read back
    identity = json.loads(json.dumps({"config": config.as_dict(), "seed": seed, "metadata": dict(metadata or {})}))
    with torch_settings(config.threads):
        learner = PPO(lambda: design.make(sizes, config), config, seed)
        counts = _Counts(likeliest_every=config.likeliest_every)
        archive = Archive.of(env, config.remembered, config.remembered_share, starts)
        path = folder / checkpoint.FILE_NAME
        if resume:
            counts = _restore(path, design, learner, archive, identity)
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise AgentError(f"{folder}: cannot be made ({error.strerror}); give another output folder") from error
            # at once, so that a training killed in its first update can be resumed too
            _save(path, policy, learner, archive, identity, counts)
        started = time.monotonic() - counts.wall_secs
        saved_at = time.monotonic()
        with ProgressLog(folder, counts.updates, counts.env_steps) as log, ExitStack() as stack:
            steps = counts.env_steps  # those of episodes that have not been learnt from included

            def steps_done(number: int) -> None:
                nonlocal steps
                steps += number
                if on_step is not None:
                    on_step(steps)

            def opening(number: int) -> Opening:
                every = counts.likeliest_every
                gathers = bool(every) and number % every == every - 1
                return Opening(archive.start(seed, number), likeliest=gathers, gathers=gathers)

            pool = None
            if workers is not None and counts.env_steps < total_steps:
                pool = stack.enter_context(open_pool(workers, config, seed, sizes, policy))
            while counts.env_steps < total_steps:
                quota = Quota(config.steps_per_update, counts.longest)
                rollout = (
                    _rollout(env, learner.policy, seed, counts.episodes, quota, steps_done, opening)
                    if pool is None
                    else pool.collect(policy_tensors(learner.policy), counts.episodes, quota, steps_done, opening)
                )
                episodes = []
                for episode in rollout:
                    if on_episode is not None:
                        on_episode(episode)
                    episodes.append(episode)
                if on_work is not None:
                    on_work("learning")
                losses = learner.update(episodes)
                counts.add(episodes)
                counts.reschedule_likeliest(episodes, config.likeliest_every)
                for episode in episodes:  # not before: all of an update's episodes choose from the same graphs
                    archive.add(episode)
                counts.wall_secs = time.monotonic() - started
                log.write({**_line(counts), **losses})
                if time.monotonic() - saved_at >= checkpoint_secs or counts.env_steps >= total_steps:
                    _save(path, policy, learner, archive, identity, counts)
                    saved_at = time.monotonic()
    told = dataclasses.asdict(counts)
    for name in ("longest", "likeliest_every", "cheapest"):
        del told[name]
    return TrainingResult(checkpoint=path, **told)


def _rollout(
    env: gymnasium.Env,
    policy: Acting,
    seed: int,
    first: int,
    quota: Quota,
    on_step: Callable[[int], None],
    opening: Callable[[int], Opening],
) -> Iterator[Episode]:
    """An update's episodes, from number `first` on, collected here; `on_step(1)` follows each step."""
    while quota.open:
        number = first + quota.taken
        episode = collect_episode(env, policy, episode_rng(seed, number), lambda: on_step(1), opening(number))
        quota.add(episode.drawn)
        yield episode


def check_folder(folder: Path, resume: bool) -> None:
    """AgentError if a training cannot begin in `folder`, or with `resume` go on in it: to be asked before long work."""
    # (pathlib's `exists` raises where a folder on the way must not be searched)
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(there):
        raise AgentError(f"{there}: is a file; give another output folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise AgentError(f"{there}: cannot be written; give another output folder")
    try:
        found = [name for name in _LEFT_BEHIND if (folder / name).exists() and not _is_empty(folder / name)]
    except OSError as error:
        raise AgentError(f"{folder}: cannot be looked into ({error.strerror}); give another output folder") from error
    if found and not resume:
        remedy = "resume it" if found[0] == checkpoint.FILE_NAME else "move that away"
        raise AgentError(f"{folder}: holds a training already ({found[0]}); {remedy}, or give another output folder")
    if resume and checkpoint.FILE_NAME not in found:
        raise AgentError(f"{folder}: no {checkpoint.FILE_NAME} to resume from; start without resume, or mend the path")


def _is_empty(path: Path) -> bool:
    """Whether it is a folder with nothing in it."""
    return path.is_dir() and next(path.iterdir(), None) is None


def _line(counts: _Counts) -> dict[str, Any]:
    values = dataclasses.asdict(counts)
    del values["cheapest"]
    return {"update": values.pop("updates"), **values}


def _save(
    path: Path, policy: str, learner: PPO, archive: Archive, identity: Mapping[str, Any], counts: _Counts
) -> None:
    description = {
        "agent": policy,
        **identity,
        "sizes": dataclasses.asdict(learner.policy.sizes),
        "learner": learner.numbers(),
        "archive": archive.kept,
        "counts": dataclasses.asdict(counts),
    }
    checkpoint.save_checkpoint(path, learner.tensors(), description)


def _restore(path: Path, design: Design, learner: PPO, archive: Archive, identity: Mapping[str, Any]) -> _Counts:
    """Put a checkpoint's state into learner and archive, once it is clear that it belongs to the same training."""
    tensors, description = checkpoint.load_checkpoint(path)
    refuse_differences(path, description, identity, learner.policy.sizes)
    learner.restore(tensors, description["learner"])
    archive.kept.update(description["archive"])
    return _Counts(**description["counts"])


def refuse_differences(path: Path, description: Mapping[str, Any], identity: Mapping[str, Any], sizes: Any) -> None:
    """AgentError naming every setting in which a checkpoint differs from the training that would go on from it."""
    check_sizes(path, description["sizes"], dataclasses.asdict(sizes))
    then, now = (
        {
            **parts["config"],
            "seed": parts["seed"],
            **{f"metadata {name}": value for name, value in parts["metadata"].items()},
        }
        for parts in (description, identity)
    )
    differing = [
        f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    if differing:
        raise AgentError(
            f"{path}: cannot resume with other settings ({'; '.join(differing)}); "
            "give the same ones, or train into another folder"
        )
