"""Searches and agents on prices of a database and of what is learnt from it: nothing is measured."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from itertools import count

import agents_predicted
import numpy as np
import pytest
from agents_predicted import PredictedTimer, gain, searched, trained
from small_models import TARGET

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement
from rlflow_tvm.cost.kernel_worker import LocalWorkers
from rlflow_tvm.cost.known_times import known_as
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.kernels import Kernel
from rlflow_tvm.passes import RewriteAction
from rlflow_tvm.search import Beginning
from rlflow_tvm.search.result import moves


class Made(KernelTimer):
    """Makes up a kernel's time by its key, and stores it."""

    def measure(self, kernels, on_progress=None, graph=None, *, confirmed=False):
        for kernel in kernels:
            if self.lookup(kernel, in_graph=True) is None:
                secs = 1e-6 * (1.0 + int(kernel.key[:4], 16) / 16**4)
                made = Measurement(run_secs=secs, repeats=1, confirmed=True)
                self.database.put(known_as(kernel), self.target_key, self.graph_version, made)
        self.descriptions.store(kernels, self.database, self.target_key, self.graph_version)
        return [self.lookup(kernel, in_graph=True) for kernel in kernels]


@pytest.fixture(scope="module")
def walked(network, tmp_path_factory):
    """A database of kernels along a random walk, as many as it takes to learn from."""
    path, rng = tmp_path_factory.mktemp("walked") / "kernels.sqlite", np.random.default_rng(0)
    with KernelDatabase(path) as opened, Made(TARGET, opened) as timer:
        opened.put(LAUNCH_KEY, timer.target_key, ONCE_VERSION, Measurement(run_secs=1e-7, repeats=1))
        problem = RewriteProblem(from_onnx(network), CostModel(TARGET, timer=timer))
        state = problem.start
        for _ in count():
            if opened.sample_count(timer.target_key, timer.graph_version) >= 60:
                break
            rules = [rule for rule, sites in state.sites.items() if sites]
            rule = rules[rng.integers(len(rules))]
            action = RewriteAction(rule, state.sites[rule][rng.integers(len(state.sites[rule]))])
            following = problem.successor(state, action)
            state = problem.start if following is None or len(state.actions) > 8 else following[0]
    return path


@pytest.fixture
def database(walked, tmp_path):
    """A copy, to write into."""
    return shutil.copy(walked, tmp_path / "kernels.sqlite")


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    """Nobody measures."""

    def answers(self, requests, limit_secs, tries=1):
        raise AssertionError(f"{requests[0]['op']}: is measured")

    monkeypatch.setattr(LocalWorkers, "answers", answers)


def test_what_is_known_is_taken_and_the_rest_predicted(network, database):
    with KernelDatabase(database) as opened, PredictedTimer(TARGET, opened) as timer, Made(TARGET, opened) as made:
        problem = RewriteProblem(from_onnx(network), CostModel(TARGET, timer=timer))
        kernels = problem.kernels(problem.start)
        made.measure(kernels)  # by predicted times an operator may be computed in another of its ways than on the walk
        stored = [opened.get(known_as(kernel), timer.target_key, timer.graph_version) for kernel in kernels]
        told = timer.measure(kernels, graph=tuple)
        assert [each.run_secs for each in told] == [each.run_secs for each in stored]
        alone = kernels[0]
        assert timer.measure([alone])[0] == timer.measure([alone])[0] != stored[0], "alone it was not measured"
        opened.put(known_as(alone), timer.target_key, timer.version, Measurement(run_secs=7.0, repeats=1))
        assert timer.measure([alone])[0].run_secs == 7.0
        unknown = [dataclasses.replace(kernel, key=f"{kernel.key}0", cold="") for kernel in kernels]
        (first, *_), (again, *_) = timer.measure(unknown), timer.measure(unknown)
        assert first == again
        assert first.run_secs > 0.0
        assert (first.confirmed, timer.measured) == (True, 0)
        broken = Kernel(unknown[0].func.with_attr("tirx.is_scheduled", "no"), "broken", "broken", 1)
        timer.descriptions.of = _raises
        assert timer.measure([broken])[0].error_kind == "build"


def _raises(kernel):
    from rlflow_tvm.errors import KernelError

    raise KernelError("cannot be scheduled")


def test_runs_tell_gains_by_steps_the_same_each_time(network, database):
    with KernelDatabase(database) as opened, PredictedTimer(TARGET, opened) as timer:
        problem = RewriteProblem(from_onnx(network), CostModel(TARGET, timer=timer))
        rows = [searched(problem, "random", 0, 60), *(trained(problem, "ppo", 0, 60, 10) for _ in range(2))]
    assert rows[1] == rows[2]
    for row in rows:
        steps = [step for step, _ in row["curve"]]
        secs = [secs for _, secs in row["curve"]]
        assert steps == sorted(steps)
        assert secs == sorted(secs, reverse=True)
        assert 1.0 <= gain(row, 0) <= gain(row, 30) <= gain(row, 60)
    assert gain(rows[0], 0) == 1.0 < gain(rows[1], 60)
    assert rows[1]["asked"]["curve"][0][1] == rows[1]["start_secs"]


def test_an_agent_may_begin_at_the_model_with_settings_of_its_own(network, database, monkeypatch):
    with KernelDatabase(database) as opened, PredictedTimer(TARGET, opened) as timer:
        problem = RewriteProblem(from_onnx(network), CostModel(TARGET, timer=timer))
        state = problem.start.apply(moves(problem.start)[0])
        begin = Beginning(problem.cost(state).run_secs, state)
        monkeypatch.setattr(agents_predicted, "beginnings", lambda _problem: [begin])
        rows = [
            trained(problem, "ppo", 0, 30, 10, from_model=each, settings={"steps_per_update": 30, "hidden": 8})
            for each in (False, True)
        ]
    assert [row["curve"][1] for row in rows] == [[0, begin.run_secs], [0, problem.start_secs]]
    assert begin.run_secs != problem.start_secs


def test_the_script_writes_what_it_shows(network, database, tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(agents_predicted, "parse_target", lambda _text: TARGET)
    monkeypatch.setattr(
        sys, "argv",
        ["agents_predicted.py", str(database), "--models", str(network), "--methods", "greedy", "--steps", "40",
         "--seeds", "1", "--out", str(out)],
    )  # fmt: skip
    agents_predicted.main()
    (row,) = json.loads(out.read_text())
    assert (row["model"], row["method"], row["seed"]) == (str(network), "greedy", 0)
    assert f"{gain(row, 40):.4f}" in capsys.readouterr().out
    KernelDatabase(tmp_path / "empty.sqlite").close()
    for name, message in (("none", "there is no such database"), ("empty", "too few to learn from")):
        path = tmp_path / f"{name}.sqlite"
        monkeypatch.setattr(sys, "argv", ["agents_predicted.py", str(path), "--models", str(network)])
        with pytest.raises(SystemExit) as ended:
            agents_predicted.main()
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none.sqlite").exists()
