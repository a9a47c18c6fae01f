"""Dreams: episodes that M makes up, without an environment, behind an environment's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.policy import PolicyOutput
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.controller import Controller, LatentObservation, latent_space
from rlflow_tvm.agents.world.memory import Memory, Recurrent, Steps


@dataclass(frozen=True, eq=False)
class DreamState:
    """Where N dreams stand."""

    latents: torch.Tensor  # (N, Z)
    counts: torch.Tensor  # (N, R+1) sites of each rule, whole numbers
    memory: Recurrent

    def __getitem__(self, rows: torch.Tensor) -> DreamState:
        memory = Recurrent(self.memory.h[rows], self.memory.c[rows])
        return DreamState(self.latents[rows], self.counts[rows], memory)

    @property
    def vectors(self) -> torch.Tensor:
        """[z, h], (N, Z+H)."""
        return torch.cat([self.latents, self.memory.h], dim=1)


class Dream:
    """M, and the real graphs that dreams begin with.

    Args:
        sizes: of the real observations.
        memory: M; it is not trained here.
        latents: (G, Z) of the graphs to begin with.
        counts: (G, R+1) sites of each rule in them.
        temperature: tau. A dream of higher temperature is harder to exploit (Ha and Schmidhuber 2018).
        horizon: steps until truncation: errors add up, so a dream is not to be believed for long.
    """

    def __init__(
        self,
        sizes: ObservationSizes,
        memory: Memory,
        latents: torch.Tensor,
        counts: torch.Tensor,
        temperature: float = 1.0,
        horizon: int = 50,
    ) -> None:
        self.sizes, self.memory, self.temperature, self.horizon = sizes, memory, temperature, horizon
        self._latents, self._counts = latents, counts

    @property
    def width(self) -> int:
        """Of [z, h]."""
        return self.memory.latent + self.memory.width

    def begin(self, graphs: torch.Tensor) -> DreamState:
        """Dreams that begin with the graphs of those numbers, int64 (N,)."""
        return DreamState(self._latents[graphs], self._counts[graphs], self.memory.begin(len(graphs)))

    def draw(self, number: int, generator: torch.Generator) -> DreamState:
        """Dreams that begin with graphs drawn uniformly."""
        return self.begin(torch.randint(len(self._latents), (number,), generator=generator))

    @torch.inference_mode()
    def step(
        self, state: DreamState, rules: torch.Tensor, locations: torch.Tensor, generator: torch.Generator
    ) -> tuple[DreamState, torch.Tensor, torch.Tensor]:
        """The states after one action each, rewards float32 (N,), and which dreams terminated, bool (N,)."""
        steps = Steps(state.latents, state.counts, rules, locations)
        foreseen, memory = self.memory.step(steps, state.memory)
        stop = self.sizes.stop_rule
        legal = foreseen.rule_logits > 0
        legal[:, stop] = True
        counts = foreseen.log_counts.expm1().round().clamp(1, self.sizes.num_locations) * legal
        counts[:, stop] = 1
        ends = torch.sigmoid(foreseen.terminal_logits)
        terminated = ends > (torch.rand(len(ends), generator=generator) if self.temperature else 0.5)
        terminated |= (rules == stop) | ~legal[:, :stop].any(dim=1)
        latents = foreseen.sample(self.temperature, generator)
        rewards = foreseen.rewards * self.memory.reward_deviation
        return DreamState(latents, counts, memory), rewards, terminated


class DreamEnv(gymnasium.Env[dict[str, Any], np.ndarray]):
    """One dream at a time, with the actions and the masks of the real environment, which it does not have."""

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own convention

    def __init__(self, dream: Dream) -> None:
        self.dream = dream
        self.observation_space = latent_space(dream.sizes, dream.width)
        self.action_space = spaces.MultiDiscrete([dream.sizes.num_rules, dream.sizes.num_locations])
        self._generator = torch.Generator()
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._generator.manual_seed(int(self.np_random.integers(2**31)))
        self._state, self._steps = self.dream.draw(1, self._generator), 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        rules, locations = torch.tensor([int(action[0])]), torch.tensor([int(action[1])])
        self._state, rewards, terminated = self.dream.step(self._state, rules, locations, self._generator)
        self._steps += 1
        over = bool(terminated[0])
        return self._observation(), float(rewards[0]), over, not over and self._steps >= self.dream.horizon, {}

    def _observation(self) -> dict[str, Any]:
        counts = self._state.counts[0].long()
        mask = np.arange(self.dream.sizes.num_locations) < counts.numpy()[:, None]
        vector = self._state.vectors[0].numpy()
        return {"latent": vector, "rule_mask": mask.any(axis=1).astype(np.int8), "location_mask": mask.astype(np.int8)}


@torch.inference_mode()
def imagine(dream: Dream, controller: Controller, number: int, seed: int) -> list[Episode]:
    """`number` episodes of the controller, dreamt all at once; determined by `seed`, parameters and dream."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    state = dream.draw(number, generator)
    episodes = [Episode() for _ in range(number)]
    running = list(episodes)
    for step in range(dream.horizon + 1):
        seen = _observations(state)
        batch = controller.collate(seen)
        output: PolicyOutput = controller(batch)
        if step == dream.horizon:
            for episode, value in zip(running, output.values.tolist(), strict=True):
                episode.truncated, episode.last_value = True, value
            break
        sites = controller.choose_all(batch, output, rng)
        chosen = torch.from_numpy(batch.site_offsets[:-1] + sites)
        rules, locations = batch.pair_rule[batch.site_pair[chosen]], batch.site_locations[chosen]
        state, rewards, terminated = dream.step(state, rules, locations, generator)
        told = (sites, rewards, output.values, output.log_probs[chosen], terminated)
        for episode, kept, *numbers in zip(running, seen, *(each.tolist() for each in told), strict=True):
            episode.observations.append(kept)
            episode.sites.append(numbers[0])
            episode.rewards.append(numbers[1])
            episode.values.append(numbers[2])
            episode.log_probs.append(numbers[3])
            episode.terminated = numbers[4]
        running = [episode for episode in running if not episode.terminated]
        state = state[~terminated]
        if not running:
            break
    return episodes


def _observations(state: DreamState) -> list[LatentObservation]:
    vectors, counts = state.vectors.numpy(), state.counts.long().numpy()
    found = []
    for vector, each in zip(vectors, counts, strict=True):
        rules = np.repeat(np.arange(len(each)), each)
        starts = np.cumsum(each) - each
        locations = np.arange(len(rules)) - starts[rules]
        found.append(LatentObservation(vector, rules.astype(np.int16), locations.astype(np.int16)))
    return found
