"""One agent trained on several models, tried on models and input shapes that it has never seen.

    python scripts/generalise.py --train zoo:resnet18 zoo:inception-v3 --unseen zoo:squeezenet1.1 zoo:resnet18@192 \\
        --steps 8000 --seeds 5 --out runs/general

For each seed an agent is trained once (and gone on with where it was interrupted), then it acts on each unseen model
for a number of steps, without learning. Beside it stand family search to its own end, and random walks from where the
agent begins and from the cheapest graphs met (`--search random-restarts`), for as many steps: shares are (gain - 1) of
(family search's gain - 1).
Gains are graph gains. Goes on with what is in --out; called twice at once (`taskset -c 0`, `-c 1`), one call leaves
to the other what seeds that is at. `scripts/paper.py xrlflow-shapes OUT` prints the table again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agents import Run, prices, searched
from agents_results import check_made, locked, read_json
from papers.shapes import unseen_lines

from rlflow_tvm.agents import AGENTS
from rlflow_tvm.cli import model_path, parse_target, progress_bar, write_json
from rlflow_tvm.errors import RlflowError
from rlflow_tvm.search import Budget, make_search
from rlflow_tvm.superoptimize import agent_search
from rlflow_tvm.training import TrainingOutcome, train_on_models

WALKS, SEARCH = AGAINST = ["random-restarts", "family"]
"""What the agent is held against."""


def trained(options: argparse.Namespace, seed: int) -> TrainingOutcome:
    """The agent with this seed."""
    folder = options.out / f"{options.agent}.{seed}"
    with progress_bar(f"seed {seed}") as bar:
        return train_on_models(
            {name: model_path(name) for name in options.train}, options.agent, parse_target(options.target),
            steps=options.steps, seed=seed, out=folder, resume=(folder / "agent.safetensors").exists(),
            horizon=options.horizon, predict=options.predict, progress=bar,
        )  # fmt: skip


def tried(options: argparse.Namespace, model: str, seed: int, checkpoint: Path) -> dict[str, Any]:
    """What the agent, random walks and (with the first seed) family search find on one unseen model."""
    run = Run(model, options.agent, seed, options.budget, options.horizon, options.predict, options.target)
    searches = {
        "agent": agent_search(checkpoint, seed, Budget(options.budget)),
        WALKS: make_search(WALKS, seed, Budget(options.budget)),
    }
    if seed == 0:
        searches[SEARCH] = make_search(SEARCH)
    return {"model": model, "seed": seed, **{name: searched(run, each)[1] for name, each in searches.items()}}


def rows_there(path: Path) -> list[dict[str, Any]]:
    """What was found so far, by whichever process."""
    return read_json(path) if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True, help="models to train on: ONNX files or zoo:NAME")
    parser.add_argument("--unseen", nargs="+", required=True, help="models to try it on")
    parser.add_argument("--agent", default="ppo", choices=list(AGENTS))
    parser.add_argument("--steps", type=int, default=8000, help="environment steps of a training")
    parser.add_argument("--budget", type=int, default=500, help="environment steps on an unseen model")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--horizon", type=int, default=60)
    parser.add_argument("--predict", type=float, default=0.3, help="of a graph's time, what may be predicted")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--out", type=Path, required=True, help="folder of the agents and the results")
    options = parser.parse_args()
    options.unseen = list(dict.fromkeys(options.unseen))  # twice there it would be two of its seeds
    path = options.out / "results.json"
    made = {name: getattr(options, name) for name in ("train", "agent", "steps", "budget", "horizon", "predict")}
    try:
        made |= {"prices": prices(options.target), "against": AGAINST}
        check_made(path, rows_there(path), made)
        for seed in range(options.seeds):
            with locked(options.out / f"{options.agent}.{seed}.lock") as ours:
                there = {(row["model"], row["seed"]) for row in rows_there(path)}
                left = [model for model in options.unseen if (model, seed) not in there]
                if not left:
                    continue
                if not ours:
                    print(f"seed {seed}: another process does it", flush=True)
                    continue
                training = trained(options, seed)
                for model in left:
                    found = tried(options, model, seed, training.checkpoint)
                    row = {**found, "training_secs": training.wall_secs, "made": made}
                    with locked(options.out / "results.lock", wait=True):
                        write_json(path, [*rows_there(path), row])
    except RlflowError as error:
        parser.error(str(error))
    print(f"{options.agent}, trained on {', '.join(options.train)}\n")
    print("\n".join(unseen_lines([row for row in rows_there(path) if row["model"] in options.unseen])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
