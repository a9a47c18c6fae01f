"""All tables on one page: what is run, gone on with, told of and left out, with stubs in place of the steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import papers.steps
import pytest
import reproduce
from papers.results import ROOT
from papers.steps import FULL, QUICK, Source, Step, sources_of, steps_of, wanted_steps

STUB = """
import shutil, sys
from pathlib import Path
source, copy, log = map(Path, sys.argv[1:])
with log.open("a") as file:
    file.write(copy.name + "\\n")
if not source.exists():
    sys.exit(3)
shutil.copy(source, copy)
"""
GRAPH = {
    "model": "zoo:one", "operators": 5, "kinds": 2, "weights": 1_500_000, "flops": 2_000_000, "kernels": 3,
    "bytes_moved": 4_000_000, "peak_bytes": 1_000_000, "rules": 4, "sites": 6, "rewrites_away": 7,
}  # fmt: skip
SCORE = {"temperature": 1.5, "seed": 0, "dream_returns": [1.0, 3.0], "real_returns": [4.0], "best_gain": 1.25}


class Stubbed:
    """Two steps of one table each, whose scripts copy files; `ran` tells which were run, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.page = folder, folder / "out", folder / "results.md"
        self.needs: tuple[str, ...] = ("graphs",)  # of the second step
        self._log = folder / "log"
        (folder / "stub.py").write_text(STUB)
        (folder / "graphs.json").write_text(json.dumps([GRAPH]))
        (folder / "scores.json").write_text(json.dumps([SCORE]))

    @property
    def ran(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []

    def steps(self, _budget: object, out: Path) -> dict[str, Step]:
        def step(source: str, copy: str, *needs: str) -> Step:
            words = (self.folder / "stub.py", self.folder / source, out / copy, self._log)
            return Step(tuple(map(str, words)), 1, needs)

        return {"graphs": step("graphs.json", "g.json"), "temperature": step("scores.json", "t.json", *self.needs)}

    def sources(self, _budget: object, out: Path) -> dict[str, Source]:
        return {
            "rlflow-table1": Source(("graphs",), (out / "g.json",)),
            "rlflow-table3": Source(("temperature",), (out / "t.json",)),
        }


@pytest.fixture
def stubbed(tmp_path, monkeypatch) -> Stubbed:
    stubs = Stubbed(tmp_path)
    monkeypatch.setattr(reproduce, "steps_of", stubs.steps)
    monkeypatch.setattr(reproduce, "sources_of", stubs.sources)
    return stubs


@pytest.fixture
def call(stubbed, monkeypatch) -> Callable[..., int]:
    """`reproduce.main()` with arguments; signals are left as they were."""

    def called(*arguments: str, page: bool = True) -> int:
        words = ["reproduce.py", "--out", str(stubbed.out), *arguments]
        monkeypatch.setattr("sys.argv", [*words, *(("--page", str(stubbed.page)) if page else ())])
        before = signal.getsignal(signal.SIGTERM)
        try:
            return reproduce.main()
        finally:
            signal.signal(signal.SIGTERM, before)

    return called


def test_a_page_of_all_tables(stubbed, call, capsys):
    assert call("--quick") == 0
    assert stubbed.ran == ["g.json", "t.json"]
    page = stubbed.page.read_text()
    first = page.split("## RLFlow, table 1: the models' graphs\n\n")[1]
    assert first.startswith("**Quick, no result** (zoo:demo: greedy")
    assert "| one | 5 | 2 | 1.500 | 2.0 | 3 | 4.00 | 1.00 | 4 | 6 | 7 |" in first
    assert f"python {stubbed.folder}/stub.py {stubbed.folder}/graphs.json {stubbed.out}/g.json" in first
    assert f"python scripts/paper.py rlflow-table1 {stubbed.out}/g.json\n```" in first
    assert "| 1.5 | 2.000 | 4.000 | 1.250 | 1 |" in page
    assert "- machine: " in page
    assert "apache-tvm 0.27" in page
    assert "step 2 of 2: temperature, about 1 minutes" in capsys.readouterr().out


def test_the_full_budget_is_told_of_once(stubbed, call):
    assert call() == 0
    page = stubbed.page.read_text()
    assert page.count("zoo:inception-v3") == 1
    assert "no result" not in page


def test_a_step_that_fails_is_told_of_and_gone_on_with(stubbed, call, capsys):
    stubbed.needs = ()
    source, away = stubbed.folder / "graphs.json", stubbed.folder / "away"
    shutil.move(source, away)
    assert call("--quick") == 1
    assert stubbed.ran == ["g.json", "t.json"]  # the others go on
    assert "graphs failed (exit code 3)" in capsys.readouterr().out
    page = stubbed.page.read_text()
    assert f"- RLFlow, table 1: the models' graphs: {stubbed.out}/g.json: cannot be read" in page
    assert "## RLFlow, table 3" in page
    shutil.move(away, source)
    assert call("--quick") == 0
    assert stubbed.ran == ["g.json", "t.json", "g.json"]  # what was done is not run again
    assert "## RLFlow, table 1" in stubbed.page.read_text()
    assert "temperature: done before" in capsys.readouterr().out


def test_nothing_is_made_of_what_a_step_that_failed_has_left(stubbed, call, capsys):
    source, away = stubbed.folder / "graphs.json", stubbed.folder / "away"
    shutil.move(source, away)
    assert call("--quick") == 1
    assert stubbed.ran == ["g.json"]
    out = capsys.readouterr().out
    assert "temperature is not run: it needs graphs" in out
    assert "failed, or not run as what they need failed: graphs, temperature" in out
    assert [path.name for path in (stubbed.out / "steps").iterdir()] == ["graphs.json"]
    shutil.move(away, source)
    assert call("--quick") == 0
    assert stubbed.ran == ["g.json", "g.json", "t.json"]


def test_the_quick_page_does_not_take_the_place_of_the_full_one(stubbed, call, monkeypatch):
    monkeypatch.chdir(stubbed.folder)
    assert call(page=False) == 0
    page = stubbed.folder / "docs" / "results.md"
    full = page.read_text()
    assert "no result" not in full
    assert call("--quick", page=False) == 0
    assert page.read_text() == full
    assert "no result" in (stubbed.out / "results.md").read_text()


def test_a_step_that_failed_after_it_left_something(stubbed, call):
    assert call("--quick") == 0
    record = json.loads((stubbed.out / "steps" / "graphs.json").read_text())
    (stubbed.folder / "graphs.json").unlink()
    (stubbed.out / "steps" / "graphs.json").write_text(json.dumps({**record, "code": 1}))
    assert call("--quick") == 1
    assert "**Incomplete**: graphs failed." in stubbed.page.read_text()


def test_another_command_is_run_although_the_step_was_done(stubbed, call):
    """And then what is made of it."""
    call("--quick")
    path = stubbed.out / "steps" / "graphs.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "words": ["another"]}))
    assert call("--quick", "--only", "rlflow-table1") == 0
    assert stubbed.ran == ["g.json", "t.json", "g.json"]
    record = stubbed.out / "steps" / "temperature.json"
    began = json.loads(path.read_text())["began"]
    record.write_text(json.dumps({**json.loads(record.read_text()), "began": f"1{began[1:]}"}))  # long before
    assert call("--quick") == 0
    assert stubbed.ran == ["g.json", "t.json", "g.json", "t.json"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "words": ["another"]}))
    assert call("--quick") == 0
    assert stubbed.ran == ["g.json", "t.json"] * 3


def test_one_table_alone(stubbed, call):
    assert call("--quick", "--only", "rlflow-table1") == 0
    assert stubbed.ran == ["g.json"]
    assert "table 3: temperature of dreams: its steps (temperature) were not run" in stubbed.page.read_text()
    assert call("--quick", "--only", "rlflow-table3") == 0
    assert stubbed.ran == ["g.json", "t.json"]  # it needs the first step, which was done
    assert "## RLFlow, table 1" in stubbed.page.read_text()


def test_list_runs_nothing(stubbed, call, capsys):
    assert call("--list") == 0
    assert capsys.readouterr().out == (
        "rlflow-table1    RLFlow, table 1: the models' graphs: graphs (1 minutes)\n"
        "rlflow-table3    RLFlow, table 3: temperature of dreams: graphs, temperature (2 minutes)\n"
        "all: 2 minutes on two cores\n"
    )
    assert not stubbed.out.exists()


def test_a_step_ends_with_the_script(tmp_path):
    """What interrupts the waiting for a step ends the step too."""
    pid, sleeper = tmp_path / "pid", tmp_path / "sleep.py"
    sleeper.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_when_it_runs() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=interrupt_when_it_runs, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            reproduce.ran([str(sleeper)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("budget", [QUICK, FULL], ids=["quick", "full"])
def test_every_table_has_its_steps(budget):
    steps, sources = steps_of(budget, Path("runs")), sources_of(budget, Path("runs"))
    assert set(sources) == set(reproduce.TABLES)
    names = list(steps)
    for source in sources.values():
        assert set(source.steps) <= set(names)
    for number, step in enumerate(steps.values()):
        assert set(step.needs) <= set(names[:number])
    assert wanted_steps(list(sources), sources, steps) == names  # none is run for nothing
    assert wanted_steps(["rlflow-table1"], sources, steps) == ["graphs"]
    assert wanted_steps(["rlflow-table3"], sources, steps)[-1] == "temperature"
    assert len(wanted_steps(["rlflow-table3"], sources, steps)) == 2


@pytest.mark.parametrize("budget", [QUICK, FULL], ids=["quick", "full"])
def test_steps_say_what_their_scripts_take(budget):
    for step in steps_of(budget, Path("runs")).values():
        text = (ROOT / step.words[0]).read_text()
        for word in step.words[1:]:
            assert not word.startswith("--") or f'"{word}"' in text, step.words
    assert sum(step.minutes for step in steps_of(QUICK, Path("runs")).values()) < 30


def test_settings_reach_the_agents_that_they_are_of():
    words = papers.steps.agents_command(QUICK.runs[0], QUICK, Path("runs"))
    settings: dict[str, Any] = json.loads(words[words.index("--settings") + 1])
    assert settings == QUICK.settings
    assert "--settings" not in papers.steps.agents_command(QUICK.rewards, QUICK, Path("runs"))
