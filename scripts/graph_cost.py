"""Graph cost against end-to-end time, of models as they are and after random rewrites.

    python scripts/graph_cost.py --models zoo:resnet18 zoo:bert-base --rewrites 0 20

Rounds are interleaved: in each the kernels are measured afresh by a new worker, first those of the model as it is, then
what the rewrites have added, and the module is run by a new process (the same binary's time varies from process to
process, with where its memory happens to lie). Before, between and after, a product and a copy of fixed size are timed:
a round in which either took longer than it should is made again, and in the end the least disturbed rounds count.
A figure is the median over them of (sum of kernels and launches) / (end-to-end time). Implementations are chosen by a
database of this run's own, in a temporary folder.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from trajectories import walked

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, export_library, measure_interleaved
from rlflow_tvm.cost.place import Here
from rlflow_tvm.cost.reference import Reference
from rlflow_tvm.cost.schema import REFERENCE_KEY
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.kernels import num_cores, pipeline, vector_lanes
from rlflow_tvm.passes import GraphState, default_rules

BURSTS = 2
DISTURBED = 1.15  # what end-to-end times are taken for: they are not reckoned to the machine's usual speed
TRIES = 3  # times the rounds asked for, at most
COPIED = 1 << 24  # floats: far more than caches hold


class Machine:
    """How much slower than at its best this machine is, by a product in its caches and a copy through its memory."""

    def __init__(self, target: tvm.target.Target) -> None:
        self._product = Reference(target, Here(target))
        self._source, self._copy = np.ones(COPIED, np.float32), np.empty(COPIED, np.float32)
        self._best = min(self._secs() for _ in range(10))

    def slowdown(self) -> float:
        """1 or a little more where nobody disturbs it."""
        secs = self._secs()
        self._best = min(self._best, secs)
        return max(self._product.slowdown(), secs / self._best)

    def _secs(self) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            np.copyto(self._copy, self._source)
            times.append(time.perf_counter() - began)
        return float(np.median(times))


def priced(start: tvm.IRModule, state: GraphState, chosen: Path, target: tvm.target.Target) -> float:
    """The cost of `state` in seconds, its kernels measured by a worker of their own: those that are the start's in the
    start, as in a search, the others in `state`. `chosen`: a database that knows which implementations to take."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(chosen, folder))
        with closing(sqlite3.connect(copy)) as raw:  # costs are to be at the speed of now, as end-to-end times are
            raw.execute("DELETE FROM measurement WHERE kernel = ?", (REFERENCE_KEY,))
            raw.commit()
        with KernelDatabase(copy) as database, CostModel(target, database) as cost_model:
            cost = RewriteProblem(start, cost_model).cost(state)
    if cost.failed:
        raise SystemExit(f"a kernel fails: {cost.failed}")
    return cost.run_secs


def compared(
    name: str, start: tvm.IRModule, state: GraphState, chosen: Path, machine: Machine, target: Any, rounds: int
) -> dict[str, Any]:
    """The least disturbed rounds of one graph: costs, end-to-end times, and the median of their ratios."""
    mod = state.bound()
    inputs = list(random_inputs(mod, 0).values())
    made: list[tuple[float, float, float]] = []  # slowdown, cost, end to end
    with tempfile.TemporaryDirectory() as folder:
        with KernelDatabase(chosen) as database, CostModel(target, database) as cost_model:
            for graph in (GraphState.from_module(start, state.ruleset), state):
                kernels = cost_model.kernels(graph.graph)  # measures which implementations are best, and no more
            library = export_library(mod, target, Path(folder) / "model.so", pipeline(target, cost_model.choices))
        while len(made) < TRIES * rounds and sum(each[0] <= DISTURBED for each in made) < rounds:
            slowdowns = [machine.slowdown()]
            cost = priced(start, state, chosen, target)
            slowdowns.append(machine.slowdown())
            run = measure_interleaved({"model": library}, inputs, BURSTS, threads=num_cores(target))
            slowdowns.append(machine.slowdown())
            made.append((max(slowdowns), cost, run["model"].run_secs))
    slowdowns, costs, times = zip(*sorted(made)[:rounds], strict=True)
    ratios = [cost / secs for cost, secs in zip(costs, times, strict=True)]
    return {
        "model": name,
        "rewrites": len(state.actions),
        "kernels": len(kernels),
        "cost_secs": costs,
        "end_to_end_secs": times,
        "slowdowns": slowdowns,
        "disturbed_rounds": sum(each[0] > DISTURBED for each in made),
        "ratio": float(np.median(ratios)),
    }


def line(row: dict[str, Any]) -> str:
    def shown(values: list[float]) -> str:
        return " ".join(f"{1e3 * value:.3f}" for value in values)

    return (
        f"{row['model']} after {row['rewrites']} rewrites ({row['kernels']} kernels): "
        f"graph cost {shown(row['cost_secs'])} ms, end to end {shown(row['end_to_end_secs'])} ms, "
        f"ratio {row['ratio']:.3f} (the machine at most {max(row['slowdowns']):.2f}x slower than at its best; "
        f"{row['disturbed_rounds']} disturbed rounds)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:demo"], help="ONNX files or zoo:NAME")
    parser.add_argument("--rewrites", nargs="+", type=int, default=[0, 20], help="random rewrites before measuring")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the rewrites")
    parser.add_argument("--target", default="llvm", help="llvm: this machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with errors_of(parser):
        check_writable(options.json)
        target = parse_target(options.target)
        machine = Machine(target)
        for name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                mod = from_onnx(model_path(name))
                start = GraphState.from_module(mod, default_rules(vector_lanes(target)))
                for count in options.rewrites:
                    state, _ = walked(start, count, np.random.default_rng((options.seed, count)))
                    rows.append(
                        compared(name, mod, state, Path(folder) / "kernels.sqlite", machine, target, options.rounds)
                    )
                    print(line(rows[-1]), flush=True)
                    write_json(options.json, rows)
    errors = [abs(row["ratio"] - 1.0) for row in rows]
    print(f"error: median {np.median(errors):.1%}, worst {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
