"""How an episode begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PATIENCE = 10
_OWN_PATIENCE = 2 * _PATIENCE
SHORT = 12
"""Steps without a cheaper graph that a drawn episode is worth where real steps are few."""


@dataclass(frozen=True)
class Opening:
    """How an episode begins, as JSON takes it.

    `start`: reset's option of that name, a graph to begin at, or a model at whose beginning. `likeliest`: whether the
    policy takes its likeliest actions by what is known of places, in place of drawing them; twenty of them without a
    cheaper graph end the episode, for what follows says little, and is paid for. `gathers`: whether that is to put
    together what a training has found out: untried places are expected to save what their rules saved elsewhere, and
    ten steps are enough. Without it the policy acts as the agent will. `patience`: steps without a cheaper graph that
    end an episode whose actions are drawn; None: it goes on.
    """

    start: Mapping[str, Any] | None = None
    likeliest: bool = False
    gathers: bool = False
    patience: int | None = None

    @property
    def options(self) -> dict[str, Any] | None:
        """Of the reset."""
        options: dict[str, Any] = {} if self.start is None else {"start": self.start}
        if self.likeliest:
            options["patience"] = _PATIENCE if self.gathers else _OWN_PATIENCE
        elif self.patience is not None:
            options["patience"] = self.patience
        return options or None


PLAIN = Opening()
"""At the beginning, actions drawn."""
