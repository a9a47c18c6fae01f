"""What the models' graphs are: operators, weights, work, memory, and how many rewrites there are. Nothing is measured.

    python scripts/graph_properties.py --models zoo:resnet18 zoo:bert-base --json graphs.json
    python scripts/paper.py rlflow-table1 graphs.json

Implementations are chosen by shapes. Graphs one rewrite away are told apart as X-RLflow's candidates are: equal ones
count once, and rewrites that change nothing do not count.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from tvm import relax

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.cost import Temperatures, kernel_bytes, kernel_flops
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.kernels import Lowering, vector_lanes
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.passes.fingerprint import distinct


def rewrites_away(state: GraphState) -> int:
    """How many different graphs one rewrite leads to."""
    differences = []
    for rule in state.sites:
        for _, match in state.located(rule):
            try:
                differences.append(Difference.of(state.graph, match, state.matches.parameters))
            except RewriteError:  # nothing would change, or not as the types allow
                continue
    return len(distinct(state.graph, differences))


def properties(model: str, target: Any) -> dict[str, Any]:
    """One model's figures."""
    state = GraphState.from_module(from_onnx(model_path(model)), default_rules(vector_lanes(target)))
    graph = state.graph
    calls = [n for n in graph.nodes if isinstance(n.value, relax.Call) and n.var not in graph.weight_only]
    shapes = [param.ty.shape.values for param in graph.params[graph.inputs :]]
    temperatures, launches = Temperatures(target), Lowering(target).launches(graph)
    kernels = temperatures.kernels(launches)
    return {
        "model": model,
        "operators": len(calls),
        "kinds": len({node.op for node in calls}),
        "weights": sum(math.prod(int(extent) for extent in shape) for shape in shapes),
        "kernels": len(launches.launches),
        "flops": sum(kernel.count * kernel_flops(kernel.func) for kernel in kernels),
        "bytes_moved": sum(kernel.count * kernel_bytes(kernel.func) for kernel in kernels),
        "peak_bytes": temperatures.peak_bytes(launches),
        "rules": sum(bool(sites) for sites in state.sites.values()),
        "sites": sum(len(sites) for sites in state.sites.values()),
        "rewrites_away": rewrites_away(state),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:demo"], help="ONNX files or zoo:NAME")
    parser.add_argument("--target", default="llvm", help="llvm: this machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with errors_of(parser):
        check_writable(options.json)
        target, rows = parse_target(options.target), []
        with progress_bar("reading graphs") as bar:
            for done, model in enumerate(options.models):
                bar(done, len(options.models), model)
                rows.append(properties(model, target))
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
