"""`python -m rlflow_tvm.cost`: look at kernel databases, merge and export them; train and judge the learned cost."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflow_tvm import cli
from rlflow_tvm.cost.database import KernelDatabase, default_path
from rlflow_tvm.cost.merge import check_there, merge
from rlflow_tvm.errors import CostError, UsageError

if TYPE_CHECKING:
    from rlflow_tvm.evaluation import ModelKernels

DatabaseOption = Annotated[
    Path | None, typer.Option("--database", help="A kernel database; by default the one that searches use.")
]
TargetOption = Annotated[str, typer.Option(help=cli.TARGET_HELP)]
_COLUMNS = (
    "kernel",
    "target",
    "version",
    "run_secs",
    "error_kind",
    "repeats",
    "spread",
    "slowdown",
    "confirmed",
    "measured_at",
)


def _existing(path: Path | None) -> Path:
    path = default_path() if path is None else path
    if not path.is_file():
        raise CostError(f"{path}: no such kernel database: run a search first, or name one with --database")
    return path


@cli.reports_errors
def stats(
    database: DatabaseOption = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """What a database holds, by target and version of the kernels; checks its integrity."""
    cli.check_writable(json, inputs=[database or default_path()])
    path = _existing(database)
    with KernelDatabase(path) as opened:
        opened.check()
        holdings = opened.holdings()
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, integrity ok")
    for held in holdings:
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(held.last_at))
        print(
            f"{held.target}\n  version {held.version}: {held.measured} measured ({held.confirmed} twice, {held.failed} "
            f"failed, {held.disturbed} on a disturbed machine), {held.tuned} tuned, last {last}"
        )
    cli.write_json(json, {"database": str(path), "holdings": [held.__dict__ for held in holdings]})


@cli.reports_errors
def merge_into(
    others: Annotated[list[Path], typer.Argument(help="Kernel databases, of this machine or others.")],
    database: DatabaseOption = None,
) -> None:
    """Take what OTHERS hold into a database: seconds rather than errors, times measured twice, then later ones."""
    path = default_path() if database is None else database
    for other in others:
        check_there(other)  # before a database is made
        if path.exists() and other.samefile(path):
            raise UsageError(f"{other}: is the database that is merged into")
    with KernelDatabase(path) as opened:
        for other in others:
            merged = merge(opened, other)
            print(f"{other}: {merged.added} added, {merged.replaced} replaced, {merged.kept} passed over")


@cli.reports_errors
def export(
    out: Annotated[Path | None, typer.Argument(help="A CSV file; standard output if not given.")] = None,
    database: DatabaseOption = None,
) -> None:
    """Write every measurement as a line of CSV."""
    cli.check_writable(out, inputs=[database or default_path()])
    with KernelDatabase(_existing(database)) as opened:
        rows = opened.rows(_COLUMNS)
    if out is None:
        csv.writer(sys.stdout).writerows([_COLUMNS, *rows])
        return
    with cli.written_whole(out) as temporary, temporary.open("w", newline="") as stream:
        csv.writer(stream).writerows([_COLUMNS, *rows])
    print(f"{len(rows)} measurements written to {out}")


@cli.reports_errors
def forget(
    database: DatabaseOption = None,
    errors: Annotated[bool, typer.Option("--errors", help="Drop remembered errors (crashes, timeouts) too.")] = False,
) -> None:
    """Drop what was measured while something else slowed the machine down, so that it is measured again.

    Where that is the reference kernel, to whose speed times are reckoned, all times of its target go with it.
    """
    with KernelDatabase(_existing(database)) as opened:
        dropped = opened.forget_disturbed()
        if errors:
            dropped += opened.forget_errors()
        print(f"{dropped} measurements dropped")


@cli.reports_errors
def train(database: DatabaseOption = None, target: TargetOption = "llvm") -> None:
    """Train the model that predicts kernels' times on all that a database holds; searches find it beside it."""
    from rlflow_tvm.cost.estimator import learned_path, train_model
    from rlflow_tvm.cost.timer import KernelTimer

    tvm_target = cli.parse_target(target)
    with KernelDatabase(_existing(database)) as opened, KernelTimer(tvm_target, opened) as timer:
        model = train_model(timer)
        out = learned_path(opened.path, timer.target_key, timer.graph_version)
    assert out is not None, "the database is a file"
    model.save(out)
    print(f"trained on {model.trained_on} kernels, written to {out}; `evaluate` says how good such a model is")


@cli.reports_errors
def calibrate(
    networks: Annotated[int, typer.Option(min=1, help="How many networks: some 70 kernels, 40 seconds each.")] = 60,
    walks: Annotated[int, typer.Option(min=0, help="Random walks from each network.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Rewrites of each walk, at most.")] = 20,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first network and its rewrites; the next has the next.")
    ] = 0,
    database: DatabaseOption = None,
    target: TargetOption = "llvm",
) -> None:
    """Measure kernels of random networks, for `train` to learn from before there are searches of your own.

    What is measured is kept: a run that was stopped goes on where it was.
    """
    from rlflow_tvm.evaluation import measure_rewritten
    from rlflow_tvm.frontend import from_onnx
    from rlflow_tvm.frontend.random_network import random_network

    tvm_target = cli.parse_target(target)
    with KernelDatabase(default_path() if database is None else database) as opened:
        launched: set[str] = set()
        with cli.progress_bar("measuring") as bar:
            for done, number in enumerate(range(seed, seed + networks)):
                bar(done, networks, f"{len(launched)} kernels")
                mod = from_onnx(random_network(number))
                launched |= measure_rewritten(mod, tvm_target, opened, walks, steps, number)
        print(f"{len(launched)} kernels of {networks} networks are known; `train` learns from all that is")


@cli.reports_errors
def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="ONNX files, with shapes as FILE@NAME=1,3,224,224, or zoo:NAME; if none is given, all evaluation "
            "models."
        ),
    ] = None,
    walks: Annotated[int, typer.Option(min=0, help="Random walks from each model's graph.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Rewrites of each walk.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the walks.")] = 0,
    database: DatabaseOption = None,
    target: TargetOption = "llvm",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Leave one model out after the other: train on the others' kernels, predict its own. Measures what is missing."""
    cli.check_writable(json, inputs=[database or default_path()])
    from rlflow_tvm.cost.timer import KernelTimer
    from rlflow_tvm.evaluation import leave_one_out, model_kernels
    from rlflow_tvm.frontend import import_models, split_shapes, zoo

    tvm_target = cli.parse_target(target)
    names = models or [f"{cli.ZOO_PREFIX}{name}" for name in zoo.names()]
    paths = {name: cli.model_path(split_shapes(name)[0]) for name in names}
    with KernelDatabase(default_path() if database is None else database) as opened:
        with cli.progress_bar("measuring") as bar:
            kernels: dict[str, ModelKernels] = {}
            for name, path in paths.items():
                bar(len(kernels), len(paths), name)
                mod = import_models({name: path}, {})[name]
                kernels[name] = model_kernels(mod, tvm_target, opened, walks, steps, seed)
        with cli.progress_bar("training") as bar, KernelTimer(tvm_target, opened) as timer:
            scores = leave_one_out(kernels, opened, timer.target_key, timer.graph_version, bar)
    cli.write_json(json, [score.to_json() for score in scores])
    print(f"{'model left out':24} kernels  learned from    MAPE  median  Spearman  sum of all")
    for score in scores:
        print(
            f"{score.model:24} {score.kernels:7}  {score.trained_on:12}  {score.mape:6.1%}  {score.median_error:6.1%}  "
            f"{score.spearman:8.3f}  {score.total_error:10.1%}"
        )


COMMANDS: dict[str, Callable[..., None]] = {
    "merge": merge_into,
    **{command.__name__: command for command in (stats, export, forget, calibrate, train, evaluate)},
}

if __name__ == "__main__":
    cli.run_group(__doc__ or "", COMMANDS)
