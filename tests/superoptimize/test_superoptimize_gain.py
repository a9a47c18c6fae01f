"""What a search found is held against a whole module's time before it is handed on."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm

import rlflow_tvm as rl
from rlflow_tvm import optimize as command
from rlflow_tvm import superoptimize
from rlflow_tvm.cost import CostModel, EndToEnd, RpcDevices, default_path
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import CostError, RewriteError
from rlflow_tvm.ir import detach, num_inputs
from rlflow_tvm.kernels import as_target
from rlflow_tvm.passes import GraphState, Plan
from rlflow_tvm.search import Beginning, Budget, SearchResult, make_search
from rlflow_tvm.superoptimize import keep_if_not_slower

TARGET = as_target("llvm")
BUDGET = "40"


def whole_modules_take(monkeypatch: pytest.MonkeyPatch, after: list[float], settled: list[float] | None = None) -> None:
    """The model 1 s in each round, the new module `after`, and that of a settled graph `settled`, or as long."""

    def measured(candidates: Mapping[str, object], _inputs: object, rounds: int, **_: object) -> dict[str, EndToEnd]:
        assert rounds == len(after)
        times = {"before": [1.0] * rounds, "after": after, "settled": after if settled is None else settled}
        return {name: EndToEnd(tuple((secs,) for secs in times[name]), ()) for name in candidates}

    monkeypatch.setattr(superoptimize, "measure_interleaved", measured)


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        ([0.8, 0.9, 0.8, 0.7, 0.8, 0.8], True),
        ([1.0, 1.1, 1.0, 1.1, 1.0, 1.1], True),  # slower, but not beyond doubt
        ([1.1, 1.1, 1.2, 1.1, 1.1, 1.2], False),
    ],
)
def test_a_slower_module_is_given_up(
    after: list[float],
    kept: bool,
    found: SearchResult,
    mod: tvm.IRModule,
    cost_model: CostModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0
    whole_modules_take(monkeypatch, after)
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        result, gain = keep_if_not_slower(found, cost_model)
    assert gain is not None
    assert gain.interval == (1 / max(after), 1 / min(after))
    assert (result is found) == kept
    assert ("left as it was" in caplog.text) != kept
    if not kept:
        assert (len(result.plan), result.run_secs_after) == (0, found.run_secs_before)
        tvm.ir.assert_structural_equal(result.state.bound()["main"], mod["main"])


@pytest.mark.parametrize(
    ("after", "settled", "taken"),
    [
        (0.8, 0.9, "after"),
        (0.9, 0.897, "after"),  # slower, but by too little
        (0.9, 0.8, "settled"),
        (1.2, 0.8, "settled"),
        (1.2, 1.1, "before"),
    ],
)
def test_a_settled_graph_that_is_faster_takes_the_place_of_what_was_found(
    after: float,
    settled: float,
    taken: str,
    found: SearchResult,
    cost_model: CostModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 1
    state = next(found.state.origin().along(found.plan))
    secs = 0.9 * found.run_secs_before
    checked: list[GraphState] = []
    monkeypatch.setattr(superoptimize, "check_state", lambda state, *_, **__: checked.append(state))
    whole_modules_take(monkeypatch, [after] * 6, [settled] * 6)
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        result, gain = keep_if_not_slower(replace(found, settled=Beginning(secs, state)), cost_model)
    states = {"before": found.state.origin(), "after": found.state, "settled": state}
    times = {"before": found.run_secs_before, "after": found.run_secs_after, "settled": secs}
    assert (result.plan, result.run_secs_after) == (states[taken].plan, times[taken])
    assert gain is not None
    assert gain.median == pytest.approx(1 / {"after": after, "settled": settled, "before": settled}[taken])
    assert checked == ([state] if taken == "settled" else [])  # what was found has been checked before
    assert ("which takes its place" in caplog.text) == (taken != "after")
    assert ("left as it was" in caplog.text) == (taken == "before")


def test_the_plan_of_a_settled_graph_that_is_wrong_is_kept(
    found: SearchResult, cost_model: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was found, and nothing is wrong with, is not what the report of the bug is about."""
    state = next(found.state.origin().along(found.plan))

    def differs(*_: object, **__: object) -> None:
        raise RewriteError("outputs differ")

    monkeypatch.setattr(superoptimize, "check_state", differs)
    whole_modules_take(monkeypatch, [0.9] * 6, [0.8] * 6)
    with pytest.raises(
        RewriteError, match=r"^outputs differ; the plan, which must not be used, is in .*wrong\."
    ) as error:
        keep_if_not_slower(replace(found, settled=Beginning(0.9 * found.run_secs_before, state)), cost_model)
    kept = Path(str(error.value).partition(" is in ")[2])
    assert Plan.load(kept) == state.plan != found.plan


def test_a_search_says_which_settled_graph_it_began_at(
    found: SearchResult, mod: tvm.IRModule, cost_model: CostModel
) -> None:
    assert found.settled is not None
    assert found.settled.state.actions
    priced = RewriteProblem(mod, cost_model).cost(found.settled.state, confirmed=True)
    assert found.settled.run_secs == priced.run_secs
    greedy = make_search("greedy", budget=Budget.parse("1")).run(RewriteProblem(mod, cost_model))
    assert greedy.settled is None  # nobody has looked


def test_the_pass_hands_on_what_it_was_given(
    found: SearchResult, mod: tvm.IRModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_modules_take(monkeypatch, [1.1] * 6)
    superoptimized = rl.Superoptimize(TARGET, search="family", budget=BUDGET)
    tvm.ir.assert_structural_equal(superoptimized(mod)["main"], mod["main"])
    assert superoptimized.result is not None
    assert superoptimized.gain is not None
    assert len(superoptimized.result.plan) == 0
    assert superoptimized.gain.median < 1 < found.run_secs_before / found.run_secs_after
    assert len(Plan.load(default_path().with_name(f"last.{found.plan.start_hash:016x}.plan.json"))) == 0
    assert len(Plan.load(default_path().with_name(f"slower.{found.plan.start_hash:016x}.plan.json"))) > 0


def test_the_command_writes_the_plan_of_what_is_left(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0  # and its kernels are in the database
    whole_modules_take(monkeypatch, [1.25] * 6)
    plan, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        command.main(str(network), search="family", budget=BUDGET, plan=plan, json=figures)
    assert len(Plan.load(plan)) == 0
    slower = default_path().with_name(f"slower.{found.plan.start_hash:016x}.plan.json")
    assert f"the plan that was found is kept in {slower}" in caplog.text
    assert len(Plan.load(slower)) > 0
    assert json.loads(figures.read_text())["measured_gain_interval"] == [0.8, 0.8]
    assert "by 0 rewrites" in (out := capsys.readouterr().out)
    assert "takes 0.80 times as long as the new one's (0.80 to 0.80 by round); it was given up" in out
    assert json.loads(figures.read_text())["given_up"]


def test_modules_are_really_timed(found: SearchResult, cost_model: CostModel) -> None:
    told: list[tuple[int, int]] = []
    _, gain = keep_if_not_slower(found, cost_model, lambda done, total: told.append((done, total)))
    assert gain is not None
    assert 0.2 < gain.median < 5
    settled = found.settled
    third = settled is not None and settled.run_secs < found.run_secs_before
    third = third and settled.state.structural_hash != found.state.structural_hash
    runs = 6 * (3 if third else 2)
    assert told == [(done, runs) for done in range(1, runs + 1)]


def test_modules_given_without_weights_are_timed_too(mod: tvm.IRModule, cost_model: CostModel) -> None:
    detached = detach(mod)
    assert num_inputs(detached.mod["main"]) < len(detached.mod["main"].params)
    problem = RewriteProblem(detached.mod, cost_model)
    _, gain = keep_if_not_slower(make_search("family", budget=Budget.parse(BUDGET)).run(problem), cost_model)
    assert gain is not None


def test_nothing_is_timed_for_other_machines(found: SearchResult) -> None:
    device = as_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 4})
    with CostModel(device, remote=RpcDevices("tracker", 9190, "board")) as elsewhere:
        assert keep_if_not_slower(found, elsewhere) == (found, None)


def test_nothing_is_timed_where_nothing_changed(cost_model: CostModel) -> None:
    same = SimpleNamespace(state=SimpleNamespace(actions=()))
    assert keep_if_not_slower(same, cost_model) == (same, None)


def test_without_room_for_the_modules_it_is_told(
    found: SearchResult,
    cost_model: CostModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        assert keep_if_not_slower(found, cost_model) == (found, None)
    assert "was not measured: temporary files cannot be written" in caplog.text


def test_without_a_compiler_it_is_told(
    found: SearchResult, cost_model: CostModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*_: object) -> None:
        raise CostError("cannot link: install a C++ compiler")

    monkeypatch.setattr(superoptimize, "export_library", cannot)
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        assert keep_if_not_slower(found, cost_model) == (found, None)
    assert "was not measured: cannot link: install a C++ compiler" in caplog.text
