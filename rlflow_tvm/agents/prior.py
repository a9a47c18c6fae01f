"""What a new policy makes of what is known of places: it prefers what saved before."""

from __future__ import annotations

import torch
from torch import nn

TRUST = 4.0, 1.0
"""A new policy's, in what is known of places: so many times what an action should save, and what it should cost
(squeezed), is in its logit."""
MOST_TRUST = 8.0
"""In either direction: a bound, so that what is learnt can outweigh what saves at once."""
_USUAL_SAVING = 4.0
"""Squeezed; so that what is known of places comes in the size of other features."""


def expected_saving(known: torch.Tensor) -> torch.Tensor:
    """What actions should save (squeezed), (S,), by what is `known` of their places, (S, 2P): by the finest key, as far
    as it was tried, else by coarser ones; 0 where none was."""
    means, weights = known.chunk(2, dim=1)
    expected = torch.zeros(len(known))
    for mean, weight in zip(means.unbind(1), weights.unbind(1), strict=True):
        expected = expected + weight * (mean - expected)
    return expected


def features(known: torch.Tensor) -> torch.Tensor:
    """What is known of places, (S, 2P), as networks take it."""
    return known / _USUAL_SAVING


class Prior(nn.Module):
    """The part of actions' logits that rests on what is known of their places alone.

    Args:
        trust: at first, in what actions should save, and in what they should cost.
        most: bound of the logits.
    """

    def __init__(self, trust: tuple[float, float] = TRUST, most: float = MOST_TRUST) -> None:
        super().__init__()
        self.trust = nn.Parameter(torch.tensor(trust))  # (2,)
        self._most = most

    def forward(self, known: torch.Tensor) -> torch.Tensor:
        """(S,), between -most and most, of what is known, (S, 2P)."""
        saving = expected_saving(known)
        trusted = torch.where(saving > 0, self.trust[0], self.trust[1]) * saving
        return self._most * torch.tanh(trusted / self._most)
