"""Proximal policy optimisation over graphs of varying size (Schulman et al. 2017; clipped objective, equation 7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional, utils

from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.graph_policy import GraphPolicy
from rlflow_tvm.agents.heads import PolicyOutput
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.rollout import Episode, Minibatch, RewardScale, RolloutBuffer
from rlflow_tvm.errors import AgentError

_KEPT = 0.8  # of the units of values, from update to update
_LEAST_DEVIATION = 1e-3
_PLACES = "policy.places."
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def clipped_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """-mean(min(r A, clip(r, 1 - eps, 1 + eps) A)) with r = exp(log pi - log pi_old); all (B,), result ()."""
    ratio = (log_probs - old_log_probs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()


def approximate_kl(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """mean((r - 1) - log r), an unbiased estimate of KL(old, new) that is never negative (Schulman 2020)."""
    log_ratio = log_probs - old_log_probs
    return (log_ratio.exp() - 1 - log_ratio).mean()


class PPO:
    """The learner: a policy, its optimizer, the random numbers of its minibatches and the scale of its rewards.

    Args:
        make_policy: makes the policy.
        config: settings.
        seed: of the parameters and the minibatches. Parameters are drawn from torch's global generator
            after seeding it: wrap in `torch.random.fork_rng` to keep that from being seen outside.
    """

    def __init__(self, make_policy: Callable[[], GraphPolicy[Any, Any]], config: PPOConfig, seed: int) -> None:
        self.config = config
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.policy = make_policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.reward_scale = RewardScale()

    def update(self, episodes: list[Episode]) -> dict[str, float | None]:
        """Learn from whole episodes, at least one of which was drawn from the policy; of the others what they tell of
        places. Returns the update's numbers, means over its gradient steps.

        Raises:
            AgentError: a reward or gradient is not finite.
        """
        config, told = self.config, episodes
        episodes = [episode for episode in told if not episode.likeliest]
        if not all(np.isfinite(episode.rewards).all() for episode in told):
            raise AgentError("PPO: a reward is not finite; mend the environment, then resume from the last checkpoint")
        if config.scale_rewards:
            for episode in episodes:
                self.reward_scale.add(np.asarray(episode.rewards), config.gamma)
        buffer = RolloutBuffer(episodes, config.gamma, config.gae_lambda, self.reward_scale.deviation)
        if config.normalise_values and np.isfinite(buffer.returns).all():  # else the gradient says what is wrong
            self._normalise_values(buffer.returns)
        steps: list[dict[str, float]] = []
        for _ in range(config.n_epochs):
            first_of_epoch = len(steps)
            steps += [self._gradient_step(part) for part in buffer.minibatches(config.minibatch_size, self.rng)]
            kl = np.mean([step["approx_kl"] for step in steps[first_of_epoch:]])
            if config.target_kl is not None and kl > 1.5 * config.target_kl:
                break
        if self.policy.places is not None:
            self.policy.places.learn(told)
        numbers: dict[str, float | None] = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        return {
            **numbers,
            "gradient_steps": float(len(steps)),
            "explained_variance": buffer.explained_variance(),
            "reward_scale": self.reward_scale.deviation,
        }

    def _normalise_values(self, returns: np.ndarray) -> None:
        """Follow the mean and the deviation of the returns (T,), so that the value loss means the same at all times.

        Both are running means without a beginning of their own (Kingma and Ba 2015, section 3): units that came down
        from 1 to those of small returns would make the head's weights larger with each update, until single gradient
        steps, whose size is Adam's, move the values by more than their units.
        """
        policy = self.policy
        mean, deviation = float(returns.mean()), max(float(returns.std()), _LEAST_DEVIATION)
        first = not policy.value_weight
        policy.value_weight.mul_(_KEPT).add_(1 - _KEPT)
        share = (1 - _KEPT) / float(policy.value_weight)
        if first:  # the values mean nothing yet
            policy.value_mean.fill_(mean)
            policy.value_deviation.fill_(deviation)
        else:
            policy.normalise_values(
                (1 - share) * float(policy.value_mean) + share * mean,
                (1 - share) * float(policy.value_deviation) + share * deviation,
            )

    def _gradient_step(self, part: Minibatch) -> dict[str, float]:
        config = self.config
        batch = self.policy.collate(part.observations)
        output: PolicyOutput = self.policy(batch)
        chosen = torch.from_numpy(batch.site_offsets[:-1] + part.sites)
        log_probs = output.log_probs.index_select(0, chosen)
        old_log_probs = torch.from_numpy(part.log_probs).float()
        advantages = torch.from_numpy(part.advantages).float()
        unit = self.policy.value_deviation
        losses = {
            "policy_loss": clipped_loss(log_probs, old_log_probs, advantages, config.clip_range),
            "value_loss": functional.mse_loss(output.values / unit, torch.from_numpy(part.returns).float() / unit),
            "entropy": output.entropy.mean(),
        }
        total = losses["policy_loss"] + config.vf_coef * losses["value_loss"] - config.ent_coef * losses["entropy"]
        self.optimizer.zero_grad()
        total.backward()
        norm = utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise AgentError(
                f"PPO: the gradient's norm became {float(norm)}; lower learning_rate, then train anew into another "
                "folder (rewriting goes on from a best plan with --start)"
            )
        self.optimizer.step()
        with torch.no_grad():
            outside = ((log_probs - old_log_probs).exp() - 1).abs() > config.clip_range
            return {
                **{name: float(loss) for name, loss in losses.items()},
                "approx_kl": float(approximate_kl(log_probs, old_log_probs)),
                "clip_fraction": float(outside.float().mean()),
                "grad_norm": float(norm),
            }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is a tensor: parameters, Adam's moments, torch's random state."""
        moments = optimizer_tensors(self.policy, self.optimizer, "optimizer")
        return policy_tensors(self.policy) | moments | {"random.torch": torch.get_rng_state()}

    def numbers(self) -> dict[str, Any]:
        """Everything else, as JSON takes it."""
        return {"random": self.rng.bit_generator.state, "reward_scale": self.reward_scale.as_dict()}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `tensors` and `numbers` gave; sets torch's global random state.

        Raises:
            AgentError: a parameter is missing or has another shape, or part of the optimizer's state is missing.
        """
        restore_optimizer(self.policy, self.optimizer, tensors, "optimizer")  # first: it refuses before it changes
        load_policy_tensors(self.policy, tensors)
        self.rng.bit_generator.state = numbers["random"]
        self.reward_scale = RewardScale(**numbers["reward_scale"])
        torch.set_rng_state(tensors["random.torch"])


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Adam, prefix: str) -> dict[str, torch.Tensor]:
    """Adam's moments under the names `prefix`.PARAMETER.KEY; none before the first gradient step."""
    return {
        f"{prefix}.{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    module: nn.Module, optimizer: torch.optim.Adam, tensors: Mapping[str, torch.Tensor], prefix: str
) -> None:
    """The inverse of `optimizer_tensors`; AgentError where a part is missing."""
    moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    # a checkpoint from before the first gradient step has none, and a parameter that nothing was learnt by neither
    for name, parameter in module.named_parameters():
        keys = {key: f"{prefix}.{name}.{key}" for key in _ADAM_STATE}
        found = {key: tensors[full].clone() for key, full in keys.items() if full in tensors}
        if found and len(found) < len(keys):
            missing = next(full for full in keys.values() if full not in tensors)
            raise AgentError(f"checkpoint: {missing} is missing; take another checkpoint or train anew")
        if found:
            moments[parameter] = found
    optimizer.state.clear()
    optimizer.state.update(moments)


def policy_tensors(policy: GraphPolicy[Any, Any]) -> dict[str, torch.Tensor]:
    """The policy's parameters, and what it knows of places, under the names they have in a checkpoint."""
    tensors = {f"policy.{name}": value.detach() for name, value in policy.state_dict().items()}
    if policy.places is not None:
        tensors |= {f"{_PLACES}{name}": value for name, value in policy.places.tensors().items()}
    return tensors


def load_policy_tensors(policy: GraphPolicy[Any, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `policy_tensors`; AgentError where a parameter is missing or has another shape."""
    load_parameters(policy, tensors, "policy")
    if policy.places is not None:
        found = {name.removeprefix(_PLACES): value for name, value in tensors.items() if name.startswith(_PLACES)}
        policy.places = Places.of(found)


def load_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Parameters and buffers from the tensors called `prefix`.NAME; AgentError where one is missing or has another
    shape."""
    state = module.state_dict()
    for name, value in state.items():
        saved = tensors.get(f"{prefix}.{name}")
        if saved is None or saved.shape != value.shape:
            found = "missing" if saved is None else f"of shape {tuple(saved.shape)}"
            raise AgentError(
                f"checkpoint: parameter {name} is {found}, expected {tuple(value.shape)}; "
                "it was written by another rlflow_tvm: train anew"
            )
    module.load_state_dict({name: tensors[f"{prefix}.{name}"] for name in state})
