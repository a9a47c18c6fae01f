"""Models and their kernels on this machine's NVIDIA GPU: times, ratios, and share of what the GPU can do at best.

For each model a line with the time of one run by this package's pipeline (`ours_launches`: without CUDA graphs), TVM's
default CUDA pipeline over it and torch.compile over it (above 1: ours is faster; only for models that are built from
torch modules, where torch sees the GPU; `torch_graphs` is its mode "reduce-overhead", which replays CUDA graphs), all
on the same inputs in interleaved rounds, the seconds that compiling took, and the difference of our outputs from ONNX
Runtime's as a share of their range. With --search that search looks for a cheaper graph, by kernels' times in the
database: `searched` is what it finds, `unsearched` the model with the same implementations, and besides their times the
line has their prices, which are to be as much. With --kernels a line for each kernel: its time with its operands where
the last run left them, and its share of peak: the time that its operations (or its bytes, where those take longer) need
at the best rate measured here, over its time. What is measured is written to --out as it comes; a model that fails is
told of, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax, te

from rlflow_tvm import from_onnx
from rlflow_tvm.cli import ZOO_PREFIX, check_writable, model_path, write_json
from rlflow_tvm.comparison_figures import finite
from rlflow_tvm.cost import CostModel, KernelDatabase, default_path, kernel_bytes, kernel_flops
from rlflow_tvm.differences import range_error
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import CostError, KernelError, RlflowError
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.kernels import RULE_ATTR, as_target, extract_kernels, pipeline, schedule_kernel
from rlflow_tvm.kernels.pipeline import CUDA_GRAPH
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.search import SEARCHES, Budget, make_search
from rlflow_tvm.verify import flatten

Call = Callable[[], Any]
DTYPES = ("float32", "float16", "bfloat16")
AGAINST = ("tvm-default", "torch")
_SIDE = 8192  # of the product whose rate counts as the best
_COPIED = 1 << 28  # elements
_CALLS = 20
_WARM = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["zoo:demo", "zoo:resnet50", "zoo:bert-base"])
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--against", nargs="*", choices=AGAINST, default=AGAINST, help="default: both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--search", choices=SEARCHES, help="look for a cheaper graph too")
    parser.add_argument("--budget", default="60s", help="of the search: steps, or a time such as 5m")
    parser.add_argument("--kernels", action="store_true", help="time each kernel as well")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    try:
        check_writable(arguments.out)
        arguments.budget = Budget.parse(arguments.budget)
        if not tvm.cuda().exist:
            raise CostError("there is no NVIDIA GPU here: run this on a machine that has one")
        run(arguments, as_target("cuda"))
    except RlflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(arguments: argparse.Namespace, target: tvm.target.Target) -> None:
    """Measure and print all of it."""
    console = Console(width=150)
    flops, byte_rate = best_rates(target, arguments.dtype)
    console.print(
        f"{tvm.cuda().device_name}, {target.attrs['arch']}; best rates measured: {flops / 1e12:.1f} TFLOP/s "
        f"({arguments.dtype} product of side {_SIDE}), {byte_rate / 1e9:.0f} GB/s"
    )
    if torch_with_cuda() is None:
        console.print("torch.compile is left out: it needs torch with CUDA")
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        row: dict[str, Any] = {"model": model}
        rows.append(row)
        try:
            search = arguments.search and (arguments.search, arguments.budget)
            row |= bench_model(model, target, arguments.dtype, arguments.rounds, arguments.against, search)
            console.print(row, highlight=False)
            if arguments.kernels:
                row["kernels"] = bench_kernels(model, target, arguments.dtype, flops, byte_rate)
                show(console, model, row["kernels"])
        except (RlflowError, RuntimeError) as error:
            # of a kernel that cannot be launched: grid, block and name, then its whole source
            row["failed"] = " ".join(str(error).split("\n")[:3])[:300]
            console.print({"model": model, "failed": row["failed"]}, highlight=False)
        write_json(arguments.out, {"flops_per_sec": flops, "bytes_per_sec": byte_rate, "models": rows})
    failed = [row["model"] for row in rows if "failed" in row]
    if failed:
        raise KernelError(
            f"{', '.join(failed)}: failed for the reason told above; mend that, or report it with the model's name"
        )


def bench_model(
    model: str,
    target: tvm.target.Target,
    dtype: str,
    rounds: int,
    against: Collection[str],
    search: tuple[str, Budget] | None = None,
) -> dict[str, Any]:
    """Seconds of one run by each candidate, and the ratios of the others' to ours, round by round (their median)."""
    path, device = model_path(model), tvm.cuda()
    original = from_onnx(path)
    mod = original if dtype == "float32" else to_half(original, dtype)
    arrays = random_inputs(original, 0)
    inputs = [tvm.runtime.tensor(array, device) for array in arrays.values()]
    calls: dict[str, Call] = {}
    compile_secs: dict[str, float] = {}
    outputs: dict[str, list[np.ndarray]] = {}
    candidates = [("ours", pipeline(target), True), ("ours_launches", pipeline(target), False)]
    if "tvm-default" in against:
        candidates.append(("tvm_default", relax.get_default_pipeline(target), False))
    built = {name: compiled(mod, target, passes, graphs) for name, passes, graphs in candidates}
    result: dict[str, Any] = {}
    if search is not None:
        found, result = searched(mod, target, *search)
        built |= found
    for name, (main, secs) in built.items():
        compile_secs[name] = secs
        calls[name] = lambda main=main: main(*inputs)
    for name in calls.keys() - {"tvm_default"}:
        outputs[name] = [tensor.numpy() for tensor in flatten(calls[name]())]
    for name, mode in (("torch_compile", None), ("torch_graphs", "reduce-overhead")) if "torch" in against else ():
        started = time.perf_counter()
        torch_call = compiled_by_torch(model, list(arrays.values()), dtype, mode)
        if torch_call is not None:
            calls[name] = torch_call
            compile_secs[name] = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    result |= {f"{name}_secs": float(np.median(found)) for name, found in times.items()}
    for name in calls:
        if name != "ours":
            # TVM's default launches one by one, and is held against ours that does
            pairs = zip(times[name], times["ours_launches" if name == "tvm_default" else "ours"], strict=True)
            result[f"{name}_over_ours"] = float(np.median([theirs / ours for theirs, ours in pairs]))
    result |= {f"{name}_compile_secs": secs for name, secs in compile_secs.items()}
    expected = onnxruntime_outputs(path, arrays)
    result["error"] = finite(max(range_error(found, expected) for found in outputs.values()))
    return result


def compiled(
    mod: tvm.IRModule, target: tvm.target.Target, passes: tvm.transform.Pass, graphs: bool
) -> tuple[Call, float]:
    """`main`, ready to be called, and the seconds that this took; `graphs`: launches are replayed as CUDA graphs."""
    started = time.perf_counter()
    with tvm.transform.PassContext(config={CUDA_GRAPH: graphs}):
        main = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline=passes), tvm.cuda())["main"]
    return main, time.perf_counter() - started


def searched(
    mod: tvm.IRModule, target: tvm.target.Target, search: str, budget: Budget
) -> tuple[dict[str, tuple[Call, float]], dict[str, Any]]:
    """The model and what the search makes of it, as `compiled` has them, with the implementations that were found best;
    and what is told of the search: prices in seconds, of a run's kernels and launches."""
    with KernelDatabase(default_path()) as database, CostModel(target, database) as cost_model:
        found = make_search(search, 0, budget).run(RewriteProblem(mod, cost_model))
        passes = pipeline(target, cost_model.choices)
        graphs = {"unsearched": mod, "searched": found.state.bound()}
        built = {name: compiled(graph, target, passes, True) for name, graph in graphs.items()}
    told = {
        "search": search,
        "unsearched_price_secs": found.run_secs_before,
        "searched_price_secs": found.run_secs_after,
        "search_steps": found.env_steps,
        "search_secs": found.wall_secs,
        "kernels_measured": found.kernels_measured,
        "rewrites": len(found.plan),
    }
    return built, told


def bench_kernels(
    model: str, target: tvm.target.Target, dtype: str, flops: float, byte_rate: float
) -> list[dict[str, Any]]:
    """Each kernel's seconds, how often it is launched, and its share of peak."""
    mod = from_onnx(model_path(model))
    rows = []
    for kernel in extract_kernels(mod if dtype == "float32" else to_half(mod, dtype), target):
        scheduled = schedule_kernel(kernel.func, target)
        secs = kernel_seconds(scheduled, target)
        least = max(kernel_flops(kernel.func) / flops, kernel_bytes(kernel.func) / byte_rate)
        rule = str(scheduled.attrs[RULE_ATTR])
        rows.append(
            {"kernel": kernel.name, "rule": rule, "count": kernel.count, "secs": secs, "share_of_peak": least / secs}
        )
    return rows


def kernel_seconds(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> float:
    """The median time of a scheduled kernel; floats are random, integers zero."""
    module = tvm.compile(tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), target).jit()
    rng, device, arguments = np.random.default_rng(0), tvm.cuda(), []
    for param in func.params:
        shape, dtype = [int(extent) for extent in param.ty.shape], str(param.ty.dtype)
        floats = dtype.startswith(("float", "bfloat"))
        values = rng.standard_normal(shape).astype(np.dtype(dtype)) if floats else np.zeros(shape, dtype)
        arguments.append(tvm.runtime.tensor(values, device))
    return float(module.time_evaluator("kernel", device, number=_CALLS, repeat=5)(*arguments).median)


def best_rates(target: tvm.target.Target, dtype: str) -> tuple[float, float]:
    """The best measured FLOP/s of a large product (torch's where it is there, else our own) and bytes/s of a copy."""
    x = te.placeholder((_COPIED,), "float32", name="x")
    copy = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i], name="copy")])
    byte_rate = 8 * _COPIED / kernel_seconds(schedule_kernel(copy, target), target)
    left, right = (te.placeholder((_SIDE, _SIDE), dtype, name=name) for name in "ab")
    k = te.reduce_axis((0, _SIDE), "k")
    product = te.compute(
        (_SIDE, _SIDE),
        lambda i, j: te.sum(left[i, k].astype("float32") * right[j, k].astype("float32"), axis=k),
        name="product",
    )
    secs = [kernel_seconds(schedule_kernel(te.create_prim_func([left, right, product]), target), target)]
    torch = torch_with_cuda()
    if torch is not None:
        a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
        secs.append(seconds(lambda: a @ b))
    return 2 * _SIDE**3 / min(secs), byte_rate


def seconds(call: Call) -> float:
    """Seconds of one call, by the wall clock round several, the GPU being done before and after."""
    for _ in range(_WARM):
        call()
    synchronise()
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    synchronise()
    return (time.perf_counter() - started) / _CALLS


def synchronise() -> None:
    """Wait for the GPU, for TVM's stream and for torch's."""
    tvm.cuda().sync()
    torch = torch_with_cuda()
    if torch is not None:
        torch.cuda.synchronize()


def compiled_by_torch(model: str, arrays: list[np.ndarray], dtype: str, mode: str | None) -> Call | None:
    """The torch module that a model of the zoo is exported from, compiled and run once, or None where there is none."""
    torch, name = torch_with_cuda(), model.removeprefix(ZOO_PREFIX)
    if torch is None or name.partition("@")[0] not in zoo.TORCH_MODELS:
        return None
    module, _ = zoo.torch_module(name)
    kind = getattr(torch, dtype)
    module = module.eval().to("cuda", kind)
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    tensors = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in tensors]
    compiled = torch.compile(module, mode=mode)

    def call() -> Any:
        with torch.no_grad():
            return compiled(*tensors)

    call()
    return call


def torch_with_cuda() -> Any | None:
    """torch, if it is installed and sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def show(console: Console, model: str, rows: list[dict[str, Any]]) -> None:
    """The table of a model's kernels, the dearest first."""
    table = Table(title=model)
    for column in ("kernel", "rule", "count", "us each", "of peak"):
        table.add_column(column, justify="left" if column in ("kernel", "rule") else "right")
    for row in sorted(rows, key=lambda row: -row["count"] * row["secs"]):
        secs, share = f"{row['secs'] * 1e6:.1f}", f"{row['share_of_peak']:.2f}"
        table.add_row(row["kernel"], row["rule"], str(row["count"]), secs, share)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
