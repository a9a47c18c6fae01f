"""The world model's settings, under the papers' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from rlflow_tvm.agents.config import PPOConfig, check_settings
from rlflow_tvm.errors import AgentError


def _controller() -> PPOConfig:
    return PPOConfig(minibatch_size=256, learning_rate=1e-3, ent_coef=0.005, informed_share=0.5)


ELSEWHERE = ("steps_per_update", "remembered_share", "remembered", "rounds", "threads")
"""Of PPO's settings, those that a controller has no use for."""


@dataclass(frozen=True)
class WorldModelConfig:
    """Settings of V, M and the controller; defaults are RLFlow's where it gives any.

    Attributes:
        latent: width of z.
        hidden: width of V's embeddings.
        rounds: message rounds of V's encoder.
        memory: width of M's LSTM.
        gaussians: of M's mixture.
        members: Ms, learnt alike but for what is random. Dreams follow the first; a dream pays what the most cautious
            of them foresees.
        learning_rate: of V and of M at first; it falls with the square of what is left (RLFlow's polynomial decay).
        vision_steps: gradient steps of V at most, on `vision_batch` graphs each.
        memory_steps: gradient steps of M at most, on `memory_batch` whole episodes each.
        patience: gradient steps without a better V, or better heads of M for sites, by the episodes held out, after
            which they have learnt enough; the best ones are kept.
        memory_patience: the same of the rest of M, which is at its best after some hundred.
        held_out: share of the episodes that nothing is learnt from, to judge V and M by; of few random ones two.
        random_share: of the real environment's steps, those of the random agent; the rest are the controller's.
        remembered_share: of the real episodes, those that begin at a remembered graph rather than at the beginning.
        remembered: graphs of each model that are remembered, the cheapest.
        iterations: of learning V and M, then the controller in dreams, then trying it in the real environment. V and M
            learn from those episodes too; the controller that did best there is the agent in the end.
        temperature: tau of the dreams.
        dream_horizon: steps until a dream is truncated. Dreams begin all along real episodes: they need not be long.
        dreams: at once, in an update of the controller.
        controller_updates: of PPO in dreams, in each iteration.
        controller: PPO's settings in dreams; `hidden` is the controller's width; those that mean nothing here
            (`ELSEWHERE`: the world model has such settings itself, or none) keep their defaults. Real episodes are told
            of places in all of them, unless `informed_share` is 0; `likeliest_every`: 0 leaves out those of likeliest
            actions that do not judge.
        threads: torch's.
    """

    latent: int = 32
    hidden: int = 64
    rounds: int = 3
    memory: int = 256
    gaussians: int = 8
    members: int = 3
    learning_rate: float = 1e-3
    vision_steps: int = 1000
    vision_batch: int = 16
    memory_steps: int = 2000
    memory_batch: int = 16
    patience: int = 300
    memory_patience: int = 100
    held_out: float = 0.1
    random_share: float = 0.5
    remembered_share: float = 0.75
    remembered: int = 16
    iterations: int = 4
    temperature: float = 1.0
    dream_horizon: int = 20
    dreams: int = 64
    controller_updates: int = 40
    controller: PPOConfig = field(default_factory=_controller)
    threads: int = 1

    def __post_init__(self) -> None:
        whole = (
            "latent",
            "hidden",
            "rounds",
            "memory",
            "gaussians",
            "members",
            "remembered",
            "iterations",
            "vision_steps",
            "vision_batch",
            "memory_steps",
            "patience",
            "memory_patience",
            "threads",
        )
        for name in (*whole, "memory_batch", "dream_horizon", "dreams", "controller_updates"):
            if getattr(self, name) < 1:
                raise AgentError(f"WorldModelConfig: {name} is {getattr(self, name)}, it must be at least 1")
        for name in ("held_out", "random_share"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise AgentError(f"WorldModelConfig: {name} is {getattr(self, name)}, it must lie between 0 and 1")
        if not 0.0 <= self.remembered_share < 1.0:
            raise AgentError(f"WorldModelConfig: remembered_share is {self.remembered_share}, it must lie in [0, 1)")
        if not self.learning_rate > 0.0:
            raise AgentError(f"WorldModelConfig: learning_rate is {self.learning_rate}, it must be above 0")
        if not self.temperature >= 0.0:
            raise AgentError(f"WorldModelConfig: temperature is {self.temperature}, it must not be negative")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON takes them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> WorldModelConfig:
        """The inverse of `as_dict`, defaults for what is missing; AgentError as `check_settings`, or for
        impossible ones."""
        check_settings(WorldModelConfig, values)
        defaults = _controller().as_dict()
        controller = PPOConfig.from_dict({**defaults, **values.get("controller", {})})
        idle = [name for name in ELSEWHERE if controller.as_dict()[name] != defaults[name]]
        if idle:
            raise AgentError(
                f"WorldModelConfig: controller.{idle[0]} means nothing to a controller; leave it out"
                + (f", or set {idle[0]} of the world model" if idle[0] in get_type_hints(WorldModelConfig) else "")
            )
        return WorldModelConfig(**{**values, "controller": controller})
