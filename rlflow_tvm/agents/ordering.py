"""Stable-Baselines3's agents for environments of flat observations with `action_masks`, as the order of passes is.

Their own files are archives of pickles; here a trained policy is kept as tensors and JSON, as all agents are.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import TRPO, MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.dqn.policies import DQNPolicy
from torch import Tensor, nn

from rlflow_tvm.agents.checkpoint import load_checkpoint, save_checkpoint
from rlflow_tvm.agents.torch_settings import torch_settings
from rlflow_tvm.errors import AgentError, Ended

log = logging.getLogger("rlflow_tvm")

KIND = "pass-ordering"
_HIDDEN = [64, 64]
_MINIBATCH = 128  # TRPO's, two of PPO's


class _Front(BaseFeaturesExtractor):
    """The first `told` numbers of an observation: what comes behind is for value functions alone."""

    def __init__(self, observation_space: spaces.Box, told: int) -> None:
        super().__init__(observation_space, told)
        self._told = told

    def forward(self, observations: Tensor) -> Tensor:
        return observations[:, : self._told]


class _Apart(nn.Module):
    """Networks of policy and value, of which the policy's sees the first `told` features alone."""

    def __init__(self, policy: ActorCriticPolicy, told: int) -> None:
        super().__init__()
        self._told = told
        self._policy = MlpExtractor(told, policy.net_arch, policy.activation_fn, policy.device).policy_net
        value = MlpExtractor(policy.features_dim, policy.net_arch, policy.activation_fn, policy.device)
        self._value = value.value_net
        self.latent_dim_pi, self.latent_dim_vf = value.latent_dim_pi, value.latent_dim_vf

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return self._policy(features[:, : self._told])

    def forward_critic(self, features: Tensor) -> Tensor:
        return self._value(features)


class _ValueSeesMore:
    """The paper's variant: metrics are shown to the value function, not to the policy."""

    mlp_extractor: Any

    def __init__(self, *args: Any, told: int, **options: Any) -> None:
        self._told = told
        super().__init__(*args, **options)

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = _Apart(self, self._told)  # type: ignore[arg-type]


class _MetricsForValue(_ValueSeesMore, ActorCriticPolicy):
    """For PPO, A2C and TRPO."""


class _MaskableMetricsForValue(_ValueSeesMore, MaskableActorCriticPolicy):
    """For maskable PPO."""


@dataclass(frozen=True)
class Algorithm:
    """One of the agents: its learner, its policy, the policy whose value function sees metrics, and settings."""

    learner: Callable[..., Any]
    policy: type[BasePolicy]
    metrics_policy: type[BasePolicy] | None
    settings: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS = {
    "ppo": Algorithm(PPO, ActorCriticPolicy, _MetricsForValue, {"n_steps": 1024}),
    "a2c": Algorithm(A2C, ActorCriticPolicy, _MetricsForValue, {"n_steps": 32, "gae_lambda": 0.95}),
    "dqn": Algorithm(
        DQN, DQNPolicy, None, {"buffer_size": 50_000, "target_update_interval": 1000, "exploration_fraction": 0.3}
    ),
    "trpo": Algorithm(TRPO, ActorCriticPolicy, _MetricsForValue, {"n_steps": 1024}),
    "maskable-ppo": Algorithm(MaskablePPO, MaskableActorCriticPolicy, _MaskableMetricsForValue, {"n_steps": 1024}),
}
"""By name. Settings are the libraries' own but for these: an episode has 32 steps, a training some ten thousand."""


def algorithm(name: str, value_metrics: bool = False) -> Algorithm:
    """The one of that name; AgentError where there is none, or none whose value function can be told more."""
    if name not in ALGORITHMS:
        raise AgentError(f"no agent {name} puts passes in order; there are: {', '.join(ALGORITHMS)}")
    if value_metrics and ALGORITHMS[name].metrics_policy is None:
        raise AgentError(f"agent {name} has no value function beside its policy that could be shown metrics")
    return ALGORITHMS[name]


class OrderingAgent:
    """A trained policy. `metadata`: what its training noted."""

    def __init__(self, policy: BasePolicy, metadata: Mapping[str, Any]) -> None:
        self._policy, self.metadata = policy.eval(), metadata

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """The likeliest (or most valuable) of the actions that are not masked out; `mask` (A,) bool."""
        with torch.no_grad():
            told = torch.as_tensor(observation, device=self._policy.device)[None]
            if isinstance(self._policy, DQNPolicy):
                scores = self._policy.q_net(told)  # type: ignore[operator]
            else:
                scores = self._policy.get_distribution(told).distribution.logits  # type: ignore
        return int(np.where(mask, scores[0].cpu().numpy(), -np.inf).argmax())

    @staticmethod
    def load(path: str | Path) -> OrderingAgent:
        """Read what `train_ordering` left; AgentError if the file is unusable or of another kind of agent."""
        tensors, told = load_checkpoint(Path(path), prefix="policy.")
        if told.get("agent") != KIND:
            raise AgentError(f"{path}: is an agent of kind {told.get('agent')}, not one that puts passes in order")
        size, actions, front = told["observations"], told["actions"], told["told"]
        chosen = algorithm(told["algorithm"], told["value_metrics"])
        policy_class, options = _policy(chosen, front, told["value_metrics"])
        space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        with torch.random.fork_rng(devices=[]):  # the parameters drawn here are overwritten at once
            policy = policy_class(space, spaces.Discrete(actions), lambda _left: 0.0, **options)
        try:
            policy.load_state_dict({name.removeprefix("policy."): tensor for name, tensor in tensors.items()})
        except RuntimeError as error:
            raise AgentError(f"{path}: its tensors do not fit its description ({error}): train anew") from error
        return OrderingAgent(policy, told["metadata"])


def _policy(chosen: Algorithm, told: int, value_metrics: bool) -> tuple[type[BasePolicy], dict[str, Any]]:
    if value_metrics:
        assert chosen.metrics_policy is not None, "`algorithm` has looked"
        return chosen.metrics_policy, {"told": told, "net_arch": {"pi": _HIDDEN, "vf": _HIDDEN}}
    return chosen.policy, {
        "features_extractor_class": _Front, "features_extractor_kwargs": {"told": told}, "net_arch": _HIDDEN,
    }  # fmt: skip


class _Watch(BaseCallback):
    """Tells of steps and of episodes that have ended."""

    def __init__(self, on_step: Callable[[int], None], on_episode: Callable[[int, Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._tell_step, self._tell_episode = on_step, on_episode

    def _on_step(self) -> bool:
        self._tell_step(self.num_timesteps)
        for ended, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if ended:
                self._tell_episode(self.num_timesteps, info)
        return True


@contextmanager
def _numbers_restored() -> Iterator[None]:
    """Python's and numpy's random numbers, which the libraries seed, as they were before."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


def train_ordering(
    env: gymnasium.Env[np.ndarray, np.int64],
    name: str,
    steps: int,
    seed: int,
    path: Path,
    *,
    metrics: int,
    gamma: float,
    value_metrics: bool = False,
    metadata: Mapping[str, Any],
    on_step: Callable[[int], None],
    on_episode: Callable[[int, Mapping[str, Any]], None],
) -> OrderingAgent:
    """Train the agent `name` of `ALGORITHMS` for `steps` environment steps and leave its policy in `path`.

    Args:
        metrics: of an observation so many numbers at its end are shown to no policy; with `value_metrics` to the
            value function.
        gamma: the discount, which the environment knows too.
        on_step: told the steps so far. on_episode: told them and the last step's `info`.
    """
    chosen = algorithm(name, value_metrics)
    size = int(np.prod(env.observation_space.shape or (0,)))
    policy, options = _policy(chosen, size - metrics, value_metrics)
    # whole minibatches of any of them, and none of a short training's steps beyond its end but to fill one
    rollout = min(chosen.settings.get("n_steps", 0), max(_MINIBATCH, steps // _MINIBATCH * _MINIBATCH))
    with torch_settings(1), _numbers_restored():  # the networks are small, and the environment is most of the time
        settings = {**chosen.settings, **({"n_steps": rollout} if "n_steps" in chosen.settings else {})}
        learner = chosen.learner(
            policy, env, gamma=gamma, seed=seed % 2**32, policy_kwargs=options, device="cpu", **settings
        )  # numpy's old generator, which the libraries seed, takes no more bits
        learner.set_logger(Logger(None, []))  # its own leaves an empty folder among the temporary files each time
        ended: Ended | None = None
        try:
            learner.learn(steps, callback=_Watch(on_step, on_episode))
        except KeyboardInterrupt:
            log.warning("interrupted: the agent is what it has learnt by now; once more gives it up")
        except Ended as error:  # such a training cannot be resumed: what it has learnt is kept all the same
            ended = error
    description = {
        "agent": KIND, "algorithm": name, "observations": size, "told": size - metrics, "value_metrics": value_metrics,
        "actions": int(env.action_space.n), "metadata": dict(metadata),  # type: ignore[attr-defined]
    }  # fmt: skip
    tensors = {f"policy.{key}": tensor for key, tensor in learner.policy.state_dict().items()}
    save_checkpoint(path, tensors, description)
    if ended is not None:
        raise ended
    return OrderingAgent.load(path)
