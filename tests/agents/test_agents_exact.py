"""Advantages and the clipped loss against torchrl's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate

from rlflow_tvm.agents.ppo import clipped_loss
from rlflow_tvm.agents.rollout import gae


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.5, 0.7)])
@pytest.mark.parametrize("steps", [1, 2, 37])
def test_advantages_are_torchrls(steps, gamma, gae_lambda, terminated):
    rng = np.random.default_rng(steps)
    rewards, values = rng.normal(size=(2, steps))
    last = float(rng.normal())
    done = torch.zeros(1, steps, 1, dtype=torch.bool)
    done[0, -1] = True
    as_column = lambda array: torch.from_numpy(np.asarray(array)).reshape(1, -1, 1)  # noqa: E731
    theirs, _ = generalized_advantage_estimate(
        gamma, gae_lambda, as_column(values), as_column([*values[1:], last]), as_column(rewards), done,
        terminated=done if terminated else torch.zeros_like(done),
    )  # fmt: skip
    ours = gae(rewards, values, 0.0 if terminated else last, gamma, gae_lambda)
    np.testing.assert_allclose(ours, theirs.squeeze().numpy().reshape(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip_range", [0.05, 0.2, 0.5])
def test_the_clipped_loss_and_its_gradient_are_torchrls(clip_range):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 7, generator=generator)
    old = torch.log_softmax(logits + 0.5 * torch.randn(64, 7, generator=generator), dim=1)
    actions = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    advantages = torch.randn(64, generator=generator)
    old_log_probs = old.gather(1, actions.unsqueeze(1)).squeeze(1)

    weights = [torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)]
    for each in weights:
        torch.nn.init.eye_(each.weight)
        torch.nn.init.zeros_(each.bias)
    mine, theirs = weights
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(theirs, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    critic = TensorDictModule(torch.nn.Linear(7, 1), in_keys=["observation"], out_keys=["state_value"])
    objective = ClipPPOLoss(actor, critic, clip_epsilon=clip_range, entropy_bonus=False, normalize_advantage=False)
    data = TensorDict(
        {
            "observation": logits,
            "action": actions,
            "action_log_prob": old_log_probs,
            "advantage": advantages.unsqueeze(1),
            "value_target": torch.zeros(64, 1),
        },
        [64],
    )
    told = objective(data)["loss_objective"]
    log_probs = torch.log_softmax(mine(logits), dim=1).gather(1, actions.unsqueeze(1)).squeeze(1)
    loss = clipped_loss(log_probs, old_log_probs, advantages, clip_range)
    assert float(loss.detach()) == pytest.approx(float(told.detach()), abs=1e-6)
    loss.backward()
    told.backward()
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=0, atol=1e-6)
