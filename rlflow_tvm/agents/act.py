"""A trained agent, ready to act."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.checkpoint import load_checkpoint
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import CompactObservation, HasSites, ObservationSizes, actions_at, compact
from rlflow_tvm.agents.policy import Acting, TwoStepPolicy
from rlflow_tvm.agents.ppo import load_policy_tensors
from rlflow_tvm.errors import AgentError


class Agent:
    """A policy with the observation sizes it was made for.

    Attributes:
        sizes: of the observations it takes.
        metadata: what the caller of `train` stored beside it (rule names, models, target, ...).
    """

    def __init__(self, policy: TwoStepPolicy, sizes: ObservationSizes, metadata: Mapping[str, Any]) -> None:
        self.policy, self.sizes, self.metadata = policy.eval(), sizes, dict(metadata)
        self._places = policy.places.copy()

    def fresh(self) -> Agent:
        """The agent as it was trained, without what `tried` has told it since."""
        return Agent(self.policy, self.sizes, self.metadata)

    @staticmethod
    def load(path: str | Path, observation_space: spaces.Space[Any] | None = None) -> Agent:
        """The agent stored in a checkpoint.

        Args:
            path: an `agent.safetensors`.
            observation_space: of the environment it is to act in, if it should be checked now.

        Raises:
            AgentError: the file is missing, truncated, of another version, or made for other observation sizes.
        """
        tensors, description = load_checkpoint(Path(path), prefix="policy.")
        sizes = ObservationSizes(**description["sizes"])
        if observation_space is not None:
            check_sizes(Path(path), sizes, ObservationSizes.from_space(observation_space))
        config = PPOConfig.from_dict(description["config"])
        with torch.random.fork_rng(devices=[]):  # the parameters drawn here are overwritten at once
            policy = TwoStepPolicy(sizes, config.hidden, config.rounds)
        load_policy_tensors(policy, tensors)
        return Agent(policy, sizes, description["metadata"])

    def begin(self, number: int = 1) -> None:
        """A new episode, or several at once: nothing is remembered of the last one."""

    def act(
        self, observation: Mapping[str, Any], deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """One action (rule, location), int64 (2,), never a masked one.

        Args:
            observation: of the environment.
            deterministic: take the likeliest rule and then its likeliest location, instead of sampling.
            rng: what to sample with; needed unless deterministic.

        Raises:
            AgentError: sampling without a generator, or an observation of other sizes or without a legal action.
        """
        return act_with(self.policy, self._compact(observation), deterministic, rng)

    def tried(self, observations: Sequence[Mapping[str, Any]], actions: np.ndarray, saved: Sequence[float]) -> None:
        """Know from now on what actions (T, 2) saved, each in percent of its episode's first graph."""
        self._places.tried(observations, actions, saved)

    def draw(
        self, observations: Sequence[Mapping[str, Any]], rng: np.random.Generator, episodes: Sequence[int]
    ) -> np.ndarray:
        """An action sampled for each of some episodes that go on at once, int64 (B, 2).

        Args:
            observations: theirs.
            rng: what to sample with.
            episodes: their numbers, below what `begin` was told.
        """
        del episodes  # nothing is remembered of them
        kept = [self._compact(each) for each in observations]
        return actions_at(kept, self.policy.draw(kept, rng))

    def probabilities(self, observation: Mapping[str, Any]) -> np.ndarray:
        """p(rule, location), float64 (R+1, L), exactly 0 where masked."""
        return self.policy.probabilities(self._compact(observation))

    def value(self, observation: Mapping[str, Any]) -> float:
        """The expected discounted return, in units of the training's reward scale."""
        return self.policy.value(self._compact(observation))

    def _compact(self, observation: Mapping[str, Any]) -> CompactObservation:
        return compact(observation, self.sizes, self._places.known)


def act_with(policy: Acting, kept: HasSites, deterministic: bool, rng: np.random.Generator | None) -> np.ndarray:
    """See `Agent.act`; `kept` is the observation as the policy keeps it."""
    if not deterministic and rng is None:
        raise AgentError("Agent.act: sampling needs rng=numpy.random.default_rng(seed), or deterministic=True")
    if len(kept.site_rules) == 0:
        raise AgentError("Agent.act: no rule is allowed by rule_mask; reset the environment after it terminated")
    site, _, _ = policy.choose(kept, None if deterministic else rng)
    return actions_at([kept], [site])[0]


def check_sizes(path: Path, saved: ObservationSizes, wanted: ObservationSizes) -> None:
    """AgentError naming every size in which a checkpoint and an environment differ."""
    pairs = zip(dataclasses.asdict(saved).items(), dataclasses.asdict(wanted).values(), strict=True)
    differing = [f"{name} {old} there, {new} here" for (name, old), new in pairs if old != new]
    if differing:
        raise AgentError(
            f"{path}: trained on other observations ({'; '.join(differing)}); "
            "use the same rules and environment, or train anew"
        )
