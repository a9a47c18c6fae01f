"""PPO's settings, under the papers' names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from rlflow_tvm.errors import AgentError


def check_settings(kind: type, values: Mapping[str, Any]) -> None:
    """AgentError where one of the values, as of a JSON object, is no setting of `kind`, a dataclass, or not of its
    type; what the numbers may be the dataclass says itself."""
    types = get_type_hints(kind)
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise AgentError(
            f"{kind.__name__} has no setting {', '.join(unknown)}; leave it out or update rlflow_tvm (there are "
            f"{', '.join(types)})"
        )
    for name, value in values.items():
        wanted, fits = _TYPES.get(types[name], ("an object of settings", lambda given: isinstance(given, Mapping)))
        if not fits(value):
            raise AgentError(f"{kind.__name__}: {name} is {value!r}, it must be {wanted}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


_TYPES: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int),  # which true is not
    float: ("a number", _is_number),
    float | None: ("a number or null", lambda value: value is None or _is_number(value)),
}
"""Type of a setting -> what it is called, and whether a value read from JSON is one."""


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO (Schulman et al. 2017) and of its network; defaults are X-RLflow's where it gives any,
    but for `learning_rate`, `n_epochs` and `steps_per_update`: of a few thousand steps more is learnt in small updates.

    Attributes:
        gamma: discount.
        gae_lambda: lambda of generalised advantage estimation (Schulman et al. 2016).
        learning_rate: Adam's.
        clip_range: epsilon of the clipped objective.
        ent_coef: weight of the joint entropy's bonus.
        vf_coef: weight of the value loss.
        max_grad_norm: gradients are scaled down to this norm.
        minibatch_size: graphs a gradient step.
        n_epochs: passes over a rollout.
        steps_per_update: a rollout is whole episodes, at least this many steps.
        target_kl: stop an update's epochs once the approximate KL exceeds 1.5 times this; None: never.
        scale_rewards: divide rewards by the running deviation of the discounted return.
        normalise_values: learn values in units of their own mean and deviation (PopArt, van Hasselt et al. 2016).
        remembered_share: of the episodes, those that begin at a remembered graph rather than at the beginning.
        remembered: graphs of each model that are remembered, the cheapest.
        informed_share: of the episodes, those in which the policy is told of places what it knows, or in half of them
            what it imagines (in dreams, what is known).
        likeliest_every: of the episodes, one in so many takes the likeliest actions by what is known of places, until
            ten steps have found nothing better; 0: none. What has been found out is put together there.
        hidden: width of the embeddings.
        rounds: message rounds of the encoder.
        threads: torch's threads. One by default: the graphs are small, and the spinning threads of a second pool
            disturb kernels that are being timed.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    learning_rate: float = 1e-3
    clip_range: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    minibatch_size: int = 64
    n_epochs: int = 8
    steps_per_update: int = 128
    target_kl: float | None = None
    scale_rewards: bool = True
    normalise_values: bool = True
    remembered_share: float = 0.75
    remembered: int = 16
    informed_share: float = 0.75
    likeliest_every: int = 4
    hidden: int = 64
    rounds: int = 3
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("minibatch_size", "n_epochs", "steps_per_update", "remembered", "hidden", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise AgentError(f"{type(self).__name__}: {name} is {getattr(self, name)}, it must be at least 1")
        for name in ("gamma", "gae_lambda", "informed_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise AgentError(f"{type(self).__name__}: {name} is {getattr(self, name)}, it must lie in [0, 1]")
        if not 0.0 <= self.remembered_share < 1.0:
            raise AgentError(
                f"{type(self).__name__}: remembered_share is {self.remembered_share}, it must lie in [0, 1)"
            )
        if self.likeliest_every < 0 or self.likeliest_every == 1:
            raise AgentError(
                f"{type(self).__name__}: likeliest_every is {self.likeliest_every}, it must be 0 (never) or above 1"
            )
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise AgentError(f"{type(self).__name__}: {name} is {getattr(self, name)}, it must be above 0")
        for name in ("ent_coef", "vf_coef"):
            if not getattr(self, name) >= 0.0:
                raise AgentError(f"{type(self).__name__}: {name} is {getattr(self, name)}, it must not be negative")
        if self.target_kl is not None and not self.target_kl > 0.0:
            raise AgentError(f"{type(self).__name__}: target_kl is {self.target_kl}, it must be above 0 or None")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; AgentError as `check_settings`, or for impossible ones."""
        check_settings(cls, values)
        return cls(**values)
