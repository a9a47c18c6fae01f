"""X-RLflow's generalisation: one agent on models and shapes that it was not trained on. Of `scripts/generalise.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from agents_results import Row, gain, told

from papers.page import NOTHING, Page, markdown, one, rows_in, short

WALKS = ("random-restarts", "random")
ENDS = ("family", "greedy")
"""Methods that were run, each in place of the one after it."""


def shapes(paths: Sequence[Path]) -> Page:
    """A line for each unseen model."""
    path = one(paths)
    file = path / "results.json" if path.is_dir() else path
    lines = [
        *unseen_lines(rows_in(file, ("model", "seed", "agent"), "generalise.py")),
        "",
        "Graph gains, means and 95 % intervals over the seeds; the agent and random walks within the same number of "
        "steps, the search to its own end. Shares are of what the search gains.",
    ]
    return Page(lines)


def unseen_lines(rows: Sequence[Row]) -> list[str]:
    """The table of what the agent, random walks and a search found on unseen models, as Markdown."""
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        gains = [gain(row["agent"]) for row in own]
        method, end = next((pair for pair in (run(row, ENDS) for row in own) if pair), (NOTHING, None))
        best = 1.0 if end is None else gain(end)
        trainings = [row["training_secs"] for row in own if "training_secs" in row]
        walks = [pair for pair in (run(row, WALKS) for row in own) if pair]
        cells.append(
            [
                short(model), str(len(own)),
                f"{np.median([row['agent']['env_steps'] for row in own]):.0f}", told(gains),
                NOTHING if not walks else f"{told([gain(row) for _, row in walks])} ({walks[0][0]})", method,
                NOTHING if end is None else f"{best:.3f}", NOTHING if end is None else str(end["env_steps"]),
                told([(each - 1) / (best - 1) for each in gains], 2) if best > 1 else NOTHING,
                f"{np.median([row['agent']['curve'][-1][0] for row in own]):.0f}",
                f"{np.median([row['agent']['wall_secs'] for row in own]):.1f}",
                NOTHING if not trainings else f"{np.median(trainings):.0f}",
            ]
        )  # fmt: skip
    columns = (
        *("unseen", "seeds", "steps", "agent", "random walks", "search", "its gain", "its steps", "share of its gain"),
        *("agent's steps until its best", "agent, s", "its training, s"),
    )
    return markdown(columns, cells)


def run(row: Row, methods: Sequence[str]) -> tuple[str, Any] | None:
    """The first of the methods that was run, and what it found."""
    return next(((method, row[method]) for method in methods if method in row), None)
