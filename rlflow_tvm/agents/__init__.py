"""Learners over rewriting environments: graph encoder, two-step masked policy, PPO, checkpoints.

This room knows torch, DGL and gymnasium and nothing of TVM: whatever has the observation and action spaces
described in `rlflow_tvm.agents.observation` can be learnt. The package itself loads neither torch nor DGL; the names
below do, when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlflow_tvm.agents.registry import AGENTS, AgentKind, agent_kind, kind_in, load_agent, named

if TYPE_CHECKING:
    from rlflow_tvm.agents.act import Agent
    from rlflow_tvm.agents.config import PPOConfig
    from rlflow_tvm.agents.ordering import OrderingAgent, train_ordering
    from rlflow_tvm.agents.pool import Workers
    from rlflow_tvm.agents.rollout import Episode
    from rlflow_tvm.agents.training import TrainingResult, train

_HOMES = {
    "Agent": "rlflow_tvm.agents.act",
    "Episode": "rlflow_tvm.agents.rollout",
    "OrderingAgent": "rlflow_tvm.agents.ordering",
    "PPOConfig": "rlflow_tvm.agents.config",
    "TrainingResult": "rlflow_tvm.agents.training",
    "Workers": "rlflow_tvm.agents.pool",
    "train": "rlflow_tvm.agents.training",
    "train_ordering": "rlflow_tvm.agents.ordering",
}

__all__ = [
    "AGENTS",
    "Agent",
    "AgentKind",
    "Episode",
    "OrderingAgent",
    "PPOConfig",
    "TrainingResult",
    "Workers",
    "agent_kind",
    "kind_in",
    "load_agent",
    "train",
    "train_ordering",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlflow_tvm.agents' has no attribute {name!r}")
    return named(f"{_HOMES[name]}:{name}")
