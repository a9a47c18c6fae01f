"""The training loop: collect whole episodes, update, log, checkpoint; and resume exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlflow_tvm.agents import checkpoint, progress
from rlflow_tvm.agents.act import check_sizes
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes, compact
from rlflow_tvm.agents.ppo import PPO
from rlflow_tvm.agents.progress import ProgressLog
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.errors import AgentError

OnStep = Callable[[int, Mapping[str, Any]], None]
OnEpisode = Callable[[gymnasium.Env, Episode], None]


@dataclass(frozen=True)
class TrainingResult:
    """Where a training stands; counts are over all its runs."""

    checkpoint: Path
    env_steps: int
    episodes: int
    updates: int
    mean_return: float | None  # of the last update's episodes
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
    best_return: float | None = None
    best_run_secs: float | None = None
    wall_secs: float = 0.0

    def add(self, episodes: list[Episode]) -> None:
        """Take in one update's episodes."""
        returns = [episode.total_reward for episode in episodes]
        times = [episode.best_run_secs for episode in episodes] + [self.best_run_secs]
        self.env_steps += sum(len(episode) for episode in episodes)
        self.episodes += len(episodes)
        self.updates += 1
        self.mean_return = math.fsum(returns) / len(returns)
        self.best_return = max(returns if self.best_return is None else [*returns, self.best_return])
        self.best_run_secs = min((secs for secs in times if secs is not None), default=None)


def train(
    env: gymnasium.Env,
    config: PPOConfig,
    total_steps: int,
    seed: int,
    out_dir: str | Path,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_episode: OnEpisode | None = None,
    metadata: Mapping[str, Any] | None = None,
    checkpoint_secs: float = 5.0,
) -> TrainingResult:
    """Train with PPO until `total_steps` environment steps, counted over all runs, and leave the agent in `out_dir`.

    A rollout is whole episodes, and a training ends between updates: it overshoots by up to one rollout. Each episode
    begins with `env.reset(seed=...)`, the seed drawn from `seed`, so that a resumed training meets the same episodes
    as one that was never interrupted; only state that `env` carries across `reset` would differ. torch's threads and
    random state are those of `config` and `seed` inside, and the caller's again afterwards.

    Args:
        env: a rewriting environment; it is not closed.
        config: settings.
        total_steps: environment steps.
        seed: of everything random.
        out_dir: gets `agent.safetensors`, `progress.jsonl` and TensorBoard's event files.
        resume: go on from the checkpoint in `out_dir`; with the same config, seed, spaces and metadata the result is
            bit for bit the one of an uninterrupted training.
        on_step: called after each step with (environment steps so far, info).
        on_episode: called at the end of each episode, before the next reset, with (env, episode).
        metadata: JSON to be stored with the agent, for example the rules' names; `Agent.metadata` has it again.
        checkpoint_secs: least time between checkpoints; they are written between updates, and at the end.

    Raises:
        AgentError: `out_dir` holds a training and `resume` is off, or holds none and it is on; or it was trained with
            another config, seed, environment or metadata.
    """
    folder = Path(out_dir)
    if total_steps < 1 or seed < 0:
        raise AgentError(f"train: total_steps {total_steps} must be at least 1 and seed {seed} at least 0")
    check_folder(folder, resume)
    sizes = ObservationSizes.from_space(env.observation_space)
    # through JSON, so that it compares equal to what is read back
    identity = json.loads(json.dumps({"config": config.as_dict(), "seed": seed, "metadata": dict(metadata or {})}))
    with _torch_settings(config.threads):
        learner, counts = PPO(sizes, config, seed), _Counts()
        path = folder / checkpoint.FILE_NAME
        if resume:
            counts = _restore(path, learner, identity)
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise AgentError(f"{folder}: cannot be made ({error.strerror}); give another output folder") from error
            # at once, so that a training killed in its first update can be resumed too
            _save(path, learner, identity, counts)
        started = time.monotonic() - counts.wall_secs
        saved_at = time.monotonic()
        with ProgressLog(folder, counts.updates, counts.env_steps) as log:
            while counts.env_steps < total_steps:
                episodes = list(_rollout(env, learner, counts.env_steps, on_step, on_episode))
                losses = learner.update(episodes)
                counts.add(episodes)
                counts.wall_secs = time.monotonic() - started
                mean_length = sum(len(episode) for episode in episodes) / len(episodes)
                log.write({**_line(counts), "mean_length": mean_length, **losses})
                if time.monotonic() - saved_at >= checkpoint_secs or counts.env_steps >= total_steps:
                    _save(path, learner, identity, counts)
                    saved_at = time.monotonic()
    return TrainingResult(checkpoint=path, **dataclasses.asdict(counts))


def collect_episode(env: gymnasium.Env, learner: PPO, on_step: Callable[[Mapping[str, Any]], None]) -> Episode:
    """One episode under the learner's policy, from a reset with a seed of the learner's to its end."""
    episode = Episode()
    observation, info = env.reset(seed=int(learner.rng.integers(2**31)))
    _note_time(episode, info)
    kept = compact(observation, learner.sizes)
    while not (episode.terminated or episode.truncated):
        if kept.num_sites == 0:
            raise AgentError("environment: neither a rule nor stop is allowed, yet the episode goes on; mend its masks")
        site, log_prob, value = learner.act(kept)
        action = np.array([kept.site_rules[site], kept.site_locations[site]], dtype=np.int64)
        observation, reward, terminated, truncated, info = env.step(action)
        episode.observations.append(kept)
        episode.sites.append(site)
        episode.rewards.append(float(reward))
        episode.values.append(value)
        episode.log_probs.append(log_prob)
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
        _note_time(episode, info)
        if "rule" in info:
            episode.rules.append(str(info["rule"]))
        on_step(info)
        if not terminated:
            kept = compact(observation, learner.sizes)
    if not episode.terminated:
        episode.last_value = learner.policy.value(kept)
    return episode


def _rollout(
    env: gymnasium.Env, learner: PPO, env_steps: int, on_step: OnStep | None, on_episode: OnEpisode | None
) -> Iterator[Episode]:
    """Whole episodes until there are at least `steps_per_update` steps; `env_steps` were done before."""
    steps = 0

    def step_done(info: Mapping[str, Any]) -> None:
        nonlocal steps
        steps += 1
        if on_step is not None:
            on_step(env_steps + steps, info)

    while steps < learner.config.steps_per_update:
        episode = collect_episode(env, learner, step_done)
        if on_episode is not None:
            on_episode(env, episode)
        yield episode


def _note_time(episode: Episode, info: Mapping[str, Any]) -> None:
    """Keep the time an info tells: an environment need not measure at each step, and a kernel can fail."""
    run_secs = info.get("run_secs")
    if run_secs is not None and math.isfinite(run_secs):
        episode.run_secs.append(float(run_secs))


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """torch's thread count and random state, given back at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def check_folder(folder: Path, resume: bool) -> None:
    """AgentError if a training cannot begin in `folder`, or with `resume` go on in it: to be asked before long work."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise AgentError(f"{there}: is a file; give another output folder")
    if not os.access(there, os.W_OK):
        raise AgentError(f"{there}: cannot be written; give another output folder")
    ours = [checkpoint.FILE_NAME, progress.FILE_NAME]
    found = [name for name in ours if (folder / name).exists()]
    if found and not resume:
        raise AgentError(f"{folder}: holds a training already ({found[0]}); resume it, or give another output folder")
    if resume and checkpoint.FILE_NAME not in found:
        raise AgentError(f"{folder}: no {checkpoint.FILE_NAME} to resume from; start without resume, or mend the path")


def _line(counts: _Counts) -> dict[str, Any]:
    values = dataclasses.asdict(counts)
    return {"update": values.pop("updates"), **values}


def _save(path: Path, learner: PPO, identity: Mapping[str, Any], counts: _Counts) -> None:
    description = {
        "agent": "ppo",
        **identity,
        "sizes": dataclasses.asdict(learner.sizes),
        "learner": learner.numbers(),
        "counts": dataclasses.asdict(counts),
    }
    checkpoint.save_checkpoint(path, learner.tensors(), description)


def _restore(path: Path, learner: PPO, identity: Mapping[str, Any]) -> _Counts:
    """Put a checkpoint's state into the learner, once it is clear that it belongs to the same training."""
    tensors, description = checkpoint.load_checkpoint(path)
    check_sizes(path, ObservationSizes(**description["sizes"]), learner.sizes)
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
    learner.restore(tensors, description["learner"])
    return _Counts(**description["counts"])
