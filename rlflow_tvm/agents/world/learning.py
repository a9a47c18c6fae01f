"""Learning V and M from real episodes, so many gradient steps at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import utils

from rlflow_tvm.agents.observation import CompactObservation
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.model import Experience, Followed, WorldModel, actions_of, facts_of, memory_losses
from rlflow_tvm.agents.world.vision import Actions, GraphFacts
from rlflow_tvm.errors import AgentError

_MAX_GRAD_NORM = 10.0
_VISION, _MEMORY, _SITES = 1, 2, 4
_FORGOTTEN, _FORGETTING = 0.25, 1
"""Of the steps, those of which M is not told what was known of the place: in dreams it is not known of new ones."""
_SITES_RATE, _SITES_BATCH = 3.0, 256
_AGAIN = 4  # from the second iteration on so much less is to be learnt

Losses = dict[str, torch.Tensor]


class Learner(ABC):
    """Adam for one part of the world model, which learns until it knows episodes held out no better.

    Each gradient step is determined by the seed, its number and what was learnt before it.

    Args:
        part: what learns.
        steps: gradient steps at most.
        patience: gradient steps without a better part, after which it has learnt enough.
        learning_rate: at first; it falls with the square of the steps that are left.
        seed: of the samples.

    Attributes:
        judge_every: gradient steps from one judgement to the next.
    """

    judge_every = 50

    def __init__(self, part: nn.Module, steps: int, patience: int, learning_rate: float, seed: tuple[int, ...]) -> None:
        self.part, self.steps, self.patience = part, steps, patience
        self.optimizer = torch.optim.Adam(part.parameters(), lr=learning_rate, fused=True)
        self.done, self.best_step, self.best_loss = 0, 0, math.inf
        self.best = self._now()
        self._learning_rate, self._seed = learning_rate, seed

    @abstractmethod
    def prepare(self, learnt: Experience, held: Experience) -> None:
        """Take the episodes to learn from, and those to be judged by."""

    @abstractmethod
    def step(self) -> Losses:
        """One gradient step."""

    @abstractmethod
    def held_out_loss(self) -> float:
        """How wrong the part is about the episodes held out."""

    @property
    def finished(self) -> bool:
        """Whether it has learnt enough."""
        return self.done >= self.steps or self.done - self.best_step >= self.patience

    @property
    def judged(self) -> bool:
        """Whether it ever was."""
        return self.best_loss < math.inf

    def judge(self) -> float:
        """The loss on the episodes held out; the part as it is is kept if none was better."""
        loss = self.held_out_loss()
        if loss < self.best_loss:
            self.best, self.best_loss, self.best_step = self._now(), loss, self.done
        return loss

    def take_best(self) -> None:
        """Be what was best; as it is, where it was never judged."""
        if self.judged:
            self.part.load_state_dict(self.best)

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.part.state_dict().items()}

    def learn(self, losses: Callable[[np.ndarray], Losses], count: int, size: int) -> Losses:
        """One gradient step on the losses of `size` of `count` samples; the losses, without gradients."""
        rng = np.random.default_rng([*self._seed, self.done])
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * (1 - self.done / self.steps) ** 2
        found = losses(rng.choice(count, min(size, count), replace=False))
        self.optimizer.zero_grad()
        self._total(found).backward()
        norm = float(utils.clip_grad_norm_(self.part.parameters(), _MAX_GRAD_NORM))
        if not math.isfinite(norm):
            raise AgentError(f"world model: the gradient's norm became {norm}; lower learning_rate, then train anew")
        self.optimizer.step()
        self.done += 1
        return {name: loss.detach() for name, loss in found.items()}

    def _total(self, losses: Losses) -> torch.Tensor:
        return torch.stack([self.weight(name) * loss for name, loss in losses.items()]).sum()

    def weight(self, name: str) -> float:
        """Of a kind of loss."""
        del name
        return 1.0


class VisionLearner(Learner):
    """V's."""

    def __init__(self, model: WorldModel, config: WorldModelConfig, seed: int, iteration: int = 0) -> None:
        steps, seeds = _steps(config.vision_steps, iteration), (seed, _VISION, iteration)
        super().__init__(model.vision, steps, config.patience, config.learning_rate, seeds)
        self._model, self._batch, self._has_learnt = model, config.vision_batch, iteration > 0

    def prepare(self, learnt: Experience, held: Experience) -> None:
        self._learnt, self._held = (_Graphs.of(each.episodes, self._model) for each in (learnt, held))
        self._model.set_scales(self._learnt.facts, self._learnt.actions, learnt=self._has_learnt)

    def step(self) -> Losses:
        return self.learn(lambda rows: self._losses(self._learnt, rows), len(self._learnt.observations), self._batch)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        parts = np.array_split(np.arange(len(self._held.observations)), -(-len(self._held.observations) // self._batch))
        losses = [float(self._total(self._losses(self._held, rows))) for rows in parts]
        return float(np.average(losses, weights=[len(rows) for rows in parts]))

    def _losses(self, graphs: _Graphs, rows: np.ndarray) -> Losses:
        latents = self._model.vision.see([graphs.observations[row] for row in rows])
        found = self._model.vision.losses(latents, graphs.facts[rows])
        return found | {"reward": self._model.vision.reward_loss(latents, graphs.actions[rows])}


@dataclass(frozen=True, eq=False)
class _Graphs:
    """The graphs of some episodes, what V is to tell of them, and what was done to them."""

    observations: list[CompactObservation]
    facts: GraphFacts
    actions: Actions

    @staticmethod
    def of(episodes: Sequence[Episode], model: WorldModel) -> _Graphs:
        return _Graphs(*facts_of(episodes, model.sizes), actions_of(episodes))


class MemoryLearner(Learner):
    """One M's; V is not learnt meanwhile."""

    judge_every = 10  # it is at its best after some hundred steps, and soon no longer

    def __init__(
        self, model: WorldModel, config: WorldModelConfig, seed: int, iteration: int = 0, member: int = 0
    ) -> None:
        steps, seeds = _steps(config.memory_steps, iteration), (seed, _MEMORY, iteration, member)
        super().__init__(model.members[member], steps, config.memory_patience, config.learning_rate, seeds)
        self._memory, self._batch = model.members[member], config.memory_batch

    def prepare(self, learnt: Experience, held: Experience) -> None:
        self._traces, self._held = learnt.traces, held.traces

    def step(self) -> Losses:
        return self.learn(self._losses, len(self._traces), self._batch)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return float(self._total(memory_losses(self._memory, self._held)))

    def weight(self, name: str) -> float:
        return 1.0 / self._memory.latent if name == "nll" else 1.0  # nats a dimension: as large as the others

    def _losses(self, rows: np.ndarray) -> Losses:
        rng = np.random.default_rng([*self._seed, self.done, _FORGETTING])
        return memory_losses(self._memory, [self._traces[row].forgetful(_FORGOTTEN, rng) for row in rows])


class SitesLearner(Learner):
    """That of the first M's heads for rule mask and location counts, which learn on where M has stopped.

    What z' is and what a step saves M knows best after some hundred gradient steps, and learns by heart from then on.
    Its heads for sites know next to nothing by then: on 1500 steps of SqueezeNet 1.1 F1 of the changes of the mask was
    0.0 on episodes held out; after 1500 gradient steps of their own it was 0.8.
    """

    def __init__(self, model: WorldModel, config: WorldModelConfig, seed: int, iteration: int = 0) -> None:
        steps, rate, seeds = _steps(config.memory_steps, iteration), _SITES_RATE * config.learning_rate, (seed, _SITES)
        super().__init__(model.memory.site_head, steps, config.patience, rate, (*seeds, iteration))
        self._memory = model.memory

    @torch.no_grad()
    def prepare(self, learnt: Experience, held: Experience) -> None:
        rng = np.random.default_rng([*self._seed, _FORGETTING])
        self._learnt = Followed.of(self._memory, [trace.forgetful(_FORGOTTEN, rng) for trace in learnt.traces])
        self._held = Followed.of(self._memory, held.traces)
        if not len(self._learnt) or not len(self._held):  # episodes of one step each
            self.steps = self.done

    def step(self) -> Losses:
        return self.learn(self._losses, len(self._learnt), _SITES_BATCH)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return float(self._total(self._held.site_losses(self._memory)))

    def _losses(self, rows: np.ndarray) -> Losses:
        return self._learnt[torch.from_numpy(rows)].site_losses(self._memory)


def _steps(most: int, iteration: int) -> int:
    return most if iteration == 0 else max(1, most // _AGAIN)
