"""Rewards: a function of the costs before and after a step. Adding one is one class and one line in `REWARDS`."""

from __future__ import annotations

from typing import Protocol

from rlflow_tvm.cost import GraphCost


class Reward(Protocol):
    """The reward of a step that took a graph of cost `before` to one of cost `after`; `start` is the first graph's."""

    def __call__(self, before: GraphCost, after: GraphCost, start: GraphCost) -> float: ...


class RuntimeReward:
    """RLFlow's incremental run time, R(t) = RT(t-1) - RT(t), in percent of the first graph's run time.

    The division only sets the unit, so that one learning rate serves fast and slow models alike.
    """

    def __call__(self, before: GraphCost, after: GraphCost, start: GraphCost) -> float:
        return 100.0 * (before.run_secs - after.run_secs) / start.run_secs


REWARDS: dict[str, type[Reward]] = {"runtime": RuntimeReward}

INVALID_ACTION_REWARD = -100.0
"""RLFlow's reward for an action outside the masks."""
