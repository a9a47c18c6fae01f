"""`python -m rlflow_tvm.report`: what a plan did to a model, as a page to look at, or as plots."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflow_tvm import cli
from rlflow_tvm.errors import ReportError, UsageError

if TYPE_CHECKING:
    from rlflow_tvm.reporting import Contents, Training
    from rlflow_tvm.run_folder import RunFolder


@cli.reports_errors
def main(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_FOLDER|MODEL",
            help="What `train` left in its --out; or with --plan an ONNX file, or zoo:NAME.",
        ),
    ],
    plan: Annotated[
        Path | None, typer.Option(help="The plan, as `optimize --plan` wrote it, of the model that is given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of a run folder: which of its models; or where the file of its only one is now."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write, or with --format png the folder for the plots, which is made where it is missing.",
            show_default="report.html or plots, in the run folder or else here",
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(help="html, a page that needs no other file; or png, plots, which need the extra 'plots'.")
    ] = "html",
    target: Annotated[
        str | None,
        typer.Option(help=cli.TARGET_HELP, show_default="the training's, or else llvm"),
    ] = None,
    rpc: cli.RpcOption = None,
    rpc_key: cli.RpcKeyOption = None,
    rules: cli.RulesOption = None,
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write what the report tells to this JSON file.")] = None,
) -> None:
    """Show what the plan that a training found, or --plan, does to its model: the cost after each rewrite with the
    places before and after, the kernels, the whole graph, the curves of the training, and which rules stand where.

    Graphs are priced with the kernels' times in the database; what is not known there is measured. The folder of a
    training of pass orders is refused: it holds no plan.
    """
    if format not in ("html", "png"):
        raise UsageError(f"--format {format}: there are html and png")
    given = _given(source, plan, model)
    place = out or (given.folder / ("report.html" if format == "html" else "plots"))
    cli.check_writable(json, place if format == "html" else None, inputs=[*given.read, rules])
    if format == "png":
        cli.check_folder(place, "cost.png")
    remote = cli.parse_rpc(rpc, rpc_key)
    if given.rpc_key is not None and remote is None and target is None:
        raise UsageError(
            f"{source}: its kernels were measured on RPC machines (key {given.rpc_key!r}): give --rpc and --rpc-key, "
            "or --target llvm to price it on this machine"
        )
    tvm_target = cli.parse_target(target or given.target)
    from rlflow_tvm.cost import CostModel, KernelDatabase, default_path
    from rlflow_tvm.frontend import import_models, input_names
    from rlflow_tvm.passes import GraphState, Plan, default_rules
    from rlflow_tvm.reporting import FIGURES, contents, outline, page, plots, price_along, require_matplotlib

    if format == "png":
        require_matplotlib()
    rewrites = Plan.load(given.plan)
    as_trained = str(tvm_target) == str(cli.parse_target(given.target)) and rpc_key == given.rpc_key
    training = None if given.run is None else _training(given.run, as_trained)
    inputs = input_names(given.file)  # other models of the training have others
    shapes = {name: shape for name, shape in given.shapes.items() if name in inputs} | cli.parse_shapes(shape or [])
    mod = import_models({given.name: given.file}, shapes)[given.name]
    start = GraphState.from_module(mod, default_rules(rewrites.lanes, rules or ()))
    with (
        KernelDatabase(default_path()) as database,
        CostModel(tvm_target, database, remote=remote) as cost_model,
        cli.progress_bar("pricing") as bar,
    ):
        cost_model.on_progress = cli.kernels_told(bar)
        along = price_along(start, rewrites, cost_model, bar)
        told = (
            contents(given.name, along, cost_model, training)
            if format == "html"
            else outline(given.name, along, str(tvm_target), training)
        )
        measured = cost_model.measured
    if format == "html":
        cli.write_text(place, page(told))
    else:
        _write_all(place, plots(told), FIGURES)
    cli.write_json(json, told)
    print(f"{_line(told)} ({measured} kernels measured), {place}")


@dataclass(frozen=True)
class _Given:
    """What to report on: the model's name and file, its plan, and of a run folder the rest."""

    name: str
    file: Path
    plan: Path
    folder: Path
    shapes: dict[str, tuple[int, ...]]
    target: str
    rpc_key: str | None
    run: RunFolder | None

    @property
    def read(self) -> list[Path]:
        """The files that a report is made of."""
        from rlflow_tvm.run_folder import BEST, CHECKPOINT, PROGRESS

        logs = [] if self.run is None else [self.folder / name for name in (CHECKPOINT, PROGRESS, BEST)]
        return [self.plan, self.file, *logs]


def _given(source: str, plan: Path | None, model: str | None) -> _Given:
    """UsageError for arguments that do not go together, ReportError for a folder that nothing can be told of."""
    from rlflow_tvm.frontend import split_shapes
    from rlflow_tvm.run_folder import RunFolder

    if plan is not None:
        if model is not None:
            raise UsageError("--model is for run folders: with --plan, the model is the argument")
        if os.path.isdir(source):
            raise UsageError(f"{source}: is a folder; with --plan give the model's file, or leave --plan out")
        return _Given(source, cli.model_path(split_shapes(source)[0]), plan, Path(), {}, "llvm", None, None)
    if source.startswith(cli.ZOO_PREFIX) or os.path.isfile(source):
        raise UsageError(f"{source}: is a model; give its plan with --plan, or the folder that train left")
    run = RunFolder.read(Path(source))
    name = _chosen(run, model)
    path = cli.model_path(split_shapes(name if model is None or model in run.plans else model)[0])
    if not os.path.exists(path):
        raise ReportError(f"{path}: the model is not there: say where it is now with --model FILE")
    if not run.plans[name].exists():
        raise ReportError(f"{run.plans[name]}: no plan was found yet: let the training go on with train --resume")
    return _Given(name, path, run.plans[name], run.folder, dict(run.shapes), run.target, run.rpc_key, run)


def _chosen(run: RunFolder, model: str | None) -> str:
    """The name of the model that is meant."""
    names = list(run.plans)
    if model is not None and model in run.plans:
        return model
    if len(names) == 1:
        return names[0]
    asked = "several models" if model is None else f"no {model}"
    raise UsageError(f"{run.folder}: the training has {asked}: choose one with --model: {', '.join(names)}")


def _training(run: RunFolder, as_trained: bool) -> Training:
    from rlflow_tvm.passes import Plan
    from rlflow_tvm.reporting import Training

    plans = {name: Plan.load(path) for name, path in run.plans.items() if path.exists()}
    return Training(run.agent, run.progress, run.best, plans, as_trained)


def _write_all(folder: Path, files: dict[str, bytes], names: Iterable[str]) -> None:
    """The files, of which an earlier report may have left others of `names`."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ReportError(f"{folder}: cannot be made ({error.strerror}): give another folder") from None
    for name, data in files.items():
        with cli.written_whole(folder / name) as temporary:
            temporary.write_bytes(data)
    for name in set(names) - set(files):
        (folder / name).unlink(missing_ok=True)


def _line(told: Contents) -> str:
    secs = [told[side]["secs"] for side in ("start", "end")]
    before, after = ("unknown" if each is None else cli.milliseconds(each) for each in secs)
    return f"{told['model']}: {before} -> {after} by {len(told['steps'])} rewrites"


if __name__ == "__main__":
    cli.run(main)
