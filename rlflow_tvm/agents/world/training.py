"""Training with a world model: random episodes, V, M, then a controller in dreams; each phase resumed exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlflow_tvm.agents import checkpoint
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.ppo import PPO, load_parameters, optimizer_tensors, policy_tensors, restore_optimizer
from rlflow_tvm.agents.progress import ProgressLog
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import (
    OnEpisode,
    OnStep,
    OnWork,
    TrainingResult,
    check_folder,
    refuse_differences,
    torch_settings,
)
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, SeenEnv
from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.learning import Learner, MemoryLearner, VisionLearner
from rlflow_tvm.agents.world.model import WorldModel, score
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.agents.world.vision import site_counts
from rlflow_tvm.errors import AgentError

_DREAM = 3
_LOG_EVERY = 100


@dataclass
class _Counts:
    """What a checkpoint remembers of the training."""

    lines: int = 0  # of the log
    updates: int = 0
    evaluations: int = 0  # episodes
    evaluation_steps: int = 0
    best_score: float | None = None
    mean_return: float | None = None
    mean_length: float | None = None
    best_return: float | None = None
    best_run_secs: float | None = None
    wall_secs: float = 0.0

    def note(self, episode: Episode) -> None:
        """Take in a real episode's results."""
        self.best_return = max(episode.total_reward, -math.inf if self.best_return is None else self.best_return)
        if episode.best_run_secs is not None:
            self.best_run_secs = min(
                episode.best_run_secs, math.inf if self.best_run_secs is None else self.best_run_secs
            )


def train(
    env: gymnasium.Env,
    config: WorldModelConfig,
    total_steps: int,
    seed: int,
    out_dir: str | Path,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_episode: OnEpisode | None = None,
    on_work: OnWork | None = None,
    metadata: Mapping[str, Any] | None = None,
    checkpoint_secs: float = 30.0,
    workers: Workers | None = None,
) -> TrainingResult:
    """Train a world model on random episodes and a controller in its dreams; see `agents.training.train`.

    `total_steps` are real ones: `random_share` of them by the random agent, the rest to see what the controller is
    worth, which never learns from them. The agent is the controller that did best there.
    """
    folder = Path(out_dir)
    if total_steps < 1 or seed < 0:
        raise AgentError(f"train: total_steps {total_steps} must be at least 1 and seed {seed} at least 0")
    if workers is not None:
        raise AgentError("world-model: its episodes are collected by one process; leave --workers and --ray out")
    check_folder(folder, resume)
    # the steps too: they say how many are random ones
    told = {**(metadata or {}), "total_steps": total_steps}
    identity = json.loads(json.dumps({"config": config.as_dict(), "seed": seed, "metadata": told}))
    with torch_settings(config.threads), ExitStack() as stack:
        training = _Training(env, config, total_steps, seed, folder, identity, checkpoint_secs)
        training.on_step, training.on_episode, training.on_work = on_step, on_episode, on_work
        training.begin(resume)
        training.log = stack.enter_context(ProgressLog(folder, training.counts.lines, training.env_steps))
        training.collect()
        training.learn()
        training.control()
        return training.finish()


class _Training:
    """One training's parts, and where it stands."""

    log: ProgressLog
    on_step: OnStep | None
    on_episode: OnEpisode | None
    on_work: OnWork | None

    def __init__(
        self,
        env: gymnasium.Env,
        config: WorldModelConfig,
        total_steps: int,
        seed: int,
        folder: Path,
        identity: Mapping[str, Any],
        checkpoint_secs: float,
    ) -> None:
        self.env, self.config, self.total_steps, self.seed = env, config, total_steps, seed
        self.path, self.rollouts = folder / checkpoint.FILE_NAME, Rollouts(folder / "rollouts")
        self.sizes = ObservationSizes.from_space(env.observation_space)
        self._identity, self._checkpoint_secs = identity, checkpoint_secs
        torch.manual_seed(seed)
        self.model = make_model(self.sizes, config)
        self.vision = VisionLearner(self.model, config, seed)
        self.memory = MemoryLearner(self.model, config, seed)
        self.ppo = PPO(self.sizes, config.controller, seed, lambda: make_controller(self.sizes, config))
        self.best = self._controller_now()
        self.counts = _Counts()
        self._started = self._saved_at = time.monotonic()

    @property
    def env_steps(self) -> int:
        """Real ones so far."""
        return self.rollouts.steps + self.counts.evaluation_steps

    def begin(self, resume: bool) -> None:
        """From the checkpoint, or a new one."""
        if resume:
            self._restore()
            self.rollouts.load()
        else:
            try:
                self.rollouts.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise AgentError(f"{self.path.parent}: cannot be made ({error.strerror}); give another one") from error
            self._save()
        self._started = time.monotonic() - self.counts.wall_secs

    def collect(self) -> None:
        """Episodes of the random agent, each on disk when it is over."""
        wanted = math.ceil(self.config.random_share * self.total_steps)
        policy = UniformPolicy(self.sizes)
        while self.rollouts.steps < wanted:
            self.rollouts.add(self._episode(self.env, policy, len(self.rollouts.episodes)))
        for episode in self.rollouts.episodes:
            self.counts.note(episode)

    def _episode(self, env: gymnasium.Env, policy: Any, number: int) -> Episode:
        steps = self.env_steps

        def stepped() -> None:
            nonlocal steps
            steps += 1
            if self.on_step is not None:
                self.on_step(steps)

        episode = collect_episode(env, policy, episode_rng(self.seed, number), stepped)
        if self.on_episode is not None:
            self.on_episode(episode)
        return episode

    def learn(self) -> None:
        """V, then M, on all episodes but those held out."""
        held, learnt = self.rollouts.split(self.config.held_out)
        for name, learner, score_held in (
            ("vision", self.vision, False),
            ("memory", self.memory, True),
        ):
            if learner.done < learner.steps:
                learner.prepare(learnt)
                self._fit(name, learner, held if score_held else [])

    def _fit(self, name: str, learner: Learner, held: list[Episode]) -> None:
        while learner.done < learner.steps:
            losses = learner.step()
            if self.on_work is not None:
                self.on_work(f"learning {name}: {learner.done} of {learner.steps}")
            if learner.done % _LOG_EVERY == 0 or learner.done == learner.steps:
                line: dict[str, float | None] = {f"{name}/{kind}": float(loss) for kind, loss in losses.items()}
                if held:
                    line |= {f"held_out/{kind}": value for kind, value in score(self.model, held).items()}
                self._log(line)
                self._save_now_and_then()
        self._save()

    def control(self) -> None:
        """PPO in dreams; now and then an episode in the real environment."""
        if self.counts.updates < self.config.controller_updates:
            dream, seen = self._dream(), SeenEnv(self.env, self.model.vision, self.model.memory)
        while self.counts.updates < self.config.controller_updates:
            # never twice the same, and the same whether or not the training was interrupted
            dream_seed = int(np.random.default_rng([self.seed, _DREAM, self.counts.updates]).integers(2**31))
            controller = self.ppo.policy
            assert isinstance(controller, Controller)
            episodes = imagine(dream, controller, self.config.dreams, dream_seed)
            losses = self.ppo.update(episodes)
            self.counts.updates += 1
            line = {f"controller/{kind}": value for kind, value in losses.items()}
            line["dream/return"] = float(np.mean([episode.total_reward for episode in episodes]))
            line["dream/length"] = float(np.mean([len(episode) for episode in episodes]))
            last = self.counts.updates == self.config.controller_updates
            if last or self.counts.updates % self.config.evaluate_every == 0:
                line |= self._evaluate(seen)
            if self.on_work is not None:
                self.on_work(f"dreaming: {self.counts.updates} of {self.config.controller_updates}")
            self._log(line)
            self._save_now_and_then()
        if self.counts.best_score is None:  # no real step was left to tell controllers apart
            self.best = self._controller_now()
        self._save()

    def _dream(self) -> Dream:
        firsts = [episode.observations[0] for episode in self.rollouts.episodes]
        starts = list({(o.nodes.tobytes(), o.edges.tobytes(), o.edge_links.tobytes()): o for o in firsts}.values())
        counts = torch.from_numpy(site_counts(starts, self.sizes)).float()
        return Dream(
            self.sizes, self.model.memory, self.model.latents(starts), counts, self.config.temperature,
            self.config.dream_horizon,
        )  # fmt: skip

    def _evaluate(self, seen: SeenEnv) -> dict[str, float | None]:
        """Real episodes of the controller, an equal share of the steps that are left: it becomes the agent if none did
        better before."""
        evaluations_left = 1 + (self.config.controller_updates - self.counts.updates) // self.config.evaluate_every
        share = (self.total_steps - self.env_steps) / evaluations_left
        episodes: list[Episode] = []
        while share > 0 and sum(map(len, episodes)) < share:
            number = len(self.rollouts.episodes) + self.counts.evaluations
            episode = self._episode(seen, self.ppo.policy, number)
            self.counts.evaluations += 1
            self.counts.evaluation_steps += len(episode)
            self.counts.note(episode)
            episodes.append(episode)
        if not episodes:
            return {}
        self.counts.mean_return = float(np.mean([episode.total_reward for episode in episodes]))
        self.counts.mean_length = float(np.mean([len(episode) for episode in episodes]))
        if self.counts.best_score is None or self.counts.mean_return > self.counts.best_score:
            self.counts.best_score = self.counts.mean_return
            self.best = self._controller_now()
        return {"real/return": self.counts.mean_return, "real/length": self.counts.mean_length}

    def _controller_now(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in policy_tensors(self.ppo.policy).items()}

    def finish(self) -> TrainingResult:
        """What the training left behind."""
        told = {each.name for each in dataclasses.fields(TrainingResult)}
        counts = {name: value for name, value in dataclasses.asdict(self.counts).items() if name in told}
        episodes = len(self.rollouts.episodes) + self.counts.evaluations
        return TrainingResult(checkpoint=self.path, env_steps=self.env_steps, episodes=episodes, **counts)

    def _log(self, line: Mapping[str, float | None]) -> None:
        self.counts.lines += 1
        self.counts.wall_secs = time.monotonic() - self._started
        numbers = {"env_steps": self.env_steps, "wall_secs": self.counts.wall_secs}
        self.log.write({"update": self.counts.lines, **numbers, **line})

    def _save_now_and_then(self) -> None:
        if time.monotonic() - self._saved_at >= self._checkpoint_secs:
            self._save()

    def _parts(self) -> Iterator[tuple[str, Learner]]:
        yield "vision", self.vision
        yield "memory", self.memory

    def _save(self) -> None:
        tensors = {f"world.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"controller.{name}": value for name, value in self.ppo.tensors().items()}
        for name, learner in self._parts():
            tensors |= optimizer_tensors(learner.part, learner.optimizer, f"{name}.optimizer")
        description = {
            "agent": "world-model",
            **self._identity,
            "sizes": dataclasses.asdict(self.sizes),
            "learner": self.ppo.numbers(),
            "learnt": {name: learner.done for name, learner in self._parts()},
            "counts": dataclasses.asdict(self.counts),
        }
        checkpoint.save_checkpoint(self.path, tensors | self.best, description)
        self._saved_at = time.monotonic()

    def _restore(self) -> None:
        tensors, description = checkpoint.load_checkpoint(self.path)
        refuse_differences(self.path, description, self._identity, self.sizes)
        load_parameters(self.model, tensors, "world")
        for name, learner in self._parts():
            learner.done = int(description["learnt"][name])
            restore_optimizer(learner.part, learner.optimizer, tensors, f"{name}.optimizer")
        begins = "controller."
        self.ppo.restore(
            {name.removeprefix(begins): value for name, value in tensors.items() if name.startswith(begins)},
            description["learner"],
        )
        self.best = {name: value for name, value in tensors.items() if name.startswith("policy.")}
        self.counts = _Counts(**description["counts"])


def make_model(sizes: ObservationSizes, config: WorldModelConfig) -> WorldModel:
    """V and M as the settings have them."""
    return WorldModel(sizes, config.latent, config.hidden, config.rounds, config.memory, config.gaussians)


def make_controller(sizes: ObservationSizes, config: WorldModelConfig) -> Controller:
    """The controller as the settings have it."""
    return Controller(sizes, config.latent + config.memory, config.controller.hidden)
