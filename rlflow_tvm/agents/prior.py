"""What a new policy makes of what is known of places: it prefers what saved before."""

from __future__ import annotations

import torch
from torch import nn

TRUST = 4.0, 1.0
"""A new policy's, in what is known of places: so many times what an action should save, and what it should cost
(squeezed), is in its logit."""
MOST_TRUST = 8.0
"""In either direction: a bound, so that what is learnt can outweigh what saves at once."""
USUAL_SAVING = 4.0
"""Squeezed; so that what is known of places comes in the size of other features."""


def saving(known: torch.Tensor) -> torch.Tensor:
    """What actions should save (squeezed), (S,), of what is `known` of their places, (S, 2P+1)."""
    return known[:, -1]


def features(known: torch.Tensor) -> torch.Tensor:
    """What else is known of places, as networks take it, (S, 2P): not what should be saved, which may be a draw."""
    return known[:, :-1] / USUAL_SAVING


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
        """(S,), between -most and most, of what is known, (S, 2P+1)."""
        saves = saving(known)
        trusted = torch.where(saves > 0, self.trust[0], self.trust[1]) * saves
        return self._most * torch.tanh(trusted / self._most)
