"""Agents that put passes in order, on the corpus: trained on its training graphs, tried on those held out.

    python scripts/ordering.py --steps 16384 --seeds 5 --out runs/ordering
    python scripts/ordering_report.py runs/ordering

Leaves OUT/baselines.json (default orders, greedy search, random orders), OUT/AGENT.STEPS.SEED.json for each training
(`ppo+shaping` and `ppo+value-metrics` are the paper's variants), OUT/checks.json (every module that any order made of a
held-out graph, run against its original), OUT/times.json (whole held-out graphs, compiled and timed in interleaved
rounds) and OUT/endurance.json (100 000 random steps in one process). What is there is not made again. An order is the
one that left fewest operations on the way of one episode of 32 passes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tvm
import tvm_ffi
from agents_results import read_json, read_number
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.cli import parse_target, progress_bar, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import export_library, measure_interleaved
from rlflow_tvm.differences import TOLERANCE, range_error
from rlflow_tvm.envs import PassOrderingEnv
from rlflow_tvm.errors import RewriteError, RlflowError, UsageError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.frontend.corpus import corpus
from rlflow_tvm.ordering import LOG, RandomPasses, find_order, greedy_order, train_on_graphs
from rlflow_tvm.passes.ordering import CLEANING_ORDER, DOCUMENTED_ORDER, applied
from rlflow_tvm.verify import flatten

AGENTS = ("ppo", "a2c", "dqn", "trpo", "maskable-ppo")
VARIANTS = ("ppo+shaping", "ppo+value-metrics")
_ENDURANCE = 100_000
DEFAULTS = {"documented": DOCUMENTED_ORDER, "cleaning": CLEANING_ORDER}
Order = Sequence[str]


@cache
def graphs(test: bool) -> dict[str, tvm.IRModule]:
    """Of the corpus, in the working form."""
    return {graph.name: graph.mod for graph in corpus() if graph.test == test}


def baselines(out: Path, seeds: int) -> None:
    """What needs no training, on each held-out graph."""
    path = out / "baselines.json"
    rows = read_json(path) if path.exists() else {}
    env = PassOrderingEnv(graphs(test=True), reward="saving")
    with progress_bar("baselines") as bar:
        for done, name in enumerate(env.names):
            bar(done, len(env.names), name)
            known = len(rows[name]["random"]) if name in rows else -1
            if known < seeds:
                row = rows[name] if name in rows else baseline(env, name)
                for seed in range(len(row["random"]), seeds):
                    order, left = find_order(env, RandomPasses(seed), name)
                    row["random"].append({"order": order, "left": left})
                rows[name] = row
                write_json(path, rows)


def baseline(env: PassOrderingEnv, name: str) -> dict[str, Any]:
    """All but random orders."""
    row: dict[str, Any] = {"operations": env.objective(env.start(name)), "random": []}
    for default, order in DEFAULTS.items():
        _, info = env.reset(options={"graph": name})
        for each in order:
            info = env.step(env.passes.index(each))[4]
        row[default] = {"order": order, "left": info["objective"] / info["start_objective"]}
        best = info["best_objective"] / info["start_objective"]
        row[f"{default}, best on the way"] = {"order": info["best_order"], "left": best}
    for label, budget in (("greedy", None), ("greedy, 32 tries", env.horizon)):
        order, left, tried = greedy_order(env, name, budget)
        row[label] = {"order": order, "left": left, "tried": tried}
    return row


def train(agent: str, steps: int, seed: int, out: Path) -> None:
    """One training, and the orders that the agent finds on held-out graphs."""
    name, _, variant = agent.partition("+")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        outcome = train_on_graphs(
            graphs(test=False), name, steps=steps, seed=seed, out=Path(folder) / "agent",
            shaping=variant == "shaping", value_metrics=variant == "value-metrics",
        )  # fmt: skip
        if outcome.env_steps < steps:  # Ctrl-C, which reaches this process too, takes the agent as it is
            raise KeyboardInterrupt
        from rlflow_tvm.agents.ordering import OrderingAgent

        trained = OrderingAgent.load(outcome.checkpoint)
        log = [json.loads(line) for line in (Path(folder) / "agent" / LOG).read_text().splitlines()]
        common = read_json(Path(outcome.order))["passes"]
    env = PassOrderingEnv(graphs(test=True), reward="saving")
    began = time.perf_counter()
    found = {graph: find_order(env, trained, graph) for graph in env.names}
    acted = time.perf_counter() - began
    starts = {graph: env.objective(env.start(graph)) for graph in env.names}
    common_left = {graph: env.objective(applied(common, env.start(graph))) / starts[graph] for graph in env.names}
    row = {
        "agent": agent, "steps": steps, "seed": seed, "wall_secs": outcome.wall_secs, "log": log,
        "env_steps": outcome.env_steps, "trained_left": outcome.left, "acting_secs": acted / len(env.names),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "graphs": {graph: {"order": order, "left": left} for graph, (order, left) in found.items()},
        "common": {"order": common, "left": common_left},
    }  # fmt: skip
    write_json(out / f"{agent}.{steps}.{seed}.json", row)


@contextmanager
def processes(jobs: int, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """So many at a time; where something fails, what has not begun is left out."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), **options) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def trainings(out: Path, agents: Sequence[str], steps: int, seeds: int, jobs: int) -> None:
    """Those that are missing, each in a process of its own."""
    missing = [
        (agent, steps, seed, out)
        for seed in range(seeds)
        for agent in agents
        if not (out / f"{agent}.{steps}.{seed}.json").exists()
    ]
    with processes(jobs, max_tasks_per_child=1) as pool, progress_bar("training") as bar:
        for done, future in enumerate([pool.submit(train, *each) for each in missing]):
            bar(done, len(missing), "{0} seed {2}".format(*missing[done]))
            future.result()


def orders_of(out: Path) -> dict[str, set[tuple[str, ...]]]:
    """Held-out graph -> every order that something found for it."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in sorted(out.glob("*.json")):
        row = read_json(path)
        if path.stem == "baselines":
            for graph, each in row.items():
                told = [*each["random"], *(value for value in each.values() if isinstance(value, dict))]
                found.setdefault(graph, set()).update(tuple(value["order"]) for value in told)
        elif "graphs" in row:
            for graph, each in row["graphs"].items():
                found.setdefault(graph, set()).update({tuple(each["order"]), tuple(row["common"]["order"])})
    return found


def checks(out: Path, jobs: int) -> None:
    """Run every different module against the graph that it was made of."""
    path = out / "checks.json"
    rows = read_json(path) if path.exists() else {}
    found = orders_of(out)
    if not found:
        raise UsageError(f"{out}: there is nothing to check in it: make baselines or trainings first")
    with processes(jobs) as pool, progress_bar("checking") as bar:
        futures = {pool.submit(checked, name, orders, rows.get(name, {})): name for name, orders in found.items()}
        for done, future in enumerate(as_completed(futures)):
            rows[futures[future]] = {key: finite(error) for key, error in future.result().items()}
            write_json(path, rows)
            bar(done + 1, len(found), futures[future])
    errors = [read_number(error) for row in rows.values() for error in row.values()]
    wrong = sum(error > TOLERANCE for error in errors)
    print(f"{len(errors)} modules of {len(rows)} graphs: {wrong} differ, largest difference {max(errors):.1e}")
    if wrong:
        raise RewriteError(
            f"{path}: {wrong} modules differ from the graphs that they were made of: look for them there"
        )


def checked(name: str, orders: set[tuple[str, ...]], known: dict[str, float | None]) -> dict[str, float]:
    """Structural hash of each module that the orders make of the graph -> its largest difference from the graph's
    outputs, as a share of their range, in double precision where that is too much in single. Modules that are `known`
    to be equal are not run again."""
    mod = graphs(test=True)[name]
    made = {f"{tvm_ffi.structural_hash(each) & (2**64 - 1):016x}": each for each in (applied(o, mod) for o in orders)}
    found = {key: error for key in made if (error := read_number(known.get(key))) <= TOLERANCE}
    if made.keys() <= found.keys():
        return found
    draws = [arguments(mod, positive) for positive in (True, False)]
    expected = outputs(mod, draws)
    for number, draws_of in enumerate(zip(*expected, strict=True)):
        if not any(np.isfinite(array).mean() > 0.5 for array in draws_of if array.size):
            raise RlflowError(f"{name}: output {number} is not finite, so that nothing can be compared")
    for key, each in made.items():
        if key not in found:
            found[key] = max(map(range_error, outputs(each, draws), expected))
            if TOLERANCE < found[key] < math.inf:
                found[key] = difference_in_double(each, mod, draws, expected)
    return found


def difference_in_double(
    made: tvm.IRModule, mod: tvm.IRModule, draws: list[list[np.ndarray]], expected: list[list[np.ndarray]]
) -> float:
    """The largest difference of the outputs where all floats are doubles, as a share of the ranges that they have in
    single precision. There some outputs are rounding and nothing else, and differ by all of it with the order of sums:
    the gradient of a key's bias is nought, as adding the same number to all scores changes no softmax."""
    wide = [[array.astype("float64") if array.dtype == "float32" else array for array in arrays] for arrays in draws]
    worst = 0.0
    for found, wanted, single in zip(*(outputs(in_double(m), wide) for m in (made, mod)), expected, strict=True):
        moved = [s.astype("float64") + (a.astype("float64") - b) for s, a, b in zip(single, found, wanted, strict=True)]
        worst = max(worst, range_error(moved, single))
    return worst


def in_double(mod: tvm.IRModule) -> tvm.IRModule:
    """A module whose constants are floats, with float64 in place of float32."""
    constants, module, text = mod.script(show_meta=True).partition("@I.ir_module")
    text = text.replace("float32", "float64")
    text = re.sub(r'(metadata\["ir.GenericConst"\]\[\d+\])', r'R.astype(\1, dtype="float64")', text)
    # the parser does not know an attribute that the printer writes
    text = re.sub(r'(take_backward\(.*), mode="[^"]*"', r"\1", text)
    return tvm.script.from_source(constants + module + text)


def arguments(mod: tvm.IRModule, positive: bool) -> list[np.ndarray]:
    """For all parameters of a module in the working form: normal numbers, or positive ones, as roots and logarithms
    need them."""
    func = mod["main"]
    every = tvm.IRModule({"main": func.with_attr("num_input", len(func.params))})
    arrays = random_inputs(every, 0).values()
    if not positive:
        return list(arrays)
    return [np.abs(array) + np.asarray(0.5, array.dtype) if array.dtype.kind == "f" else array for array in arrays]


def outputs(mod: tvm.IRModule, draws: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """For each draw of arguments; built without LLVM's optimisations, which take most of the time."""
    target = parse_target('{"kind": "llvm", "opt-level": 0}')
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    return [
        [tensor.numpy() for tensor in flatten(machine["main"](*map(tvm.runtime.tensor, arrays)))] for arrays in draws
    ]


def times(out: Path, agent: str, steps: int, rounds: int) -> None:
    """Whole held-out graphs by TVM's default build: as they are, in the default order, in the agent's best of its
    seeds. UsageError where there are times of others."""
    path = out / "times.json"
    rows = read_json(path) if path.exists() else {}
    orders = {
        name: {"documented": DOCUMENTED_ORDER, agent: order} for name, order in best_orders(out, agent, steps).items()
    }
    if any(name not in orders or not is_of(row, orders[name], rounds) for name, row in rows.items()):
        raise UsageError(f"{path}: has times of other orders or rounds: give --timed and --rounds as then, or move it")
    names = [name for name in graphs(test=True) if "." not in name]
    names = names[::3] + names[1::3] + names[2::3]  # of all kinds also where it is interrupted
    target = parse_target("llvm")
    with progress_bar("timing") as bar:
        for done, name in enumerate(names):
            bar(done, len(names), name)
            if name not in rows:
                row = timed(graphs(test=True)[name], orders[name], target, rounds)
                rows[name] = {label: {**each, "order": orders[name].get(label, ())} for label, each in row.items()}
                write_json(path, rows)


def best_orders(out: Path, agent: str, steps: int) -> dict[str, Order]:
    """Held-out graph -> the best order that the agent found for it with any seed; UsageError without a training."""
    trained = [read_json(each)["graphs"] for each in sorted(out.glob(f"{agent}.{steps}.*.json"))]
    if not trained:
        raise UsageError(f"{out}: no training of {agent} with {steps} steps to time: train it, or give another --timed")
    best = {name: min((row[name] for row in trained), key=lambda e: (e["left"], e["order"])) for name in trained[0]}
    return {name: each["order"] for name, each in best.items()}


def is_of(row: dict[str, Any], orders: dict[str, Order], rounds: int) -> bool:
    """Whether times are of these orders, by their names where the orders were not noted, and of so many rounds."""
    if list(row) != ["as it is", *orders] or any(len(each["round_secs"]) != rounds for each in row.values()):
        return False
    return all(row[label].get("order", list(order)) == list(order) for label, order in orders.items())


def timed(mod: tvm.IRModule, orders: dict[str, Order], target: tvm.target.Target, rounds: int) -> dict[str, Any]:
    inputs = ir.num_inputs(mod["main"])
    arrays = [array / array.max() if array.dtype.kind == "f" else array for array in arguments(mod, positive=True)]
    weights = {
        param.name: tvm.runtime.tensor(array)
        for param, array in zip(mod["main"].params[inputs:], arrays[inputs:], strict=True)
    }
    env = PassOrderingEnv({"main": mod})
    made = {"as it is": mod, **{label: applied(order, mod) for label, order in orders.items()}}
    with tempfile.TemporaryDirectory() as folder:
        candidates = {
            label: export_library(
                ir.Detached(each, weights).bind(), target, Path(folder) / f"{number}.so",
                relax.get_pipeline("default_build"),
            )
            for number, (label, each) in enumerate(made.items())
        }  # fmt: skip
        measured = measure_interleaved(candidates, arrays[:inputs], rounds, threads=1)
    return {
        label: {"round_secs": each.round_secs, "operations": env.objective(made[label])}
        for label, each in measured.items()
    }


def endurance(out: Path, steps: int) -> None:
    """Random passes on all training graphs in one process: its memory, refusals and steps a second along the way."""
    path = out / "endurance.json"
    if path.exists():
        return
    env = PassOrderingEnv(graphs(test=False), reward="saving")
    act = RandomPasses(0).act
    observation, _ = env.reset(seed=0)
    rows, since = [], time.perf_counter()
    with progress_bar("endurance") as bar:
        for done in range(1, steps + 1):
            observation, _, ended, _, _ = env.step(act(observation, env.action_masks()))
            if ended:
                observation, _ = env.reset()
            if done % (steps // 20) == 0:
                secs, since = time.perf_counter() - since, time.perf_counter()
                resident = psutil.Process().memory_info().rss / 2**20
                rows.append({"steps": done, "resident_mib": resident, "steps_per_sec": steps // 20 / secs,
                             "refusals": len(env.refusals)})  # fmt: skip
                bar(done, steps, f"{resident:.0f} MiB")
    write_json(path, {"rows": rows, "refusals": sorted(set(env.refusals.values()))})


def positive(text: str) -> int:
    """ArgumentTypeError for no positive number."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is expected")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", default=[*AGENTS, *VARIANTS], choices=[*AGENTS, *VARIANTS])
    parser.add_argument("--steps", type=positive, default=16_384, help="environment steps of a training")
    parser.add_argument("--seeds", type=positive, default=5, help="how many")
    parser.add_argument("--jobs", type=positive, default=1, help="trainings or checks at a time")
    parser.add_argument(
        "--timed", choices=[*AGENTS, *VARIANTS], help="whose graphs are timed; by default the first agent's"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="of timing")
    parser.add_argument(
        "--only", choices=["baselines", "trainings", "checks", "times", "endurance"], help="do only this"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{options.out}: cannot be made ({error.strerror}); give another --out")
    try:
        do(options)
    except UsageError as error:
        parser.error(str(error))
    except RlflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def do(options: argparse.Namespace) -> None:
    out, timed_agent = options.out, options.timed or options.agents[0]
    if options.only is None and timed_agent not in options.agents:
        best_orders(out, timed_agent, options.steps)  # told now, if there is no training of it, rather than in the end
    if options.only in (None, "baselines"):
        baselines(out, options.seeds)
    if options.only in (None, "trainings"):
        trainings(out, options.agents, options.steps, options.seeds, options.jobs)
    if options.only in (None, "checks"):
        checks(out, options.jobs)
    if options.only in (None, "times"):
        times(out, timed_agent, options.steps, options.rounds)
    if options.only in (None, "endurance"):
        endurance(out, _ENDURANCE)


if __name__ == "__main__":
    sys.exit(main())
