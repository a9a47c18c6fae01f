"""Stable-Baselines3's agents in an environment of passes that needs no compiler."""

from __future__ import annotations

import random
import tempfile

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from rlflow_tvm.agents.checkpoint import save_checkpoint
from rlflow_tvm.agents.ordering import ALGORITHMS, KIND, OrderingAgent, train_ordering
from rlflow_tvm.agents.registry import kind_in
from rlflow_tvm.errors import AgentError

METRICS = 2


class Digits(gymnasium.Env):
    """Three numbers count down where their action is taken; the last number of an observation is noise for values."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-10, 10, (3 + METRICS,), np.float32)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.digits, self.left = self.np_random.integers(0, 3, 3), 8
        return self._told(), {}

    def step(self, action):
        self.left -= 1
        saved = 0
        if action < 3 and self.digits[action]:
            self.digits[action] -= 1
            saved = 1
        ended = action == 3 or not self.left
        return self._told(), float(saved), ended, False, {"sum": int(self.digits.sum())}

    def action_masks(self):
        return np.append(self.digits > 0, True)

    def _told(self):
        return np.array([*self.digits, 1.0, -1.0], np.float32)


def trained(tmp_path, name, steps=64, seed=0, **options):
    told = []
    agent = train_ordering(
        Digits(), name, steps, seed, tmp_path / "agent.safetensors", metrics=METRICS, gamma=0.99,
        metadata={"of": "digits"}, on_step=told.append, on_episode=lambda taken, info: told.append(info), **options,
    )  # fmt: skip
    return agent, told


@pytest.mark.parametrize("value_metrics", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_agent_is_trained_kept_and_loaded(tmp_path, name, value_metrics):
    if value_metrics and ALGORITHMS[name].metrics_policy is None:
        with pytest.raises(AgentError, match="no value function beside its policy"):
            trained(tmp_path, name, value_metrics=True)
        return
    agent, told = trained(tmp_path, name, value_metrics=value_metrics)
    assert max(each for each in told if isinstance(each, int)) <= 128
    again = OrderingAgent.load(tmp_path / "agent.safetensors")
    assert again.metadata == {"of": "digits"}
    assert 64 in told
    assert any(isinstance(each, dict) and "sum" in each for each in told)
    rng = np.random.default_rng(0)
    for _ in range(20):
        observation = rng.integers(0, 3, 3 + METRICS).astype(np.float32)
        mask = np.append(rng.random(3) < 0.5, True)
        action = agent.act(observation, mask)
        assert mask[action]
        assert again.act(observation, mask) == action
        other = np.concatenate([observation[:3], [7.0, -7.0]]).astype(np.float32)
        assert agent.act(other, mask) == action  # no policy sees metrics


def test_a_trained_agent_counts_down(tmp_path):
    agent, _ = trained(tmp_path, "maskable-ppo", steps=4096)
    env, left = Digits(), []
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            observation, _, ended, _, info = env.step(agent.act(observation, env.action_masks()))
        left.append(info["sum"])
    assert np.mean(left) < 0.2


def test_the_same_seed_gives_the_same_agent(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        trained(folder, "ppo")
    a, b = (load_file(folder / "agent.safetensors") for folder in (first, second))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_callers_random_numbers_are_left_as_they_were(tmp_path):
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)

    seed()
    expected = drawn()
    seed()
    trained(tmp_path, "ppo")
    assert drawn() == expected


def test_nothing_is_left_among_temporary_files(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    trained(tmp_path, "ppo")
    assert not list(temporary.iterdir())


def test_a_seed_may_have_more_than_32_bits(tmp_path):
    assert trained(tmp_path, "a2c", seed=2**63 + 1)[1]


def test_files_of_other_agents_are_told(tmp_path):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"policy.x": torch.zeros(1)}, {"agent": "ppo"})
    with pytest.raises(AgentError, match="is an agent of kind ppo"):
        OrderingAgent.load(path)
    with pytest.raises(AgentError, match="no agent sarsa puts passes in order"):
        trained(tmp_path, "sarsa")


def test_an_agent_of_passes_is_told_from_those_that_rewrite(tmp_path):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"policy.x": torch.zeros(1)}, {"agent": KIND})
    with pytest.raises(AgentError, match=rf"^{path}: is an agent that puts passes in order, for .*\.LearnedOrder;"):
        kind_in(path)
