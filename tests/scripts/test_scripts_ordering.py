"""What counts as equal to the original where a graph is ordered; results that are there, and wrong use."""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import ordering
import ordering_report
import pytest
import tvm
from small_models import conv_chain, module, wasteful
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.differences import TOLERANCE, range_error
from rlflow_tvm.errors import RewriteError, UsageError

_X = np.random.default_rng(0).standard_normal((3, 64)).astype("float32")


def _of(body) -> tvm.IRModule:
    return module({"x": _X.shape}, {}, body)


def _nought(emit, x):
    """The sums of what is left of each row's mean: nought, and in floats rounding alone."""
    return emit(rx.sum(emit(rx.subtract(x, emit(rx.mean(x, [1], keepdims=True)))), [1]))


def _nought_otherwise(emit, x):
    mean = emit(rx.mean(x, [1]))
    return emit(rx.subtract(emit(rx.sum(x, [1])), emit(rx.multiply(mean, relax.const(64.0)))))


def _differences(body) -> tuple[float, float]:
    """Of a module that is not, or not quite, the first one: in single, and in double precision."""
    mod, made, draws = _of(_nought), _of(body), [[_X]]
    expected = ordering.outputs(mod, draws)
    single = max(map(range_error, ordering.outputs(made, draws), expected))
    return single, ordering.difference_in_double(made, mod, draws, expected)


def test_rounding_is_told_from_other_values() -> None:
    single, double = _differences(_nought_otherwise)
    assert single > TOLERANCE
    assert double < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        lambda emit, x: emit(rx.add(_nought(emit, x), relax.const(1e-6))),
        lambda emit, x: emit(rx.log(emit(rx.subtract(_nought(emit, x), relax.const(1.0))))),
    ],
)
def test_what_is_wrong_is_wrong_in_double_too(body) -> None:
    """Also by a little, or where it is no number."""
    single, double = _differences(body)
    assert single > TOLERANCE
    assert double > TOLERANCE


@pytest.fixture
def small(monkeypatch) -> None:
    """A corpus of two graphs."""
    monkeypatch.setattr(ordering, "graphs", lambda test: {"a-b-1": conv_chain() if test else wasteful()})


def row(agent: str, order: list[str], seed: int = 0, steps: int = 8) -> dict:
    """What a training leaves."""
    return {"agent": agent, "steps": steps, "seed": seed, "graphs": {"a-b-1": {"order": order, "left": 0.5}}}


def written(out: Path, *rows: dict) -> None:
    for each in rows:
        (out / "{agent}.{steps}.{seed}.json".format(**each)).write_text(json.dumps(each))


def test_a_training_of_few_episodes_has_an_empty_log(small, tmp_path):
    ordering.train("a2c", 32, 0, tmp_path)
    (left,) = tmp_path.iterdir()
    found = json.loads(left.read_text())
    assert (left.name, found["log"]) == ("a2c.32.0.json", [])
    assert ordering_report.steps_a_second([found]) == ""
    assert ordering_report.steps_a_second([found, {"log": [{"env_steps": 640, "secs": 2.0}]}]) == "320"
    ordering_report.curves({("a2c", 32): [found]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_times_of_other_orders_or_rounds_are_not_mixed_with_new_ones(small, tmp_path, monkeypatch):
    """As of another agent, or before a seed that found a better one; what is there of the same is not made again."""
    timed: list[list[str]] = []

    def measured(mod, orders, target, rounds):
        timed.append(list(orders))
        return {label: {"round_secs": [1.0] * rounds, "operations": 1.0} for label in ("as it is", *orders)}

    monkeypatch.setattr(ordering, "timed", measured)
    written(tmp_path, row("ppo", ["Normalize"]), row("a2c", ["Normalize"]))
    for _ in range(2):
        ordering.times(tmp_path, "ppo", 8, 2)
    assert timed == [["documented", "ppo"]]
    path = tmp_path / "times.json"
    found = path.read_text()
    for agent, rounds in (("a2c", 2), ("ppo", 3)):
        with pytest.raises(UsageError, match=r"times\.json: has times of other orders or rounds"):
            ordering.times(tmp_path, agent, 8, rounds)
    written(tmp_path, row("ppo", ["LambdaLift"], seed=1))
    with pytest.raises(UsageError, match="of other orders"):
        ordering.times(tmp_path, "ppo", 8, 2)
    assert path.read_text() == found
    kept = json.loads(found)
    for each in kept["a-b-1"].values():
        del each["order"]  # as earlier versions of the script left it
    path.write_text(json.dumps(kept))
    ordering.times(tmp_path, "ppo", 8, 2)
    assert len(timed) == 1


def test_without_a_training_there_is_nothing_to_time(small, tmp_path):
    with pytest.raises(UsageError, match=r"no training of ppo with 8 steps .*--timed"):
        ordering.times(tmp_path, "ppo", 8, 5)


def test_baselines_have_as_many_random_orders_as_are_asked_for(small, tmp_path):
    for seeds in (1, 3, 2):
        ordering.baselines(tmp_path, seeds)
    (found,) = json.loads((tmp_path / "baselines.json").read_text()).values()
    assert len(found["random"]) == 3
    again = tmp_path / "again"
    again.mkdir()
    ordering.baselines(again, 3)
    assert json.loads((again / "baselines.json").read_text()) == {"a-b-1": found}


def test_modules_that_are_wrong_without_end_are_kept_and_told(tmp_path, monkeypatch, capsys):
    """JSON has no word for infinity."""
    monkeypatch.setattr(ordering, "processes", ThreadPoolExecutor)
    monkeypatch.setattr(ordering, "checked", lambda *_: {"0a": math.inf, "0b": 1e-7})
    written(tmp_path, {**row("ppo", ["Normalize"]), "common": {"order": ["LambdaLift"]}})
    with pytest.raises(RewriteError, match=r"checks\.json: 1 modules differ"):
        ordering.checks(tmp_path, 1)
    assert "2 modules of 1 graphs: 1 differ, largest difference inf" in capsys.readouterr().out
    assert json.loads((tmp_path / "checks.json").read_text()) == {"a-b-1": {"0a": None, "0b": 1e-7}}
    assert "1 differ: a-b-1 (inf); largest difference inf" in ordering_report.equality(tmp_path)[0]


def test_modules_that_were_wrong_without_end_are_run_again(small, monkeypatch):
    run = []
    monkeypatch.setattr(ordering, "outputs", lambda mod, draws: run.append(mod) or [[np.ones(3)] for _ in draws])
    found = ordering.checked("a-b-1", {()}, {})
    assert list(found.values()) == [0.0]
    run.clear()
    assert ordering.checked("a-b-1", {()}, found) == found
    assert not run
    assert ordering.checked("a-b-1", {()}, dict.fromkeys(found)) == found
    assert run


def test_what_has_not_begun_is_left_out_where_something_failed(tmp_path):
    others = []

    def work() -> None:
        with ordering.processes(1) as pool:
            failing = pool.submit(Path.rmdir, tmp_path / "none")
            others.extend(pool.submit(time.sleep, 0.1) for _ in range(9))
            failing.result()

    with pytest.raises(FileNotFoundError):
        work()
    assert others[-1].cancelled()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--jobs", "0"], "argument --jobs: 0: at least 1 is expected"),
        (["--seeds", "-1"], "argument --seeds: -1: at least 1 is expected"),
        (["--steps", "1.5"], "argument --steps: 1.5: at least 1 is expected"),
        (["--timed", "nobody"], "argument --timed: invalid choice: 'nobody'"),
        (["--agents", "a2c", "--timed", "ppo"], "no training of ppo with 16384 steps"),
        (["--only", "checks"], "nothing to check"),
        (["--out", "FILE"], "FILE: cannot be made (File exists)"),
    ],
)
def test_wrong_use_is_one_line(small, tmp_path, monkeypatch, capsys, options, told):
    file = tmp_path / "file"
    file.touch()
    options = [str(file) if each == "FILE" else each for each in options]
    for work in ("baselines", "trainings", "endurance"):
        monkeypatch.setattr(ordering, work, lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["ordering.py", "--out", str(tmp_path / "out"), *options])
    with pytest.raises(SystemExit) as ended:
        ordering.main()
    assert ended.value.code == 2
    assert told.replace("FILE", str(file)) in capsys.readouterr().err.splitlines()[-1]
