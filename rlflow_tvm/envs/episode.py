"""An episode of rewriting one graph: what every rewriting environment does, however its actions are told."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import gymnasium
import tvm

from rlflow_tvm.cost import CostModel, GraphCost, KernelDatabase, default_path
from rlflow_tvm.envs.observation import graph_arrays
from rlflow_tvm.envs.problem import RewriteProblem
from rlflow_tvm.envs.rewards import INVALID_ACTION_REWARD, REWARDS, Reward, Step
from rlflow_tvm.errors import CostError, EnvError, RlflowError
from rlflow_tvm.passes import GraphState, Plan, RewriteAction, RuleSet

log = logging.getLogger("rlflow_tvm")

ActionT = TypeVar("ActionT")
StepResult = tuple[dict[str, Any], float, bool, bool, dict[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class RewritingEnv(gymnasium.Env[dict[str, Any], ActionT], Generic[ActionT], ABC):
    """Rewrite one graph, one substitution a step.

    An episode is `terminated` by stop, when no rule applies any more, or when the graph costs more than `limit` times
    the episode's first one: from there on steps lead nowhere (TASO's search gives up such graphs too). The cost then
    counts as just that. It is `truncated` after `horizon` steps, and with `reset`'s option "patience" after so many
    without a graph cheaper than all of the episode. An illegal action leaves the graph as it is, for a
    reward of -100. The state is the start module and the actions since: `replay` and `fork` build on that. Episodes
    begin, with their whole horizon, at the end of the plan `begin`, by default at the module, or where `reset`'s option
    "plan" ends.

    An info tells `run_secs`, `kernels`, `flops` and `bytes_moved` of the graph now, and the applied `rule`; where the
    reward had a graph run as a whole, `end_to_end_secs` besides, to be held against `run_secs`.

    `reward`: a name in `rewards.REWARDS`, or a reward of one's own. `target` may be given as a `CostModel`, to share
    its measurements between environments; `problem`, in place of module, target and rules, shares the start state too.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own convention

    def __init__(
        self,
        mod: tvm.IRModule | None = None,
        target: tvm.target.Target | str | dict | CostModel | None = None,
        rules: RuleSet | None = None,
        horizon: int = 200,
        reward: str | Reward = "relative",
        limit: float = 1.1,
        problem: RewriteProblem | None = None,
        begin: Plan | None = None,
    ) -> None:
        if horizon < 1:
            raise EnvError(f"horizon {horizon}: an episode needs at least one step")
        if limit <= 1.0:
            raise EnvError(f"limit {limit}: it must lie above 1, the cost of the first graph")
        if isinstance(reward, str) and reward not in REWARDS:
            raise EnvError(f"no reward is called {reward!r}: there are {', '.join(REWARDS)}")
        self.horizon, self.limit = horizon, limit
        self._reward: Reward = REWARDS[reward]() if isinstance(reward, str) else deepcopy(reward)
        self._opened = ExitStack()  # what this environment itself has to close
        try:
            self.problem = problem if problem is not None else self._problem_of(mod, target, rules)
            self.rule_names = tuple(rule.name for rule in self.problem.ruleset.rules)
            self._start_cost = self.problem.cost(self.problem.start)
            if self._start_cost.run_secs <= 0.0:
                raise EnvError("the module costs nothing (it only changes shapes): nothing is to be gained")
            self._beginning = (self.problem.start, self._start_cost) if begin is None else self._end_of(begin)
        except RlflowError:
            self.close()
            raise
        self.problem.keep(self._beginning[0])
        self.whole_work = graph_arrays(self.problem.start.graph).whole
        self.observation_space, self.action_space = self._spaces()
        self._begin()

    def _problem_of(self, mod: tvm.IRModule | None, target: Any, rules: RuleSet | None) -> RewriteProblem:
        if mod is None or target is None:
            raise EnvError("an environment needs a module and a target, or a problem")
        if not isinstance(target, CostModel):
            database = self._opened.enter_context(KernelDatabase(default_path()))
            target = self._opened.enter_context(CostModel(target, database))
        return RewriteProblem(mod, target, rules)

    @classmethod
    @abstractmethod
    def observations(cls, rules: int) -> gymnasium.Space[dict[str, Any]]:
        """The space of observations with so many rules."""

    @abstractmethod
    def _spaces(self) -> tuple[gymnasium.Space[dict[str, Any]], gymnasium.Space[ActionT]]:
        """Of observations and actions."""

    def _begin(self) -> None:
        self.state, self.cost = self._beginning
        self._first, self._first_secs, self.best_cost = self.state, self.cost.run_secs, self.cost
        self._steps = 0
        self._patience, self._better = math.inf, 0  # steps to wait for a cheaper graph; the one that led to the last
        self._over = False
        self._refused: set[RewriteAction] = set()
        self._reward.begin()

    @abstractmethod
    def _observe(self) -> tuple[dict[str, Any], bool]:
        """The state as an observation, and whether there is anything to do in it but to stop."""

    @property
    def module(self) -> tvm.IRModule:
        """The module now, weights bound."""
        return self.state.bound()

    @property
    def plan(self) -> Plan:
        """The actions since the module, those that the episode began with included."""
        return self.state.plan

    @property
    def run_secs(self) -> float:
        """Cost of the graph now, in seconds a run."""
        return self.cost.run_secs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._begin()
        if options and "plan" in options:
            self._go_to(options["plan"])
            self._steps, self._first, self._first_secs, self.best_cost = 0, self.state, self.run_secs, self.cost
        self._patience = (options or {}).get("patience", math.inf)
        observation, _ = self._observe()
        return observation, self._info("reset")

    def _count(self) -> bool:
        """A step begins; whether it is the horizon's last."""
        if self._over:
            raise EnvError("the episode is over: call reset before the next step")
        self._steps += 1
        return self._steps >= self.horizon

    def _stop(self) -> StepResult:
        """The action that ends the episode."""
        self._count()
        self._over = True
        reward, told = self._reward_of(self.state, self.cost, self.cost, terminated=True, truncated=False)
        return self._observe()[0], reward, True, False, self._info("stop") | told

    def _refuse(self, name: str) -> StepResult:
        """An action that the masks forbid."""
        truncated = self._over = self._count()
        observation, _ = self._observe()
        return observation, INVALID_ACTION_REWARD, False, truncated, self._info(name) | {"invalid": True}

    def _take(self, move: RewriteAction) -> StepResult:
        """A rewrite."""
        truncated = self._count()
        lost, before = False, self.cost
        counted = before
        following = self.problem.successor(self.state, move)
        if following is None:
            self._refused.add(move)
        else:
            before = self._priced_again(before)
            self.state, self.cost = following
            self._refused = set()
            most = self.limit * self._first_secs
            lost = self.cost.run_secs > most
            counted = replace(self.cost, run_secs=most) if lost else self.cost
        if self.cost.run_secs < self.best_cost.run_secs:
            self._better = self._steps
        truncated = truncated or self._steps - self._better >= self._patience
        observation, goes_on = self._observe()
        terminated = lost or not goes_on
        self._over = terminated or truncated
        truncated = truncated and not terminated
        reward, told = self._reward_of(self.state, before, counted, terminated, truncated, lost)
        self.best_cost = min(self.best_cost, self.cost, key=lambda c: c.run_secs)
        info = self._info(move.rule) | told | {"run_secs_before": before.run_secs}
        if following is None:
            info["refused"] = str(move)
        return observation, reward, terminated, truncated, info

    def _priced_again(self, cost: GraphCost) -> GraphCost:
        """What the graph costs that the next one has been priced beside: that may have confirmed times which both rest
        on, and what such a time was wrong by is not for the step that found it out."""
        again = self.problem.cost(self.state)
        if not math.isfinite(again.run_secs):
            return cost
        if self.best_cost is cost:
            self.best_cost = again
        return again

    def _reward_of(
        self,
        state: GraphState,
        before: GraphCost,
        after: GraphCost,
        terminated: bool,
        truncated: bool,
        lost: bool = False,
    ) -> tuple[float, dict[str, Any]]:
        """The reward, and what an info tells of it. A graph beyond the limit (`lost`) counts as just the limit, as it
        does where its kernels are counted; so does one that cannot be run as a whole where their beginning can."""
        told: dict[str, Any] = {}

        def first_secs() -> float:
            try:
                return self.problem.end_to_end(self._first)
            except CostError:
                begin, cost = self._beginning
                if self._first is begin:
                    raise
                # a remembered graph, known by its kernels alone
                return self.problem.end_to_end(begin) * self._first_secs / cost.run_secs

        def most() -> float:
            return self.limit * first_secs()

        def after_secs() -> float:
            try:
                secs = told["end_to_end_secs"] = self.problem.end_to_end(state)
            except CostError as error:
                secs = most()
                log.warning("a graph that cannot be run as a whole counts as the limit: %s", error)
            return min(secs, most()) if lost else secs

        reward = self._reward(
            Step(
                before=before,
                after=after,
                start=self._beginning[1],
                best=self.best_cost,
                number=self._steps,
                terminated=terminated,
                truncated=truncated,
                start_secs=lambda: self.problem.end_to_end(self._beginning[0]),
                first_secs=first_secs,
                after_secs=after_secs,
            )
        )
        return reward, told

    def fork(self) -> Self:
        """An independent environment in the same state, random numbers included, sharing the measurements."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._refused = set(self._refused)
        other._reward = deepcopy(self._reward)
        other._opened = ExitStack()
        other._np_random = deepcopy(self._np_random)
        other.action_space = copy(self.action_space)  # only its generator changes
        other.action_space._np_random = deepcopy(self.action_space._np_random)
        return other

    def replay(self, plan: Plan) -> None:
        """Reset and apply `plan`; PlanError if it is not for this module, EnvError if its graph cannot be priced."""
        self._go_to(plan)
        self._observe()

    def _go_to(self, plan: Plan) -> None:
        """As `replay`, but nobody has looked at the state yet."""
        state, cost = self._end_of(plan)
        self._begin()
        begun = self._beginning[0].plan.actions
        if plan.actions[: len(begun)] != begun:  # it does not lead through there
            begun, self._first, self.best_cost = (), self.problem.start, self._start_cost
            self._first_secs = self._start_cost.run_secs
        self.state, self.cost = state, cost
        self.best_cost = min(self.best_cost, self.cost, key=lambda c: c.run_secs)  # of those that were priced
        self._steps = len(plan) - len(begun)

    def _end_of(self, plan: Plan) -> tuple[GraphState, GraphCost]:
        """A plan's graph and its cost; errors as `replay`'s."""
        state = self.problem.replay(plan)
        if state.graph.is_empty:
            raise EnvError("the plan leaves nothing to compute, and so to build and to price: search again")
        cost = self.problem.surest_cost(state)  # what an episode saves is reckoned from here
        if not math.isfinite(cost.run_secs):
            raise EnvError(f"the plan's graph cannot be priced: kernel {cost.failed[0]} fails; search again")
        return state, cost

    def close(self) -> None:
        """End the measuring worker and close the database, if this environment opened them."""
        self._opened.close()

    def _info(self, rule: str) -> dict[str, Any]:
        return {
            "run_secs": self.cost.run_secs,
            "kernels": self.cost.kernels,
            "flops": self.cost.flops,
            "bytes_moved": self.cost.bytes_moved,
            "rule": rule,
        }
