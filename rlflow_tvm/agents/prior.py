"""What a new policy makes of what is known of places: it prefers what saved before."""

from __future__ import annotations

import torch
from torch import nn

_TRUST = 2.0, 0.5
"""A new policy's, in what is known of places: so many times what an action should save, and what it should cost
(squeezed), is in its logit."""
_MOST = 4.0
"""In either direction: a bound, so that what is learnt can outweigh what saves at once. With one of 8 PPO solved the
tests' toy environment, where greed leads astray, for four of ten seeds, with one of 4 for nine or ten of ten."""
USUAL_SAVING = 4.0
"""Squeezed; so that what is known of places comes in the size of other features."""


def saving(known: torch.Tensor) -> torch.Tensor:
    """What actions should save (squeezed), (S,), of what is `known` of their places, (S, 2P+1)."""
    return known[:, -1]


def features(known: torch.Tensor) -> torch.Tensor:
    """What else is known of places, as networks take it, (S, 2P): not what should be saved, which may be a draw."""
    return known[:, :-1] / USUAL_SAVING


class Prior(nn.Module):
    """The part of actions' logits that rests on what is known of their places alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trust = nn.Parameter(torch.tensor(_TRUST))  # (2,)

    def forward(self, known: torch.Tensor) -> torch.Tensor:
        """(S,), between -_MOST and _MOST, of what is known, (S, 2P+1)."""
        saves = saving(known)
        trusted = torch.where(saves > 0, self.trust[0], self.trust[1]) * saves
        return _MOST * torch.tanh(trusted / _MOST)
