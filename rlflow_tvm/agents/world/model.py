"""The world model: V and M, what they learn from, and how well they know what they have not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed
from rlflow_tvm.agents.world.memory import Memory, Prediction, Steps
from rlflow_tvm.agents.world.vision import Actions, GraphFacts, Vision, site_counts, site_number

_AT_ONCE = 64
_DRAWS = 16


@dataclass(frozen=True, eq=False)
class Trace:
    """One real episode as M learns from it (T steps), float32 where nothing else is said.

    After the last step no graph was kept: what it led to is not learnt, only its reward and whether it terminated.
    """

    steps: Steps  # T of them
    rewards: torch.Tensor  # (T,) what each step saved, squeezed
    terminal: torch.Tensor  # (T,) 1 where the episode terminated

    def __len__(self) -> int:
        return len(self.rewards)

    def forgetful(self, share: float, rng: np.random.Generator) -> Trace:
        """The same, nothing known of the places of some steps."""
        told = torch.from_numpy(rng.random(len(self)) >= share).unsqueeze(1)
        return replace(self, steps=replace(self.steps, known=self.steps.known * told))


class WorldModel(nn.Module):
    """V and several Ms; the first is the one that dreams and the controller follow.

    Args:
        sizes: of the observations.
        latent: width of z; `hidden` and `rounds`: of V's encoder; `memory`: width of M; `gaussians`: of its mixture.
        members: how many Ms.
    """

    def __init__(
        self, sizes: ObservationSizes, latent: int, hidden: int, rounds: int, memory: int, gaussians: int, members: int
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.vision = Vision(sizes, latent, hidden, rounds)
        self.memories = nn.ModuleList([Memory(sizes, latent, memory, gaussians) for _ in range(members)])

    @property
    def members(self) -> list[Memory]:
        """All Ms."""
        return [memory for memory in self.memories if isinstance(memory, Memory)]

    @property
    def memory(self) -> Memory:
        """The first M."""
        return self.members[0]

    @torch.inference_mode()
    def latents(self, observations: Sequence[CompactObservation]) -> torch.Tensor:
        """z of each observation, (T, Z)."""
        parts = [observations[start : start + _AT_ONCE] for start in range(0, len(observations), _AT_ONCE)]
        return torch.cat([self.vision.see(part) for part in parts])

    def trace(self, episode: Episode) -> Trace:
        """An episode in latents, by V as it is now."""
        actions = actions_of([episode])
        terminal = torch.zeros(len(episode))
        terminal[-1] = float(episode.terminated)
        counts = torch.from_numpy(site_counts(episode.observations, self.sizes)).float()
        # cloned: a tensor made in inference mode cannot be learnt from
        latents = self.latents(episode.observations).clone()
        steps = Steps(latents, counts, actions.rules, actions.locations, actions.known)
        return Trace(steps, actions.rewards, terminal)

    @torch.no_grad()
    def set_scales(self, facts: GraphFacts, actions: Actions, *, learnt: bool = False) -> None:
        """Take means and deviations from the data. `learnt`: heads that have learnt in other units are changed so that
        what they tell stays what it is (as PopArt does, van Hasselt et al. 2016)."""
        vision, cost, reward = self.vision, _deviation(facts.log_cost), _deviation(actions.rewards)
        mean, units = facts.log_cost.mean(), [(vision.reward, vision.reward_deviation)]
        units += [(each.reward, each.reward_deviation) for each in self.members]
        if learnt:
            head = vision.log_cost
            head.weight.mul_(vision.cost_deviation / cost)
            head.bias.mul_(vision.cost_deviation / cost).add_((vision.cost_mean - mean) / cost)
            for told, deviation in units:
                last = told[-1]
                assert isinstance(last, nn.Linear), "a head ends with one"
                last.weight.mul_(deviation / reward)
                last.bias.mul_(deviation / reward)
        vision.cost_mean.copy_(mean)
        vision.cost_deviation.copy_(cost)
        for _, deviation in units:
            deviation.copy_(reward)


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """1 of values that are all alike."""
    found = values.std(correction=0)
    return found if float(found) > 1e-8 else torch.ones(())


@dataclass(frozen=True, eq=False)
class Experience:
    """Real episodes, and how a world model sees them whose V learns no more."""

    model: WorldModel
    episodes: Sequence[Episode]

    @cached_property
    def traces(self) -> list[Trace]:
        """Of each episode. Made when first asked for."""
        return [self.model.trace(episode) for episode in self.episodes]


def facts_of(episodes: Sequence[Episode], sizes: ObservationSizes) -> tuple[list[CompactObservation], GraphFacts]:
    """All graphs of the episodes, and what V is to tell of them."""
    observations = [kept for episode in episodes for kept in episode.observations]
    run_secs: list[float] = []
    for episode in episodes:
        run_secs += episode.run_secs[:-1]
    return observations, GraphFacts.of(observations, run_secs, sizes)


def actions_of(episodes: Sequence[Episode]) -> Actions:
    """What was done in the episodes, one after another, and what it saved; AgentError where the environment told no
    times."""
    chosen = [pair for episode in episodes for pair in zip(episode.observations, episode.sites, strict=True)]
    rules = torch.tensor([int(seen.site_rules[site]) for seen, site in chosen])
    locations = torch.tensor([site_number(seen, site) for seen, site in chosen])
    known = torch.from_numpy(np.stack([seen.site_known[site] for seen, site in chosen]))
    saved = np.concatenate([savings(episode) for episode in episodes])
    return Actions(rules, locations, known, squeezed(torch.from_numpy(saved)))


def memory_losses(memory: Memory, traces: Sequence[Trace]) -> dict[str, torch.Tensor]:
    """What M foresees wrongly of whole episodes, by kinds: each a mean over steps, the likelihood's in nats a step."""
    foreseen = memory(*steps_of(traces))
    rewards = torch.cat([trace.rewards for trace in traces]) / memory.reward_deviation
    terminal = torch.cat([trace.terminal for trace in traces])
    losses = {
        "reward": functional.mse_loss(foreseen.rewards, rewards),
        "terminal": functional.binary_cross_entropy_with_logits(foreseen.terminal_logits, terminal),
    }
    followed = Followed.behind(foreseen, traces)
    if not len(followed):  # episodes of one step each
        return losses
    return losses | {"nll": followed.foreseen.nll(followed.latents).mean()} | followed.site_losses(memory)


def steps_of(traces: Sequence[Trace]) -> tuple[Steps, list[int]]:
    """The steps of whole episodes, one after another, and the episodes' lengths."""
    parts = [trace.steps for trace in traces]
    steps = Steps(*(torch.cat([getattr(part, name) for part in parts]) for name in Steps.__dataclass_fields__))
    return steps, [len(trace) for trace in traces]


@dataclass(frozen=True, eq=False)
class Followed:
    """Steps whose graph after them is known (N of them): all of an episode but the last."""

    foreseen: Prediction
    latents: torch.Tensor  # (N, Z), of the graph after
    counts: torch.Tensor  # (N, R+1) of its sites

    @staticmethod
    def of(memory: Memory, traces: Sequence[Trace]) -> Followed:
        """Those of whole episodes."""
        return Followed.behind(memory(*steps_of(traces)), traces)

    @staticmethod
    def behind(foreseen: Prediction, traces: Sequence[Trace]) -> Followed:
        """The same where M has foreseen all their steps."""
        starts = np.cumsum([0, *(len(trace) for trace in traces)])[:-1]
        known = [start + np.arange(len(trace) - 1) for start, trace in zip(starts, traces, strict=True)]
        return Followed(
            foreseen[torch.from_numpy(np.concatenate(known))],
            torch.cat([trace.steps.latents[1:] for trace in traces]),
            torch.cat([trace.steps.counts[1:] for trace in traces]),
        )

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, rows: torch.Tensor) -> Followed:
        return Followed(self.foreseen[rows], self.latents[rows], self.counts[rows])

    def site_losses(self, memory: Memory) -> dict[str, torch.Tensor]:
        """What M's heads for mask and counts say wrongly of the graphs after, given their z."""
        sites, legal = memory.site_forecast(self.foreseen, self.latents), (self.counts > 0).float()
        wrong = functional.smooth_l1_loss(sites.log_counts, self.counts.log1p(), reduction="none")
        return {
            "rules": functional.binary_cross_entropy_with_logits(sites.rule_logits, legal),
            "locations": (wrong * legal).sum() / legal.sum(),
        }


@torch.inference_mode()
def score(held: Experience) -> dict[str, float]:
    """How well M knows episodes that it has not seen: `nll` of z' in nats, R² of what is saved (squeezed), and by what
    the z' that it draws say on average, F1 of the rule mask and of the changes in it, and the share of locations'
    counts foreseen exactly."""
    memory = held.model.memory
    foreseen = memory(*steps_of(held.traces))
    rewards = torch.cat([trace.rewards for trace in held.traces])
    left = (rewards - foreseen.rewards * memory.reward_deviation).square().sum()
    spread = (rewards - rewards.mean()).square().sum()
    followed = Followed.behind(foreseen, held.traces)
    generator = torch.Generator().manual_seed(0)
    draws = [followed.foreseen.sample(1.0, generator) for _ in range(_DRAWS)]
    sites = [memory.site_forecast(followed.foreseen, latents) for latents in draws]
    told = torch.stack([each.rule_logits.sigmoid() for each in sites]).mean(dim=0) > 0.5
    numbers = torch.stack([each.log_counts for each in sites]).mean(dim=0).expm1().round()
    legal, before = followed.counts > 0, followed.foreseen.counts > 0
    return {
        "nll": float(followed.foreseen.nll(followed.latents).mean()),
        "reward_r2": 1.0 - float(left / spread) if float(spread) > 0 else math.nan,
        "rule_mask_f1": _f1(told, legal),
        "rule_change_f1": _f1(told != before, legal != before),
        "locations_exact": float((numbers == followed.counts)[legal].float().mean()),
    }


def _f1(told: torch.Tensor, true: torch.Tensor) -> float:
    right = float((told & true).sum())
    return 2 * right / max(1.0, float(told.sum() + true.sum()))
