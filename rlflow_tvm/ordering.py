"""Learning orders of passes: training on graphs, the order best for all of them, the trained agent as a pass."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tvm

from rlflow_tvm import ir
from rlflow_tvm.envs import PassOrderingEnv
from rlflow_tvm.envs.pass_ordering import METRICS, check_reward
from rlflow_tvm.errors import AgentError, UsageError
from rlflow_tvm.passes import OrderedPasses
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.ordering import PASSES, applied
from rlflow_tvm.search import check_seed
from rlflow_tvm.training_files import mean_ratio

CHECKPOINT, ORDER, LOG = "agent.safetensors", "best.order.json", "progress.jsonl"
_CANDIDATES, _TRIED_ON, _TOLD_OF = 8, 32, 64
_EPISODES_A_LINE = 20


@dataclass(frozen=True)
class OrderingOutcome:
    """What a training left behind.

    `left`: the geometric mean over the graphs it was trained on (where they are many, over some 64, evenly taken) of
    what is left of the objective after the agent's own orders; `common_left`: after the order in `order`, which is one
    for all.
    """

    agent: str
    seed: int
    graphs: int
    env_steps: int
    episodes: int
    left: float
    common_left: float
    order: str
    checkpoint: str
    wall_secs: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The outcome for a person."""
        return [
            f"{self.graphs} graphs: {100 * self.left:.1f} % of the operations left by the agent, "
            f"{100 * self.common_left:.1f} % by {self.order}",
            f"agent: {self.checkpoint} ({self.env_steps} steps, {self.episodes} episodes, {self.wall_secs:.0f} s)",
        ]


def find_order(env: PassOrderingEnv, agent: Any, graph: str) -> tuple[tuple[str, ...], float]:
    """The best order on the way of one episode of an agent on a graph of `env`; and what it leaves of the objective.

    `agent`: has `act(observation, mask)`, as `agents.OrderingAgent`.
    """
    observation, info = env.reset(options={"graph": graph})
    ended = False
    while not ended:
        observation, _, ended, _, info = env.step(agent.act(observation, env.action_masks()))
    return info["best_order"], info["best_objective"] / info["start_objective"]


class RandomPasses:
    """Acts at random, each pass that may change anything as likely as another; never stops before the horizon."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def act(self, _observation: np.ndarray, mask: np.ndarray) -> int:
        passes = np.flatnonzero(mask[:-1])
        return int(self._rng.choice(passes)) if passes.size else len(mask) - 1


def greedy_order(env: PassOrderingEnv, graph: str, budget: int | None = None) -> tuple[tuple[str, ...], float, int]:
    """The pass that leaves least, again and again while one leaves less, of at most `budget` tries; what it leaves of
    the objective, and how many passes were tried."""
    _, info = env.reset(options={"graph": graph})
    start = objective = info["objective"]
    order: tuple[str, ...] = ()
    tried, improved = 0, True
    while improved and len(order) < env.horizon:
        improved = False
        best = objective, ""
        for name in env.passes[: None if budget is None else max(0, budget - tried)]:
            left = env.after(name)
            tried += 1
            best = min(best, (objective if left is None else left, name))
        if best[0] < objective:
            env.step(env.passes.index(best[1]))
            objective, order, improved = best[0], (*order, best[1]), True
    return order, objective / start, tried


def left_by(env: PassOrderingEnv, order: tuple[str, ...], graph: str) -> float:
    """What an order leaves of the objective of a graph of `env`, in the end (whatever its horizon)."""
    mod = applied(order, env.start(graph))
    return env.objective(mod) / env.objective(env.start(graph))


def train_on_graphs(
    graphs: Mapping[str, tvm.IRModule],
    agent: str,
    *,
    steps: int,
    seed: int,
    out: Path,
    reward: str = "saving",
    shaping: bool = False,
    value_metrics: bool = False,
    horizon: int = 32,
    progress: Callable[[int, int, str], None] | None = None,
) -> OrderingOutcome:
    """Train `agent` (of `agents.ordering.ALGORITHMS`) to put passes in order on `graphs`.

    Leaves in `out` the agent, the order that is best for all graphs of those that it finds for one of them, and a log,
    a line for each twenty episodes.

    EnvError for an unknown reward; AgentError for an unknown agent or a folder that cannot be used; UsageError where
    there is a training in it, or what is left of one.
    """
    from rlflow_tvm.agents.registry import named

    check_training(agent, seed, out, reward, value_metrics)
    env = PassOrderingEnv(graphs, reward=reward, shaping=shaping, horizon=horizon)
    for name in env.names:  # one that nothing can be done with is told before anything was learnt
        env.reset(options={"graph": name})
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AgentError(f"{out}: cannot be made ({error.strerror}): give another --out") from error
    _write_log(out, "x", "")  # what cannot be written is told now
    began, done = time.perf_counter(), 0
    ratios: list[float] = []

    def on_step(taken: int) -> None:
        nonlocal done
        done = taken
        if progress is not None:
            text = f"{100 * mean_ratio(ratios[-_EPISODES_A_LINE:]):.1f} % of the operations left" if ratios else ""
            progress(min(taken, steps), steps, text)

    def on_episode(taken: int, info: Mapping[str, Any]) -> None:
        ratios.append(info["best_objective"] / info["start_objective"])
        if len(ratios) % _EPISODES_A_LINE == 0:
            left, secs = mean_ratio(ratios[-_EPISODES_A_LINE:]), time.perf_counter() - began
            row = {"env_steps": taken, "episodes": len(ratios), "left": left, "secs": secs,
                   "resident_mib": psutil.Process().memory_info().rss / 2**20}  # fmt: skip
            _write_log(out, "a", json.dumps(row) + "\n")

    trained = named("rlflow_tvm.agents.ordering:train_ordering")(
        env, agent, steps, seed, out / CHECKPOINT,
        metrics=METRICS, gamma=env.gamma, value_metrics=value_metrics, on_step=on_step, on_episode=on_episode,
        metadata={"passes": list(env.passes), "operators": env.operators, "horizon": horizon, "reward": reward,
                  "shaping": shaping, "seed": seed, "graphs": list(graphs)},
    )  # fmt: skip
    found = {name: find_order(env, trained, name) for name in _some(graphs, _TOLD_OF)}
    order, common = common_order(env, found)
    OrderedPasses(order).save(out / ORDER)
    return OrderingOutcome(
        agent, seed, len(graphs), done, len(ratios), mean_ratio(left for _, left in found.values()), common,
        str(out / ORDER), str(out / CHECKPOINT), time.perf_counter() - began,
    )  # fmt: skip


def check_training(agent: str, seed: int, out: Path, reward: str = "saving", value_metrics: bool = False) -> None:
    """Errors of `train_on_graphs` that can be told before there are graphs."""
    from rlflow_tvm.agents.registry import named

    check_seed(seed)
    check_reward(reward)
    named("rlflow_tvm.agents.ordering:algorithm")(agent, value_metrics)
    _check_unused(out)


def _check_unused(out: Path) -> None:
    """UsageError where a training has left something; AgentError where that cannot be seen."""
    try:
        left = next((name for name in (CHECKPOINT, ORDER, LOG) if (out / name).exists()), None)
    except OSError as error:
        raise AgentError(f"{out}: cannot be looked into ({error.strerror}): give another --out") from error
    if left is not None:
        raise UsageError(f"{out}: there is a training in it ({left}): move it away, or give another --out")


def _write_log(out: Path, mode: str, text: str) -> None:
    """AgentError where that cannot be."""
    try:
        with open(out / LOG, mode) as log:
            log.write(text)
    except OSError as error:
        raise AgentError(f"{out / LOG}: cannot be written ({error.strerror}): give another --out") from error


def _some(names: Iterable[str], enough: int) -> list[str]:
    """All, or where there are many so many of them or a few more, evenly taken."""
    every = list(names)
    return every[:: max(1, len(every) // enough)]


def common_order(
    env: PassOrderingEnv, found: Mapping[str, tuple[tuple[str, ...], float]]
) -> tuple[tuple[str, ...], float]:
    """Of the orders found for single graphs that leave least there, the one that leaves least of all (of some dozens of
    them, evenly taken), and how much."""
    best = sorted(found.values(), key=lambda each: (each[1], each[0]))
    candidates = list(dict.fromkeys(order for order, _ in best))[:_CANDIDATES]
    names = _some(found, _TRIED_ON)
    left = {order: mean_ratio(left_by(env, order, name) for name in names) for order in candidates}
    order = min(left, key=lambda each: (left[each], each))
    return order, left[order]


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.LearnedOrder")
class LearnedOrder:
    """Let a trained agent choose passes for the module at hand, and keep the best it comes by. Needs `[agents,sb3]`.

    A module that computes nothing at run time is left as it is. AgentError if the file is unusable, or the agent was
    trained with other passes or operators than there are.
    """

    def __init__(self, path: str | Path) -> None:
        from rlflow_tvm.agents.registry import named

        self._agent = named("rlflow_tvm.agents.ordering:OrderingAgent").load(path)
        self._path = path

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        told = self._agent.metadata
        unknown = set(told["passes"]) - set(PASSES)
        if unknown:
            raise AgentError(f"{self._path}: was trained with the pass {min(unknown)}, which there is not: train anew")
        if Graph.from_module(ir.detach(mod).mod).is_empty:
            return mod
        env = PassOrderingEnv({"main": mod}, passes=told["passes"], reward=told["reward"], horizon=told["horizon"])
        if env.operators != told["operators"]:
            raise AgentError(f"{self._path}: was trained with another TVM, which has other operators: train anew")
        return applied(find_order(env, self._agent, "main")[0], mod)
