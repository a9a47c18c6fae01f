"""Learning V and M from real episodes, so many gradient steps at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import utils

from rlflow_tvm.agents.observation import collate
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.model import WorldModel, actions_of, facts_of, memory_losses
from rlflow_tvm.errors import AgentError

_MAX_GRAD_NORM = 10.0
_VISION, _MEMORY = 1, 2

Losses = dict[str, torch.Tensor]


class Learner(ABC):
    """Adam for one part of the world model; each gradient step is determined by the seed, its number and what was
    learnt before it."""

    def __init__(self, part: nn.Module, steps: int, learning_rate: float, seed: tuple[int, ...]) -> None:
        self.part, self.steps, self.done = part, steps, 0
        self.optimizer = torch.optim.Adam(part.parameters(), lr=learning_rate)
        self._learning_rate, self._seed = learning_rate, seed

    @abstractmethod
    def prepare(self, episodes: Sequence[Episode]) -> None:
        """Take what is learnt from."""

    @abstractmethod
    def step(self) -> Losses:
        """One gradient step."""

    def learn(self, losses: Callable[[np.ndarray], Losses], weights: dict[str, float], count: int, size: int) -> Losses:
        """One gradient step on the weighted losses of `size` of `count` samples; the losses, without gradients."""
        rng = np.random.default_rng([*self._seed, self.done])
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * (1 - self.done / self.steps) ** 2
        found = losses(rng.choice(count, min(size, count), replace=False))
        total = sum((weights.get(name, 1.0) * loss for name, loss in found.items()), torch.zeros(()))
        self.optimizer.zero_grad()
        total.backward()
        norm = float(utils.clip_grad_norm_(self.part.parameters(), _MAX_GRAD_NORM))
        if not math.isfinite(norm):
            raise AgentError(f"world model: the gradient's norm became {norm}; lower learning_rate, then train anew")
        self.optimizer.step()
        self.done += 1
        return {name: loss.detach() for name, loss in found.items()}


class VisionLearner(Learner):
    """V's."""

    def __init__(self, model: WorldModel, config: WorldModelConfig, seed: int) -> None:
        super().__init__(model.vision, config.vision_steps, config.learning_rate, (seed, _VISION))
        self._model, self._batch = model, config.vision_batch

    def prepare(self, episodes: Sequence[Episode]) -> None:
        """Take the graphs of the episodes to learn from."""
        self._observations, self._facts = facts_of(episodes, self._model.sizes)
        self._actions = actions_of(episodes)
        self._model.set_scales(self._facts, self._actions)

    def step(self) -> Losses:
        """One gradient step."""
        return self.learn(self._losses, {}, len(self._observations), self._batch)

    def _losses(self, rows: np.ndarray) -> Losses:
        latents = self._model.vision(collate([self._observations[row] for row in rows]))
        found = self._model.vision.losses(latents, self._facts[rows])
        return found | {"reward": self._model.vision.reward_loss(latents, self._actions[rows])}


class MemoryLearner(Learner):
    """M's; V is not learnt any more."""

    def __init__(self, model: WorldModel, config: WorldModelConfig, seed: int) -> None:
        super().__init__(model.memory, config.memory_steps, config.learning_rate, (seed, _MEMORY))
        self._model, self._batch = model, config.memory_batch
        # nats a dimension: as large as the other losses
        self._weights = {"nll": 1.0 / config.latent}

    def prepare(self, episodes: Sequence[Episode]) -> None:
        """Take the episodes to learn from, in V's latents."""
        self._traces = [self._model.trace(episode) for episode in episodes]

    def step(self) -> Losses:
        """One gradient step."""
        return self.learn(self._losses, self._weights, len(self._traces), self._batch)

    def _losses(self, rows: np.ndarray) -> Losses:
        return memory_losses(self._model.memory, [self._traces[row] for row in rows])
