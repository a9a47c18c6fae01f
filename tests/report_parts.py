"""What the tests of reports share: a plan on a small graph, priced without measuring, and a training made up."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from fake_cost import FakeCostModel
from small_models import LANES, TARGET, algebra

from rlflow_tvm.cost import CostModel, KernelTimer, Measurement
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RuleSet
from rlflow_tvm.reporting import Along, Contents, Training, contents, price_along

WANTED = 4
"""Rewrites of the plan."""

LOG = [
    {"update": n, "env_steps": 40 * n, "mean_return": 0.1 * n, "entropy": 2.0 - 0.2 * n, "approx_kl": 0.01, "note": "x"}
    for n in range(1, 6)
]
BEST = [{"env_steps": 10 * n, "model": "zoo:small", "run_secs": 1e-4 / n} for n in range(1, 4)]


class KnownTimes(KernelTimer):
    """Every kernel is known at once, by a time made of its key."""

    def measure(
        self, kernels: Sequence[Any], on_progress: object = None, graph: object = None, confirmed: bool = True
    ) -> list[Measurement]:
        del on_progress, graph, confirmed
        return [self.lookup(kernel) for kernel in kernels]

    def lookup(self, kernel: Any, *, in_graph: bool = False) -> Measurement:
        del in_graph
        return Measurement(run_secs=1e-12 * (1 + int(kernel.key[:6], 16)), repeats=1, confirmed=True)

    def launch_secs(self) -> float:
        return 1e-6


def start_of(mod: tvm.IRModule) -> GraphState:
    return GraphState.from_module(mod, RuleSet(CATALOGUE, LANES))


def planned(mod: tvm.IRModule | None = None, count: int = WANTED) -> GraphState:
    """The state after some rewrites, each of another rule, and the first site of it."""
    state = start_of(algebra() if mod is None else mod)
    used: set[str] = set()
    while len(state.actions) < count:
        rule = next(name for name, sites in state.sites.items() if sites and name not in used)
        used.add(rule)
        state = state.apply(RewriteAction(rule, state.sites[rule][0]))
    return state


def along_of(state: GraphState) -> Along:
    return price_along(state.origin(), state.plan, FakeCostModel())  # type: ignore[arg-type]


def told_of(state: GraphState, model: str = "zoo:small", training: Training | None = None) -> Contents:
    """A whole report's contents, kernels included, without measuring."""
    cost_model = CostModel(TARGET, timer=KnownTimes(TARGET))
    return contents(model, price_along(state.origin(), state.plan, cost_model), cost_model, training)


def trained(state: GraphState) -> Training:
    return Training("ppo", LOG, BEST, {"zoo:small": state.plan, "zoo:other": state.plan})


def write_run(folder: Path, state: GraphState, model: str, target: str = "llvm", **metadata: object) -> Path:
    """A folder such as a training leaves, but that its agent has no weights."""
    folder.mkdir()
    told = {"models": [model], "shapes": {}, "target": target, **metadata}
    description = {"agent": "ppo", "metadata": told}
    write_checkpoint(folder / "agent.safetensors", description)
    state.plan.save(folder / "best.plan.json")
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LOG) + '{"cut')
    best = [{**line, "model": model} for line in BEST]
    (folder / "best.jsonl").write_text("".join(json.dumps(line) + "\n" for line in best))
    return folder


def write_checkpoint(path: Path, description: object) -> None:
    metadata = {"format": "rlflow_tvm.agent", "version": "5", "description": json.dumps(description)}
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
