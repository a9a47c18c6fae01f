"""What a search found is written down, whatever comes behind it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm
import typer

import rlflow_tvm as rl
from rlflow_tvm import compare, comparison, superoptimize
from rlflow_tvm import optimize as command
from rlflow_tvm.cost import CostModel, default_path
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import AgentError, CostError, KernelError, PlanError, RewriteError, UncomparableError
from rlflow_tvm.kernels import as_target
from rlflow_tvm.passes import Plan
from rlflow_tvm.search import SearchResult

TARGET = as_target("llvm")
BUDGET = "40"


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_was_found_is_written_where_timing_is_interrupted(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0
    monkeypatch.setattr(superoptimize, "measure_interleaved", interrupted)
    model, figures = tmp_path / "new.onnx", tmp_path / "figures.json"
    with caplog.at_level(logging.WARNING, "rlflow_tvm"):
        command.main(str(network), search="family", budget=BUDGET, onnx=model, json=figures)
    assert "interrupted: whether the new module is faster as a whole was not measured" in caplog.text
    assert json.loads(figures.read_text())["plan_length"] > 0
    assert model.exists()


def test_a_plan_is_written_unchecked_where_the_check_is_interrupted(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0
    monkeypatch.setattr(superoptimize, "check_state", interrupted)
    plan, model = tmp_path / "plan.json", tmp_path / "new.onnx"
    with caplog.at_level(logging.WARNING, "rlflow_tvm"), pytest.raises(typer.Exit) as ended:
        command.main(str(network), search="family", budget=BUDGET, plan=plan, onnx=model)
    assert ended.value.exit_code == 130
    assert f"outputs were not compared: the plan written to {plan} is unchecked" in caplog.text
    assert len(Plan.load(plan)) > 0
    assert not model.exists()


def ended_by(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search meets after it has found something."""
    successor = RewriteProblem.successor

    def gone(problem: RewriteProblem, *arguments: object, **options: object) -> object:
        if problem.best.actions:
            raise error
        return successor(problem, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RewriteProblem, "successor", gone)


def test_a_comparison_that_is_given_up_leaves_what_was_found(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0
    ended_by(KeyboardInterrupt(), monkeypatch)
    (tmp_path / "plans").mkdir()
    with caplog.at_level(logging.WARNING, "rlflow_tvm"), pytest.raises(typer.Exit) as ended:
        compare.main(str(network), search=["greedy"], budget=BUDGET, against=["onnxruntime"], plans=tmp_path / "plans")
    assert ended.value.exit_code == 130
    plan = tmp_path / "plans" / "greedy.plan.json"
    assert f"outputs were not compared: the plan written to {plan} is unchecked" in caplog.text
    assert len(Plan.load(plan)) > 0


def test_a_comparison_keeps_plans_that_nobody_asked_for(
    found: SearchResult, network: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes behind the search may fail."""
    assert len(found.plan) > 0

    def broken(*_: object, **__: object) -> None:
        raise CostError("the library cannot be linked")

    monkeypatch.setattr(comparison, "compare", broken)
    with pytest.raises(typer.Exit):
        compare.main(str(network), search=["family"], budget=BUDGET, against=["onnxruntime"])
    plan = default_path().with_name(f"family.{found.plan.start_hash:016x}.plan.json")
    assert f"plan kept in {plan}" in capsys.readouterr().out
    assert len(Plan.load(plan)) > 0


@pytest.mark.parametrize("error", [CostError("no room"), KeyboardInterrupt()], ids=["an error", "given up"])
def test_the_pass_keeps_the_plan_of_a_search_that_was_ended(
    error: BaseException,
    found: SearchResult,
    mod: tvm.IRModule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(found.plan) > 0
    plan = default_path().with_name(f"last.{found.plan.start_hash:016x}.plan.json")
    plan.unlink(missing_ok=True)
    ended_by(error, monkeypatch)
    superoptimized = rl.Superoptimize(TARGET, search="greedy", budget=BUDGET)
    with caplog.at_level(logging.WARNING, "rlflow_tvm"), pytest.raises(type(error)):
        superoptimized(mod)
    assert superoptimized.result is None
    assert f"the plan written to {plan} is unchecked" in caplog.text
    assert len(Plan.load(plan)) > 0


def test_the_pass_keeps_its_plan_whatever_comes_then(
    found: SearchResult, mod: tvm.IRModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = default_path().with_name(f"last.{found.plan.start_hash:016x}.plan.json")
    plan.unlink(missing_ok=True)
    monkeypatch.setattr(superoptimize, "keep_if_not_slower", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rl.Superoptimize(TARGET, search="family", budget=BUDGET)(mod)
    assert len(Plan.load(plan)) > 0


@pytest.mark.parametrize(
    ("asked", "error", "exit_code"),
    [
        (True, CostError("no server to measure on"), CostError.exit_code),
        (False, CostError("no server to measure on"), CostError.exit_code),
        (True, KernelError("cannot be built"), KernelError.exit_code),
        (True, KeyboardInterrupt(), 130),
        (True, AgentError("cannot act"), AgentError.exit_code),
    ],
    ids=["not measured", "not measured, no file", "not built", "given up", "an agent's"],
)
def test_what_was_found_before_a_search_was_ended_is_written(
    asked: bool,
    error: BaseException,
    exit_code: int,
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To where it was asked for, or beside the database."""
    assert len(found.plan) > 0
    ended_by(error, monkeypatch)
    plan = tmp_path / "plan.json" if asked else default_path().with_name(f"last.{found.plan.start_hash:016x}.plan.json")
    plan.unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING, "rlflow_tvm"), pytest.raises(typer.Exit) as ended:
        command.main(str(network), search="greedy", budget=BUDGET, plan=plan if asked else None)
    assert ended.value.exit_code == exit_code
    assert f"outputs were not compared: the plan written to {plan} is unchecked" in caplog.text
    assert len(Plan.load(plan)) > 0


def test_the_plan_of_wrong_outputs_is_kept_for_the_report(
    found: SearchResult, cost_model: CostModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_: object, **__: object) -> None:
        raise RewriteError("outputs differ: report it with the plan")

    assert len(found.plan) > 0
    monkeypatch.setattr(superoptimize, "RewriteProblem", lambda *_: None)
    monkeypatch.setattr(superoptimize, "check_state", differ)
    search = SimpleNamespace(run=lambda *_: found)
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path / "home"))
    with pytest.raises(RewriteError, match=r"with the plan; the plan, which must not be used, is in .*\.json$") as told:
        superoptimize.optimize(None, search, cost_model)
    assert Plan.load(str(told.value).rpartition(" is in ")[2]) == found.plan
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path / "file"))
    with pytest.raises(RewriteError, match=r"which must not be used, is lost: .* cannot be written"):
        superoptimize.optimize(None, search, cost_model)
    written: list[Plan] = []
    with pytest.raises(RewriteError), superoptimize.unchecked_kept(written.append) as on_plan:
        superoptimize.optimize(None, search, cost_model, on_plan=on_plan)
    assert not written


def test_a_plan_whose_outputs_nothing_can_be_told_by_is_not_called_wrong(
    found: SearchResult, cost_model: CostModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise UncomparableError("the outputs cannot be compared")

    monkeypatch.setattr(superoptimize, "RewriteProblem", lambda *_: None)
    monkeypatch.setattr(superoptimize, "check_state", cannot)
    search = SimpleNamespace(run=lambda *_: found)
    wrong = default_path().with_name(f"wrong.{found.plan.end_hash:016x}.plan.json")
    wrong.unlink(missing_ok=True)
    written: list[Plan] = []
    with (
        caplog.at_level(logging.WARNING, "rlflow_tvm"),
        pytest.raises(UncomparableError, match=r"^the outputs cannot be compared$"),
        superoptimize.unchecked_kept(lambda plan: written.append(plan) or Path("there")) as on_plan,
    ):
        superoptimize.optimize(None, search, cost_model, on_plan=on_plan)
    assert written == [found.plan]
    assert "the plan written to there is unchecked" in caplog.text
    assert not wrong.exists()


def test_a_plan_that_cannot_be_written_is_kept_and_hides_no_error(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a disk that has become full meanwhile."""
    last = default_path().with_name(f"last.{found.plan.start_hash:016x}.plan.json")
    save = Plan.save

    def full(plan: Plan, path: Path) -> None:
        if Path(path).parent == tmp_path:
            raise PlanError(f"{path}: cannot be written (No space left on device)")
        save(plan, path)

    monkeypatch.setattr(Plan, "save", full)
    for error, exit_code in (
        (None, PlanError.exit_code),
        (CostError("no room"), CostError.exit_code),
        (KeyboardInterrupt(), 130),
    ):
        last.unlink(missing_ok=True)
        with monkeypatch.context() as patches:
            if error is not None:
                ended_by(error, patches)
            with caplog.at_level(logging.WARNING, "rlflow_tvm"), pytest.raises(typer.Exit) as ended:
                command.main(str(network), search="greedy", budget=BUDGET, plan=tmp_path / "plan.json")
        assert ended.value.exit_code == exit_code
        assert len(Plan.load(last)) > 0
    assert f"No space left on device); the plan is kept in {last}" in caplog.text


def test_what_a_plan_file_held_is_kept(
    found: SearchResult,
    network: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A search may find less than a former one, and be ended before it has found as much."""
    plan = tmp_path / "plan.json"
    found.plan.save(plan)
    former = default_path().with_name(f"former.{found.plan.start_hash:016x}.plan.json")
    former.unlink(missing_ok=True)
    monkeypatch.setattr(superoptimize, "measure_interleaved", interrupted)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "rlflow_tvm"):
            command.main(str(network), search="greedy", budget="1", plan=plan)
        assert Plan.load(plan) != found.plan
    assert Plan.load(former) == found.plan
    assert caplog.text.count(f"the plan that {plan} held is kept in {former}") == 1


def test_what_the_file_held_is_kept_beside_it_where_there_is_no_other_place(
    found: SearchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    found.plan.save(plan)
    monkeypatch.setattr(superoptimize, "keep_plan", lambda *_, **__: None)
    less = dataclasses.replace(found.plan, actions=found.plan.actions[:1])
    assert command._Saving(plan)(less) == plan
    assert Plan.load(plan) == less
    assert Plan.load(tmp_path / "former.plan.json") == found.plan


def test_what_a_search_without_a_file_left_last_is_kept(found: SearchResult) -> None:
    """Of the next one that finds something, which may be less."""
    last, former = (
        default_path().with_name(f"{name}.{found.plan.start_hash:016x}.plan.json") for name in ("last", "former")
    )
    for each in (last, former):
        each.unlink(missing_ok=True)
    short = dataclasses.replace(found.plan, actions=found.plan.actions[:1])
    assert len(found.plan) > 1
    superoptimize.keep_plan(found.plan)
    superoptimize.keep_plan(found.plan)
    assert not former.exists()
    superoptimize.keep_plan(short)
    superoptimize.keep_plan(dataclasses.replace(short, actions=()))
    assert Plan.load(former) == found.plan
    assert not Plan.load(last).actions
    superoptimize.keep_plan(short)
    superoptimize.keep_plan(found.plan)
    other = dataclasses.replace(found.plan, actions=found.plan.actions[1:])
    superoptimize.keep_plan(other, own=found.plan)
    assert Plan.load(former) == short, "and not what this search found first"
    superoptimize.keep_plan(dataclasses.replace(short, actions=()), own=found.plan)
    assert Plan.load(former) == other, "which another search has left meanwhile"


def test_a_plan_lies_beside_the_database_while_its_outputs_are_compared(found: SearchResult) -> None:
    """What compares them may end the process without a word."""
    place = default_path().with_name(f"unchecked.{found.plan.start_hash:016x}.plan.json")
    with superoptimize.unchecked_kept(lambda _: None) as on_plan:
        assert not place.exists()
        on_plan(found.plan)
        assert Plan.load(place) == found.plan
    assert not place.exists()


@pytest.mark.parametrize("called_back", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_that_ends_a_search_loses_nothing(
    number: signal.Signals, called_back: bool, found: SearchResult, mod: tvm.IRModule
) -> None:
    """As `timeout`, a container's end or a closed terminal sends it; also in what TVM's C++ calls."""
    written: list[Plan] = []

    @tvm.transform.module_pass(opt_level=0)
    def killed(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        os.kill(os.getpid(), number)
        return mod

    def search() -> None:
        with superoptimize.unchecked_kept(written.append) as on_plan:
            on_plan(found.plan)
            if called_back:
                killed(mod)
            os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may be run by `nohup`
    try:
        with pytest.raises(SystemExit) as ended:
            search()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert written == [found.plan]


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As `nohup` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with superoptimize.unchecked_kept(lambda _: None):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
