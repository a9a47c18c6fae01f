"""Episodes, advantages, and the buffer an update learns from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, last_value: float, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalised advantage estimates of one episode (Schulman et al. 2016, equation 16); all arrays (T,).

    A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t), with V(s_T) = `last_value`:
    0 where the episode terminated, the value of the final observation where it was only truncated.
    """
    following = np.append(values[1:], last_value)
    deltas = rewards + gamma * following - values
    advantages = np.zeros(len(rewards))
    ahead = 0.0
    for t in reversed(range(len(rewards))):
        ahead = deltas[t] + gamma * gae_lambda * ahead
        advantages[t] = ahead
    return advantages


@dataclass(eq=False)
class Episode:
    """One whole episode, from reset to `terminated` or `truncated` (T steps).

    `last_value` is the value of the observation after the last step; it counts only where the episode was truncated.
    `run_secs` holds the finite times the environment told in its infos, the reset's first where it tells one.
    """

    observations: list[Any] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)  # index of the chosen site in its observation
    rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    run_secs: list[float] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)  # names of the applied rules, as the infos tell them
    end_to_end: list[list[float]] = field(default_factory=list)  # [time told, that of a whole run] where one was made
    terminated: bool = False
    truncated: bool = False
    last_value: float = 0.0
    remembered: bool = False  # whether it began at a remembered graph
    likeliest: bool = False  # whether its actions were the policy's likeliest, and so say nothing of what it draws
    summary: dict[str, Any] = field(default_factory=dict)  # JSON: what the last info tells of the episode

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def drawn(self) -> int:
        """Its steps that were drawn from the policy, which it can be improved by: all of them or none."""
        return 0 if self.likeliest else len(self)

    @property
    def total_reward(self) -> float:
        """The undiscounted return."""
        return math.fsum(self.rewards)

    @property
    def bootstrap(self) -> float:
        """V(s_T) for `gae`: an end that the environment declared is worth nothing, a cut-off is worth its value."""
        return 0.0 if self.terminated else self.last_value

    @property
    def best_run_secs(self) -> float | None:
        """The smallest time seen, None if the environment told none."""
        return min(self.run_secs, default=None)


class RewardScale:
    """Running deviation of the discounted return, by which rewards are divided.

    The returns sum_{k<=t} gamma^{t-k} r_k are the ones of Engstrom et al. 2020 ("Implementation matters in deep policy
    gradients"), their variance is kept by Welford's method. Rewards are not centred: that would change the optimum.
    """

    def __init__(self, count: float = 0.0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, rewards: np.ndarray, gamma: float) -> None:
        """Take in one episode's rewards (T,)."""
        running = 0.0
        for reward in rewards:
            running = gamma * running + float(reward)
            self.count += 1.0
            difference = running - self.mean
            self.mean += difference / self.count
            self.squares += difference * (running - self.mean)

    @property
    def deviation(self) -> float:
        """The standard deviation so far; 1 as long as there is none to speak of."""
        variance = self.squares / self.count if self.count else 0.0
        return math.sqrt(variance) if variance > 1e-16 else 1.0

    def as_dict(self) -> dict[str, float]:
        """The state as JSON takes it; the keyword arguments of the constructor."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}


@dataclass(frozen=True, eq=False)
class Minibatch:
    """Some steps of the buffer (B of them); arrays (B,)."""

    observations: list[Any]  # as the policy keeps them
    sites: np.ndarray
    log_probs: np.ndarray  # of the policy that acted
    advantages: np.ndarray  # normalised over the whole buffer
    returns: np.ndarray  # advantages before normalisation + values: the value head's targets


class RolloutBuffer:
    """The episodes of one update, with their advantages; T steps in all.

    Args:
        episodes: whole episodes, at least one step in all.
        gamma: discount.
        gae_lambda: lambda.
        reward_divisor: rewards are divided by it before anything else.
    """

    def __init__(self, episodes: list[Episode], gamma: float, gae_lambda: float, reward_divisor: float = 1.0) -> None:
        self.observations = [observation for episode in episodes for observation in episode.observations]
        self.sites = np.concatenate([episode.sites for episode in episodes]).astype(np.int64)
        self.log_probs = np.concatenate([episode.log_probs for episode in episodes])
        self.values = np.concatenate([episode.values for episode in episodes])
        self.advantages = np.concatenate(
            [
                gae(
                    np.asarray(episode.rewards) / reward_divisor,
                    np.asarray(episode.values),
                    episode.bootstrap,
                    gamma,
                    gae_lambda,
                )
                for episode in episodes
            ]
        )
        self.returns = self.advantages + self.values
        spread = self.advantages.std()
        self.normalised = (self.advantages - self.advantages.mean()) / (spread + 1e-8)

    def __len__(self) -> int:
        return len(self.sites)

    def explained_variance(self) -> float | None:
        """1 - Var(returns - values) / Var(returns); None where the returns do not vary."""
        variance = float(self.returns.var())
        return None if variance < 1e-12 else 1.0 - float((self.returns - self.values).var()) / variance

    def minibatches(self, size: int, rng: np.random.Generator) -> Iterator[Minibatch]:
        """All steps once, in random order, `size` at a time (the last one may be smaller)."""
        order = rng.permutation(len(self))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield Minibatch(
                observations=[self.observations[i] for i in chosen],
                sites=self.sites[chosen],
                log_probs=self.log_probs[chosen],
                advantages=self.normalised[chosen],
                returns=self.returns[chosen],
            )
