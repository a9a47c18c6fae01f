"""The candidate agent's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.errors import AgentError


@dataclass(frozen=True)
class CandidateConfig(PPOConfig):
    """PPO's settings and those of its network; `rounds` are attention layers here (X-RLflow has 5).

    Attributes:
        minibatch_size: as X-RLflow's: a graph comes with all of its candidates.
        heads: of each attention layer.
        change_rounds: message rounds among what candidates add.
        by_rule: whether a new policy, while nothing is known, draws each rule as often as any other, as one in two
            steps does, and not each candidate. Drawn evenly, most of what is tried are candidates of the few rules that
            match everywhere.
    """

    minibatch_size: int = 16
    n_epochs: int = 4
    heads: int = 4
    change_rounds: int = 2
    by_rule: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heads", "change_rounds"):
            if getattr(self, name) < 1:
                raise AgentError(f"CandidateConfig: {name} is {getattr(self, name)}, it must be at least 1")
        if self.hidden % self.heads:
            raise AgentError(f"CandidateConfig: hidden {self.hidden} must be a multiple of heads {self.heads}")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "x-rlflow": {
        "learning_rate": 5e-4,
        "n_epochs": 4,
        "minibatch_size": 16,
        "steps_per_update": 256,
        "rounds": 5,
        "remembered_share": 0.0,
        "informed_share": 0.0,
        "likeliest_every": 0,
        "by_rule": False,
        "scale_rewards": False,
        "normalise_values": False,
    }
}
"""Settings by name. X-RLflow's (section 4.1 and its code): nothing is remembered, or known of places or rules. It
updates after ten episodes; here after some 256 steps, for episodes end by themselves."""
