"""What a dream's temperature is worth: controllers trained in the dreams of one world model, tried in the real one.

    python -m rlflow_tvm.train zoo:bert-base --agent world-model --steps 4000 --horizon 60 --out runs/world
    python scripts/temperature.py runs/world zoo:bert-base --out temperature.json

For each temperature and seed a controller learns in dreams alone, with the V and M of the training in RUN; then it
plays real episodes, which nobody learns from. Scores are returns of an episode: in dreams those of the last update
(they begin all along real episodes, so that they need not be as large as real ones), in the real environment from where
the agent begins. As RLFlow's table 3. Goes on with what is in --out.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from agents import prices
from agents_results import Row, check_made, read_json
from papers.world import temperature_lines

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import load_agent
from rlflow_tvm.agents.checkpoint import FILE_NAME, load_checkpoint
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.ppo import PPO, load_parameters
from rlflow_tvm.agents.torch_settings import torch_settings
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Eyes, SeeingPolicy
from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.model import Experience, WorldModel
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.agents.world.training import make_controller, make_model
from rlflow_tvm.cli import check_writable, model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, PredictionPolicy, default_path
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.errors import RlflowError, UsageError
from rlflow_tvm.passes import GraphState, Plan
from rlflow_tvm.training import beginning_of

EPISODES = 8
RLFLOW = [0.1, 0.5, 0.75, 1.0, 1.2, 1.5, 1.75, 2.0, 2.5, 3.0]


def learnt_model(run: Path) -> tuple[WorldModel, WorldModelConfig, Rollouts, dict[str, Any]]:
    """V and M as they were when the training's controller was best, and the episodes that they learnt from."""
    tensors, description = load_checkpoint(run / "agent.safetensors")
    config = WorldModelConfig.from_dict(description["config"])
    model = make_model(load_agent(run / "agent.safetensors").sizes, config)
    load_parameters(model, tensors, "agent.world")
    rollouts = Rollouts(run / "rollouts")
    rollouts.load()
    return model.eval(), config, rollouts, description["metadata"]


def experience(
    model: WorldModel, config: WorldModelConfig, rollouts: Rollouts, metadata: Mapping[str, Any]
) -> Experience:
    """The training's episodes that were learnt from, as its world model sees them."""
    random_steps = math.ceil(config.random_share * metadata["total_steps"])
    return Experience(model, rollouts.split(config.held_out, random_steps)[1])


def places_of(rollouts: Rollouts) -> Places:
    """What the episodes told of places."""
    places = Places()
    places.learn(rollouts.episodes)
    return places


def begin_of(problem: RewriteProblem, metadata: Mapping[str, Any]) -> Plan | None:
    """Where a training's episodes on the problem's model begin; None at the model, as those of former versions do.
    UsageError where it was not trained on that."""
    if "begins" not in metadata:
        return None
    begun = dict(zip(metadata["structures"], metadata["begins"].values(), strict=True))
    own = f"{problem.start.structural_hash:016x}"
    if own not in begun:
        raise UsageError("this model is none of those that the agent was trained on; give one of them")
    return beginning_of(problem, begun[own]).state.plan


def scores(dream: Dream, eyes: Eyes, places: Places, config: WorldModelConfig, env: GraphRewriteEnv, seed: int) -> Row:
    """Those of a controller that learns in dreams as long as one does in an iteration of a training."""
    ppo = PPO(lambda: make_controller(eyes.sizes, config), config.controller, seed)
    for update in range(config.controller_updates):
        dreamt = imagine(dream, ppo.policy, config.dreams, int(np.random.default_rng([seed, update]).integers(2**31)))
        ppo.update(dreamt)
    informed = config.controller.informed_share > 0.0  # else it would be told what it never was in its dreams
    policy = SeeingPolicy(ppo.policy, eyes, places, informed_share=None if informed else 0.0)
    real, cheapest = [], []
    for number in range(EPISODES):
        met: list[tuple[float, GraphState]] = []
        real.append(
            collect_episode(
                env, policy, episode_rng(seed, number), lambda met=met: met.append((env.cost.run_secs, env.state))
            )
        )
        cheapest.append(min(met, key=itemgetter(0))[1])
    return {
        "temperature": dream.temperature,
        "seed": seed,
        "dream_returns": [each.total_reward for each in dreamt],
        "real_returns": [each.total_reward for each in real],
        # by second times: what was predicted, or measured once, is the more too low the more graphs there were
        "best_gain": env.problem.start_secs
        / min(env.problem.cost(state, confirmed=True).run_secs for state in cheapest),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a training with --agent world-model")
    parser.add_argument("model", help="its model: an ONNX file or zoo:NAME")
    parser.add_argument("--temperatures", type=float, nargs="+", default=RLFLOW)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the scores")
    options = parser.parse_args()
    try:
        rows = sweep(options)
    except RlflowError as error:
        parser.error(str(error))
    print(f"{options.model}: returns of an episode, mean and 95 % interval over the seeds\n")
    print("\n".join(temperature_lines(rows)))
    return 0


def sweep(options: argparse.Namespace) -> list[Row]:
    """The scores of each temperature and seed, those that are there already included."""
    check_writable(options.out)
    model, config, rollouts, metadata = learnt_model(options.run)
    seen, places = experience(model, config, rollouts, metadata), places_of(rollouts)
    eyes = Eyes(model.sizes, model.vision, model.memory)
    trained = hashlib.sha256((options.run / FILE_NAME).read_bytes()).hexdigest()[:16]
    made = {"run": str(options.run), "trained": trained, "model": options.model, "prices": prices(options.target)}
    rows: list[Row] = read_json(options.out) if options.out.exists() else []
    check_made(options.out, rows, made)
    there = {(row["temperature"], row["seed"]) for row in rows}
    policy = PredictionPolicy(share=metadata["predict"])
    with (
        KernelDatabase(default_path()) as database,
        CostModel(parse_target(options.target), database, policy=policy) as cost_model,
        torch_settings(config.threads),
    ):
        problem = RewriteProblem(from_onnx(model_path(options.model)), cost_model)
        begin = begin_of(problem, metadata)
        env = GraphRewriteEnv(problem=problem, horizon=metadata["horizon"], reward=metadata["reward"], begin=begin)
        for seed in range(options.seeds):
            for temperature in options.temperatures:
                if (temperature, seed) not in there:
                    dream = Dream.along(seen, places, config, temperature, env.limit)
                    rows.append({**scores(dream, eyes, places, config, env, seed), "made": made})
                    write_json(options.out, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
