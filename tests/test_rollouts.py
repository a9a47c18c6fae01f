"""What a worker's environment adds to the training's own: consideration for others, and the rows it measured."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import threading
from contextlib import closing

import pytest
from fake_cost import FakeCostModel
from small_models import LANES, conv_chain, module
from tvm.relax import op as rx

from rlflow_tvm import rollouts
from rlflow_tvm.cost import KernelDatabase, Measurement, QuietMachine, default_path
from rlflow_tvm.cost.reference import rescaled
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.envs import GraphRewriteEnv, ManyModelsEnv, RewriteProblem
from rlflow_tvm.errors import EnvError, UsageError
from rlflow_tvm.frontend import import_models, zoo
from rlflow_tvm.kernels import as_target
from rlflow_tvm.passes import default_rules
from rlflow_tvm.rollouts import ConsiderateEnv, RecordingDatabase, description, store_rows, worker_env
from rlflow_tvm.search import Greedy


def considerate(quiet, rows=list, refresh=lambda: None) -> ConsiderateEnv:
    problem = RewriteProblem(conv_chain(), FakeCostModel(), default_rules(LANES))
    return ConsiderateEnv(ManyModelsEnv({"m": GraphRewriteEnv(problem=problem, horizon=2)}), quiet, rows, refresh)


def test_an_episode_makes_way_at_each_step_and_at_its_end(tmp_path):
    with QuietMachine(tmp_path / "lock") as quiet, QuietMachine(tmp_path / "lock") as other:
        env = considerate(quiet)
        order = []

        def measure():
            with other.measuring():
                order.append("measured")

        observation, _ = env.reset(seed=0)
        assert quiet.computing
        waiting = threading.Thread(target=measure)
        waiting.start()
        waiting.join(0.3)
        assert order == []  # between reset and step there is no gap
        rule, location = next(zip(*observation["location_mask"][:-1].nonzero(), strict=True))
        env.step((rule, location))
        order.append("stepped")
        waiting.join()
        assert sorted(order) == ["measured", "stepped"]
        assert quiet.computing
        *_, terminated, _, info = env.step((env.unwrapped.current.stop, 0))
        assert terminated
        assert info["episode"]["rows"] == []
        assert not quiet.computing
        measure()  # at once


def test_an_episode_begins_with_what_others_have_confirmed(tmp_path):
    told = []
    with QuietMachine(tmp_path / "lock") as quiet:
        env = considerate(quiet, refresh=lambda: told.append(quiet.computing))
        env.reset(seed=0)
        env.step((env.unwrapped.current.stop, 0))
        env.reset(seed=1)
    assert told == [True, True]


def test_rows_go_with_the_episode_and_into_another_database_once(tmp_path):
    ours, theirs = Measurement(run_secs=1.0), Measurement(run_secs=2.0, repeats=7, spread=0.1, slowdown=1.0)
    with RecordingDatabase(tmp_path / "there.sqlite") as there, KernelDatabase(tmp_path / "here.sqlite") as here:
        assert isinstance(there, RecordingDatabase)
        there.put("a", "t", "v", theirs, "0.27")
        there.put("b", "t", "v", theirs, "0.27")
        there.put("c", "another machine", "v", theirs, "0.27")
        there.describe("a", "t", "v", "add", {"flops": 3.0})
        here.put("a", "t", "v", ours)
        with QuietMachine(tmp_path / "lock") as quiet:
            env = considerate(quiet, there.taken)
            for number in (4, 0):
                env.reset(seed=0)
                *_, info = env.step((env.unwrapped.current.stop, 0))
                rows = json.loads(json.dumps(info["episode"]["rows"]))
                assert len(rows) == number
                store_rows(here, rows, "t")
        assert here.get("a", "t", "v") == ours
        assert here.get("b", "t", "v") == theirs
        assert len(here) == 2
        for secs in (3.0, 4.0):
            told = dataclasses.replace(theirs, run_secs=secs, confirmed=True)
            store_rows(here, [["a", "t", "v", dataclasses.asdict(told), "0.27"]], "t")
            assert here.get("a", "t", "v").run_secs == 3.0  # what is confirmed stays
        assert here.samples("t", "v") == [("a", {"flops": 3.0}, "", 3.0)]
        here.put("d", "t", "v", Measurement(error="killed", error_kind="crash"))
        store_rows(here, [["d", "t", "v", dataclasses.asdict(theirs), "0.27"]], "t")
        assert here.get("d", "t", "v") == theirs  # what failed here gives way to others' seconds


def test_rows_are_stored_at_the_speed_that_our_times_are_reckoned_to(tmp_path):
    """Another machine's reference kernel took twice as long when its database was begun."""

    def secs(run_secs: float) -> Measurement:
        return Measurement(run_secs=run_secs, repeats=7)

    with KernelDatabase(tmp_path / "ours.sqlite") as ours, closing(RecordingDatabase(tmp_path / "k.sqlite")) as there:
        ours.put(REFERENCE_KEY, "t", ONCE_VERSION, secs(1.0))
        there.put(REFERENCE_KEY, "t", ONCE_VERSION, secs(2.0))
        for key in ("a", LAUNCH_KEY):
            there.put(key, "t", "v", secs(8.0))
            store_rows(ours, json.loads(json.dumps(there.taken())), "t")
        assert there.taken() == []
        assert ours.get("a", "t", "v") == secs(8.0 * rescaled(1.0, 2.0))
        assert ours.get(LAUNCH_KEY, "t", "v") == secs(8.0)
        assert ours.get(REFERENCE_KEY, "t", ONCE_VERSION) == secs(1.0)


class Timer:
    """In place of a timer: nothing is measured."""

    def __init__(self, target, database, remote, quiet):
        self.quiet = quiet

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def refresh(self) -> None:
        """Nobody else measures."""


class Priced(FakeCostModel):
    def __init__(self, target, timer, policy) -> None:
        super().__init__()
        self.target = target

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


def somebody_computes(path) -> bool:
    with open(f"{path}.busy", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_worker_builds_what_the_training_describes(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "KernelTimer", Timer)
    monkeypatch.setattr(rollouts, "CostModel", Priced)
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    target = as_target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
    models = {"demo": zoo.path("demo")}
    with rollouts.open_prices(target, KernelDatabase(default_path()), shared=False) as prices:
        assert prices.quiet is None
        modules = rollouts.import_models(models, {})
        problems = rollouts.make_problems(modules, prices.cost_model)
        begins = {"demo": Greedy().run(problems["demo"]).plan}
        assert len(begins["demo"])
        own = rollouts.make_env(problems, 3, "improvement", begins=begins)
    told = description(models, {}, target, None, "rewriting", 3, "improvement", 0.0, problems, begins)
    told = json.loads(json.dumps(told))
    computing: list[bool] = []

    def imported(*arguments):
        computing.append(somebody_computes(default_path()))
        return import_models(*arguments)

    monkeypatch.setattr(rollouts, "import_models", imported)
    env = worker_env(**told)
    assert computing == [True], "another that measures would be disturbed"
    assert not somebody_computes(default_path())
    assert isinstance(env, ConsiderateEnv)
    assert env.observation_space == own.observation_space
    assert str(env.unwrapped.current.problem.cost_model.target) == str(target)
    assert env.unwrapped.current.horizon == 3
    for seed in range(3):
        (seen, info), (expected, expected_info) = env.reset(seed=seed), own.reset(seed=seed)
        assert info == expected_info
        assert (seen["graph"].nodes == expected["graph"].nodes).all()
    env.close()
    with pytest.raises(UsageError, match="not the same on"):
        worker_env(**{**told, "expected": ["0"]})


def test_of_several_models_the_unusable_one_is_named():
    views = module({"x": (2, 3)}, {}, lambda emit, x: rx.reshape(x, (6,)))
    constant = module({"x": (2,)}, {"w": (2,)}, lambda emit, x, w: rx.nn.relu(w))
    cost_model = FakeCostModel()
    with pytest.raises(EnvError, match=r"^b: the module computes nothing"):
        rollouts.make_problems({"a": conv_chain(), "b": constant}, cost_model)
    with pytest.raises(EnvError, match=r"^b: the module costs nothing"):
        rollouts.make_env(rollouts.make_problems({"a": conv_chain(), "b": views}, cost_model), 3, "improvement")
    with pytest.raises(EnvError, match=r"^the module costs nothing"):
        rollouts.make_env(rollouts.make_problems({"b": views}, cost_model), 3, "improvement")
