"""The kinds of policies that PPO trains, and what each of them sees of an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gymnasium import spaces

from rlflow_tvm.agents.candidate.config import CandidateConfig
from rlflow_tvm.agents.candidate.observation import CandidateObservation, CandidateSizes
from rlflow_tvm.agents.candidate.policy import CandidatePolicy
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.graph_policy import GraphPolicy
from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.policy import TwoStepPolicy, UniformPolicy


@dataclass(frozen=True)
class Design:
    """One kind of policy: one line of `DESIGNS`, by the name of the agent that it makes, if it makes one.

    Attributes:
        sizes: what its parameters depend on, a dataclass.
        from_space: reads them from an observation space.
        kept: what it keeps of an observation, a dataclass of arrays.
        config: its settings.
        make: makes a new policy.
    """

    sizes: type
    from_space: Callable[[spaces.Space[Any]], Any]
    kept: type
    config: type[PPOConfig]
    make: Callable[[Any, Any], GraphPolicy[Any, Any]]


DESIGNS: dict[str, Design] = {
    "ppo": Design(
        ObservationSizes,
        ObservationSizes.from_space,
        CompactObservation,
        PPOConfig,
        lambda sizes, config: TwoStepPolicy(sizes, config.hidden, config.rounds, config.informed_share),
    ),
    "uniform": Design(
        ObservationSizes,
        ObservationSizes.from_space,
        CompactObservation,
        PPOConfig,
        lambda sizes, _config: UniformPolicy(sizes),
    ),
    "candidate": Design(
        CandidateSizes,
        CandidateSizes.from_space,
        CandidateObservation,
        CandidateConfig,
        CandidatePolicy,
    ),
}
