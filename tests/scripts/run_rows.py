"""Made-up results of scripts, small enough to reckon with by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = {
    "run_secs": 10.0,
    "launch_secs": 0.0,
    "kernels": 8,
    "flops": 100,
    "bytes_moved": 400,
    "peak_bytes": 2_000_000,
}
"""Of a first graph."""


def run_row(method: str = "greedy", seed: int = 0, best: float = 8.0, **others: Any) -> dict[str, Any]:
    """A run of 100 steps from 10 seconds to `best`, half of what it saves found at step 10, the rest at step 60."""
    row = {
        "model": "zoo:one", "method": method, "steps": 100, "seed": seed, "prices": "a machine", "start_secs": 10.0,
        "best_secs": best, "env_steps": 100, "curve": [[0, 10.0], [10, (10.0 + best) / 2], [60, best]],
        "wall_secs": 20.0, "actions": ["fold@1#0", "fold@2#0", "move@3#0"],
    }  # fmt: skip
    return {**row, **others}


def with_metrics(**after: float) -> dict[str, Any]:
    """What a run tells of its first and cheapest graph."""
    return {"metrics": {"before": METRICS, "after": {**METRICS, **after}}}


def world_row(seed: int = 0, **others: Any) -> dict[str, Any]:
    """A world model's run: two iterations of judging, two updates in dreams each, one real return each."""
    log: list[dict[str, Any]] = []
    for iteration in (0, 1):
        scores = ("nll", "reward_r2", "rule_mask_f1", "rule_change_f1", "locations_exact")
        held_out = {f"held_out/{name}": 0.5 + iteration for name in scores}
        for line in (held_out, {"dream/return": 1.0 + seed}, {"dream/return": 3.0 + seed}, {"real/return": 2.0}):
            log.append({"iteration": iteration, "env_steps": 50 * (iteration + 1), **line})
    return run_row("world-model", seed, log=log, **others)


def write_runs(folder: Path, *rows: dict[str, Any]) -> Path:
    """The rows as `scripts/agents.py` leaves them."""
    for row in rows:
        path = folder / row["model"].removeprefix("zoo:") / f"{row['method']}.{row['steps']}.{row['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row))
    return folder


def bench_row(**others: Any) -> dict[str, Any]:
    """As `scripts/bench_models.py` leaves it: ours 2 ms, ONNX Runtime 3 ms, what greedy search left 1 ms."""
    row: dict[str, Any] = {"model": "zoo:one", "ours": ["unsearched", "greedy, 100 steps"]}
    for name, secs in (("unsearched", 2e-3), ("greedy, 100 steps", 1e-3), ("onnxruntime", 3e-3)):
        row |= {f"{name}_secs": secs, f"{name}_quartiles": [0.9 * secs, 1.2 * secs], f"{name}_error": 1e-6}
    return {**row, "greedy, 100 steps_graph_gain": 1.9, **others}
