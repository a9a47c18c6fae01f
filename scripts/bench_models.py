"""Whole models against ONNX Runtime, torch.compile and TVM's default build, timed in interleaved rounds.

Unsearched is what `rlflow_tvm.pipeline` makes of the imported model, nothing measured. The search measures kernels, and
what it finds is built with the implementations that came out fastest.

For each model and each of ours a line with its median time and quartiles, the others' times over ours (above 1 is
faster than they), seconds to compile and to link the library, and the largest difference of an output from ONNX
Runtime's as a share of its range; at the end the geometric means. torch.compile runs the torch module that a zoo
model was exported from, weights as constants; the other models have none. What is
measured is written to --out as it comes, and models that are there already are not measured again.

With --runs, the folder of a `scripts/agents.py` that ran on this machine with the same database, the graph that each
method left is timed too (of its seeds that with the median cost), and the unsearched graphs built with the same
measured kernels: the graph gain is the faster one's time over the method's. `scripts/paper.py rlflow-figure6 OUT` makes
the table.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from agents import prices
from agents_plans import median_run
from agents_results import Row, check_made, plan_of, read_json, read_number, rows_of, run_name
from rich.console import Console
from rich.table import Table
from tvm import relax

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.comparison import CONVERTED, UNSEARCHED, unsearched
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import Candidate, CostModel, KernelDatabase, default_path, export_library, measure_interleaved
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import RlflowError, UsageError
from rlflow_tvm.frontend import random_inputs, zoo
from rlflow_tvm.kernels import BY_SHAPE, num_cores, pipeline, vector_lanes
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.search import make_search
from rlflow_tvm.superoptimize import optimize

MODELS = tuple(f"zoo:{n}" for n in ("resnet18", "resnet50", "squeezenet1.1", "inception-v3", "bert-base", "vit-base"))
LIGHT = tuple(f"zoo:{name}" for name in zoo.names() if name.startswith("light_"))


PLAIN = {UNSEARCHED: "as imported", CONVERTED: "ConvertLayout"}
"""The names of unsearched graphs that are built with measured kernels."""
AGAINST = {"onnxruntime": "ONNX Runtime", "torch": "torch.compile", "tvm-default": "TVM default"}


def bench(
    model: str, target: Any, search: str, rounds: int, cost_model: CostModel, against: list[str], runs: Path | None
) -> dict[str, Any]:
    """One model's figures."""
    path = model_path(model)
    mod = from_onnx(path)
    result: dict[str, Any] = {"model": model, "search": search, "runs": None if runs is None else str(runs)}
    candidates: dict[str, Candidate] = {}
    modules = {"unsearched": (mod, BY_SHAPE)}
    chosen = {} if runs is None else chosen_runs(runs, model)
    left = {} if runs is None else left_by_methods(chosen, mod, cost_model)
    result["chosen"] = names_of_runs(chosen)
    modules |= {name: (each, cost_model.choices) for name, each in left.items()}
    if search != "none":
        started = time.monotonic()
        with progress_bar(f"{model}: searching") as bar:
            outcome = optimize(
                mod, make_search(search), cost_model, progress=lambda done, total, best: bar(done, total, f"{best:.4f}")
            )
        result["search_secs"] = time.monotonic() - started
        result["plan_length"] = len(outcome.state.actions)
        modules["searched"] = outcome.state.bound(), cost_model.choices
    with tempfile.TemporaryDirectory() as folder:
        for name, (each, choices) in modules.items():
            candidates[name] = compiled(each, target, Path(folder) / f"{name}.so", pipeline(target, choices), result)
        candidates["onnxruntime"] = Candidate("onnx", path)
        if "tvm-default" in against:
            how = relax.get_pipeline("default_build")
            candidates["tvm-default"] = compiled(mod, target, Path(folder) / "tvm-default.so", how, result)
        if "torch" in against and model.removeprefix("zoo:") in zoo.TORCH_MODELS:
            program = Path(folder) / "torch.pt2"
            zoo.save_program(model.removeprefix("zoo:"), program)
            candidates["torch"] = Candidate("torch", program)
        inputs = list(random_inputs(mod, 0).values())
        with progress_bar(f"{model}: timing") as bar, cost_model.timer.in_turn():
            measured = measure_interleaved(
                candidates, inputs, rounds, threads=num_cores(target), timeout_secs=900.0,
                on_progress=lambda done, total: bar(done, total),
            )  # fmt: skip
    result["ours"] = list(modules)
    if left:
        plain = min((PLAIN[name] for name in PLAIN if PLAIN[name] in left), key=lambda name: measured[name].run_secs)
        for name in left:
            pairs = zip(measured[plain].round_secs, measured[name].round_secs, strict=True)
            result[f"{name}_graph_gain"] = float(np.median([old / new for old, new in pairs]))
    for name, times in measured.items():
        result[f"{name}_secs"] = times.run_secs
        result[f"{name}_quartiles"] = times.quartiles
        result[f"{name}_error"] = finite(range_error(times.outputs, measured["onnxruntime"].outputs))
    for name in modules:
        for other in AGAINST:
            if other in measured:
                pairs = zip(measured[other].round_secs, measured[name].round_secs, strict=True)
                result[f"{name}_against_{other}"] = float(np.median([theirs / ours for theirs, ours in pairs]))
    return result


def chosen_runs(runs: Path, model: str) -> dict[str, Row]:
    """Each method's run of the median gain, by the candidates' names."""
    found = rows_of(runs).get(model)
    if found is None:
        raise UsageError(f"{runs}: no run of {model} is there; leave the model out, or run scripts/agents.py on it")
    chosen = {}
    for (method, steps), rows in sorted(found.items()):
        if "-for-" in method:  # another reward: the same agent
            continue
        row = median_run(rows)
        if "plan" not in row:
            raise UsageError(f"{runs}: {method} of {model} is of an earlier version of agents.py; run it again")
        chosen[f"{method}, {steps} steps, median seed" if len(rows) > 1 else f"{method}, {steps} steps"] = row
    return chosen


def names_of_runs(chosen: dict[str, Row]) -> list[str]:
    """What times of what they have left are times of."""
    return [run_name(row) for row in chosen.values()]


def left_by_methods(chosen: dict[str, Row], mod: tvm.IRModule, cost_model: CostModel) -> dict[str, tvm.IRModule]:
    """The unsearched graphs, and what the runs have left, by the candidates' names."""
    start = GraphState.from_module(mod, default_rules(vector_lanes(cost_model.target)))
    modules = {PLAIN[name]: each for name, each in unsearched(mod, vector_lanes(cost_model.target)).items()}
    for name, row in chosen.items():
        state = start.replay(plan_of(row))
        cost_model.kernels(state.graph)  # so that implementations that nobody has measured are measured now
        modules[name] = state.bound()
    return modules


def compiled(mod: Any, target: Any, path: Path, how: Any, result: dict[str, Any]) -> Candidate:
    """The module as a library; seconds of both steps go to `result`."""
    candidate = export_library(mod, target, path, how)
    result[f"{path.stem}_compile_secs"] = candidate.compile_secs
    result[f"{path.stem}_link_secs"] = candidate.link_secs
    return candidate


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and the geometric mean of each candidate's ratio."""
    table = Table()
    others = [other for other in AGAINST if any(f"unsearched_against_{other}" in row for row in rows)]
    left = ("model", "candidate")
    columns = (*left, "ours, ms", "quartiles", *(f"{AGAINST[other]}" for other in others), "compile, s", "link, s")
    for column in (*columns, "difference"):
        table.add_column(column, justify="left" if column in left else "right")
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name in row.get("ours", ("unsearched", "searched")):
            if f"{name}_secs" not in row:
                continue
            cells = []
            for other in others:
                ratio = row.get(f"{name}_against_{other}")
                cells.append("-" if ratio is None else f"{row[f'{other}_secs'] * 1e3:.2f} ({ratio:.3f})")
                if ratio is not None:
                    ratios.setdefault((name, other), []).append(ratio)
            low, high = row[f"{name}_quartiles"]
            table.add_row(
                row["model"].removeprefix("zoo:"), name, f"{row[f'{name}_secs'] * 1e3:.2f}",
                f"{low * 1e3:.2f}-{high * 1e3:.2f}", *cells, f"{row[f'{name}_compile_secs']:.1f}",
                f"{row[f'{name}_link_secs']:.1f}", f"{read_number(row[f'{name}_error']):.1e}",
            )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    for (name, other), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        text = f"{name}: {AGAINST[other]}'s time over ours: geometric mean {mean:.3f}, lowest {min(values):.3f}"
        console.print(text, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="ONNX files or zoo:NAME; 'light' for all light_*")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--search", default="greedy", help="as of rlflow_tvm.optimize, or none")
    parser.add_argument("--against", nargs="*", choices=tuple(AGAINST), default=list(AGAINST), help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runs", type=Path, help="folder of scripts/agents.py: time what its methods left")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    models = [name for model in arguments.models for name in (LIGHT if model == "light" else (model,))]
    runs = None if arguments.runs is None else str(arguments.runs)
    made: dict[str, Any] = {"rounds": arguments.rounds, "against": sorted(arguments.against)}

    def wanted() -> list[dict[str, Any]]:
        """The rows of what was asked for."""
        ours = arguments.search, runs
        return [row for row in rows if row["model"] in models and (row["search"], row.get("runs")) == ours]

    def is_old(row: dict[str, Any]) -> bool:
        """Whether runs have been made since that are others."""
        return arguments.runs is not None and row.get("chosen") != names_of_runs(
            chosen_runs(arguments.runs, row["model"])
        )

    try:
        check_writable(arguments.out)
        target = parse_target(arguments.target)
        made |= {"target": arguments.target, "prices": prices(arguments.target)}
        rows: list[dict[str, Any]] = read_json(arguments.out) if arguments.out.exists() else []
        old = [row for row in wanted() if is_old(row)]
        rows = [row for row in rows if row not in old]
        check_made(arguments.out, wanted(), made)
        known = {row["model"] for row in wanted()}
        with KernelDatabase(default_path()) as database, CostModel(target, database) as cost_model:
            for model in dict.fromkeys(models):
                if model in known:
                    continue
                row = bench(
                    model, target, arguments.search, arguments.rounds, cost_model, arguments.against, arguments.runs
                )
                rows.append({**row, "made": made})
                write_json(arguments.out, rows)
    except RlflowError as error:
        parser.error(str(error))
    show(wanted())


if __name__ == "__main__":
    main()
