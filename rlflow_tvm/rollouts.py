"""The environment of a training on models, built alike by the training itself and by each of its workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import gymnasium
import tvm

from rlflow_tvm.cost import (
    CostModel,
    KernelDatabase,
    KernelTimer,
    Measurement,
    PredictionPolicy,
    QuietMachine,
    RpcDevices,
    default_path,
)
from rlflow_tvm.cost.reference import rescaled
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.envs import ENVIRONMENTS, ManyModelsEnv, RewriteProblem
from rlflow_tvm.errors import EnvError, UsageError
from rlflow_tvm.frontend import import_models
from rlflow_tvm.passes import Plan

FACTORY = "rlflow_tvm.rollouts:worker_env"
"""What makes the environment in a worker; `description` gives its arguments."""


def make_problems(modules: Mapping[str, tvm.IRModule], cost_model: CostModel) -> dict[str, RewriteProblem]:
    """Each model's problem; prices their graphs as they are. EnvError, of several models naming which, for one that
    cannot be worked on."""
    problems = {}
    for name, mod in modules.items():
        with _named(name, modules):
            problems[name] = RewriteProblem(mod, cost_model)
    return problems


@contextmanager
def _named(name: str, models: Sized) -> Iterator[None]:
    """Say of which one an EnvError is, where there are several."""
    try:
        yield
    except EnvError as error:
        if len(models) == 1:
            raise
        raise EnvError(f"{name}: {error}") from error


def make_env(
    problems: Mapping[str, RewriteProblem],
    horizon: int,
    reward: str,
    environment: str = "rewriting",
    begins: Mapping[str, Plan] | None = None,
) -> ManyModelsEnv:
    """All of them in one environment; `environment`: of each, one of `envs.ENVIRONMENTS`; `begins`: of some, a plan at
    whose end episodes begin. EnvError as `make_problems`'."""
    make, plans = ENVIRONMENTS[environment], begins or {}
    envs = {}
    for name, problem in problems.items():
        with _named(name, problems):
            envs[name] = make(problem=problem, horizon=horizon, reward=reward, begin=plans.get(name))
    return ManyModelsEnv(envs)


def structures(problems: Mapping[str, RewriteProblem]) -> list[str]:
    """The structural hashes of the models' graphs."""
    return [f"{problem.start.structural_hash:016x}" for problem in problems.values()]


class RecordingDatabase(KernelDatabase):
    """A database that remembers what this process put into it since `taken` was last called."""

    def __init__(self, path: Path) -> None:
        self._rows: list[list[Any]] = []
        super().__init__(path)

    def put(self, key: str, target_key: str, version: str, measurement: Measurement, tvm_version: str = "") -> None:
        super().put(key, target_key, version, measurement, tvm_version)
        self._rows.append([key, target_key, version, dataclasses.asdict(measurement), tvm_version])

    def describe(self, key: str, target_key: str, version: str, name: str, features: Mapping[str, float]) -> None:
        super().describe(key, target_key, version, name, features)
        self._rows.append([key, target_key, version, name, dict(features)])

    def taken(self) -> list[list[Any]]:
        """The arguments of those calls of `put` and `describe`, as JSON takes them; before them, of each target, the
        reference kernel's that the times are reckoned to."""
        rows, self._rows = self._rows, []
        targets = dict.fromkeys(row[1] for row in rows)
        references = {target: self.get(REFERENCE_KEY, target, ONCE_VERSION) for target in targets}
        told = [
            [REFERENCE_KEY, target, ONCE_VERSION, dataclasses.asdict(reference), ""]
            for target, reference in references.items()
            if reference is not None
        ]
        return told + [row for row in rows if row[0] != REFERENCE_KEY]


def store_rows(database: KernelDatabase, rows: list[list[Any]], target_key: str) -> None:
    """Put in what `RecordingDatabase.taken` gave, at the speed that our times are reckoned to, as far as it is for
    `target_key` and better than what is known here: seconds than an error, confirmed ones than others.
    """
    share = 1.0
    for row in rows:
        if row[1] != target_key:
            continue
        if _describes(row):
            database.describe(*row)
            continue
        key, theirs, version, fields, tvm_version = row
        measurement, ours = Measurement(**fields), database.get(key, theirs, version)
        secs = measurement.run_secs
        if key == REFERENCE_KEY and ours is not None:
            assert secs is not None, "a reference that failed is not stored"
            assert ours.run_secs is not None, "a reference that failed is not stored"
            share = rescaled(ours.run_secs, secs)
        elif ours is None or (measurement.ok, measurement.confirmed) > (ours.ok, ours.confirmed):
            if secs is not None and key not in (REFERENCE_KEY, LAUNCH_KEY):
                measurement = dataclasses.replace(measurement, run_secs=share * secs)
            database.put(key, theirs, version, measurement, tvm_version)


def _describes(row: list[Any]) -> bool:
    """Whether it is `describe`'s, which ends with the features, not `put`'s."""
    return isinstance(row[-1], dict)


class ConsiderateEnv(gymnasium.Wrapper):
    """Computes while nobody measures on this machine: from reset to the end of the episode, with a stop at each step.

    `rows`: called at an episode's end, and told with it as `rows`. `refresh`: called before an episode begins. `owned`:
    closed with the environment.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        quiet: QuietMachine,
        rows: Callable[[], list[Any]],
        refresh: Callable[[], None] = lambda: None,
        owned: ExitStack | None = None,
    ) -> None:
        super().__init__(env)
        self._quiet, self._rows, self._refresh = quiet, rows, refresh
        self._owned = owned or ExitStack()

    def close(self) -> None:
        super().close()
        self._owned.close()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._quiet.compute()
        self._refresh()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._quiet.compute()
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info["episode"] = {**info["episode"], "rows": self._rows()}
            self._quiet.rest()
        return observation, reward, terminated, truncated, info


@dataclass(frozen=True)
class Prices:
    """What a process prices graphs with; `quiet` is None where it is the only one."""

    timer: KernelTimer
    cost_model: CostModel
    quiet: QuietMachine | None


@contextmanager
def open_prices(
    target: tvm.target.Target,
    database: KernelDatabase,
    shared: bool,
    remote: RpcDevices | None = None,
    predict: float = 0.0,
) -> Iterator[Prices]:
    """A cost model over this machine's kernel database, which is closed in the end; with `remote` kernels are measured
    on those machines. `predict`: how much of a graph's time may be predicted.

    With `shared` several processes do the same at once: they take turns at measuring, and take what any of them
    measured for the price, so that a graph costs the same everywhere.
    """
    with ExitStack() as stack:
        stack.enter_context(closing(database))
        quiet = stack.enter_context(QuietMachine(database.path)) if shared else None
        measuring = None if quiet is None else quiet.measuring
        timer = stack.enter_context(KernelTimer(target, database, remote=remote, quiet=measuring))
        policy = PredictionPolicy(share=predict)
        yield Prices(timer, stack.enter_context(CostModel(target, timer=timer, policy=policy)), quiet)


def description(
    models: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    target: tvm.target.Target,
    remote: RpcDevices | None,
    environment: str,
    horizon: int,
    reward: str,
    predict: float,
    problems: Mapping[str, RewriteProblem],
    begins: Mapping[str, Plan],
) -> dict[str, Any]:
    """The arguments of `worker_env` for the environment that `make_env` makes of `problems` and `begins`."""
    return {
        "models": {name: str(Path(path).absolute()) for name, path in models.items()},
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "target": tvm.ir.save_json(target),
        "remote": None if remote is None else dataclasses.asdict(remote),
        "environment": environment,
        "horizon": horizon,
        "reward": reward,
        "predict": predict,
        "expected": structures(problems),
        "begins": {name: dataclasses.asdict(plan) for name, plan in begins.items()},
    }


def worker_env(
    models: Mapping[str, str],
    shapes: Mapping[str, list[int]],
    target: str,
    remote: Mapping[str, Any] | None,
    environment: str,
    horizon: int,
    reward: str,
    predict: float,
    expected: list[str],
    begins: Mapping[str, Mapping[str, Any]],
) -> gymnasium.Env:
    """A worker's environment, with prices of its own.

    `expected`: the structures of the training's own graphs. UsageError where the models are others here.
    """
    with ExitStack() as stack:
        devices = None if remote is None else RpcDevices(**remote)
        database = RecordingDatabase(default_path())
        prices = stack.enter_context(open_prices(tvm.ir.load_json(target), database, True, devices, predict))
        assert prices.quiet is not None, "it was asked for"
        prices.quiet.compute()  # others are measuring their first graphs
        modules = import_models(models, {name: tuple(shape) for name, shape in shapes.items()})
        problems = make_problems(modules, prices.cost_model)
        if structures(problems) != expected:
            files = ", ".join(models.values())
            raise UsageError(f"{files}: not the same on {gethostname()} as where the training began; copy them there")
        plans = {name: Plan.of(plan) for name, plan in begins.items()}
        env = make_env(problems, horizon, reward, environment, plans)
        prices.quiet.rest()
        return ConsiderateEnv(env, prices.quiet, database.taken, prices.timer.refresh, stack.pop_all())
