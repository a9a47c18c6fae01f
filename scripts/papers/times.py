"""Whole models timed: RLFlow's figure 6, and X-RLflow's cost model against end to end.

Of `scripts/bench_models.py` and `scripts/graph_cost.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from agents_results import Row, read_number

from papers.page import NOTHING, Page, markdown, one, panels, rows_in, save, scaled, short

AGAINST = {"onnxruntime": "ONNX Runtime", "torch": "torch.compile", "tvm-default": "TVM's default build"}
PLAIN = ("unsearched", "searched")
"""What bench_models.py has always timed of ours."""


def timed(row: Row) -> list[str]:
    """The candidates of a row: ours, then the others."""
    return [name for name in (*row.get("ours", PLAIN), *AGAINST) if f"{name}_secs" in row]


def figure6(paths: Sequence[Path]) -> Page:
    """Run times of whole models: unsearched, as methods left them, and as others run them."""
    rows = rows_in(one(paths), ("model", "onnxruntime_secs"), "bench_models.py")
    columns = (
        *("model", "candidate", "run time, ms", "quartiles", "ONNX Runtime's time over it", "graph gain"),
        "difference, of the output's range",
    )
    cells = []
    for row in rows:
        for name in timed(row):
            low, high = row[f"{name}_quartiles"]
            gain, ratio = row.get(f"{name}_graph_gain"), row["onnxruntime_secs"] / row[f"{name}_secs"]
            cells.append(
                [
                    short(row["model"]), AGAINST.get(name, name), scaled(row[f"{name}_secs"], 1e-3),
                    f"{1e3 * low:.3f} to {1e3 * high:.3f}", f"{row.get(f'{name}_against_onnxruntime', ratio):.3f}",
                    NOTHING if gain is None else f"{gain:.3f}", f"{read_number(row[f'{name}_error']):.1e}",
                ]
            )  # fmt: skip
    lines = [
        *markdown(columns, cells, left=2),
        "",
        "End to end, candidates in interleaved rounds, medians over all calls; ratios are medians over the rounds. "
        "`unsearched` is built with what shapes decide. `X, median seed` is the graph that method X left in the run "
        "whose cost is the median of its seeds, `as imported` and `ConvertLayout` are the unsearched graphs; these are "
        "built with the same measured kernels, and a graph gain is the faster unsearched one's time over this one's.",
    ]
    return Page(lines, partial(draw_run_times, rows))


def draw_run_times(rows: Sequence[Row], path: Path) -> None:
    """How much faster than ONNX Runtime, a panel for each model."""
    figure, axes = panels(len(rows), 4.2, 3.6)
    for each, row in zip(axes, rows, strict=True):
        names = timed(row)
        for number, name in enumerate(names):
            low, high = (row["onnxruntime_secs"] / secs for secs in reversed(row[f"{name}_quartiles"]))
            speed = row["onnxruntime_secs"] / row[f"{name}_secs"]
            bounds = [[max(speed - low, 0.0)], [max(high - speed, 0.0)]]
            each.barh(number, speed, xerr=bounds, color="0.6" if name in AGAINST else "C0", capsize=2)
        each.axvline(1.0, color="0.3", linewidth=0.8)
        each.set_yticks(range(len(names)), [AGAINST.get(name, name) for name in names], fontsize=6)
        each.set(xlabel="ONNX Runtime's time over it", title=short(row["model"]))
    save(figure, path)


def cost_model(paths: Sequence[Path]) -> Page:
    """The sum of kernels against the time end to end."""
    rows = rows_in(one(paths), ("model", "rewrites", "kernels", "cost_secs", "end_to_end_secs", "ratio"),
                   "graph_cost.py")  # fmt: skip
    cells = [
        [
            short(row["model"]), str(row["rewrites"]), str(row["kernels"]),
            scaled(float(np.median(row["cost_secs"])), 1e-3), scaled(float(np.median(row["end_to_end_secs"])), 1e-3),
            f"{100 * (row['ratio'] - 1):+.1f}", str(row.get("disturbed_rounds", NOTHING)),
        ]
        for row in rows
    ]  # fmt: skip
    errors = [100 * abs(row["ratio"] - 1) for row in rows]
    columns = (
        *("model", "random rewrites", "kernels", "sum of kernels, ms", "end to end, ms", "difference, %"),
        "disturbed rounds",
    )
    lines = [
        *markdown(columns, cells),
        "",
        f"Difference: the median over interleaved rounds of (sum of kernels) / (end to end), less one. Without signs: "
        f"median {np.median(errors):.1f} %, worst {max(errors):.1f} %.",
    ]
    return Page(lines)
