"""M: what a rewrite makes of a latent, foreseen by an LSTM with a mixture of Gaussians (Ha and Schmidhuber 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import rnn

from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.prior import USUAL_SAVING, saving

_RULE_WIDTH, _LOCATION_WIDTH = 32, 16
_LOG_DEVIATIONS = (-3.0, 1.0)
"""Latents have deviation 1: what is foreseen closer than to a twentieth of it is learnt by heart."""


class Recurrent(NamedTuple):
    """The LSTM's state, both (B, H); `h` is what the controller sees."""

    h: torch.Tensor
    c: torch.Tensor


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps (N of them): the graph before, in latents and counts of sites, and the action: rule, location, and what was
    known of its place (`places`)."""

    latents: torch.Tensor  # float32 (N, Z)
    counts: torch.Tensor  # float32 (N, R+1), stop included
    rules: torch.Tensor  # int64 (N,)
    locations: torch.Tensor  # int64 (N,)
    known: torch.Tensor  # float32 (N, 2P+1)

    def __getitem__(self, rows: torch.Tensor) -> Steps:
        return Steps(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Prediction:
    """What M foresees of N steps, K Gaussians each."""

    log_weights: torch.Tensor  # (N, K), normalised
    means: torch.Tensor  # (N, K, Z)
    log_deviations: torch.Tensor  # (N, K, Z)
    rewards: torch.Tensor  # (N,) what is saved, squeezed, in units of its deviation
    terminal_logits: torch.Tensor  # (N,)
    hidden: torch.Tensor  # (N, H) what the LSTM made of all so far, the action included
    counts: torch.Tensor  # (N, R+1) of sites, before

    def __getitem__(self, rows: torch.Tensor) -> Prediction:
        return Prediction(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def nll(self, latents: torch.Tensor) -> torch.Tensor:
        """-log p(z') in nats, (N,), of latents (N, Z)."""
        scaled = (latents.unsqueeze(1) - self.means) / self.log_deviations.exp()
        each = -0.5 * scaled.square() - self.log_deviations - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(self.log_weights + each.sum(dim=2), dim=1)

    def sample(self, temperature: float, generator: torch.Generator | None = None) -> torch.Tensor:
        """z' (N, Z): the mixture's logits divided by the temperature, variances multiplied by it; at 0 the mean of the
        likeliest Gaussian."""
        row = torch.arange(len(self.means))
        if temperature == 0.0:
            return self.means[row, self.log_weights.argmax(dim=1)]
        weights = functional.softmax(self.log_weights / temperature, dim=1)
        chosen = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        means, deviations = self.means[row, chosen], self.log_deviations[row, chosen].exp()
        return means + math.sqrt(temperature) * deviations * torch.randn(means.shape, generator=generator)


class SiteForecast(NamedTuple):
    """Which rules apply to graphs, and at how many sites, both (N, R+1)."""

    rule_logits: torch.Tensor
    log_counts: torch.Tensor  # log(1 + sites), where the rule applies


class SiteHead(nn.Module):
    """M's heads for rule mask and location counts.

    Args:
        width: of what they see.
        num_rules: R+1, stop included.
    """

    def __init__(self, width: int, num_rules: int) -> None:
        super().__init__()
        self.changes = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 2 * num_rules))
        self.stays = nn.Parameter(torch.tensor(2.0))

    def forward(self, seen: torch.Tensor, counts: torch.Tensor) -> SiteForecast:
        """`seen` (N, width) of a step, and `counts` (N, R+1) of sites before it."""
        rules, changes = self.changes(seen).chunk(2, dim=1)
        return SiteForecast(rules + self.stays * (2.0 * (counts > 0) - 1.0), changes + counts.log1p())


class Memory(nn.Module):
    """P(z' | a, z, h), and heads of their own for reward, terminal, rule mask and location counts.

    z' and the mask are foreseen as changes of z and of the mask now: a rewrite leaves most of a graph as it is; the
    reward as a change of what is known to be saved at the action's place. Mask and counts are those of one z': where
    it is open what a rewrite leads to, a dream follows one of the ways, and what seldom comes about seldom comes about
    there; the likeliest mask of all would never hold it.

    Args:
        sizes: of the observations.
        latent: width of z.
        width: of the LSTM (RLFlow: 256).
        gaussians: of the mixture (RLFlow: 8).
    """

    reward_deviation: torch.Tensor  # () what squeezed savings are divided by

    def __init__(self, sizes: ObservationSizes, latent: int, width: int, gaussians: int) -> None:
        super().__init__()
        self.latent, self.width, self.gaussians = latent, width, gaussians
        self.rule = nn.Embedding(sizes.num_rules, _RULE_WIDTH)
        self.location = nn.Embedding(sizes.num_locations, _LOCATION_WIDTH)
        self.lstm = nn.LSTM(latent + sizes.num_rules + _RULE_WIDTH + _LOCATION_WIDTH + 1, width, batch_first=True)
        self.mixture = nn.Linear(width, gaussians * (1 + 2 * latent))
        self.reward = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.trust = nn.Parameter(torch.tensor(1.0))
        self.terminal = nn.Linear(width, 1)
        self.site_head = SiteHead(width + latent, sizes.num_rules)
        self.register_buffer("reward_deviation", torch.ones(()))

    def site_forecast(self, foreseen: Prediction, latents: torch.Tensor) -> SiteForecast:
        """What applies after steps that led to `latents` (N, Z)."""
        forecast: SiteForecast = self.site_head(torch.cat([foreseen.hidden, latents], dim=1), foreseen.counts)
        return forecast

    def begin(self, number: int) -> Recurrent:
        """The state before `number` episodes' first step."""
        return Recurrent(torch.zeros(number, self.width), torch.zeros(number, self.width))

    def step(self, steps: Steps, state: Recurrent) -> tuple[Prediction, Recurrent]:
        """One step of each of N episodes, and the states after it."""
        h, (last_h, last_c) = self.lstm(self._inputs(steps).unsqueeze(1), (state.h.unsqueeze(0), state.c.unsqueeze(0)))
        return self._predict(h.squeeze(1), steps), Recurrent(last_h.squeeze(0), last_c.squeeze(0))

    def forward(self, steps: Steps, lengths: list[int]) -> Prediction:
        """Whole episodes, one after another in `steps` (N = sum of the lengths): what is foreseen of each step.

        Behind the ends of shorter ones the LSTM goes on, but nobody looks. Packed, it would not; but oneDNN's LSTM
        takes no packed ones, and learns in three fifths of the time. Most rules apply nowhere in a few episodes: their
        columns of the inputs hold nothing but zeros, and are left out, as half of the LSTM's work would be on them.
        """
        inputs = self._inputs(steps)
        used = inputs.any(dim=0)
        narrow = nn.LSTM(int(used.sum()), self.width, batch_first=True, device="meta")
        weights: dict[str, torch.Tensor] = dict(self.lstm.named_parameters())
        weights["weight_ih_l0"] = weights["weight_ih_l0"][:, used]
        sequences = torch.split(inputs[:, used], lengths)
        h, _ = functional_call(narrow, weights, rnn.pad_sequence(list(sequences), batch_first=True))
        step = torch.arange(max(lengths))
        return self._predict(h[step < torch.tensor(lengths).unsqueeze(1)], steps)

    @torch.inference_mode()
    def states(self, steps: Steps, lengths: Sequence[int]) -> Recurrent:
        """The states before each step of whole episodes, given as in `forward`; (N, H)."""
        h, c = self.begin(len(steps.rules))
        firsts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        for step in range(max(lengths) - 1):
            rows = firsts[torch.tensor(lengths) > step + 1] + step
            before = h[rows].unsqueeze(0), c[rows].unsqueeze(0)
            _, (after_h, after_c) = self.lstm(self._inputs(steps[rows]).unsqueeze(1), before)
            h[rows + 1], c[rows + 1] = after_h.squeeze(0), after_c.squeeze(0)
        return Recurrent(h, c)

    def _inputs(self, steps: Steps) -> torch.Tensor:
        # Of what is known the saving alone: how often a place was tried would tell graphs apart, and in a dream that
        # stays as it was where the dream began.
        expected = saving(steps.known).unsqueeze(1) / USUAL_SAVING
        action = [self.rule(steps.rules), self.location(steps.locations), expected]
        return torch.cat([steps.latents, steps.counts.log1p(), *action], dim=1)

    def _predict(self, h: torch.Tensor, steps: Steps) -> Prediction:
        parts = self.mixture(h).split([self.gaussians, *[self.gaussians * self.latent] * 2], dim=1)
        shape = (len(h), self.gaussians, self.latent)
        low, high = _LOG_DEVIATIONS
        return Prediction(
            log_weights=functional.log_softmax(parts[0], dim=1),
            means=steps.latents.unsqueeze(1) + parts[1].view(shape),
            # bounded smoothly: a Gaussian that narrows to nothing would take all the likelihood
            log_deviations=low + (high - low) * torch.sigmoid(parts[2].view(shape)),
            rewards=self.reward(h).squeeze(1) + self.trust * saving(steps.known) / self.reward_deviation,
            terminal_logits=self.terminal(h).squeeze(1),
            hidden=h,
            counts=steps.counts,
        )
