"""The real environment's episodes: the random agent's and the controller's, kept on disk, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium

from rlflow_tvm.agents.archive import Archive
from rlflow_tvm.agents.collect import Quota, collect_episode, episode_rng
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.graph_policy import Acting
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.opening import SHORT, Opening
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.pool import Workers, open_pool
from rlflow_tvm.agents.ppo import policy_tensors
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import OnEpisode, OnStep
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.errors import AgentError

JUDGED = 4
"""Of a controller's real episodes, one in so many judges it, the last of them."""
_PARTS = 4
_FAVOUR = 0.5  # of the remembered graphs, the cheapest's chance that a controller's episode goes on from it


class RealEpisodes:
    """All of a training's, each determined by the seed, its number, the policy and those before it.

    Args:
        env: the real environment; where workers collect, its observation space alone is looked at, and the names of its
            `models`.
        config: settings.
        seed: of everything random.
        folder: of the files.
        starts: graphs remembered from the beginning.
        on_step: called with the steps so far.
        on_episode: called with each episode.

    Attributes:
        rollouts: the episodes, with what was known of places before each.
        places: what is known now.
        limit: of a graph's cost over that of its episode's first, where the environment ends it; infinite where never.
        best_return: the largest of those that began at no remembered graph.
        best_run_secs: the smallest time told.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        config: WorldModelConfig,
        seed: int,
        folder: Path,
        starts: Sequence[Mapping[str, Any]] = (),
        on_step: OnStep | None = None,
        on_episode: OnEpisode | None = None,
    ) -> None:
        self.env, self.sizes = env, ObservationSizes.from_space(env.observation_space)
        self.limit = float(getattr(env.unwrapped, "limit", math.inf))
        self.rollouts, self.places = Rollouts(folder), Places()
        self.starts = list(starts)
        self.best_return: float | None = None
        self.best_run_secs: float | None = None
        self._config, self._seed, self._on_step, self._on_episode = config, seed, on_step, on_episode

    @property
    def steps(self) -> int:
        """Of all episodes."""
        return self.rollouts.steps

    def begin(self) -> None:
        """With none; AgentError where they cannot be kept."""
        try:
            self.rollouts.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            folder = self.rollouts.folder.parent
            raise AgentError(f"{folder}: cannot be made ({error.strerror}); give another one") from error

    def load(self) -> None:
        """Those that are on disk."""
        self.rollouts.load()
        for episode in self.rollouts.episodes:
            self._note(episode)

    def collect_random(self, steps: int, workers: Workers | None = None) -> None:
        """At least so many steps of the random agent, those that are there included: in parts, each of which may begin
        at the cheapest graphs of those before."""
        policy, archive = UniformPolicy(self.sizes), self._archive(0)

        def opening(number: int) -> Opening:
            return Opening(archive.start(self._seed, number))

        known = iter(self.rollouts.episodes[:])
        with ExitStack() as stack:
            pool = None
            collected = episodes = 0
            for part in range(1, _PARTS + 1):
                quota = Quota(math.ceil(part / _PARTS * steps) - collected, None)
                while quota.open and (episode := next(known, None)) is not None:
                    quota.add(len(episode))
                if quota.open and workers is not None and pool is None:
                    settings = PPOConfig(threads=self._config.threads)
                    pool = stack.enter_context(open_pool(workers, settings, self._seed, self.sizes, "uniform"))
                if pool is not None:
                    tensors = policy_tensors(policy)
                    for episode in pool.collect(tensors, episodes, quota, self._counted(), opening):
                        self._keep(episode)
                while quota.open:
                    quota.add(len(self._collect(policy, opening)))
                taken = self.rollouts.episodes[episodes : episodes + quota.taken]
                collected, episodes = collected + sum(map(len, taken)), episodes + len(taken)
                for episode in taken:
                    archive.add(episode)

    def collect_until(self, steps: float, before: int, policy: Acting) -> None:
        """Episodes until there are so many steps. Of those after the first `before` the last of `JUDGED` takes the
        likeliest actions from the beginning, as the agent will, and judges the policy; of several models each in turn,
        so that controllers are judged on the same ones, whatever is drawn. The others begin there or at one
        of the cheapest graphs met until then, mostly the cheapest; every other one puts together what is known, if the
        controller's settings have such episodes, and of the rest actions are drawn until nothing cheaper comes: real
        steps are few."""
        archive = self._archive(len(self.rollouts.episodes), _FAVOUR)
        models = getattr(self.env.unwrapped, "models", ())

        def opening(number: int) -> Opening:
            turn = (number - before) % JUDGED
            if turn == JUDGED - 1:
                judged = (number - before) // JUDGED
                start = {"model": models[judged % len(models)]} if len(models) > 1 else None
                return Opening(start, likeliest=True)
            gathers = turn % 2 == 0 and self._config.controller.likeliest_every > 0
            begins = archive.start(self._seed, number)
            return Opening(begins, likeliest=gathers, gathers=gathers, patience=None if gathers else SHORT)

        while self.steps < steps:
            archive.add(self._collect(policy, opening))

    def _archive(self, number: int, favour: float = 0.0) -> Archive:
        """The cheapest graphs of so many episodes; `favour` as in `Archive`."""
        archive = Archive.of(self.env, self._config.remembered, self._config.remembered_share, self.starts, favour)
        for episode in self.rollouts.episodes[:number]:
            archive.add(episode)
        return archive

    def _counted(self) -> Callable[[int], None]:
        """What is told of steps before their episodes are kept."""
        steps = self.steps

        def stepped(number: int) -> None:
            nonlocal steps
            steps += number
            if self._on_step is not None:
                self._on_step(steps)

        return stepped

    def _collect(self, policy: Acting, opening: Callable[[int], Opening]) -> Episode:
        """The next one, on disk when it is over."""
        stepped, number = self._counted(), len(self.rollouts.episodes)
        rng = episode_rng(self._seed, number)
        return self._keep(collect_episode(self.env, policy, rng, lambda: stepped(1), opening(number)))

    def _keep(self, episode: Episode) -> Episode:
        if self._on_episode is not None:
            self._on_episode(episode)
        # what was known before the episode, whoever collected it: M is not to read off what it has to foresee
        seen = [replace(each, site_known=self.places.known(each.site_places)) for each in episode.observations]
        self.rollouts.add(replace(episode, observations=seen))
        self._note(episode)
        return episode

    def _note(self, episode: Episode) -> None:
        self.places.learn([episode])
        if not episode.remembered:
            self.best_return = max(episode.total_reward, -math.inf if self.best_return is None else self.best_return)
        if episode.best_run_secs is not None:
            before = math.inf if self.best_run_secs is None else self.best_run_secs
            self.best_run_secs = min(episode.best_run_secs, before)
