"""Rewards: functions of one step of an episode. Adding one is one class and one line in `REWARDS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlflow_tvm.cost import GraphCost
from rlflow_tvm.errors import EnvError

INVALID_ACTION_REWARD = -100.0
"""RLFlow's reward for an action outside the masks."""


@dataclass(frozen=True)
class Step:
    """One step of an episode: the costs of four graphs, and where in the episode it stands.

    `before`, `after`: the graphs on both sides of the step (the same one where the step stopped or was refused);
    `start`: where episodes begin, mostly the model's own; `best`: the cheapest before this step. `number` counts from
    1. `terminated`, `truncated`: as gymnasium has them. `start_secs()`, `after_secs()`: seconds of a run, measured end
    to end; `first_secs()`: of the graph that this episode began with, that or a remembered one.
    """

    before: GraphCost
    after: GraphCost
    start: GraphCost
    best: GraphCost
    number: int
    terminated: bool
    truncated: bool
    start_secs: Callable[[], float]
    first_secs: Callable[[], float]
    after_secs: Callable[[], float]


class Reward(Protocol):
    """The reward of a step. One that remembers something of an episode forgets it in `begin`."""

    def begin(self) -> None: ...
    def __call__(self, step: Step) -> float: ...


class _Stateless:
    def begin(self) -> None:
        """Nothing is remembered."""


class IncrementalReward(_Stateless):
    """RLFlow's reward as printed: RT(t-1) - RT(t), here in milliseconds.

    Its size goes with the model's run time, so that a learning rate found on one model is wrong for another:
    `RelativeReward` is the same in a unit of the model's own.
    """

    def __call__(self, step: Step) -> float:
        return 1e3 * (step.before.run_secs - step.after.run_secs)


class RelativeReward(_Stateless):
    """100 (RT(t-1) - RT(t)) / RT(0): RLFlow's incremental run time in percent of the beginning's (X-RLflow)."""

    def __call__(self, step: Step) -> float:
        return _percent(step.before.run_secs - step.after.run_secs, step.start.run_secs)


class MixedReward(_Stateless):
    """RLFlow's alpha (RT(t-1) - RT(t)) + beta (M(t-1) - M(t)), M being the bytes that kernels read and write.

    Both in percent of the beginning's. RLFlow's grid search found alpha = 0.8, beta = 1 - alpha.
    """

    def __init__(self, alpha: float = 0.8) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise EnvError(f"alpha {alpha}: the run time's share lies between 0 and 1")
        self.alpha = alpha

    def __call__(self, step: Step) -> float:
        moved = _percent(step.before.bytes_moved - step.after.bytes_moved, step.start.bytes_moved)
        return self.alpha * RelativeReward()(step) + (1.0 - self.alpha) * moved


class EndToEndReward:
    """X-RLflow's: 100 (RT(t-N) - RT(t)) / RT(0) at every Nth step and at the end, RT measured end to end; a small
    constant at the steps between.

    A measurement builds the module and runs it: seconds each.
    """

    def __init__(self, every: int = 5, between: float = 0.1) -> None:
        if every < 1:
            raise EnvError(f"every {every}: the run time is measured at every step at most")
        self.every, self.between = every, between
        self._last: float | None = None

    def begin(self) -> None:
        """A new episode: the last measurement is its first graph's."""
        self._last = None

    def __call__(self, step: Step) -> float:
        if step.number % self.every and not step.terminated and not step.truncated:
            return self.between
        last, now = self._last or step.first_secs(), step.after_secs()
        self._last = now
        return _percent(last - now, step.start_secs())


class ImprovementReward(_Stateless):
    """By how much the step beats the cheapest graph of the episode so far, in percent of the beginning's run time;
    a tenth of the weight is `RelativeReward`'s.

    What counts in a search is the best graph on the way. Under `RelativeReward` alone a policy that is still random
    loses on average, so that stopping at once looks best and is learned first. Under improvement alone nothing is
    lost by going on, and the policy never learns to stop at its best graph. The sum over an episode is
    0.9 (first - best) + 0.1 (first - last), of the graph that it began with.
    """

    RUNTIME_SHARE = 0.1

    def __call__(self, step: Step) -> float:
        improvement = _percent(max(0.0, step.best.run_secs - step.after.run_secs), step.start.run_secs)
        return (1.0 - self.RUNTIME_SHARE) * improvement + self.RUNTIME_SHARE * RelativeReward()(step)


class ShapedReward:
    """Another reward with potential-based shaping, gamma Phi(s') - Phi(s) (Ng, Harada and Russell 1999).

    Phi is what the graph has saved of `metric` (a field of `GraphCost`), in percent of the beginning's, and zero
    where an episode terminates: then the best policies are those of `base` alone. `gamma` must be the learner's.
    """

    METRICS = ("run_secs", "kernels", "flops", "bytes_moved", "peak_bytes")

    def __init__(self, base: Reward | None = None, metric: str = "flops", gamma: float = 0.99) -> None:
        if metric not in self.METRICS:
            raise EnvError(f"no potential is made of {metric!r}: there are {', '.join(self.METRICS)}")
        self.base: Reward = RelativeReward() if base is None else base
        self.metric, self.gamma = metric, gamma

    def begin(self) -> None:
        """The base's beginning."""
        self.base.begin()

    def __call__(self, step: Step) -> float:
        after = 0.0 if step.terminated else self._potential(step.after, step.start)
        return self.base(step) + self.gamma * after - self._potential(step.before, step.start)

    def _potential(self, cost: GraphCost, start: GraphCost) -> float:
        first = getattr(start, self.metric)
        return _percent(first - getattr(cost, self.metric), first)


def _percent(part: float, whole: float) -> float:
    """Of a whole that is nothing, nothing."""
    return 100.0 * part / whole if whole else 0.0


REWARDS: dict[str, Callable[[], Reward]] = {
    "incremental": IncrementalReward,
    "relative": RelativeReward,
    "mixed": MixedReward,
    "end-to-end": EndToEndReward,
    "improvement": ImprovementReward,
    "shaped": ShapedReward,
}
