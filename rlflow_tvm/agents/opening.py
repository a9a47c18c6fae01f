"""How an episode begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PATIENCE = 10


@dataclass(frozen=True)
class Opening:
    """How an episode begins, as JSON takes it.

    `start`: reset's option of that name, a graph to begin at. `likeliest`: whether the policy takes its likeliest
    actions by what is known of places, in place of drawing them. `gathers`: whether that is to put together what a
    training has found out: untried places are expected to save what their rules saved elsewhere, and ten steps without
    a cheaper graph end the episode. Without it the policy acts as the agent will.
    """

    start: Mapping[str, Any] | None = None
    likeliest: bool = False
    gathers: bool = False

    @property
    def options(self) -> dict[str, Any] | None:
        """Of the reset."""
        options = {} if self.start is None else {"start": self.start}
        return {**options, "patience": _PATIENCE} if self.gathers else options or None


PLAIN = Opening()
"""At the beginning, actions drawn."""
