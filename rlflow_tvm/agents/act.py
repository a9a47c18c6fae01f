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
from rlflow_tvm.agents.designs import DESIGNS
from rlflow_tvm.agents.graph_policy import Acting, GraphPolicy, Kept
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.ppo import load_policy_tensors
from rlflow_tvm.errors import AgentError


class Agent:
    """A policy with the observation sizes it was made for.

    Attributes:
        sizes: of the observations it takes.
        metadata: what the caller of `train` stored beside it (rule names, models, target, ...).
    """

    def __init__(self, policy: GraphPolicy[Any, Any], metadata: Mapping[str, Any]) -> None:
        assert policy.places is not None
        self.policy, self.sizes, self.metadata = policy.eval(), policy.sizes, dict(metadata)
        self._places = policy.places.copy()

    def fresh(self) -> Agent:
        """The agent as it was trained, without what `tried` has told it since."""
        return Agent(self.policy, self.metadata)

    @staticmethod
    def load(path: str | Path, observation_space: spaces.Space[Any] | None = None) -> Agent:
        """The agent stored in a checkpoint.

        Args:
            path: an `agent.safetensors`.
            observation_space: of the environment it is to act in, if it should be checked now.

        Raises:
            AgentError: the file is missing, truncated, of another version or kind of agent, or made for other
                observation sizes.
        """
        tensors, description = load_checkpoint(Path(path), prefix="policy.")
        if description["agent"] not in DESIGNS:
            raise AgentError(
                f"{path}: is an agent of kind {description['agent']}, which this class is not for; load it with "
                "rlflow_tvm.agents.load_agent"
            )
        design = DESIGNS[description["agent"]]
        if observation_space is not None:
            found = dataclasses.asdict(design.from_space(observation_space))
            check_sizes(Path(path), description["sizes"], found)
        config = design.config.from_dict(description["config"])
        with torch.random.fork_rng(devices=[]):  # the parameters drawn here are overwritten at once
            policy = design.make(design.sizes(**description["sizes"]), config)
        load_policy_tensors(policy, tensors)
        return Agent(policy, description["metadata"])

    def begin(self, number: int = 1) -> None:
        """A new episode, or several at once: nothing is remembered of the last one."""

    def act(
        self, observation: Mapping[str, Any], deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> Any:
        """One action as the environment takes it, such as (rule, location), int64 (2,); never a masked one.

        Args:
            observation: of the environment.
            deterministic: take the likeliest (rule and then its likeliest location), instead of sampling.
            rng: what to sample with; needed unless deterministic.

        Raises:
            AgentError: sampling without a generator, or an observation of other sizes or without a legal action.
        """
        return act_with(self.policy, self._compact(observation), deterministic, rng)

    def tried(self, observations: Sequence[Mapping[str, Any]], actions: Sequence[Any], saved: Sequence[float]) -> None:
        """Know from now on what actions (T of them) saved, each in percent of its episode's first graph; one that never
        looked at places in its training does not look at that either."""
        pairs = zip(observations, actions, strict=True)
        self._places.tried([self.policy.place(seen, action) for seen, action in pairs], saved)

    def draw(
        self, observations: Sequence[Mapping[str, Any]], rng: np.random.Generator, episodes: Sequence[int]
    ) -> Sequence[Any]:
        """An action sampled for each of some episodes that go on at once (B of them).

        Args:
            observations: theirs.
            rng: what to sample with.
            episodes: their numbers, below what `begin` was told.
        """
        del episodes  # nothing is remembered of them
        kept = [self._compact(each) for each in observations]
        drawn = zip(kept, self.policy.draw(kept, rng), strict=True)
        return [self.policy.action(each, int(site)) for each, site in drawn]

    def probabilities(self, observation: Mapping[str, Any]) -> np.ndarray:
        """p(rule, location), float64 (R+1, L), or p(candidate); exactly 0 where masked."""
        return self.policy.probabilities(self._compact(observation))

    def value(self, observation: Mapping[str, Any]) -> float:
        """The expected discounted return, in units of the training's reward scale."""
        return self.policy.value(self._compact(observation))

    def _compact(self, observation: Mapping[str, Any]) -> Any:
        # one that never looked at places in its training would not know what to make of them
        places = Places() if self.policy.informed_share == 0.0 else self._places
        return self.policy.compact(observation, places.known)


def act_with(policy: Acting, kept: Kept, deterministic: bool, rng: np.random.Generator | None) -> Any:
    """See `Agent.act`; `kept` is the observation as the policy keeps it."""
    if not deterministic and rng is None:
        raise AgentError("Agent.act: sampling needs rng=numpy.random.default_rng(seed), or deterministic=True")
    if kept.num_sites == 0:
        raise AgentError("Agent.act: no rule is allowed by rule_mask; reset the environment after it terminated")
    site, _, _ = policy.choose(kept, None if deterministic else rng)
    return policy.action(kept, site)


def check_sizes(path: Path, saved: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """AgentError naming every size in which a checkpoint and an environment differ."""
    names = dict.fromkeys([*saved, *wanted])
    pairs = [(name, saved.get(name, "not told"), wanted.get(name, "not told")) for name in names]
    differing = [f"{name} {old} there, {new} here" for name, old, new in pairs if old != new]
    if differing:
        raise AgentError(
            f"{path}: trained on other observations ({'; '.join(differing)}); "
            "use the same rules and environment, or train anew"
        )
