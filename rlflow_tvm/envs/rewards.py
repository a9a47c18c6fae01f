"""Rewards: a function of the costs before and after a step. Adding one is one class and one line in `REWARDS`."""

from __future__ import annotations

from typing import Protocol

from rlflow_tvm.cost import GraphCost


class Reward(Protocol):
    """The reward of a step from a graph of cost `before` to one of cost `after`.

    `start` is the first graph's cost, `best` the lowest of the episode before this step.
    """

    def __call__(self, before: GraphCost, after: GraphCost, start: GraphCost, best: GraphCost) -> float: ...


class RuntimeReward:
    """RLFlow's incremental run time, R(t) = RT(t-1) - RT(t), in percent of the first graph's run time.

    The division only sets the unit, so that one learning rate serves fast and slow models alike.
    """

    def __call__(self, before: GraphCost, after: GraphCost, start: GraphCost, best: GraphCost) -> float:
        return 100.0 * (before.run_secs - after.run_secs) / start.run_secs


class ImprovementReward:
    """By how much the step beats the cheapest graph of the episode so far, in percent of the first graph's run time;
    a tenth of the weight is `RuntimeReward`'s.

    What counts in a search is the best graph on the way. Under `RuntimeReward` alone a policy that is still random
    loses on average, so that stopping at once looks best and is learned first. Under improvement alone nothing is
    lost by going on, and the policy never learns to stop at its best graph. The sum over an episode is
    0.9 (start - best) + 0.1 (start - last).
    """

    RUNTIME_SHARE = 0.1

    def __call__(self, before: GraphCost, after: GraphCost, start: GraphCost, best: GraphCost) -> float:
        improvement = max(0.0, best.run_secs - after.run_secs)
        change = before.run_secs - after.run_secs
        share = self.RUNTIME_SHARE
        return 100.0 * ((1.0 - share) * improvement + share * change) / start.run_secs


REWARDS: dict[str, type[Reward]] = {"runtime": RuntimeReward, "improvement": ImprovementReward}

INVALID_ACTION_REWARD = -100.0
"""RLFlow's reward for an action outside the masks."""
