"""Prices anew what `scripts/agents.py` left in a folder, by kernel times that no run chose by.

    python scripts/agents_anew.py runs/a --databases 3
    python scripts/agents_report.py runs/a

A run takes the cheapest of many graphs, and so what was measured too low, by as much as the machine is noisy. Here each
model's first graph and the plans of all its runs are priced once more, by second times, in databases that are new and
have a process each. Leaves FOLDER/MODEL.anew.json, which the report makes a column of, and the databases beside it;
called again, it prices what was added since. On the same machine and cores as the runs, and alone there.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from agents import prices
from agents_results import Row, anew_path, plan_of, read_anew, rows_of, run_name
from rich.console import Console

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import CostError, RlflowError, UsageError
from rlflow_tvm.passes import Plan


def price_anew(model: str, target: str, plans: Mapping[str, Plan], folder: Path, number: int) -> None:
    """Have database `number` price the plans, which are told of when they are priced."""
    console = Console(stderr=True)
    database_path = anew_path(folder, model).with_suffix(f".{number}.sqlite")
    with KernelDatabase(database_path) as database, CostModel(parse_target(target), database) as cost_model:
        problem = RewriteProblem(from_onnx(model_path(model)), cost_model)
        for name, plan in plans.items():
            cost = problem.cost(problem.replay(plan), confirmed=True)
            if not math.isfinite(cost.run_secs):
                raise CostError(
                    f"{model} {name}: {', '.join(cost.failed)} fails when it is measured again; call this again"
                )
            found = read_anew(folder, model)
            found["databases"][number][name] = problem.start_secs / cost.run_secs
            write_json(anew_path(folder, model), found)
            console.print(f"{model} {name}: {problem.start_secs / cost.run_secs:.4f}", highlight=False)


def _priced(*arguments: object) -> None:
    """In a process of its own."""
    try:
        price_anew(*arguments)  # type: ignore[arg-type]
    except RlflowError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def begin(folder: Path, model: str, rows: Iterable[Row], target: str, databases: int) -> list[dict[str, float]]:
    """What is known of a model; UsageError where that, or a run, is of another machine or other kernels."""
    ours, path = prices(target), anew_path(folder, model)
    found = read_anew(folder, model) or {"prices": ours, "databases": []}
    if found["prices"] != ours:
        raise UsageError(f"{path}: is of {found['prices']}, this is {ours}; remove it and its databases")
    if other := next((row for row in rows if row.get("prices", ours) != ours), None):
        raise UsageError(f"{folder}: runs of {model} are of {other['prices']}, this is {ours}; price them anew there")
    found["databases"] += [{} for _ in range(databases - len(found["databases"]))]
    write_json(anew_path(folder, model), found)
    known: list[dict[str, float]] = found["databases"]
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--databases", type=int, default=3, help="how many")
    parser.add_argument("--target", default="llvm")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for model, methods in rows_of(options.folder).items():
            rows = [row for each in methods.values() for row in each]
            runs = {run_name(row): plan_of(row) for row in rows if "plan" in row}
            for number, known in enumerate(begin(options.folder, model, rows, options.target, options.databases)):
                todo = {name: plan for name, plan in runs.items() if name not in known}
                if not todo:
                    continue
                process = context.Process(target=_priced, args=(model, options.target, todo, options.folder, number))
                process.start()
                try:
                    process.join()
                finally:  # it would go on measuring
                    process.kill()
                if process.exitcode:
                    return process.exitcode
    except RlflowError as error:  # as for a target that cannot be measured here
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
