"""What `scripts/reproduce.py` runs, for its two budgets, and which steps each table is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEARCHES = ("greedy", "backtracking", "random-restarts")
AGENTS = ("ppo", "world-model", "candidate")
RLFLOW = tuple(
    f"zoo:{name}" for name in ("inception-v3", "resnet18", "resnet50", "squeezenet1.1", "bert-base", "vit-base")
)
X_RLFLOW = tuple(f"zoo:{name}" for name in ("dalle", "resnext50", "transformer-transducer"))
"""X-RLflow's models beside those."""


@dataclass(frozen=True)
class Step:
    """One command: a script and its arguments, and about how many minutes it takes on two cores that do nothing else.

    `needs`: steps that have to come before it.
    """

    words: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a table is made of: steps, and the files or folders that they leave."""

    steps: tuple[str, ...]
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Runs:
    """Models, methods, environment steps and seeds of one call of `scripts/agents.py`, and its minutes."""

    models: tuple[str, ...]
    methods: tuple[str, ...]
    steps: int
    seeds: int
    minutes: float


@dataclass(frozen=True)
class Budget:
    """How much is run. `settings`: of agents; `dreaming`: the model whose world model is looked at more closely;
    `minutes`: of all steps but the runs, by their names."""

    graphs: tuple[str, ...]
    runs: tuple[Runs, ...]
    horizon: int
    settings: dict[str, dict[str, Any]]
    rewards: Runs
    dreaming: str
    temperatures: tuple[float, ...]
    sweeps: int
    priced: tuple[str, ...]
    rewrites: tuple[int, ...]
    rounds: int
    train: tuple[str, ...]
    unseen: tuple[str, ...]
    train_steps: int
    act_steps: int
    general_seeds: int
    minutes: dict[str, float]

    @property
    def told(self) -> str:
        """In words."""
        runs = "; ".join(
            f"{', '.join(each.models)}: {', '.join(each.methods)}, {each.steps} steps, "
            f"{each.seeds} seed{'s' * (each.seeds > 1)}"
            for each in self.runs
        )
        return f"{runs}; horizon {self.horizon}"


QUICK = Budget(
    graphs=("zoo:demo", "zoo:squeezenet1.1", "zoo:resnet18", "zoo:bert-base"),
    runs=(
        Runs(("zoo:demo",), ("greedy", "backtracking", *AGENTS), 200, 2, 11),
        Runs(("zoo:squeezenet-tiny",), ("greedy", "backtracking", "ppo"), 100, 1, 3),
    ),
    horizon=15,
    settings={
        "world-model": {
            "iterations": 2, "controller_updates": 10, "vision_steps": 200, "memory_steps": 300, "members": 1,
        },
    },
    rewards=Runs(("zoo:demo",), ("ppo", "ppo-for-mixed"), 200, 1, 2),
    dreaming="zoo:demo",
    temperatures=(0.5, 1.0, 1.5),
    sweeps=2,
    priced=("zoo:demo",),
    rewrites=(0, 10),
    rounds=3,
    train=("zoo:demo",),
    unseen=("zoo:squeezenet-tiny",),
    train_steps=200,
    act_steps=100,
    general_seeds=2,
    minutes={"graphs": 1, "temperature": 1, "steps": 1, "cost": 3, "bench": 2, "general": 3},
)  # fmt: skip
FULL = Budget(
    graphs=(*RLFLOW, *X_RLFLOW),
    runs=(
        Runs(RLFLOW, (*SEARCHES, *AGENTS), 2000, 5, 1200),
        Runs(X_RLFLOW, ("greedy", "backtracking", "ppo", "candidate"), 2000, 5, 420),
    ),
    horizon=60,
    settings={},
    rewards=Runs(
        ("zoo:squeezenet1.1",),
        ("ppo", "ppo-for-incremental", "ppo-for-relative", "ppo-for-mixed", "ppo-for-shaped"),
        2000, 5, 130,
    ),
    dreaming="zoo:bert-base",
    temperatures=(0.1, 0.5, 0.75, 1.0, 1.2, 1.5, 1.75, 2.0, 2.5, 3.0),
    sweeps=5,
    priced=(*RLFLOW, *X_RLFLOW),
    rewrites=(0, 20),
    rounds=5,
    train=("zoo:resnet18", "zoo:inception-v3", "zoo:bert-base", "zoo:vit-base"),
    unseen=("zoo:squeezenet1.1", "zoo:resnet18@192", "zoo:bert-base@64"),
    train_steps=4000,
    act_steps=500,
    general_seeds=5,
    minutes={"graphs": 10, "temperature": 180, "steps": 5, "cost": 120, "bench": 100, "general": 240},
)  # fmt: skip


def runs_name(number: int) -> str:
    """Of the step that makes these runs."""
    return f"agents{number or ''}"


def command(script: str, *parts: object) -> tuple[str, ...]:
    """A script of this folder's parent and its arguments; sequences are laid out."""
    words = [f"scripts/{script}"]
    for part in parts:
        words += [str(each) for each in part] if isinstance(part, list | tuple) else [str(part)]
    return tuple(words)


def agents_command(runs: Runs, budget: Budget, out: Path) -> tuple[str, ...]:
    used = {agent: own for agent, own in budget.settings.items() if agent in runs.methods}
    settings = ("--settings", json.dumps(used)) if used else ()
    return command(
        "agents.py", "--models", runs.models, "--methods", runs.methods, "--steps", runs.steps, "--seeds", runs.seeds,
        "--horizon", budget.horizon, settings, "--out", out,
    )  # fmt: skip


def steps_of(budget: Budget, out: Path) -> dict[str, Step]:
    """All steps by name, in the order in which they are run; what they leave lies in `out`."""
    agents, minutes = out / "agents", budget.minutes
    names = tuple(runs_name(number) for number in range(len(budget.runs)))
    world = next(runs for runs in budget.runs if "world-model" in runs.methods and budget.dreaming in runs.models)
    trained = agents / budget.dreaming.removeprefix("zoo:") / f"world-model.{world.steps}.0"
    dreamt_by = (names[budget.runs.index(world)],)
    timed = [model for runs in budget.runs for model in runs.models]
    steps = {
        "graphs": Step(
            command("graph_properties.py", "--models", budget.graphs, "--json", out / "graphs.json"), minutes["graphs"]
        ),
        "cost": Step(
            command(
                "graph_cost.py", "--models", budget.priced, "--rewrites", budget.rewrites, "--rounds", budget.rounds,
                "--json", out / "cost.json",
            ),
            minutes["cost"],
        ),
    }  # fmt: skip
    for name, runs in zip(names, budget.runs, strict=True):
        steps[name] = Step(agents_command(runs, budget, agents), runs.minutes)
    steps["rewards"] = Step(agents_command(budget.rewards, budget, out / "rewards"), budget.rewards.minutes)
    steps["bench"] = Step(
        command(
            "bench_models.py", timed, "--search", "none", "--rounds", 2 * budget.rounds, "--runs", agents,
            "--out", out / "bench.json",
        ),
        minutes["bench"], names,
    )  # fmt: skip
    steps["temperature"] = Step(
        command(
            "temperature.py", trained, budget.dreaming, "--temperatures", budget.temperatures,
            "--seeds", budget.sweeps, "--out", out / "temperature.json",
        ),
        minutes["temperature"], dreamt_by,
    )  # fmt: skip
    steps["steps"] = Step(
        command("dream_time.py", trained, budget.dreaming, "--json", out / "steps.json"), minutes["steps"], dreamt_by
    )
    steps["general"] = Step(
        command(
            "generalise.py", "--train", budget.train, "--unseen", budget.unseen, "--steps", budget.train_steps,
            "--budget", budget.act_steps, "--seeds", budget.general_seeds, "--horizon", budget.horizon,
            "--out", out / "general",
        ),
        minutes["general"],
    )  # fmt: skip
    return steps


def sources_of(budget: Budget, out: Path) -> dict[str, Source]:
    """Table -> what it is made of."""
    names = tuple(runs_name(number) for number in range(len(budget.runs)))
    with_world = tuple(
        name for name, runs in zip(names, budget.runs, strict=True) if "world-model" in runs.methods
    )  # the others' runs are in the same folder, and are not looked at
    agents = (out / "agents",)
    return {
        "rlflow-table1": Source(("graphs",), (out / "graphs.json",)),
        "rlflow-table2": Source(names, agents),
        "rlflow-table3": Source(("temperature",), (out / "temperature.json",)),
        "rlflow-figure5": Source(("rewards",), (out / "rewards",)),
        "rlflow-figure6": Source(("bench",), (out / "bench.json",)),
        "rlflow-figure7": Source(names, agents),
        "rlflow-figure8": Source(with_world, agents),
        "rlflow-figure9": Source(with_world, agents),
        "rlflow-figure10": Source(names, agents),
        "rlflow-steps": Source(("steps",), (out / "steps.json",)),
        "xrlflow-cost": Source(("cost",), (out / "cost.json",)),
        "xrlflow-speedup": Source(names, agents),
        "xrlflow-shapes": Source(("general",), (out / "general",)),
    }


def wanted_steps(tables: Sequence[str], sources: dict[str, Source], steps: dict[str, Step]) -> list[str]:
    """The steps that these tables need, with those that they need, in order."""
    needed = {step for table in tables for step in sources[table].steps}
    for name in reversed(list(steps)):  # what a step needs stands before it
        if name in needed:
            needed.update(steps[name].needs)
    return [name for name in steps if name in needed]
