"""A model kernel by kernel, in its place in the model: time, share of the whole, rate, share of the possible.

The share of peak is the time that the kernel's operations (or its bytes, where those take longer) need at the
machine's best measured rate, over the time that the kernel takes. The rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlflow_tvm import ApplyPlan, from_onnx
from rlflow_tvm.cli import check_writable, errors_of, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import KernelDatabase, KernelTimer, Temperatures, default_path, kernel_flops, measure_roofline
from rlflow_tvm.kernels import Lowering, explain

HEAVY_RULES = ("conv2d", "conv2d_pixels", "winograd", "matmul")
MEASURED = ("run_secs", "flops_per_sec", "share_of_peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="ONNX files or zoo:NAME")
    parser.add_argument("--plan", help="replay this plan first (one model only)")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--least", type=float, default=0.5, help="show kernels from this percentage of the model on")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    with errors_of(parser):
        check_writable(arguments.out)
        tell(arguments)


def tell(arguments: argparse.Namespace) -> None:
    """Measure, show and write what was asked for."""
    target = parse_target(arguments.target)
    best = measure_roofline(target)
    console = Console(width=150)
    console.print(f"best rates: {best.flops_per_sec / 1e9:.0f} GFLOP/s, {best.bytes_per_sec / 1e9:.1f} GB/s")
    lowering, temperatures, rows = Lowering(target), Temperatures(target), []
    with KernelDatabase(default_path()) as database, KernelTimer(target, database) as timer:
        for model in arguments.models:
            mod = from_onnx(model_path(model))
            if arguments.plan:
                mod = ApplyPlan(arguments.plan)(mod)
            launches = lowering.launches(mod)
            kernels = temperatures.kernels(launches)
            rules = {row.key: row.rule for row in explain(mod, target)}
            with progress_bar(model) as bar:
                measured = timer.measure(kernels, bar, lambda graph=launches: temperatures.rehearsal(graph))
            for kernel, measurement in zip(kernels, measured, strict=True):
                secs = measurement.run_secs or float("nan")
                rows.append(
                    {
                        "model": model, "kernel": kernel.name, "key": kernel.key, "rule": rules[kernel.key],
                        "count": kernel.count,
                        "run_secs": secs, "flops_per_sec": kernel_flops(kernel.func) / secs,
                        "share_of_peak": best.least_secs(kernel) / secs,
                        "shapes": [[int(d) for d in p.ty.shape] for p in kernel.func.params],
                    }
                )  # fmt: skip
            show(console, [row for row in rows if row["model"] == model], arguments.least)
    shares = [row["share_of_peak"] for row in rows if row["rule"] in HEAVY_RULES and math.isfinite(row["run_secs"])]
    if shares:
        console.print(f"matmul and convolution: {len(shares)} kernels, median share {np.median(shares):.2f}, "
                      f"lowest {min(shares):.2f}, {sum(s < 0.5 for s in shares)} under 0.5")  # fmt: skip
    write_json(arguments.out, as_json(rows))


def as_json(rows: list[dict]) -> list[dict]:
    """The rows; null for the figures of a kernel that could not be run."""
    return [{**row, **{name: finite(row[name]) for name in MEASURED}} for row in rows]


def show(console: Console, rows: list[dict], least: float) -> None:
    """One model's table, the dearest kernel first, and the names of those that could not be run."""
    name, launches = rows[0]["model"], sum(row["count"] for row in rows)
    failed = [row["kernel"] for row in rows if not math.isfinite(row["run_secs"])]
    rows = [row for row in rows if math.isfinite(row["run_secs"])]
    total = sum(row["count"] * row["run_secs"] for row in rows)
    without = f" but for {len(failed)} kernels that could not be run" if failed else ""
    table = Table(title=f"{name}: {total * 1e3:.2f} ms in {launches} launches{without}")
    for column in ("kernel", "rule", "shapes", "count", "us each", "% of all", "GFLOP/s", "of peak"):
        table.add_column(column, justify="left" if column in ("kernel", "rule", "shapes") else "right")
    for row in sorted(rows, key=lambda row: -row["count"] * row["run_secs"]):
        percent = 100 * row["count"] * row["run_secs"] / total
        if percent >= least:
            shapes = " ".join("x".join(map(str, shape)) for shape in row["shapes"])
            table.add_row(
                row["kernel"], row["rule"], shapes, str(row["count"]), f"{row['run_secs'] * 1e6:.1f}",
                f"{percent:.1f}", f"{row['flops_per_sec'] / 1e9:.0f}", f"{row['share_of_peak']:.2f}",
            )  # fmt: skip
    console.print(table)
    if failed:
        console.print(f"could not be run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
