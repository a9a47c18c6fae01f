"""Comparing trainings, a small world model's settings, and environments that end the process they are in."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from toy_env import HOT, ToyRewriteEnv, cost

from rlflow_tvm.agents.checkpoint import load_checkpoint
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.designs import DESIGNS
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.ppo import PPO
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.jsonl import read_lines

SMALL = WorldModelConfig(
    latent=8, hidden=8, rounds=1, memory=16, gaussians=2, vision_steps=30, vision_batch=16, memory_steps=30,
    memory_batch=4, members=2, dream_horizon=6, dreams=5, iterations=3, controller_updates=3, patience=100,
    controller=PPOConfig(minibatch_size=16, n_epochs=2, hidden=8),
)  # fmt: skip


def make_ppo(sizes: ObservationSizes, config: PPOConfig, seed: int) -> PPO:
    """A learner of the two-step policy."""
    return PPO(lambda: DESIGNS["ppo"].make(sizes, config), config, seed)


def known_of(episodes: list[Episode]) -> Places:
    """What they tell of places."""
    places = Places()
    places.learn(episodes)
    return places


def most_of(seeds: int, holds: Callable[[int], bool]) -> bool:
    """Whether more than half of the seeds from 0 on hold; no more are tried than it takes to tell.

    What a training ends at may hang on the rounding of a sum: one seed says little.
    """
    needed, held = seeds // 2 + 1, 0
    for seed in range(seeds):
        held += holds(seed)
        if held == needed or held + seeds - 1 - seed < needed:
            break
    return held == needed


def curve(folder):
    """The log without its clock."""
    return [{k: v for k, v in line.items() if k != "wall_secs"} for line in read_lines(folder / "progress.jsonl")]


def state(folder):
    """A checkpoint's tensors, and its description without the clock."""
    tensors, description = load_checkpoint(folder / "agent.safetensors")
    description["counts"].pop("wall_secs")
    return tensors, description


def assert_same_training(one, other):
    """Bit for bit: parameters, optimizer, random states, counts, logged curve."""
    (tensors, description), (tensors2, description2) = state(one), state(other)
    assert tensors.keys() == tensors2.keys()
    assert [name for name, value in tensors.items() if not torch.equal(value, tensors2[name])] == []
    assert description == description2
    assert curve(one) == curve(other)


class TwoModels(ToyRewriteEnv):
    """As `ManyModelsEnv`; of the poor one nothing can be rewritten."""

    models = ("poor", "rich")

    def begin(self, seed, options):
        start = (options or {}).get("start", {})
        own = {name: value for name, value in (options or {}).items() if name != "start" or "plan" in value}
        info = super().begin(seed, own)
        self.model = start.get("model", self.models[int(self.np_random.integers(2))])
        if self.model == "poor":
            self.state = self.cheapest = ((HOT,), ())
        return {**info, "run_secs": cost(self.state) * 1e-3}

    def move(self, action):
        *moved, info = super().move(action)
        if "episode" in info:
            info["episode"] |= {"model": self.model, "step": self.better}
        return *moved, info


class Announced(ToyRewriteEnv):
    """Leaves a file named by its process in `folder`, with a line for each reset.

    From the fifth on, a reset waits until `company` processes have begun an episode, unless it is its process's first.
    """

    def __init__(self, folder: str, company: int = 1, **options) -> None:
        super().__init__(**options)
        self.file, self.company = Path(folder) / str(os.getpid()), company
        self.file.touch()

    def reset(self, *, seed=None, options=None):
        with self.file.open("a") as file:
            file.write(f"{seed}\n")
        while self.company > 1:
            lines = [len(file.read_text().splitlines()) for file in self.file.parent.iterdir()]
            own = len(self.file.read_text().splitlines())
            if own == 1 or sum(lines) < 5 or sum(map(bool, lines)) >= self.company:
                break
            time.sleep(0.01)
        return super().reset(seed=seed, options=options)


class Mortal(Announced):
    """Dies, as if killed by the system, in the second step of the episode with reset seed `fatal`, `times` times."""

    def __init__(self, fatal: int, times: int, **options) -> None:
        super().__init__(**options)
        self.fatal, self.times = fatal, times
        self.deaths = self.file.with_name("deaths")
        self.reset_seed: int | None = None

    def reset(self, *, seed=None, options=None):
        self.reset_seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        died = len(self.deaths.read_text()) if self.deaths.exists() else 0
        if self.reset_seed == self.fatal and self.steps == 1 and died < self.times:
            with self.deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Faulty(ToyRewriteEnv):
    """Raises in its first step."""

    def step(self, action):
        raise LookupError("no such thing")


def refuses(**options):
    """A factory that cannot make an environment."""
    from rlflow_tvm.errors import EnvError

    raise EnvError(f"no environment with {options}; give others")


def ends(**options):
    """A factory that ends its process."""
    print("no room for me", file=sys.stderr, flush=True)
    os._exit(7)
