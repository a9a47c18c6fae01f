"""ONNX Runtime's time on our exports against its time on the original files, model by model.

    python scripts/export_time.py --search family --budget 30s --out exported.json
    python scripts/export_time.py --models zoo:resnet18 model.onnx --search none --out exported.json

For each model: the original file; its import, exported as it is; and what the search made of it with the whole
catalogue of rules, exported. They run in interleaved rounds, one process each; ratios (the original's time over the
export's) are taken round by round, above 1 the export is faster. Searches are for TVM's kernels, so what they find need
not be faster here.

Each export has passed `onnx.checker`. The table tells how far its outputs are from the original's by ONNX Runtime, and
how far those of the export imported again, by TVM, as a share of the output's range; a name of an input or an output
that is not the original's ends the script. What is measured is written to --out as it comes, and models that are there
already are not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import tvm
from agents import prices
from agents_results import check_made, read_json, read_number
from papers.page import markdown
from papers.results import machine

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import (
    Candidate,
    CostModel,
    EndToEnd,
    KernelDatabase,
    Ratio,
    default_path,
    measure_interleaved,
    ratio_json,
)
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import RewriteError, RlflowError
from rlflow_tvm.frontend import random_inputs, save_onnx, to_onnx, zoo
from rlflow_tvm.kernels import num_cores
from rlflow_tvm.search import DEFAULT_SEARCH, SEARCHES, Budget, make_search
from rlflow_tvm.superoptimize import optimize
from rlflow_tvm.verify import run_module

ORIGINAL, IMPORTED, SEARCHED = "original", "imported", "searched"


def exports(mod: tvm.IRModule, search: str, budget: Budget | None, cost_model: CostModel) -> dict[str, Any]:
    """The modules to export, by the candidates' names, and the number of rewrites of each."""
    found = {IMPORTED: (mod, 0)}
    if search != "none":
        state = optimize(mod, make_search(search, budget=budget), cost_model).state
        found[SEARCHED] = state.bound(), len(state.actions)
    return found


def interface(path: Path) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs of a file."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [i.name for i in graph.input if i.name not in weights], [o.name for o in graph.output]


def bench(model: str, search: str, budget: Budget | None, rounds: int, cost_model: CostModel) -> dict[str, Any]:
    """One model's figures.

    Raises:
        RewriteError: an export's inputs or outputs are not called as the original's.
    """
    path, started = model_path(model), time.monotonic()
    mod = from_onnx(path)
    inputs = list(random_inputs(mod, 0).values())
    row: dict[str, Any] = {"model": model, "search": search, "rounds": rounds, **machine()}
    with tempfile.TemporaryDirectory() as folder:
        candidates = {ORIGINAL: Candidate("onnx", path)}
        again = {}
        for name, (each, rewrites) in exports(mod, search, budget, cost_model).items():
            file = Path(folder) / f"{name}.onnx"
            save_onnx(to_onnx(each), file)
            if interface(file) != interface(path):
                raise RewriteError(f"{model}, {name}: inputs or outputs have other names: this is a bug, report it")
            again[name] = run_module(from_onnx(file), cost_model.target, inputs)
            candidates[name] = Candidate("onnx", file)
            row[f"{name}_rewrites"] = rewrites
            row[f"{name}_nodes"] = len(onnx.load(file, load_external_data=False).graph.node)
        row["made_secs"] = time.monotonic() - started
        with progress_bar(f"{model}: timing") as bar, cost_model.timer.in_turn():
            measured = measure_interleaved(
                candidates, inputs, rounds, threads=num_cores(cost_model.target),
                on_progress=lambda done, total: bar(done, total),
            )  # fmt: skip
    theirs = measured[ORIGINAL]
    row["original_secs"] = theirs.run_secs
    for name, outputs in again.items():
        row |= compared(name, theirs, measured[name])
        row[f"{name}_again_error"] = finite(range_error(outputs, theirs.outputs))
    return row


def compared(name: str, theirs: EndToEnd, ours: EndToEnd) -> dict[str, Any]:
    """An export's figures against the original's."""
    return {
        f"{name}_secs": ours.run_secs,
        f"{name}_error": finite(range_error(ours.outputs, theirs.outputs)),
        **ratio_json(f"{name}_gain", Ratio.of(theirs, ours)),
    }


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    columns = ("model", "original, ms", "over export", "over searched export", "rewrites", "difference", "again")
    lines = []
    for row in rows:
        names = [name for name in (IMPORTED, SEARCHED) if f"{name}_gain" in row]
        gains = [gain(row, name) for name in (IMPORTED, SEARCHED)]
        worst = [max(read_number(row[f"{name}_{of}"]) for name in names) for of in ("error", "again_error")]
        rewrites = str(row.get(f"{SEARCHED}_rewrites", "-"))
        called = row["model"].removeprefix("zoo:")
        lines.append((called, f"{row['original_secs'] * 1e3:.2f}", *gains, rewrites, *(f"{w:.1e}" for w in worst)))
    return markdown(columns, lines)


def gain(row: dict[str, Any], name: str) -> str:
    if f"{name}_gain" not in row:
        return "-"
    interval = row[f"{name}_gain_interval"]
    return f"{row[f'{name}_gain']:.2f}x" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"zoo:{name}" for name in zoo.names()]
    parser.add_argument("--models", nargs="+", default=every, help="ONNX files or zoo:NAME (default: all of the zoo)")
    parser.add_argument("--search", choices=(*SEARCHES, "none"), default=DEFAULT_SEARCH)
    parser.add_argument("--budget", help="of the search, as of rlflow_tvm.optimize")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    target = parse_target("llvm")
    made = {"budget": None if options.search == "none" else options.budget, "rounds": options.rounds}
    made["prices"] = prices("llvm")
    try:
        check_writable(options.out)
        rows: list[dict[str, Any]] = read_json(options.out) if options.out.exists() else []
        known = [row for row in rows if row["model"] in options.models and row["search"] == options.search]
        there = {row["model"] for row in known}
        check_made(options.out, known, made)
        budget = None if options.budget is None else Budget.parse(options.budget)
        with KernelDatabase(default_path()) as database, CostModel(target, database) as cost_model:
            for model in dict.fromkeys(options.models):
                if model not in there:
                    rows.append({**bench(model, options.search, budget, options.rounds, cost_model), "made": made})
                    write_json(options.out, rows)
                    print(*table(rows[-1:])[2:], flush=True)
    except RlflowError as error:
        parser.error(str(error))
    print("\n".join(table(row for row in rows if row["model"] in options.models and row["search"] == options.search)))


if __name__ == "__main__":
    main()
