"""The matrix products and convolutions of models, one by one: our kernels against torch's, interleaved.

Each distinct operator is compiled alone, by `rlflow_tvm.pipeline` and by `torch.compile`, weights being constants for
both; both are called in turns, in processes of their own with the same number of threads, on the same operands, which
lie wherever the call before left them. A line an operator: median times, torch's time over ours, GFLOP/s, and share of
the peak: of the rate of multiply-adds that stay in registers, measured in turns with the two. Operations are counted as
the definition has them, so a Winograd convolution may come above 1. What is measured is written to --out as it comes,
and operators that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from agents import prices
from agents_results import check_made, read_json, read_number
from rich.console import Console
from rich.table import Table
from tvm import relax

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import check_writable, model_path, parse_target, progress_bar, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import Candidate, Runners, export_library, export_peak, peak_flops
from rlflow_tvm.dataflow import all_bindings, variables_of
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import RlflowError
from rlflow_tvm.ir import detach
from rlflow_tvm.kernels import Choice, explain, num_cores, pipeline

MODELS = tuple(f"zoo:{n}" for n in ("resnet18", "resnet50", "squeezenet1.1", "inception-v3", "bert-base", "vit-base"))
OPERATORS = ("relax.nn.conv2d", "relax.matmul")


@dataclass(frozen=True)
class Operator:
    """A call of a product or convolution, float32; `weight`: its second operand is known at compile time."""

    call: relax.Call
    weight: bool

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) for shape in self.shapes[:2])
        if self.call.op.name == "relax.matmul":
            return f"matmul {shapes}{' (weight)' if self.weight else ''}"
        attrs = self.call.attrs
        parts = {"stride": attrs.strides, "pad": attrs.padding, "dilation": attrs.dilation}
        told = [f"{name} {'x'.join(str(int(v)) for v in values)}" for name, values in parts.items()
                if any(int(v) != (name != "pad") for v in values)]  # fmt: skip
        return " ".join(["conv2d", shapes, *told, *([f"groups {attrs.groups}"] if int(attrs.groups) > 1 else [])])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of both operands and the result."""
        types = [*(arg.ty for arg in self.call.args), self.call.ty]
        return [tuple(int(extent) for extent in ty.shape) for ty in types]

    @property
    def flops(self) -> int:
        """As the definition of the operator has them."""
        left, right, out = self.shapes
        terms = left[-1] if self.call.op.name == "relax.matmul" else math.prod(right[1:])
        return 2 * math.prod(out) * terms


class Torch(torch.nn.Module):
    """The operator as torch has it."""

    def __init__(self, operator: Operator, right: np.ndarray) -> None:
        super().__init__()
        self._attrs = None if operator.call.op.name == "relax.matmul" else operator.call.attrs
        if operator.weight:
            self.register_buffer("weight", torch.from_numpy(right))

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
        other = self.weight if right is None else right
        if self._attrs is None:
            return torch.matmul(left, other)
        top, before, bottom, behind = (int(v) for v in self._attrs.padding)
        if (top, before) != (bottom, behind):
            left, top, before = torch.nn.functional.pad(left, (before, behind, top, bottom)), 0, 0
        strides, dilation = ([int(v) for v in values] for values in (self._attrs.strides, self._attrs.dilation))
        return torch.nn.functional.conv2d(left, other, None, strides, (top, before), dilation, int(self._attrs.groups))


def operators(model: str) -> Iterator[Operator]:
    """The products and convolutions of a model, in order."""
    main = detach(from_onnx(model_path(model))).mod["main"]
    weights = set(main.params[int(main.attrs["num_input"]) :])
    for binding in all_bindings(main):
        call = binding.value
        read = variables_of(call)
        if read and all(var in weights for var in read):
            weights.add(binding.var)  # made of weights alone
        elif isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) and call.op.name in OPERATORS:
            names = [relax.Var(name, arg.ty) for name, arg in zip(("x", "y"), call.args, strict=True)]
            alone = relax.BlockBuilder().normalize(relax.Call(call.op, names, call.attrs))
            yield Operator(alone, call.args[1] in weights)


def bench(operator: Operator, target: tvm.target.Target, runners: Runners, rounds: int) -> dict[str, Any]:
    """One operator's figures."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in operator.shapes[:2]]
    mod = Choice(operator.call, operator.weight, target, ()).module()
    rules = [row.rule for row in explain(mod, target)]
    if operator.weight:
        bound = mod["main"].bind_params({mod["main"].params[1]: tvm.runtime.tensor(arrays[1])})
        mod = tvm.IRModule({tvm.ir.GlobalVar("main"): bound})
    inputs = arrays[:1] if operator.weight else arrays
    with tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(Torch(operator, arrays[1]), tuple(torch.from_numpy(a) for a in inputs))
        torch.export.save(program, Path(folder) / "torch.pt2")
        candidates = {
            "ours": export_library(mod, target, Path(folder) / "ours.so", pipeline(target)),
            "torch": Candidate("torch", Path(folder) / "torch.pt2"),
            "peak": export_peak(target, Path(folder) / "peak.so"),
        }
        measured = runners.measure(candidates, inputs, rounds)
    ours, theirs = measured["ours"], measured["torch"]
    peak = [peak_flops(target) / secs for secs in measured["peak"].round_secs]
    share, torch_share = (
        float(np.median([operator.flops / secs / best for secs, best in zip(each.round_secs, peak, strict=True)]))
        for each in (ours, theirs)
    )
    return {
        "operator": str(operator), "rules": rules, "run_secs": ours.run_secs, "torch_secs": theirs.run_secs,
        "ratio": float(np.median([b / a for a, b in zip(ours.round_secs, theirs.round_secs, strict=True)])),
        "flops_per_sec": operator.flops / ours.run_secs, "share_of_peak": share,
        "torch_share_of_peak": torch_share, "peak": float(np.median(peak)),
        "difference": finite(range_error(ours.outputs, theirs.outputs)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="ONNX files or zoo:NAME")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    try:
        check_writable(arguments.out)
        target = parse_target(arguments.target)
        made = {"rounds": arguments.rounds, "target": arguments.target, "prices": prices(arguments.target)}
        rows: list[dict[str, Any]] = read_json(arguments.out) if arguments.out.exists() else []
        check_made(arguments.out, rows, made)
        known = {row["operator"] for row in rows}
        todo: dict[str, Operator] = {}
        for model in arguments.models:
            todo.update({str(each): each for each in operators(model) if str(each) not in known})
        with Runners(num_cores(target), timeout_secs=600.0) as runners, progress_bar("operators") as bar:
            for number, (name, operator) in enumerate(todo.items()):
                bar(number, len(todo), name)
                rows.append({**bench(operator, target, runners, arguments.rounds), "made": made})
                write_json(arguments.out, rows)
    except RlflowError as error:
        parser.error(str(error))
    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """The table, the least share of the peak first, and its medians."""
    console = Console(width=150)
    peaks = [row["peak"] / 1e9 for row in rows]
    console.print(f"peak: {np.median(peaks):.0f} GFLOP/s ({min(peaks):.0f} to {max(peaks):.0f})", highlight=False)
    table = Table()
    for column in ("operator", "rule", "ours, us", "torch, us", "ratio", "GFLOP/s", "of peak", "torch's", "difference"):
        table.add_column(column, justify="left" if column in ("operator", "rule") else "right")
    for row in sorted(rows, key=lambda row: row["share_of_peak"]):
        table.add_row(
            row["operator"], " ".join(row["rules"]), f"{row['run_secs'] * 1e6:.1f}", f"{row['torch_secs'] * 1e6:.1f}",
            f"{row['ratio']:.2f}", f"{row['flops_per_sec'] / 1e9:.0f}", f"{row['share_of_peak']:.2f}",
            f"{row['torch_share_of_peak']:.2f}", f"{read_number(row['difference']):.0e}",
        )  # fmt: skip
    console.print(table)
    shares = [row["share_of_peak"] for row in rows]
    ratios = [row["ratio"] for row in rows]
    console.print(
        f"{len(rows)} operators: median share of peak {np.median(shares):.2f} (torch's "
        f"{np.median([row['torch_share_of_peak'] for row in rows]):.2f}), {sum(s < 0.5 for s in shares)} under 0.5; "
        f"torch's time over ours: geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}, "
        f"lowest {min(ratios):.2f}", highlight=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
