"""Training with a world model: random episodes; then again and again V and M, a controller in dreams, the real
environment; all of it resumed exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlflow_tvm.agents import checkpoint
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.ppo import PPO, load_parameters, optimizer_tensors, policy_tensors, restore_optimizer
from rlflow_tvm.agents.progress import ProgressLog
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import worth
from rlflow_tvm.agents.torch_settings import torch_settings
from rlflow_tvm.agents.training import (
    OnEpisode,
    OnStep,
    OnWork,
    TrainingResult,
    check_folder,
    refuse_differences,
)
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, Eyes, SeeingPolicy
from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.learning import Learner, MemoryLearner, SitesLearner, VisionLearner
from rlflow_tvm.agents.world.model import Experience, WorldModel, score
from rlflow_tvm.agents.world.real import JUDGED, RealEpisodes
from rlflow_tvm.errors import AgentError

_DREAM = 3
_PLACES = "agent.places."


@dataclass
class _Counts:
    """What a checkpoint remembers of the training."""

    lines: int = 0  # of the log
    iteration: int = 0
    updates: int = 0  # in this iteration
    tried_from: int = 0  # the first of the controller's episodes in this iteration
    best_scores: dict[str, float] = field(default_factory=dict)  # by model, of the controller that is the agent
    mean_return: float | None = None
    mean_length: float | None = None
    wall_secs: float = 0.0


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
    starts: Sequence[Mapping[str, Any]] = (),
) -> TrainingResult:
    """Train a world model and a controller in its dreams; see `agents.training.train`.

    `total_steps` are real ones: `random_share` of them by the random agent, with `workers` by them; the rest, here, by
    the controller as it is after each iteration: PPO never learns from them, V and M do. The agent is the controller
    that did best there, with V and M as they were then.
    """
    folder = Path(out_dir)
    if total_steps < 1 or not 0 <= seed < 2**64:
        raise AgentError(f"train: total_steps {total_steps} must be at least 1, seed {seed} at least 0 and below 2^64")
    check_folder(folder, resume)
    # the steps too: they say how many are random ones
    told = {**(metadata or {}), "total_steps": total_steps}
    identity = json.loads(json.dumps({"config": config.as_dict(), "seed": seed, "metadata": told}))
    with torch_settings(config.threads), ExitStack() as stack:
        real = RealEpisodes(env, config, seed, folder / "rollouts", starts, on_step, on_episode)
        training = _Training(real, config, total_steps, seed, folder, identity, checkpoint_secs, on_work)
        training.begin(resume)
        training.log = stack.enter_context(ProgressLog(folder, training.counts.lines, real.steps, by="update"))
        training.collect(workers)
        while training.counts.iteration < config.iterations:
            training.learn()
            training.control()
            training.try_out()
        return training.finish()


class _Training:
    """One training's parts, and where it stands."""

    log: ProgressLog

    def __init__(
        self,
        real: RealEpisodes,
        config: WorldModelConfig,
        total_steps: int,
        seed: int,
        folder: Path,
        identity: Mapping[str, Any],
        checkpoint_secs: float,
        on_work: OnWork | None = None,
    ) -> None:
        self.real, self.config, self.total_steps, self.seed = real, config, total_steps, seed
        self.random_steps = math.ceil(config.random_share * total_steps)
        self.path, self.sizes = folder / checkpoint.FILE_NAME, real.sizes
        self._identity, self._checkpoint_secs, self._on_work = identity, checkpoint_secs, on_work
        torch.manual_seed(seed)
        self.model = make_model(self.sizes, config)
        self.ppo = PPO(lambda: make_controller(self.sizes, config), config.controller, seed)
        self.best = self._agent_now()
        self.counts = _Counts()
        self._make_learners()
        self._started = self._saved_at = time.monotonic()

    @property
    def controller(self) -> Controller:
        """What PPO trains."""
        assert isinstance(self.ppo.policy, Controller)
        return self.ppo.policy

    def _make_learners(self) -> None:
        """Those of this iteration."""
        model, config, seed, iteration = self.model, self.config, self.seed, self.counts.iteration
        self.learners: dict[str, Learner] = {"vision": VisionLearner(model, config, seed, iteration)}
        for member in range(config.members):
            name = f"memory{member or ''}"
            self.learners[name] = MemoryLearner(model, config, seed, iteration, member)
        self.learners["sites"] = SitesLearner(model, config, seed, iteration)
        self._experience: tuple[Experience, Experience] | None = None

    def begin(self, resume: bool) -> None:
        """From the checkpoint, or a new one."""
        if resume:
            self._restore()
            self.real.load()
        else:
            self.real.begin()
            self._save()
        self._started = time.monotonic() - self.counts.wall_secs

    def collect(self, workers: Workers | None = None) -> None:
        """The random agent's episodes."""
        self.real.collect_random(self.random_steps, workers)

    def learn(self) -> None:
        """V, then each M, on all episodes but those held out."""
        if self.counts.updates:  # all is learnt that dreams were begun with; there may be newer episodes since
            return
        held, learnt = self._seen()
        learners = list(self.learners.values())
        for number, (name, learner) in enumerate(self.learners.items()):
            if any(later.done for later in learners[number + 1 :]):
                continue  # it is its best already; taken again, M's would undo what the heads for sites learnt since
            if not learner.finished:
                learner.prepare(learnt, held)
                if self.counts.iteration and not learner.done and not learner.finished:
                    learner.judge()  # what it has learnt before, which it may not get better than
            while not learner.finished:
                losses = learner.step()
                if self._on_work is not None:
                    self._on_work(f"learning {name}: {learner.done} of {learner.steps}")
                if learner.done % learner.judge_every and not learner.finished:
                    continue  # at its patience's end it is judged too, and goes on if it is better
                line: dict[str, float | None] = {f"{name}/{kind}": float(loss) for kind, loss in losses.items()}
                line[f"held_out/{name}"] = learner.judge()
                if name in ("memory", "sites"):
                    told = score(held).items()
                    line |= {f"held_out/{kind}": value if math.isfinite(value) else None for kind, value in told}
                self._log(line)
                self._save_now_and_then()
            learner.take_best()
        self._save()

    def control(self) -> None:
        """PPO in dreams."""
        if self.counts.updates < self.config.controller_updates:
            dream = self._dream()
        while self.counts.updates < self.config.controller_updates:
            # never twice the same, and the same whether or not the training was interrupted
            rng = np.random.default_rng([self.seed, _DREAM, self.counts.iteration, self.counts.updates])
            episodes = imagine(dream, self.controller, self.config.dreams, int(rng.integers(2**31)))
            losses = self.ppo.update(episodes)
            self.counts.updates += 1
            self.counts.tried_from = len(self.real.rollouts.episodes)
            line = {f"controller/{kind}": value for kind, value in losses.items()}
            line["dream/return"] = float(np.mean([episode.total_reward for episode in episodes]))
            line["dream/length"] = float(np.mean([len(episode) for episode in episodes]))
            line["dream/ended"] = float(np.mean([episode.terminated for episode in episodes]))
            if self._on_work is not None:
                self._on_work(f"dreaming: {self.counts.updates} of {self.config.controller_updates}")
            self._log(line)
            self._save_now_and_then()
        self._save()

    def _dream(self) -> Dream:
        # of those held out too: nothing that they tell is learnt, and one of few may have met the best graph
        real = Experience(self.model, self.real.rollouts.episodes)
        return Dream.along(real, self.real.places, self.config, limit=self.real.limit)

    def _seen(self) -> tuple[Experience, Experience]:
        """The episodes held out in this iteration, and the others."""
        if self._experience is None:
            held, learnt = self.real.rollouts.split(self.config.held_out, self.random_steps)
            self._experience = Experience(self.model, held), Experience(self.model, learnt)
        return self._experience

    def try_out(self) -> None:
        """Real episodes of the controller, an equal share of the steps in each iteration: it becomes the agent if none
        did better before."""
        counts = self.counts
        part = (counts.iteration + 1) / self.config.iterations
        wanted = self.random_steps + part * (self.total_steps - self.random_steps)
        eyes = Eyes(self.sizes, self.model.vision, self.model.memory)
        # dreams without what is known of places are many; of the few real episodes none is without
        informed = self.config.controller.informed_share > 0.0
        policy = SeeingPolicy(self.controller, eyes, self.real.places, informed_share=float(informed))
        self.real.collect_until(wanted, counts.tried_from, policy)
        episodes = self.real.rollouts.episodes[counts.tried_from + JUDGED - 1 :: JUDGED]
        if episodes:
            counts.mean_return = mean_return(episodes)
            counts.mean_length = float(np.mean([len(episode) for episode in episodes]))
            self._log({"real/return": counts.mean_return, "real/length": counts.mean_length})
        worths = _by_model(episodes, lambda episode: worth(episode, self.real.limit))
        scores = {model: float(np.mean(each)) for model, each in worths.items()}
        # there may be steps for more models in one iteration than in another, and models gain more and less
        both = scores.keys() & counts.best_scores.keys()
        ahead = sum(scores[model] - counts.best_scores[model] for model in sorted(both))
        # likeliest actions say little but what they gain: of equal controllers the later one has learnt more
        if not counts.best_scores or (both and ahead >= 0.0):  # untried ones too, where no steps were left to try any
            counts.best_scores = scores
            self.best = self._agent_now()
        counts.iteration, counts.updates = counts.iteration + 1, 0
        self._make_learners()
        self._save()

    def _agent_now(self) -> dict[str, torch.Tensor]:
        """The controller, with V and M, for they are not the same in the next iteration."""
        sees = {f"agent.world.{name}": value for name, value in self.model.state_dict().items()}
        return {name: value.clone() for name, value in (policy_tensors(self.ppo.policy) | sees).items()}

    def finish(self) -> TrainingResult:
        """What the training left behind."""
        counts, real = self.counts, self.real
        return TrainingResult(
            checkpoint=self.path,
            env_steps=real.steps,
            episodes=len(real.rollouts.episodes),
            updates=counts.iteration * self.config.controller_updates,
            mean_return=counts.mean_return,
            mean_length=counts.mean_length,
            best_return=real.best_return,
            best_run_secs=real.best_run_secs,
            wall_secs=counts.wall_secs,
        )

    def _log(self, line: Mapping[str, float | None]) -> None:
        self.counts.lines += 1
        self.counts.wall_secs = time.monotonic() - self._started
        numbers = {
            "env_steps": self.real.steps, "wall_secs": self.counts.wall_secs, "iteration": self.counts.iteration,
            "best_run_secs": self.real.best_run_secs,
        }  # fmt: skip
        self.log.write({"update": self.counts.lines, **numbers, **line})

    def _save_now_and_then(self) -> None:
        if time.monotonic() - self._saved_at >= self._checkpoint_secs:
            self._save()

    def _save(self) -> None:
        tensors = {f"world.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"controller.{name}": value for name, value in self.ppo.tensors().items()}
        for name, learner in self.learners.items():
            tensors |= optimizer_tensors(learner.part, learner.optimizer, f"{name}.optimizer")
            tensors |= {f"{name}.best.{parameter}": value for parameter, value in learner.best.items()}
        tensors |= {f"{_PLACES}{name}": value for name, value in self.real.places.tensors().items()}
        description = {
            "agent": "world-model",
            **self._identity,
            "sizes": dataclasses.asdict(self.sizes),
            "learner": self.ppo.numbers(),
            "starts": self.real.starts,
            "learnt": {
                name: {"done": learner.done, "best_step": learner.best_step, "best_loss": learner.best_loss}
                for name, learner in self.learners.items()
                if learner.judged
            },
            "counts": dataclasses.asdict(self.counts),
        }
        checkpoint.save_checkpoint(self.path, tensors | self.best, description)
        self._saved_at = time.monotonic()

    def _restore(self) -> None:
        tensors, description = checkpoint.load_checkpoint(self.path)
        refuse_differences(self.path, description, self._identity, self.sizes)
        counts = dict(description["counts"])
        counts.pop("best_score", None)  # formerly of all models together, which says little of any
        self.counts, self.real.starts = _Counts(**counts), description["starts"]
        load_parameters(self.model, tensors, "world")
        self._make_learners()
        for name, learner in self.learners.items():
            for key, value in description["learnt"].get(name, {}).items():
                setattr(learner, key, value)
            learner.best = {parameter: tensors[f"{name}.best.{parameter}"].clone() for parameter in learner.best}
            restore_optimizer(learner.part, learner.optimizer, tensors, f"{name}.optimizer")
        begins = "controller."
        self.ppo.restore(
            {name.removeprefix(begins): value for name, value in tensors.items() if name.startswith(begins)},
            description["learner"],
        )
        self.best = {name: value for name, value in tensors.items() if name.startswith(("policy.", "agent.world."))}


def mean_return(episodes: Sequence[Episode]) -> float:
    """Of several models' episodes the mean of each model's: one may have been judged on once more than another."""
    returns = _by_model(episodes, lambda episode: episode.total_reward)
    return float(np.mean([np.mean(each) for each in returns.values()]))


def _by_model(episodes: Sequence[Episode], value: Callable[[Episode], float]) -> dict[str, list[float]]:
    """What is told of each episode, by the names of their models."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        values.setdefault(episode.summary.get("model", ""), []).append(value(episode))
    return values


def places_in(tensors: Mapping[str, torch.Tensor]) -> Places:
    """What a checkpoint's agent knows of places."""
    return Places.of({name.removeprefix(_PLACES): value for name, value in tensors.items() if name.startswith(_PLACES)})


def make_model(sizes: ObservationSizes, config: WorldModelConfig) -> WorldModel:
    """V and M as the settings have them."""
    return WorldModel(
        sizes, config.latent, config.hidden, config.rounds, config.memory, config.gaussians, config.members
    )


def make_controller(sizes: ObservationSizes, config: WorldModelConfig) -> Controller:
    """The controller as the settings have it."""
    return Controller(sizes, config.latent + config.memory, config.controller.hidden)
