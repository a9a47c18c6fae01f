"""Collecting episodes: which ones make up an update, and how each of them goes.

An episode is determined by the training's seed, its number, where it begins and the policy: its parameters and what it
knows of places. So it does not matter which process collects it, or how often it is begun.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from rlflow_tvm.agents.graph_policy import Acting
from rlflow_tvm.agents.opening import PLAIN, Opening
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings
from rlflow_tvm.errors import AgentError


class Quota:
    """How many episodes an update takes: as many as are `planned` once all planned ones are there.

    The plan rests on the lengths of episodes (steps that are learnt from) in the order of their numbers alone. So it is
    the same for any number of workers, every episode that was begun counts, and several can be begun at once: after
    each episode in turn, as many more as the missing steps should need if all were as long as the longest, but at least
    one. (By the mean length far too many would be begun where episodes become longer.)

    Args:
        steps: wanted; the update has at least as many.
        longest: steps of the longest episode before; None in the first update, where the number doubles at most until
            lengths are known.
    """

    def __init__(self, steps: int, longest: int | None) -> None:
        self.planned = 0
        self.taken = 0
        self.longest = longest or 0
        self._known = longest is not None
        self._missing = steps
        self._plan()

    def add(self, length: int) -> None:
        """Take in the next episode's number of steps."""
        self.taken += 1
        self.longest = max(self.longest, length)
        self._missing -= length
        self._plan()

    @property
    def open(self) -> bool:
        """Whether a planned episode is not there yet."""
        return self.taken < self.planned

    def _plan(self) -> None:
        if self._missing <= 0:
            return
        ahead = self._missing // self.longest if self.longest else 0
        if not self._known:
            ahead = min(ahead, self.taken)
        self.planned = max(self.planned, self.taken + max(1, ahead))


def episode_rng(seed: int, number: int) -> np.random.Generator:
    """The random numbers of episode `number` (from 0) of a training: its reset's seed first, then its actions."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))


def collect_episode(
    env: gymnasium.Env,
    policy: Acting,
    rng: np.random.Generator,
    on_step: Callable[[], None] = lambda: None,
    opening: Opening = PLAIN,
) -> Episode:
    """One episode under the policy, from a reset with a seed of `rng`'s to its end; `on_step` follows each step.

    The last info's `episode`, JSON, is kept as the episode's summary. AgentError where the masks leave nothing to do.
    """
    episode = Episode(remembered="plan" in (opening.start or {}), likeliest=opening.likeliest)
    observation, info = env.reset(seed=int(rng.integers(2**31)), options=opening.options)
    _note_time(episode, info)
    policy.begin_episode(rng, opening)
    kept = policy.compact(observation)
    while not (episode.terminated or episode.truncated):
        if kept.num_sites == 0:
            raise AgentError("environment: nothing is allowed, nor to stop, yet the episode goes on; mend its masks")
        site, log_prob, value = policy.choose(kept, None if opening.likeliest else rng)
        observation, reward, terminated, truncated, info = env.step(policy.action(kept, site))
        episode.observations.append(kept)
        episode.sites.append(site)
        episode.rewards.append(float(reward))
        episode.values.append(value)
        episode.log_probs.append(log_prob)
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
        _note_time(episode, info)
        if len(episode.run_secs) == len(episode) + 1:
            policy.tried(kept, site, float(savings(episode)[-1]))
        if "rule" in info:
            episode.rules.append(str(info["rule"]))
        on_step()
        if not terminated:
            kept = policy.compact(observation)
    if not episode.terminated:
        episode.last_value = policy.value(kept)
    episode.summary = dict(info.get("episode", {}))
    return episode


def _note_time(episode: Episode, info: Mapping[str, Any]) -> None:
    """Keep the time an info tells: an environment need not measure at each step, and a kernel can fail. Where it has
    become wiser about the graph before, by pricing the one after it, so does the episode."""
    run_secs = info.get("run_secs")
    if "run_secs_before" in info and len(episode.run_secs) == len(episode):
        episode.run_secs[-1] = float(info["run_secs_before"])
    if run_secs is not None and math.isfinite(run_secs):
        episode.run_secs.append(float(run_secs))
        if "end_to_end_secs" in info:
            episode.end_to_end.append([float(run_secs), float(info["end_to_end_secs"])])
