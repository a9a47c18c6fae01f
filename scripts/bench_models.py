"""Whole models against ONNX Runtime: searched, unsearched and ONNX Runtime timed in interleaved rounds.

Unsearched is what `rlflow_tvm.pipeline` makes of the imported model, nothing measured. The search measures kernels, and
what it finds is built with the implementations that came out fastest.

For each model a line with both times, ONNX Runtime's time over ours (above 1 is faster than ONNX Runtime), seconds to
compile, and the largest difference of an output as a share of its range; at the end the geometric mean. What is
measured is written to --out as it comes, and models that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import model_path, parse_target, progress_bar, write_json
from rlflow_tvm.cost import Candidate, CostModel, KernelDatabase, default_path, export_library, measure_interleaved
from rlflow_tvm.frontend import random_inputs, zoo
from rlflow_tvm.kernels import heuristic_choice, num_cores, pipeline
from rlflow_tvm.search import make_search
from rlflow_tvm.superoptimize import optimize
from rlflow_tvm.verify import range_error

MODELS = tuple(f"zoo:{n}" for n in ("resnet18", "resnet50", "squeezenet1.1", "inception-v3", "bert-base", "vit-base"))
LIGHT = tuple(f"zoo:{name}" for name in zoo.names() if name.startswith("light_"))


def bench(model: str, target: Any, search: str, rounds: int, cost_model: CostModel) -> dict[str, Any]:
    """One model's figures."""
    path = model_path(model)
    mod = from_onnx(path)
    result: dict[str, Any] = {"model": model, "search": search}
    candidates: dict[str, Candidate] = {}
    modules = {"unsearched": (mod, heuristic_choice)}
    if search != "none":
        started = time.monotonic()
        with progress_bar(f"{model}: searching") as bar:
            outcome = optimize(
                mod, make_search(search), cost_model, progress=lambda done, total, best: bar(done, total, f"{best:.4f}")
            )
        result["search_secs"] = time.monotonic() - started
        result["plan_length"] = len(outcome.state.actions)
        modules["searched"] = outcome.state.bound(), cost_model.choose
    with tempfile.TemporaryDirectory() as folder:
        for name, (each, choose) in modules.items():
            started = time.monotonic()
            candidates[name] = export_library(each, target, Path(folder) / f"{name}.so", pipeline(target, choose))
            result[f"{name}_compile_secs"] = time.monotonic() - started
        candidates["onnxruntime"] = Candidate("onnx", path)
        inputs = list(random_inputs(mod, 0).values())
        with progress_bar(f"{model}: timing") as bar:
            measured = measure_interleaved(
                candidates, inputs, rounds, threads=num_cores(target), on_progress=lambda done, total: bar(done, total)
            )
    for name, times in measured.items():
        result[f"{name}_secs"] = times.run_secs
    for name in modules:
        pairs = zip(measured["onnxruntime"].round_secs, measured[name].round_secs, strict=True)
        result[f"{name}_ratio"] = float(np.median([theirs / ours for theirs, ours in pairs]))
        result[f"{name}_error"] = range_error(measured[name].outputs, measured["onnxruntime"].outputs)
    return result


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and the geometric mean of each candidate's ratio."""
    table = Table()
    for column in ("model", "candidate", "ours, ms", "ONNX Runtime, ms", "ratio", "compile, s", "difference"):
        table.add_column(column, justify="left" if column in ("model", "candidate") else "right")
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name in ("unsearched", "searched"):
            if f"{name}_secs" not in row:
                continue
            ratios.setdefault(name, []).append(row[f"{name}_ratio"])
            table.add_row(
                row["model"], name, f"{row[f'{name}_secs'] * 1e3:.2f}", f"{row['onnxruntime_secs'] * 1e3:.2f}",
                f"{row[f'{name}_ratio']:.3f}", f"{row[f'{name}_compile_secs']:.1f}", f"{row[f'{name}_error']:.1e}",
            )  # fmt: skip
    console = Console()
    console.print(table)
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        console.print(f"{name}: geometric mean {mean:.3f}, lowest {min(values):.3f}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="ONNX files or zoo:NAME; 'light' for all light_*")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--search", default="greedy", help="greedy, family, random or none")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    target = parse_target(arguments.target)
    models = [name for model in arguments.models for name in (LIGHT if model == "light" else (model,))]
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    known = {(row["model"], row["search"]) for row in rows}
    with KernelDatabase(default_path()) as database, CostModel(target, database) as cost_model:
        for model in models:
            if (model, arguments.search) not in known:
                rows.append(bench(model, target, arguments.search, arguments.rounds, cost_model))
                write_json(arguments.out, rows)
    show([row for row in rows if row["model"] in models and row["search"] == arguments.search])


if __name__ == "__main__":
    main()
