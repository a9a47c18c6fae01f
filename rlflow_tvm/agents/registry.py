"""The agents by name, for command lines; torch and DGL are loaded only when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    `config_class`, `train_function` and `agent_class` are "module:name", looked up when they are needed. `environment`:
    what it acts in, by its name among rewriting environments. `options`: of `train_function`, besides what `train`
    is given. `presets`: "module:name" of named settings, where there are any.
    """

    summary: str
    environment: str
    config_class: str
    train_function: str
    agent_class: str
    options: Mapping[str, Any] = field(default_factory=dict)
    presets: str | None = None

    def config(self, settings: Mapping[str, Any] | None = None) -> Any:
        """The kind's settings, defaults where none is given; AgentError for unknown or impossible ones."""
        return named(self.config_class).from_dict(settings or {})

    def preset(self, name: str) -> Mapping[str, Any]:
        """Settings by their name, such as a paper's; AgentError lists the names there are."""
        there = {} if self.presets is None else named(self.presets)
        if name not in there:
            raise AgentError(f"no preset {name} of this agent; there are: {', '.join(there) or 'none'}")
        return there[name]

    def check_folder(self, folder: str | Path, resume: bool = False) -> None:
        """AgentError if `train` would refuse the folder, or would resume an agent of another kind in it."""
        named("rlflow_tvm.agents.training:check_folder")(Path(folder), resume)
        path = Path(folder) / named("rlflow_tvm.agents.checkpoint:FILE_NAME")
        if resume and (found := kind_in(path)) is not self:
            raise AgentError(f"{path}: is an agent of another kind ({found.summary}): resume that one, or train anew")

    def train(
        self, env: gymnasium.Env, config: Any, total_steps: int, seed: int, out_dir: str | Path, **options: Any
    ) -> TrainingResult:
        """Train one; see `rlflow_tvm.agents.training.train`."""
        return named(self.train_function)(env, config, total_steps, seed, out_dir, **self.options, **options)

    def load(self, path: str | Path, observation_space: gymnasium.Space[Any] | None = None) -> Agent:
        """A trained one; see `rlflow_tvm.agents.act.Agent.load`."""
        return named(self.agent_class).load(path, observation_space)


AGENTS: dict[str, AgentKind] = {
    "ppo": AgentKind(
        summary="model-free: PPO with a two-step policy (rule, then location) over the graph",
        environment="rewriting",
        config_class="rlflow_tvm.agents.config:PPOConfig",
        train_function="rlflow_tvm.agents.training:train",
        agent_class="rlflow_tvm.agents.act:Agent",
    ),
    "world-model": AgentKind(
        environment="rewriting",
        summary="RLFlow's: a model of rewriting learnt from random episodes, a controller trained in its dreams",
        config_class="rlflow_tvm.agents.world.config:WorldModelConfig",
        train_function="rlflow_tvm.agents.world.training:train",
        agent_class="rlflow_tvm.agents.world.act:WorldAgent",
    ),
    "candidate": AgentKind(
        summary="X-RLflow's: PPO with a policy that chooses among all graphs one rewrite away",
        environment="candidate",
        config_class="rlflow_tvm.agents.candidate.config:CandidateConfig",
        train_function="rlflow_tvm.agents.training:train",
        agent_class="rlflow_tvm.agents.act:Agent",
        options={"policy": "candidate"},
        presets="rlflow_tvm.agents.candidate.config:PRESETS",
    ),
}
_PASS_ORDERING = "pass-ordering"  # as agents.ordering, which needs the extra sb3, has it


def agent_kind(name: str) -> AgentKind:
    """The kind of that name; AgentError lists the names there are."""
    if name not in AGENTS:
        raise AgentError(f"no agent {name}; there are: {', '.join(AGENTS)}")
    return AGENTS[name]


def kind_in(path: str | Path) -> AgentKind:
    """The kind of the trained agent in a checkpoint; AgentError if it cannot be read, or rewrites nothing."""
    described = named("rlflow_tvm.agents.checkpoint:load_checkpoint")(Path(path), prefix="policy.")[1]
    if described["agent"] == _PASS_ORDERING:
        raise AgentError(
            f"{path}: is an agent that puts passes in order, for rlflow_tvm.ordering.LearnedOrder; give one that was "
            "trained to rewrite"
        )
    return agent_kind(described["agent"])


def load_agent(path: str | Path, observation_space: gymnasium.Space[Any] | None = None) -> Agent:
    """The trained agent in a checkpoint, of whichever kind it is; AgentError if it cannot be used."""
    return kind_in(path).load(path, observation_space)


def named(reference: str) -> Any:
    """What "module:name" means; AgentError where a package that the module needs is not installed."""
    module, name = reference.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        extra = "sb3" if error.name in ("stable_baselines3", "sb3_contrib") else "agents"
        raise AgentError(
            f"agents need {error.name}, which is not installed: pip install 'rlflow_tvm[{extra}]', in Python 3.11 "
            "(DGL is not there for later ones)"
        ) from error
