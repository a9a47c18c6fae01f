"""The agents by name, for command lines; torch and DGL are loaded only when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from rlflow_tvm.errors import AgentError

if TYPE_CHECKING:
    from rlflow_tvm.agents.act import Agent
    from rlflow_tvm.agents.training import TrainingResult


@dataclass(frozen=True)
class AgentKind:
    """One kind of agent: one line of `AGENTS`.

    `config_class`, `train_function` and `agent_class` are "module:name", looked up when they are needed.
    """

    summary: str
    config_class: str
    train_function: str
    agent_class: str

    def config(self, settings: Mapping[str, Any] | None = None) -> Any:
        """The kind's settings, defaults where none is given; AgentError for unknown or impossible ones."""
        return named(self.config_class).from_dict(settings or {})

    def check_folder(self, folder: str | Path, resume: bool = False) -> None:
        """AgentError if `train` would refuse the folder."""
        named("rlflow_tvm.agents.training:check_folder")(Path(folder), resume)

    def train(
        self, env: gymnasium.Env, config: Any, total_steps: int, seed: int, out_dir: str | Path, **options: Any
    ) -> TrainingResult:
        """Train one; see `rlflow_tvm.agents.training.train`."""
        return named(self.train_function)(env, config, total_steps, seed, out_dir, **options)

    def load(self, path: str | Path, observation_space: gymnasium.Space[Any] | None = None) -> Agent:
        """A trained one; see `rlflow_tvm.agents.act.Agent.load`."""
        return named(self.agent_class).load(path, observation_space)


AGENTS: dict[str, AgentKind] = {
    "ppo": AgentKind(
        summary="model-free: PPO with a two-step policy (rule, then location) over the graph",
        config_class="rlflow_tvm.agents.config:PPOConfig",
        train_function="rlflow_tvm.agents.training:train",
        agent_class="rlflow_tvm.agents.act:Agent",
    ),
    "world-model": AgentKind(
        summary="RLFlow's: a model of rewriting learnt from random episodes, a controller trained in its dreams",
        config_class="rlflow_tvm.agents.world.config:WorldModelConfig",
        train_function="rlflow_tvm.agents.world.training:train",
        agent_class="rlflow_tvm.agents.world.act:WorldAgent",
    ),
}


def agent_kind(name: str) -> AgentKind:
    """The kind of that name; AgentError lists the names there are."""
    if name not in AGENTS:
        raise AgentError(f"no agent {name}; there are: {', '.join(AGENTS)}")
    return AGENTS[name]


def load_agent(path: str | Path, observation_space: gymnasium.Space[Any] | None = None) -> Agent:
    """The trained agent in a checkpoint, of whichever kind it is; AgentError if it cannot be used."""
    described = named("rlflow_tvm.agents.checkpoint:load_checkpoint")(Path(path), prefix="policy.")[1]
    return agent_kind(described["agent"]).load(path, observation_space)


def named(reference: str) -> Any:
    """What "module:name" means; AgentError where a package that the module needs is not installed."""
    module, name = reference.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise AgentError(
            f"agents need {error.name}, which is not installed; pip install rlflow_tvm[agents] (Python 3.11)"
        ) from error
