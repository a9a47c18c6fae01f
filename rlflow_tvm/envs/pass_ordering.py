"""Choosing the order of a compiler's passes: TVM's, and families of our rules, on graphs of a corpus.

After "Target-independent XLA optimization using Reinforcement Learning" (2022): a state is told by its operations, an
action is a pass, a reward is the negative scaled number of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import tvm
from gymnasium import spaces

from rlflow_tvm import ir
from rlflow_tvm.envs.ordering_states import Facts, OrderingStates
from rlflow_tvm.errors import EnvError
from rlflow_tvm.kernels import Lowering
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.operations import Operations
from rlflow_tvm.passes.ordering import PASSES

Objective = Callable[[tvm.IRModule, Operations], float]
"""What there is to be little of, of a module in the working form."""

METRICS = 3
"""How many numbers of an observation, at its end, tell of more than operations: see `PassOrderingEnv`."""

_OTHERS = "other"
_LEAST_LEFT = 1e-6  # of the objective, as observed: its logarithm has no end


def operation_count(_mod: tvm.IRModule, operations: Operations) -> float:
    """Operations at run time, as in the paper."""
    return float(operations.total)


def kernel_count(target: tvm.target.Target) -> Objective:
    """How many kernels a run launches, built for `target`; KernelError where the graph cannot be lowered."""
    lowering = Lowering(target)
    return lambda mod, _operations: float(sum(kernel.count for kernel in lowering.kernels(Graph.from_module(mod))))


def check_reward(reward: str) -> None:
    """EnvError where `PassOrderingEnv` has none of that name."""
    if reward not in ("count", "saving"):
        raise EnvError(f"no reward is called {reward!r}: there are count, saving")


def operator_names() -> list[str]:
    """The operators that counts tell apart, all others being one more: Relax's on tensors."""
    inner = ("relax.builtin.", "relax.vm.", "relax.memory.", "relax.ccl.", "relax.dist.", "relax.inspect.")
    names = (str(name) for name in tvm.ir.Op.list_op_names())
    return [*sorted(n for n in names if n.startswith("relax.") and not n.startswith(inner)), _OTHERS]


class PassOrderingEnv(gymnasium.Env[np.ndarray, np.int64]):
    """An episode improves one module by passes, one after another, and ends with stop or after `horizon` of them.

    Action i < P applies the pass `passes[i]`, P stops. A pass that fails on a module, or makes something of it that is
    not well-formed or that the objective cannot be told of, changes nothing; `info["refused"]` tells why, `refusals`
    keeps it, and `action_masks` leaves it out from then on (while the episode is at this module). So it does with a
    pass that changed nothing.

    Observation, float32: for each of `operators` log(1 + how many there are at run time); for each pass whether it is
    masked; how much of the horizon is left; then `METRICS` numbers: logarithms of what is left of the start's
    objective, FLOPs and transcendental elements.

    Rewards, with m the objective (`operation_count` by default) and m0 that of the start: `reward="count"` is the
    paper's, -m/m0 after each step; stop pays, discounted by `gamma`, what the steps left would have. `reward="saving"`
    is (m(before) - m(after))/m0. With `shaping`, F = gamma phi(after) - phi(before) is added (Ng et al. 1999), phi
    being minus the mean of what is left of the start's FLOPs and transcendental elements, and 0 at the end.

    `info`: operations, flops, transcendentals, objective, `start_objective`, `pass_secs` (of the pass, when it was
    done first), graph (its name), order (the passes that changed the module), `best_order` and `best_objective` (the
    cheapest on the way).

    Args:
        graphs: name -> module, bound or in the working form.
        passes: names in `rlflow_tvm.passes.ordering.PASSES`.

    Raises:
        EnvError: no graph, a graph without operations or that costs nothing, an unknown reward or pass; `step` before
            `reset`.
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(
        self,
        graphs: Mapping[str, tvm.IRModule],
        *,
        passes: Sequence[str] = tuple(PASSES),
        objective: Objective = operation_count,
        reward: str = "count",
        shaping: bool = False,
        horizon: int = 32,
        gamma: float = 0.99,
        render_mode: str | None = None,
    ) -> None:
        if not graphs:
            raise EnvError("there is no graph to order passes for: give one at least")
        check_reward(reward)
        if horizon < 1:
            raise EnvError(f"horizon {horizon}: an episode needs at least one step")
        unknown = [name for name in passes if name not in PASSES]
        if unknown:
            raise EnvError(f"no pass is called {unknown[0]!r}: there are {', '.join(PASSES)}")
        self.names, self.passes, self.operators = tuple(graphs), tuple(passes), operator_names()
        self.horizon, self.gamma, self.render_mode = horizon, gamma, render_mode
        self.refusals: dict[tuple[str, str], str] = {}
        self._reward, self._shaping, self._objective = reward, shaping, objective
        self._starts = [ir.detach(mod).mod for mod in graphs.values()]
        self._number = {name: i for i, name in enumerate(self.operators)}
        self._states = OrderingStates(objective)
        self.action_space = spaces.Discrete(len(self.passes) + 1)
        size = len(self.operators) + len(self.passes) + 1 + METRICS
        self.observation_space = spaces.Box(-100.0, 100.0, (size,), np.float32)  # logarithms
        self._key: int | None = None

    def start(self, graph: str) -> tvm.IRModule:
        """The module that episodes of this graph begin with, in the working form."""
        return self._starts[self.names.index(graph)]

    def objective(self, mod: tvm.IRModule) -> float:
        """Of a module in the working form."""
        return self._objective(mod, Operations.of(Graph.from_module(mod)))

    @property
    def module(self) -> tvm.IRModule:
        """The module now, in the working form."""
        return self._states.module(self._at(), self._start, self._order)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin with a graph drawn at random, or with `options["graph"]`, its name."""
        super().reset(seed=seed)
        wanted = (options or {}).get("graph")
        if wanted is not None and wanted not in self.names:
            raise EnvError(f"no graph is called {wanted!r}: there are {', '.join(self.names)}")
        number = int(self.np_random.integers(len(self.names))) if wanted is None else self.names.index(wanted)
        self.graph, self._start = self.names[number], self._starts[number]
        self._order: tuple[str, ...] = ()
        self._left, self._masked = self.horizon, np.zeros(len(self.passes), bool)
        self._key = self._states.add(self._start)
        self._first = self._facts()
        if not self._first.operations.total:
            raise EnvError(f"graph {self.graph} has no operations at run time: leave it out")
        if not math.isfinite(self._first.objective):
            raise EnvError(f"graph {self.graph} cannot be priced as it is, one of its kernels fails: leave it out")
        if self._first.objective <= 0:
            raise EnvError(f"graph {self.graph} costs nothing by this objective, and cannot cost less: leave it out")
        self._best: tuple[float, tuple[str, ...]] = self._first.objective, ()
        return self._observation(), self._info(0.0, "")

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply a pass or stop. Episodes are never cut off: the horizon is part of the task, and observed."""
        before, key = self._facts(), self._at()
        if not self._left:
            raise EnvError("the episode has ended: call reset")
        if int(action) == len(self.passes):
            steps, self._left = self._left, 0
            worth = (1 - self.gamma**steps) / (1 - self.gamma) if self.gamma < 1 else float(steps)
            reward = -self._scaled(before) * worth if self._reward == "count" else 0.0
            return self._observation(), reward + self._shaped(before, None), True, False, self._info(0.0, "")
        name = self.passes[int(action)]
        step = self._states.step(key, name, self._start, self._order)
        self._left -= 1
        if step.key == key:
            self._masked[int(action)] = True
            if step.refused:
                self.refusals[self.graph, name] = step.refused
        else:
            self._key, self._order = step.key, (*self._order, name)
            self._masked[:] = False
        after = self._facts()
        if after.objective < self._best[0]:
            self._best = after.objective, self._order
        saved = self._scaled(before) - self._scaled(after)
        reward = -self._scaled(after) if self._reward == "count" else saved
        ended = not self._left
        reward += self._shaped(before, None if ended else after)
        return self._observation(), reward, ended, False, self._info(step.secs, step.refused)

    def after(self, name: str) -> float | None:
        """The objective of what the pass would make of the module now; None where it would change nothing."""
        step = self._states.step(self._at(), name, self._start, self._order)
        if step.key == self._at():
            return None
        return self._states.facts(step.key, self._start, (*self._order, name)).objective

    def action_masks(self) -> np.ndarray:
        """(P + 1,) bool: which actions may change anything, stop included; as sb3-contrib asks for it."""
        return np.append(~self._masked, True)

    def render(self) -> str:
        """The graph, the passes so far and what is left of the objective."""
        left = 100 * self._scaled(self._facts())
        return f"{self.graph}: {' '.join(self._order) or 'no pass'} -> {left:.1f} % of the start"

    def _at(self) -> int:
        if self._key is None:
            raise EnvError("there is no episode: call reset first")
        return self._key

    def _facts(self) -> Facts:
        return self._states.facts(self._at(), self._start, self._order)

    def _scaled(self, facts: Facts) -> float:
        return facts.objective / self._first.objective

    def _shaped(self, before: Facts, after: Facts | None) -> float:
        if not self._shaping:
            return 0.0
        return (self.gamma * self._potential(after) if after is not None else 0.0) - self._potential(before)

    def _potential(self, facts: Facts) -> float:
        first, now = self._first.operations, facts.operations
        return -(now.flops / max(first.flops, 1) + now.transcendentals / max(first.transcendentals, 1)) / 2

    def _observation(self) -> np.ndarray:
        facts, first = self._facts(), self._first.operations
        counts = np.zeros(len(self.operators), np.float32)
        for name, count in facts.operations.counts.items():
            counts[self._number.get(name, len(counts) - 1)] += count
        told = (
            self._left / self.horizon,
            np.log(max(self._scaled(facts), _LEAST_LEFT)),
            np.log1p(facts.operations.flops) - np.log1p(first.flops),
            np.log1p(facts.operations.transcendentals) - np.log1p(first.transcendentals),
        )
        return np.concatenate([np.log1p(counts), self._masked, told]).astype(np.float32)

    def _info(self, secs: float, refused: str) -> dict[str, Any]:
        facts = self._facts()
        return {
            "graph": self.graph,
            "operations": facts.operations.total,
            "flops": facts.operations.flops,
            "transcendentals": facts.operations.transcendentals,
            "objective": facts.objective,
            "start_objective": self._first.objective,
            "pass_secs": secs,
            "order": self._order,
            "best_objective": self._best[0],
            "best_order": self._best[1],
            **({"refused": refused} if refused else {}),
        }
