"""Random rewrite trajectories over whole models, run and compared with the model they started from.

    python scripts/trajectories.py --models zoo:demo model.onnx --count 100 --steps 30 --seed 0

A line a trajectory and a summary; exit code 1 if any trajectory changed the outputs (the first wrong rule is named)
or could not be built. The plans of those are written to --plans, to be replayed with rlflow_tvm.ApplyPlan.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import errors_of, model_path
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.kernels import as_target, vector_lanes
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.search import random_action
from rlflow_tvm.training_files import model_name
from rlflow_tvm.verify import Comparison


def walked(start: GraphState, steps: int, rng: np.random.Generator) -> tuple[GraphState, list[str]]:
    """The state after `steps` uniformly random moves (fewer if no rule applies), and the moves that were refused."""
    state, refused = start, []
    while len(state.actions) + len(refused) < steps and any(state.sites.values()):
        action = random_action(state, rng)
        if action is None:
            continue
        try:
            state = state.apply(action)
        except RewriteError as error:
            refused.append(f"{action}: {error}")
    return state, refused


def run_model(name: str, options: argparse.Namespace) -> int:
    """Run the trajectories of one model; returns how many failed."""
    target = as_target(options.target)
    start = GraphState.from_module(from_onnx(model_path(name)), default_rules(vector_lanes(target)))
    comparison = Comparison(start, target, options.seed)
    failures = 0
    for number in range(options.count):
        began = time.monotonic()
        state, refused = walked(start, options.steps, np.random.default_rng((options.seed, number)))
        try:
            outcome = f"ok, error {comparison.check(state):.1e}"
        except Exception as error:  # noqa: BLE001 - whatever fails in one trajectory is its result; the others still run
            failures += 1
            outcome = f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            if options.plans is not None:
                path = options.plans / f"{model_name(name)}.{options.seed}.{number}.plan.json"
                state.plan.save(path)
                outcome += f" ({path})"
        counts = f"{len(state.actions)} rewrites, {len(refused)} refused, {time.monotonic() - began:.1f} s"
        print(f"{name} {number}: {outcome}; {counts}", flush=True)
        for line in refused:
            print(f"  refused {line}", flush=True)
    print(f"{name}: {options.count - failures} of {options.count} trajectories keep the outputs", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:demo"], help="ONNX files or zoo:NAME")
    parser.add_argument("--count", type=int, default=100, help="trajectories a model")
    parser.add_argument("--steps", type=int, default=30, help="moves a trajectory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="llvm", help="llvm: this machine")
    parser.add_argument("--plans", type=Path, help="folder for the plans of trajectories that fail")
    options = parser.parse_args()
    with errors_of(parser):
        return 1 if sum(run_model(name, options) for name in options.models) else 0


if __name__ == "__main__":
    sys.exit(main())
