"""A trained world-model agent, ready to act: V and M see the graph, the controller decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.act import act_with, check_sizes
from rlflow_tvm.agents.checkpoint import load_checkpoint
from rlflow_tvm.agents.observation import ObservationSizes, actions_at
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.ppo import load_parameters, load_policy_tensors
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, Eyes, SeeingPolicy
from rlflow_tvm.agents.world.training import make_controller, make_model, places_in


class WorldAgent:
    """A controller with the world model that it sees through. It remembers what it did: `begin` before each episode.

    Args:
        controller: what decides.
        eyes: what it sees with.
        places: what its training knew of them.
        metadata: what the caller of `train` stored.
        informed: whether its training told the controller of places.
    """

    def __init__(
        self, controller: Controller, eyes: Eyes, places: Places, metadata: Mapping[str, Any], informed: bool = True
    ) -> None:
        own = Eyes(eyes.sizes, eyes.vision, eyes.memory)  # it remembers episodes of its own
        self.policy = SeeingPolicy(controller, own, places.copy(), informed_share=None if informed else 0.0)
        self.sizes, self.metadata = eyes.sizes, dict(metadata)
        self._trained, self._informed = (controller, eyes, places), informed

    @staticmethod
    def load(path: str | Path, observation_space: spaces.Space[Any] | None = None) -> WorldAgent:
        """The agent stored in a checkpoint; see `agents.act.Agent.load`."""
        tensors, description = load_checkpoint(Path(path))
        sizes = ObservationSizes(**description["sizes"])
        if observation_space is not None:
            found = dataclasses.asdict(ObservationSizes.from_space(observation_space))
            check_sizes(Path(path), description["sizes"], found)
        config = WorldModelConfig.from_dict(description["config"])
        with torch.random.fork_rng(devices=[]):  # the parameters drawn here are overwritten at once
            model, controller = make_model(sizes, config), make_controller(sizes, config)
        load_parameters(model, tensors, "agent.world")
        load_policy_tensors(controller, tensors)
        eyes, places = Eyes(sizes, model.eval().vision, model.memory), places_in(tensors)
        informed = config.controller.informed_share > 0.0
        return WorldAgent(controller.eval(), eyes, places, description["metadata"], informed)

    def fresh(self) -> WorldAgent:
        """See `agents.act.Agent.fresh`."""
        return WorldAgent(*self._trained, self.metadata, self._informed)

    def begin(self, number: int = 1) -> None:
        """A new episode, or several at once."""
        self.policy.begin(number)

    def act(
        self, observation: Mapping[str, Any], deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """See `agents.act.Agent.act`; the action is taken to be done."""
        return act_with(self.policy, self.policy.compact(observation), deterministic, rng)

    def tried(self, observations: Sequence[Mapping[str, Any]], actions: Sequence[Any], saved: Sequence[float]) -> None:
        """See `agents.act.Agent.tried`."""
        pairs = zip(observations, actions, strict=True)
        self.policy.places.tried([self.policy.controller.place(seen, action) for seen, action in pairs], saved)

    def draw(
        self, observations: Sequence[Mapping[str, Any]], rng: np.random.Generator, episodes: Sequence[int]
    ) -> Sequence[Any]:
        """See `agents.act.Agent.draw`; the actions are taken to be done."""
        kept = [self.policy.compact(each) for each in observations]
        return list(actions_at(kept, self.policy.draw(kept, rng, episodes)))
