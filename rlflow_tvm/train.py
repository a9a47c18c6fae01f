"""`python -m rlflow_tvm.train`: train an agent that chooses which substitution to apply where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflow_tvm import cli

if TYPE_CHECKING:
    from rlflow_tvm.ordering import OrderingOutcome


@cli.reports_errors
def main(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="ONNX files or zoo:NAME; without any, a small bundled model. FILE@NAME=1,3,224,224 is a file with an "
            "input of that shape: several such are one model at several shapes."
        ),
    ] = None,
    agent: Annotated[
        str,
        typer.Option(
            help="ppo, world-model or candidate; for pass-ordering ppo, a2c, dqn, trpo or maskable-ppo, which need "
            "the extra 'sb3'."
        ),
    ] = "ppo",
    env: Annotated[
        str,
        typer.Option(
            help="What is learnt: rewriting, by our rules; pass-ordering, of TVM's passes and families of our rules, "
            "on the operations of MODELS or without any of a corpus."
        ),
    ] = "rewriting",
    preset: Annotated[
        str | None, typer.Option(help="Settings of a paper instead of the defaults: x-rlflow, for candidate.")
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="Of the agent's learning and networks, where they are not to be the defaults or the preset's: a JSON "
            'object, such as \'{"learning_rate": 0.0003, "hidden": 128}\', or a file of one. An unknown name is '
            "answered with all there are.",
        ),
    ] = None,
    target: Annotated[str, typer.Option(help=cli.TARGET_HELP)] = "llvm",
    rpc: cli.RpcOption = None,
    rpc_key: cli.RpcKeyOption = None,
    shape: Annotated[list[str] | None, typer.Option(help="NAME=1,3,224,224 for a model with dynamic shapes.")] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Environment steps, counted over all runs of this folder; ppo and candidate take them in whole "
            "updates of 128 or more.",
        ),
    ] = 2000,
    horizon: Annotated[
        int | None,
        typer.Option(min=1, help="Steps after which an episode is cut off.", show_default="200, of passes 32"),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="A plan for MODEL that `optimize` wrote: episodes may begin at its graph, where it is cheaper than "
            "what they begin at without."
        ),
    ] = None,
    predict: cli.PredictOption = 0.0,
    reward: Annotated[
        str | None,
        typer.Option(
            help="What a step earns: incremental, relative, mixed, end-to-end, improvement or shaped; for "
            "pass-ordering saving, or count, the paper's.",
            show_default="improvement, of passes saving",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the agent, the best plan and the logs: a new one, or to --resume.")
    ] = Path("runs/train"),
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Collect episodes in so many processes; with --ray by default one a processor there."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Collect them on the Ray cluster at this address (auto, HOST:PORT, ray://...).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Train an agent on MODELS and leave OUT/agent.safetensors, OUT/best.plan.json (of several models
    OUT/best.NAME.plan.json), and logs for TensorBoard.

    An agent for pass-ordering leaves OUT/best.order.json in place of a plan.

    Neither --workers nor --ray changes what is trained, given the same kernel times.
    """
    from rlflow_tvm.errors import UsageError
    from rlflow_tvm.frontend import split_shapes

    twice = next((model for model, times in Counter(models or ()).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"{twice}: is given twice; leave one out, or give each a shape, as FILE@NAME=1,3,224,224")
    inputs = [start, *(Path(split_shapes(model)[0]) for model in models or ())]
    if json is not None and json.parent == out and not out.exists():  # it is made in time, with those above it
        cli.check_folder([each for each in (out, *out.parents) if not each.exists()][-1], json.name, inputs=inputs)
    else:
        cli.check_writable(json, inputs=inputs)
    tvm_target, shapes, remote = cli.parse_target(target), cli.parse_shapes(shape or []), cli.parse_rpc(rpc, rpc_key)
    own = cli.parse_settings(settings)
    from rlflow_tvm.agents import agent_kind
    from rlflow_tvm.training import train_on_models

    # where one is not given, what is trained knows its own
    chosen: dict[str, Any] = {
        name: value for name, value in (("horizon", horizon), ("reward", reward)) if value is not None
    }
    if env not in ("rewriting", "pass-ordering"):
        raise UsageError(f"no environment is called {env!r}: there are rewriting, pass-ordering")
    if env == "pass-ordering":
        given: dict[str, object] = {
            "--preset": preset,
            "--settings": settings,
            "--target": target != "llvm",
            "--rpc": rpc,
            "--start": start,
            "--predict": predict,
            "--workers": workers,
            "--ray": ray,
            "--resume": resume,
        }
        unfit = next((name for name, value in given.items() if value), None)
        if unfit:
            raise UsageError(f"{unfit} does not go with --env pass-ordering: leave it out")
        if shapes and not models:
            raise UsageError("--shape is for MODELS: give one, or leave it out, for the corpus has shapes of its own")
        with cli.progress_bar("training") as bar:
            ordered = _order_passes(models, agent, shapes, bar, steps=steps, seed=seed, out=out, **chosen)
        cli.write_json(json, ordered.to_json())
        for line in ordered.lines():
            print(line)
        return
    names = models or ["zoo:demo"]
    if start is not None and len(names) != 1:
        raise UsageError("--start is a plan for one model: train on that one alone")
    with cli.progress_bar("training") as bar:
        outcome = train_on_models(
            {name: cli.model_path(split_shapes(name)[0]) for name in names},
            agent,
            tvm_target,
            remote=remote,
            steps=steps,
            seed=seed,
            out=out,
            resume=resume,
            shapes=shapes,
            predict=predict,
            starts=None if start is None else {names[0]: start},
            settings={**({} if preset is None else agent_kind(agent).preset(preset)), **own},
            progress=bar,
            workers=workers,
            ray=ray,
            **chosen,
        )
    cli.write_json(json, outcome.to_json())
    for line in outcome.lines():
        print(line)


def _order_passes(
    models: list[str] | None, agent: str, shapes: dict[str, tuple[int, ...]], bar: Callable[..., None], **options: Any
) -> OrderingOutcome:
    """Train on the models, or without any on the corpus; `options` are `train_on_graphs`'."""
    from rlflow_tvm.frontend import import_models, split_shapes
    from rlflow_tvm.frontend.corpus import corpus
    from rlflow_tvm.ordering import check_training, train_on_graphs

    check_training(agent, options["seed"], options["out"], options.get("reward", "saving"))
    if models:
        graphs = import_models({name: cli.model_path(split_shapes(name)[0]) for name in models}, shapes)
    else:
        bar(0, options["steps"], "making the corpus")
        graphs = {graph.name: graph.mod for graph in corpus() if not graph.test}
    return train_on_graphs(graphs, agent, progress=bar, **options)


if __name__ == "__main__":
    cli.run(main)
