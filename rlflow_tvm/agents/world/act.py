"""A trained world-model agent, ready to act: V and M see the graph, the controller decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.act import act_with, check_sizes
from rlflow_tvm.agents.checkpoint import load_checkpoint
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.ppo import load_parameters, load_policy_tensors
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, Eyes
from rlflow_tvm.agents.world.training import make_controller, make_model


class WorldAgent:
    """A controller with the world model that it sees through. It remembers what it did: `begin` before each episode."""

    def __init__(
        self, controller: Controller, eyes: Eyes, sizes: ObservationSizes, metadata: Mapping[str, Any]
    ) -> None:
        self.policy, self._eyes, self.sizes, self.metadata = controller.eval(), eyes, sizes, dict(metadata)

    @staticmethod
    def load(path: str | Path, observation_space: spaces.Space[Any] | None = None) -> WorldAgent:
        """The agent stored in a checkpoint; see `agents.act.Agent.load`."""
        tensors, description = load_checkpoint(Path(path))
        sizes = ObservationSizes(**description["sizes"])
        if observation_space is not None:
            check_sizes(Path(path), sizes, ObservationSizes.from_space(observation_space))
        config = WorldModelConfig.from_dict(description["config"])
        with torch.random.fork_rng(devices=[]):  # the parameters drawn here are overwritten at once
            model, controller = make_model(sizes, config), make_controller(sizes, config)
        load_parameters(model, tensors, "world")
        load_policy_tensors(controller, tensors)
        return WorldAgent(controller, Eyes(sizes, model.eval().vision, model.memory), sizes, description["metadata"])

    def begin(self) -> None:
        """A new episode."""
        self._eyes.begin()

    def act(
        self, observation: Mapping[str, Any], deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """See `agents.act.Agent.act`; the action is taken to be done."""
        action = act_with(self.policy, self._eyes.see(observation), deterministic, rng)
        self._eyes.acted(int(action[0]), int(action[1]))
        return action
