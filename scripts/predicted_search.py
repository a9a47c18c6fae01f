"""A greedy search that may predict kernels against one that measures them all, from databases without the model's own.

    python scripts/predicted_search.py --models zoo:bert-base --share 0.5

For each model both searches begin with a copy of the database from which everything is gone that pricing the model and
random walks from it touch (measured first, where the database lacks it), as in `python -m rlflow_tvm.cost evaluate`.
Told are the kernels that each had to measure, and the two modules' times end to end: ratios round by round, both in the
same process, a new one each round.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, write_json
from rlflow_tvm.cost import (
    Candidate,
    CostModel,
    KernelDatabase,
    PredictionPolicy,
    default_path,
    export_library,
    measure_interleaved,
)
from rlflow_tvm.evaluation import model_kernels
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.kernels import num_cores, pipeline
from rlflow_tvm.search import SearchResult, make_search
from rlflow_tvm.superoptimize import optimize

BURSTS = 4
WALKS, STEPS, SEED = 4, 20, 0  # those of `cost evaluate`


def without(path: Path, keys: Iterable[str]) -> None:
    """Drop all times of these kernels from a database."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "DELETE FROM measurement WHERE kernel = ?1 OR kernel LIKE ?1 || '/%'", [(key,) for key in keys]
        )


def searched(
    mod: tvm.IRModule, database: Path, share: float, target: tvm.target.Target, library: Path
) -> tuple[SearchResult, Candidate]:
    """What greedy search finds, with what it measured left in `database`, and the module built of it."""
    with (
        KernelDatabase(database) as opened,
        CostModel(target, opened, policy=PredictionPolicy(share=share)) as cost_model,
    ):
        result = optimize(mod, make_search("greedy", SEED), cost_model)
        return result, export_library(result.state.bound(), target, library, pipeline(target, cost_model.choices))


def compared(name: str, database: Path, share: float, target: tvm.target.Target, rounds: int) -> dict[str, Any]:
    """The figures of one model."""
    mod = from_onnx(model_path(name))
    inputs = list(random_inputs(mod, SEED).values())
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.sqlite"
        with KernelDatabase(database) as opened:
            own = model_kernels(mod, target, opened, WALKS, STEPS, SEED)
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(start)) as copy:
            source.backup(copy)
        without(start, own.touched)
        results, candidates = {}, {}
        for kind, allowed in (("measured", 0.0), ("predicted", share)):
            copied = Path(shutil.copy(start, Path(folder) / f"{kind}.sqlite"))
            results[kind], candidates[kind] = searched(mod, copied, allowed, target, Path(folder) / f"{kind}.so")
        times: dict[str, list[float]] = {kind: [] for kind in candidates}
        for _ in range(rounds):
            run = measure_interleaved(candidates, inputs, BURSTS, threads=num_cores(target))
            for kind, secs in times.items():
                secs.append(run[kind].run_secs)
    ratios = [a / b for a, b in zip(times["predicted"], times["measured"], strict=True)]
    return {
        "model": name,
        "share": share,
        "searches": {
            kind: {
                "kernels_measured": result.kernels_measured,
                "kernels_predicted": result.kernels_predicted,
                "env_steps": result.env_steps,
                "wall_secs": result.wall_secs,
                "plan_length": len(result.plan),
                "run_secs_before": result.run_secs_before,
                "run_secs_after": result.run_secs_after,
                "end_to_end_secs": times[kind],
            }
            for kind, result in results.items()
        },
        "measured_share": results["predicted"].kernels_measured / max(results["measured"].kernels_measured, 1),
        "end_to_end_ratio": float(np.median(ratios)),
    }


def lines(row: dict[str, Any]) -> str:
    told = [row["model"]]
    for kind, search in row["searches"].items():
        told.append(
            f"  {kind}: {search['kernels_measured']} kernels measured, {search['plan_length']} rewrites, "
            f"{search['wall_secs']:.0f} s, cost {1e3 * search['run_secs_before']:.3f} -> "
            f"{1e3 * search['run_secs_after']:.3f} ms, end to end {1e3 * np.median(search['end_to_end_secs']):.3f} ms"
        )
    told.append(f"  measured with predictions: {row['measured_share']:.1%} of the kernels")
    told.append(f"  end to end, predicted / measured: {row['end_to_end_ratio']:.3f}")
    return "\n".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:bert-base"], help="ONNX files or zoo:NAME")
    parser.add_argument("--share", type=float, default=0.5, help="of a graph's time that may be predicted")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--database", type=Path, help="by default the one that searches use")
    parser.add_argument("--target", default="llvm", help="llvm: this machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with errors_of(parser):
        check_writable(options.json)
        target = parse_target(options.target)
        for name in options.models:
            rows.append(compared(name, options.database or default_path(), options.share, target, options.rounds))
            print(lines(rows[-1]), flush=True)
            write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
