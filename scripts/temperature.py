"""What a dream's temperature is worth: controllers trained in the dreams of one world model, tried in the real one.

    python -m rlflow_tvm.train zoo:bert-base --agent world-model --steps 4000 --horizon 60 --out runs/world
    python scripts/temperature.py runs/world zoo:bert-base --out temperature.json

For each temperature and seed a controller learns in dreams alone, with the V and M of the training in RUN; then it
plays real episodes, which nobody learns from. Scores are returns of an episode: in dreams those of the last update
(they begin all along real episodes, so that they need not be as large as real ones), in the real environment from the
start graph. As RLFlow's table 3. Goes on with what is in --out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from agents_report import told
from rich.console import Console
from rich.table import Table

from rlflow_tvm import from_onnx
from rlflow_tvm.agents import load_agent
from rlflow_tvm.agents.checkpoint import load_checkpoint
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.ppo import PPO, load_parameters
from rlflow_tvm.agents.training import torch_settings
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.agents.world.controller import Eyes, SeeingPolicy
from rlflow_tvm.agents.world.dream import Dream, imagine
from rlflow_tvm.agents.world.model import Experience, WorldModel
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.agents.world.training import make_controller, make_model
from rlflow_tvm.cli import model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, PredictionPolicy, default_path
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem

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


def dream_of(model: WorldModel, config: WorldModelConfig, rollouts: Rollouts, temperature: float) -> Dream:
    """Dreams along the training's episodes, with what they told of places."""
    held, learnt = rollouts.split(config.held_out)
    return Dream.along(Experience(model, learnt), Experience(model, held), places_of(rollouts), config, temperature)


def places_of(rollouts: Rollouts) -> Places:
    """What the episodes told of places."""
    places = Places()
    places.learn(rollouts.episodes)
    return places


def scores(
    model: WorldModel, config: WorldModelConfig, rollouts: Rollouts, env: GraphRewriteEnv, temperature: float, seed: int
) -> dict[str, Any]:
    """A controller's, trained at one temperature."""
    dream = dream_of(model, config, rollouts, temperature)
    ppo = PPO(model.sizes, config.controller, seed, lambda: make_controller(model.sizes, config))
    for update in range(config.iterations * config.controller_updates):
        dreamt = imagine(dream, ppo.policy, config.dreams, int(np.random.default_rng([seed, update]).integers(2**31)))
        ppo.update(dreamt)
    policy = SeeingPolicy(ppo.policy, Eyes(model.sizes, model.vision, model.memory), places_of(rollouts))
    real = []
    for number in range(EPISODES):
        real.append(collect_episode(env, policy, episode_rng(seed, number)))
    return {
        "temperature": temperature,
        "seed": seed,
        "dream_returns": [each.total_reward for each in dreamt],
        "real_returns": [each.total_reward for each in real],
        "best_gain": max(each.run_secs[0] / min(each.run_secs) for each in real),
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
    model, config, rollouts, metadata = learnt_model(options.run)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    there = {(row["temperature"], row["seed"]) for row in rows}
    policy = PredictionPolicy(share=metadata["predict"])
    with (
        KernelDatabase(default_path()) as database,
        CostModel(parse_target(options.target), database, policy=policy) as cost_model,
        torch_settings(config.threads),
    ):
        problem = RewriteProblem(from_onnx(model_path(options.model)), cost_model)
        env = GraphRewriteEnv(problem=problem, horizon=metadata["horizon"], reward=metadata["reward"])
        for seed in range(options.seeds):
            for temperature in options.temperatures:
                if (temperature, seed) not in there:
                    rows.append(scores(model, config, rollouts, env, temperature, seed))
                    write_json(options.out, rows)
    table = Table(title=f"{options.model}: returns of an episode, mean and 95 % interval over the seeds")
    for column in ("temperature", "dream", "real", "best gain", "seeds"):
        table.add_column(column, justify="right")
    for temperature in options.temperatures:
        own = [row for row in rows if row["temperature"] == temperature]
        means = [[float(np.mean(row[name])) for row in own] for name in ("dream_returns", "real_returns")]
        table.add_row(f"{temperature:g}", *map(told, means), told([row["best_gain"] for row in own]), str(len(own)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
