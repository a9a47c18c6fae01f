"""How long a step of a dream takes, and a step of the real environment.

    python -m rlflow_tvm.train zoo:bert-base --agent world-model --steps 4000 --horizon 60 --out runs/world
    python scripts/dream_time.py runs/world zoo:bert-base

Both with actions drawn uniformly, without the time of choosing them: dreams so many at once, as in training; the real
environment alone, with its database warm (a round is played before, and nothing is timed in which a kernel was
measured). In turns, in one process. RLFlow: 10 ms against 850 ms.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from temperature import begin_of, experience, learnt_model, places_of

from rlflow_tvm import from_onnx
from rlflow_tvm.agents.observation import actions_at
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.torch_settings import torch_settings
from rlflow_tvm.agents.world.dream import Dream
from rlflow_tvm.cli import check_writable, model_path, parse_target, write_json
from rlflow_tvm.cost import CostModel, KernelDatabase, PredictionPolicy, default_path
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.errors import RlflowError

STEPS = 50


def dreamt(dream: Dream, batch: int, seed: int) -> list[float]:
    """Seconds of steps of `batch` dreams at once; where one ends, all begin anew."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    state, times = dream.draw(batch, generator), []
    for _ in range(STEPS):
        offsets = state.sites.offsets
        chosen = rng.integers(offsets[:-1], offsets[1:])
        began = time.perf_counter()
        following, _, over = dream.step(state, chosen, generator)
        _ = following.seen  # as a real step tells what it leads to
        times.append(time.perf_counter() - began)
        left = torch.nonzero(~over).squeeze(1)
        state = following[left] if len(left) == batch else dream.draw(batch, generator)
    return times


def real(env: GraphRewriteEnv, policy: UniformPolicy, cost_model: CostModel, seed: int) -> list[float]:
    """Seconds of steps in which nothing was measured."""
    rng, times, over = np.random.default_rng(seed), [], True
    for _ in range(STEPS):
        if over:
            observation, _ = env.reset(seed=int(rng.integers(2**31)))
        kept = policy.compact(observation)
        action = actions_at([kept], policy.draw([kept], rng))[0]
        measured, began = cost_model.measured, time.perf_counter()
        observation, _, terminated, truncated, _ = env.step(action)
        secs, over = time.perf_counter() - began, terminated or truncated
        if cost_model.measured == measured:
            times.append(secs)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a training with --agent world-model")
    parser.add_argument("model", help="its model: an ONNX file or zoo:NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], help="dreams at once")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps each")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    options = parser.parse_args()
    try:
        times = timed(options)
    except RlflowError as error:
        parser.error(str(error))
    step = float(np.median(times[0]))
    print(f"{options.model}: a real step {1e3 * step:.2f} ms (median of {len(times[0])})")
    dreams = [{"batch": batch, "step_secs": float(np.median(times[batch]))} for batch in options.batches]
    write_json(options.json, [{"model": options.model, "real_secs": step, "dreams": dreams}])
    for dreamt_step in dreams:
        batch, secs = dreamt_step["batch"], dreamt_step["step_secs"]
        print(
            f"  {batch} dreams at once: {1e3 * secs:.2f} ms a step, {1e3 * secs / batch:.4f} ms a dream: "
            f"1/{step * batch / secs:.0f} of a real one"
        )
    return 0


def timed(options: argparse.Namespace) -> dict[int, list[float]]:
    """How many dreams at once, or 0 for the real environment -> the seconds of each step."""
    check_writable(options.json)
    model, config, rollouts, metadata = learnt_model(options.run)
    dream = Dream.along(experience(model, config, rollouts, metadata), places_of(rollouts), config)
    policy = UniformPolicy(model.sizes)
    times: dict[int, list[float]] = {batch: [] for batch in (0, *options.batches)}  # 0: the real environment
    with (
        KernelDatabase(default_path()) as database,
        CostModel(
            parse_target(options.target), database, policy=PredictionPolicy(share=metadata["predict"])
        ) as cost_model,
        torch_settings(config.threads),
    ):
        problem = RewriteProblem(from_onnx(model_path(options.model)), cost_model)
        begin = begin_of(problem, metadata)
        env = GraphRewriteEnv(problem=problem, horizon=metadata["horizon"], reward=metadata["reward"], begin=begin)
        for seed in range(options.rounds + 1):
            found = {0: real(env, policy, cost_model, seed)}
            found |= {batch: dreamt(dream, batch, seed) for batch in options.batches}
            for batch, secs in found.items():
                times[batch] += secs if seed else []  # the first round warms up
    return times


if __name__ == "__main__":
    sys.exit(main())
