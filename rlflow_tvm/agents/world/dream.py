"""Dreams: episodes that M makes up, without an environment, behind an environment's interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlflow_tvm.agents.heads import PolicyOutput
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import SAVING_SHARE, stretched
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Controller, LatentObservation, latent_space
from rlflow_tvm.agents.world.memory import Memory, Recurrent, Steps
from rlflow_tvm.agents.world.model import Experience, steps_of
from rlflow_tvm.agents.world.sites import Newcomers, Sites

_BEGINNINGS = 0.25
"""Of the dreams, those that begin where a real episode at no remembered graph did, as the agent will; the others begin
anywhere along one."""
_INVALID_REWARD = -100.0
"""Of an action outside the masks, as before real graphs."""


@dataclass(frozen=True, eq=False)
class DreamState:
    """Where N dreams stand."""

    latents: torch.Tensor  # (N, Z)
    sites: Sites  # of the N graphs
    informed: torch.Tensor  # (N,) whether the controller is told what is known of places
    saved: torch.Tensor  # (N,) so far, in percent of the episode's first graph
    best: torch.Tensor  # (N,) the most that was saved so far
    memories: tuple[Recurrent, ...]  # of each M

    def __getitem__(self, rows: torch.Tensor) -> DreamState:
        memories = tuple(Recurrent(each.h[rows], each.c[rows]) for each in self.memories)
        numbers = (self.informed[rows], self.saved[rows], self.best[rows])
        return DreamState(self.latents[rows], self.sites[rows.numpy()], *numbers, memories)

    @property
    def seen(self) -> list[LatentObservation]:
        """What the controller sees of each."""
        vectors, offsets = torch.cat([self.latents, self.memories[0].h], dim=1).numpy(), self.sites.offsets
        rules, locations = (each.astype(np.int16) for each in (self.sites.rules, self.sites.locations))
        # no product: -0.0 would not be what 0.0 is to those that look for equal sites
        known = np.where(self.informed.numpy()[self.sites.graphs, None], self.sites.known, np.float32(0))
        return [
            LatentObservation(vector, rules[begin:end], locations[begin:end], known[begin:end])
            for vector, begin, end in zip(vectors, offsets[:-1], offsets[1:], strict=True)
        ]


class Dream:
    """Ms, and the real graphs that dreams begin with.

    Where the controller has found out what M errs about, a dream is worth nothing. So it pays what the most cautious M
    foresees, it is short and begins all along real episodes (Janner et al. 2019), and its temperature may be raised (Ha
    and Schmidhuber 2018). It does not end where Ms disagree (as in MOReL, Kidambi et al. 2020): what pays most is rare
    in random episodes, and Ms disagree on what is rare.

    Args:
        sizes: of the real observations.
        memories: Ms, which are not trained here; the dream follows the first.
        starts: the real graphs, with what Ms remember before them.
        beginnings: numbers of those that real episodes at no remembered graph began with, int64 (B,).
        newcomers: the sites that come with rewrites.
        temperature: tau.
        horizon: steps until truncation: errors add up.
        informed_share: of the dreams, those in which the controller is told what is known of places.
        limit: of a graph's cost over that of the episode's first, where an episode ends, and counts as just that.
    """

    def __init__(
        self,
        sizes: ObservationSizes,
        memories: Sequence[Memory],
        starts: DreamState,
        beginnings: torch.Tensor,
        newcomers: Newcomers,
        temperature: float = 1.0,
        horizon: int = 20,
        informed_share: float = 1.0,
        limit: float = math.inf,
    ) -> None:
        self.sizes, self.memories, self.temperature = sizes, list(memories), temperature
        self.horizon, self.informed_share = horizon, informed_share
        self._starts, self._beginnings, self._newcomers = starts, beginnings, newcomers
        self._least_saved = torch.tensor(100.0 * (1.0 - limit))

    @staticmethod
    def along(
        learnt: Experience,
        places: Places,
        config: WorldModelConfig,
        temperature: float | None = None,
        limit: float = math.inf,
    ) -> Dream:
        """Dreams that begin along the episodes that were learnt from, with what is known of places now. `temperature`:
        if not that of `config`. `limit`: the real environment's."""
        model, traces = learnt.model, learnt.traces
        steps, lengths = steps_of(traces)
        states = tuple(memory.states(steps, lengths) for memory in model.members)
        firsts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        from_start = torch.tensor([not episode.remembered for episode in learnt.episodes])
        beginnings = firsts[from_start] if from_start.any() else firsts
        before = [torch.cat([torch.zeros(1), stretched(trace.rewards[:-1]).cumsum(0)]) for trace in traces]
        best = torch.cat([each.cummax(0).values for each in before])
        sites = Sites.of([kept for episode in learnt.episodes for kept in episode.observations], model.sizes, places)
        informed = torch.ones(len(steps.latents), dtype=torch.bool)
        starts = DreamState(steps.latents, sites, informed, torch.cat(before), best, states)
        return Dream(
            model.sizes,
            model.members,
            starts,
            beginnings,
            Newcomers.of(learnt.episodes, model.sizes, places),
            config.temperature if temperature is None else temperature,
            config.dream_horizon,
            config.controller.informed_share,
            limit,
        )

    @property
    def width(self) -> int:
        """Of [z, h]."""
        return self.memories[0].latent + self.memories[0].width

    def draw(self, number: int, generator: torch.Generator) -> DreamState:
        """Where so many dreams begin."""
        anywhere = torch.randint(len(self._starts.latents), (number,), generator=generator)
        first = self._beginnings[torch.randint(len(self._beginnings), (number,), generator=generator)]
        drawn = self._starts[torch.where(torch.rand(number, generator=generator) < _BEGINNINGS, first, anywhere)]
        return replace(drawn, informed=torch.rand(number, generator=generator) < self.informed_share)

    @torch.inference_mode()
    def step(
        self, state: DreamState, chosen: np.ndarray, generator: torch.Generator
    ) -> tuple[DreamState, torch.Tensor, torch.Tensor]:
        """The states after one action each, at the sites `chosen` (N,), numbers among all of `state`; rewards float32
        (N,), and which dreams terminated, bool (N,).

        The rewards are those of `envs.rewards.ImprovementReward`.
        """
        before = torch.from_numpy(state.sites.counts).float()
        action = [each[chosen] for each in (state.sites.rules, state.sites.locations, state.sites.known)]
        steps = Steps(state.latents, before, *map(torch.from_numpy, action))
        rules = steps.rules
        after = [memory.step(steps, each) for memory, each in zip(self.memories, state.memories, strict=True)]
        foreseen, memories = [each for each, _ in after], tuple(each for _, each in after)
        stop = self.sizes.stop_rule
        latents = foreseen[0].sample(self.temperature, generator)
        forecast = self.memories[0].site_forecast(foreseen[0], latents)
        legal = forecast.rule_logits > 0
        counts = forecast.log_counts.expm1().round().clamp(1, self.sizes.num_locations) * legal
        counts[:, stop] = 1
        told = torch.stack([each.rewards for each in foreseen]).amin(dim=0) * self.memories[0].reward_deviation
        reached = state.saved + torch.where(rules == stop, torch.zeros(()), stretched(told))
        saved = torch.maximum(reached, self._least_saved)
        best = torch.maximum(state.best, saved)
        rewards = (1.0 - SAVING_SHARE) * (best - state.best) + SAVING_SHARE * (saved - state.saved)
        ends = torch.sigmoid(foreseen[0].terminal_logits)
        terminated = ends > (torch.rand(len(ends), generator=generator) if self.temperature else 0.5)
        terminated |= (rules == stop) | ~legal[:, :stop].any(dim=1) | (reached < self._least_saved)
        uniform = partial(_uniform, generator)
        sites = state.sites.after(chosen, counts.long().numpy(), self._newcomers, uniform)
        return DreamState(latents, sites, state.informed, saved, best, memories), rewards, terminated


def _uniform(generator: torch.Generator, number: int) -> np.ndarray:
    return torch.rand(number, generator=generator, dtype=torch.float64).numpy()


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
        rule, location = (int(part) for part in action)
        self._steps += 1
        counts = self._state.sites.counts[0]
        reward, over = _INVALID_REWARD, False
        if 0 <= rule < len(counts) and 0 <= location < counts[rule]:
            chosen = np.array([counts[:rule].sum() + location])
            self._state, rewards, terminated = self.dream.step(self._state, chosen, self._generator)
            reward, over = float(rewards[0]), bool(terminated[0])
        return self._observation(), reward, over, not over and self._steps >= self.dream.horizon, {}

    def _observation(self) -> dict[str, Any]:
        (seen,), sizes = self._state.seen, self.dream.sizes
        mask = np.zeros((sizes.num_rules, sizes.num_locations), np.int8)
        known = np.zeros((*mask.shape, seen.site_known.shape[1]), np.float32)
        mask[seen.site_rules, seen.site_locations] = 1
        known[seen.site_rules, seen.site_locations] = seen.site_known
        rules = mask.any(axis=1).astype(np.int8)
        return {"latent": seen.vector, "rule_mask": rules, "location_mask": mask, "location_known": known}


@torch.inference_mode()
def imagine(dream: Dream, controller: Controller, number: int, seed: int) -> list[Episode]:
    """`number` episodes of the controller, dreamt all at once; determined by `seed`, parameters and dream."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    state = dream.draw(number, generator)
    episodes = [Episode() for _ in range(number)]
    running = list(episodes)
    for step in range(dream.horizon + 1):
        seen = state.seen
        batch = controller.collate(seen)
        output: PolicyOutput = controller(batch)
        if step == dream.horizon:
            for episode, value in zip(running, output.values.tolist(), strict=True):
                episode.truncated, episode.last_value = True, value
            break
        sites = controller.choose_all(batch, output, rng)
        chosen = batch.site_offsets[:-1] + sites
        state, rewards, terminated = dream.step(state, chosen, generator)
        told = (sites, rewards, output.values, output.log_probs[torch.from_numpy(chosen)], terminated)
        for episode, kept, *numbers in zip(running, seen, *(each.tolist() for each in told), strict=True):
            episode.observations.append(kept)
            episode.sites.append(numbers[0])
            episode.rewards.append(numbers[1])
            episode.values.append(numbers[2])
            episode.log_probs.append(numbers[3])
            episode.terminated = numbers[4]
        running = [episode for episode in running if not episode.terminated]
        state = state[torch.nonzero(~terminated).squeeze(1)]
        if not running:
            break
    return episodes
