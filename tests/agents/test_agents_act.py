"""A loaded agent acts as the trained one did; and the registry."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from training_checks import make_ppo

from rlflow_tvm import agents
from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.checkpoint import save_checkpoint
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.registry import AGENTS, agent_kind, load_agent
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError

CONFIG = PPOConfig(hidden=16, rounds=1, steps_per_update=20, n_epochs=1)


@pytest.fixture
def env(toy):
    return toy.ToyRewriteEnv(length=5)


@pytest.fixture(scope="module")
def checkpoint(toy, tmp_path_factory):
    return train(toy.ToyRewriteEnv(length=5), CONFIG, 1, seed=0, out_dir=tmp_path_factory.mktemp("out")).checkpoint


@pytest.fixture
def stored(checkpoint, tmp_path):
    """A copy, as some write over it."""
    return shutil.copy(checkpoint, tmp_path / "agent.safetensors")


def test_actions_are_legal_and_deterministic_ones_repeat(env, stored):
    agent, again = Agent.load(stored, env.observation_space), Agent.load(stored)
    rng = np.random.default_rng(0)
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        done = False
        while not done:
            first = agent.act(observation)
            assert env.action_space.contains(first)
            assert np.array_equal(first, again.act(observation, deterministic=True, rng=rng))
            sampled = agent.act(observation, deterministic=False, rng=rng)
            assert observation["location_mask"][tuple(sampled)] == 1
            assert observation["location_mask"][tuple(first)] == 1
            assert agent.probabilities(observation)[tuple(first)] > 0
            assert np.isfinite(agent.value(observation))
            observation, _, terminated, truncated, _ = env.step(sampled)
            done = terminated or truncated


def test_equal_generators_sample_equal_actions(env, stored):
    agent = Agent.load(stored)
    observation, _ = env.reset(seed=0)
    draws = [
        [agent.act(observation, False, rng).tolist() for _ in range(20)]
        for rng in (np.random.default_rng(1), np.random.default_rng(1), np.random.default_rng(2))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_sampling_without_a_generator_is_an_error(env, stored):
    with pytest.raises(AgentError, match="rng"):
        Agent.load(stored).act(env.reset(seed=0)[0], deterministic=False)


def test_a_graph_with_no_legal_action_is_an_error(env, stored):
    observation, _ = env.reset(seed=0)
    observation["rule_mask"][:] = 0
    with pytest.raises(AgentError, match="no rule is allowed"):
        Agent.load(stored).act(observation)


def test_another_environment_is_refused_by_its_sizes(toy, stored):
    other = toy.ToyRewriteEnv(length=3, num_locations=4)
    with pytest.raises(AgentError, match="num_locations 8 there, 4 here"):
        Agent.load(stored, other.observation_space)


def test_loading_leaves_torchs_random_state(stored):
    before = torch.get_rng_state()
    Agent.load(stored)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("damage", ["missing", "of shape"])
def test_a_checkpoint_of_other_parameters_is_an_error(stored, damage):
    with safe_open(stored, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    broken = tensors.pop("policy.heads.value_head.weight")
    if damage == "of shape":
        tensors["policy.heads.value_head.weight"] = broken.t().contiguous()
    save_file(tensors, stored, metadata=metadata)
    with pytest.raises(AgentError, match=f"value_head.weight is {damage}"):
        Agent.load(stored)


def test_an_agent_of_another_kind_is_an_error(tmp_path):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {}, {"agent": "world-model", "metadata": {}})
    with pytest.raises(AgentError, match=rf"^{path}: is an agent of kind world-model, .*\.agents\.load_agent$"):
        Agent.load(path)


def test_the_registry_builds_trains_and_loads(env, tmp_path):
    kind = agent_kind("ppo")
    config = kind.config(dataclasses.asdict(CONFIG))
    assert config == CONFIG
    result = kind.train(env, config, 1, 0, tmp_path / "out", resume=False)
    for agent in (kind.load(result.checkpoint), load_agent(result.checkpoint, env.observation_space)):
        assert agent.sizes == ObservationSizes.from_space(env.observation_space)
    assert list(AGENTS) == ["ppo", "world-model", "candidate"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AgentError, match="no agent dqn; there are: ppo, world-model"):
        agent_kind("dqn")


def test_a_missing_package_names_itself_and_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "rlflow_tvm.agents.training", None)
    kind = dataclasses.replace(AGENTS["ppo"], train_function="rlflow_tvm.agents.training:train")
    with pytest.raises(AgentError, match=r"pip install 'rlflow_tvm\[agents\]'"):
        kind.train(None, None, 1, 0, "out")


def test_every_name_of_the_room_says_what_is_missing():
    names = ["Agent", "Episode", "PPOConfig", "TrainingResult", "Workers", "train"]
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom rlflow_tvm import agents\n"
        "from rlflow_tvm.errors import AgentError\nfor name in sys.argv[1:]:\n"
        "    try:\n        getattr(agents, name)\n        print()\n"
        "    except AgentError as error:\n        print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
    missing = (
        "agents need torch, which is not installed: pip install 'rlflow_tvm[agents]', in Python 3.11 (DGL is not there "
        "for later ones)"
    )
    told = dict(zip(names, done.stdout.split("\n")[:-1], strict=True))
    needs_none = ("PPOConfig", "Episode")
    assert told == {name: "" if name in needs_none else missing for name in names}


def test_naming_the_agents_loads_no_learner():
    # torch itself comes with TVM, which the package loads
    program = (
        "import sys\nfrom rlflow_tvm.agents import AGENTS\n"
        "print([m for m in ('dgl', 'tensorboard', 'rlflow_tvm.agents.policy') if m in sys.modules])\n"
        "from rlflow_tvm.agents import Agent, PPOConfig, train\nprint('dgl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["[]", "True", ""]


def test_the_package_has_what_it_lists_and_nothing_else():
    for name in agents.__all__:
        assert getattr(agents, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Planner'"):
        _ = agents.Planner


def test_a_learner_and_its_stored_agent_agree(env, toy):
    sizes = ObservationSizes.from_space(env.observation_space)
    with torch.random.fork_rng(devices=[]):
        learner, other = make_ppo(sizes, CONFIG, 0), make_ppo(sizes, CONFIG, 1)
        other.restore(learner.tensors(), learner.numbers())
    for one, same in zip(learner.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(one, same)
    assert learner.rng.random() == other.rng.random()
