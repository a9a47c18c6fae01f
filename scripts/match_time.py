"""How long it takes to find all sites of all rules: from scratch, and after each rewrite of a random walk.

    python scripts/match_time.py --models zoo:bert-base zoo:inception-v3

From scratch: a graph of which nothing is known but its bindings, the rules' forms compiled before. After a rewrite: the
neighbourhood's sites, without the rewrite itself.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import model_path
from rlflow_tvm.dataflow import Node
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.kernels import as_target, vector_lanes
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.apply import apply_match
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.matcher import Matches
from rlflow_tvm.search import random_action


def from_scratch(state: GraphState, rounds: int) -> list[float]:
    secs = []
    for _ in range(rounds):
        known = state.graph
        nodes = [Node.of(node.var, node.value, node.binding) for node in known.nodes]  # new: nothing read off them yet
        graph = Graph(known.params, known.inputs, nodes, known.output, known.attrs, known.prim_funcs)
        began = time.perf_counter()
        Matches.of(graph, state.ruleset)
        secs.append(time.perf_counter() - began)
    return secs


def after_rewrites(state: GraphState, steps: int, seed: int) -> list[float]:
    """Fewer where nothing is left to rewrite, or moves are refused."""
    rng, secs, refused = np.random.default_rng(seed), list[float](), 0
    while len(secs) + refused < steps and any(state.sites.values()):
        action = random_action(state, rng)
        if action is None:
            continue
        try:
            graph = apply_match(state.graph, state.match(action), state.matches.parameters)
        except RewriteError:
            refused += 1
            continue
        began = time.perf_counter()
        state.matches.after(graph)
        secs.append(time.perf_counter() - began)
        state = state.apply(action)
    return secs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:bert-base", "zoo:inception-v3"], help="files or zoo:NAME")
    parser.add_argument("--rounds", type=int, default=15, help="from scratch")
    parser.add_argument("--steps", type=int, default=60, help="rewrites")
    parser.add_argument("--seed", type=int, default=0, help="of the rewrites")
    options = parser.parse_args()
    ruleset = default_rules(vector_lanes(as_target("llvm")))
    for name in options.models:
        state = GraphState.from_module(from_onnx(model_path(name)), ruleset)
        sites = sum(len(found) for found in state.sites.values())
        scratch, after = (
            [1e3 * secs for secs in found]
            for found in (from_scratch(state, options.rounds), after_rewrites(state, options.steps, options.seed))
        )
        walked = (
            f"after a rewrite {np.median(after):.2f} ms, 95 % {np.quantile(after, 0.95):.2f}, most {max(after):.2f}"
            if after
            else "no rewrite"
        )
        print(
            f"{name}: {len(state.graph.nodes)} bindings, {len(ruleset.rules)} rules, {sites} sites; from scratch "
            f"{np.median(scratch):.1f} ms ({min(scratch):.1f} to {max(scratch):.1f}); {walked}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
