"""Runs' plans priced anew: in databases of their own, once each, and what the report makes of it."""

from __future__ import annotations

import json
import multiprocessing

import agents
import agents_anew
import agents_report
import pytest
from agents_results import gains_anew, run_name
from fake_workers import workers_by
from run_rows import run_row, write_runs
from small_models import bound, conv_chain

from rlflow_tvm.cli import parse_target
from rlflow_tvm.cost import KernelDatabase, timer
from rlflow_tvm.kernels import vector_lanes
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.search.result import moves


class Inline:
    """Processes that are this one: what they call can be replaced."""

    def __init__(self, target, args) -> None:
        self.exitcode, self._do, self._with = 0, target, args

    def start(self) -> None:
        try:
            self._do(*self._with)
        except SystemExit as end:
            self.exitcode = end.code

    def join(self) -> None:
        pass

    def kill(self) -> None:
        """They have ended by now."""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with one run that rewrote nothing, and one with a rewrite."""
    state = GraphState.from_module(bound(conv_chain()), default_rules(vector_lanes(parse_target("llvm"))))
    moved = state.apply(next(iter(moves(state))))
    plans = {"greedy": state.plan, "random": moved.plan}
    ours = agents.prices("llvm")
    rows = [run_row(method, 0, 8.0, prices=ours, **agents.told_of_plan(plan)) for method, plan in plans.items()]
    monkeypatch.setattr(agents_anew, "from_onnx", lambda _path: bound(conv_chain()))
    monkeypatch.setattr(agents_anew, "model_path", lambda name: name)
    # kernels take what their multiplications and additions do
    monkeypatch.setattr(timer, "LocalWorkers", workers_by(lambda features, _cold: 1e-6 + 1e-11 * features["flops"]))
    monkeypatch.setattr(multiprocessing, "get_context", lambda _kind: type("Context", (), {"Process": Inline}))
    return write_runs(tmp_path, *rows)


def named(runs, *files: str) -> list[str]:
    """What the runs in these files are called."""
    return [run_name(json.loads((runs / "one" / f"{file}.json").read_text())) for file in files]


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["agents_anew.py", *map(str, arguments)])
    return agents_anew.main()


def test_plans_are_priced_in_new_databases(runs, monkeypatch, capsys):
    assert call(monkeypatch, runs, "--databases", 2) == 0
    found = json.loads((runs / "one.anew.json").read_text())
    assert found["prices"] == agents.prices("llvm")
    greedy, random = named(runs, "greedy.100.0", "random.100.0")
    assert [set(known) for known in found["databases"]] == [{greedy, random}] * 2
    assert [known[greedy] for known in found["databases"]] == [1.0, 1.0]  # the model's own graph
    assert all(known[random] > 0 for known in found["databases"])
    for number in range(2):
        with KernelDatabase(runs / f"one.anew.{number}.sqlite") as database:
            assert database.holdings()

    monkeypatch.setattr(agents_anew, "price_anew", lambda *_arguments: pytest.fail("all of it is known"))
    assert call(monkeypatch, runs, "--databases", 2) == 0

    monkeypatch.setattr("sys.argv", ["agents_report.py", str(runs)])
    assert agents_report.main() == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    column = [cell.strip() for cell in rows[0]].index("priced anew")
    assert {row[1].strip(): row[column].strip() for row in rows[2:]}["greedy"] == "1.0000"


def test_another_database_and_another_run_are_added(runs, monkeypatch):
    assert call(monkeypatch, runs, "--databases", 1) == 0
    before = json.loads((runs / "one.anew.json").read_text())["databases"][0]
    (runs / "one" / "random.100.1.json").write_text(
        (runs / "one" / "random.100.0.json").read_text().replace('"seed": 0', '"seed": 1')
    )
    assert call(monkeypatch, runs, "--databases", 2) == 0
    first, second = json.loads((runs / "one.anew.json").read_text())["databases"]
    assert first.items() > before.items()
    random, again = named(runs, "random.100.0", "random.100.1")
    assert set(first) == set(second) == {*before, again}
    assert first[again] == first[random]  # the same plan, by the same prices


def test_a_run_that_was_done_again_is_priced_again(runs, monkeypatch):
    """What another plan gained is not told of it."""
    assert call(monkeypatch, runs, "--databases", 1) == 0
    path = runs / "one" / "random.100.0.json"
    row = json.loads(path.read_text())
    greedy = json.loads((runs / "one" / "greedy.100.0.json").read_text())
    path.write_text(json.dumps({**row, "actions": greedy["actions"], "plan": greedy["plan"]}))
    (new,) = named(runs, "random.100.0")
    assert gains_anew(runs, "zoo:one", [json.loads(path.read_text())]) == []
    assert call(monkeypatch, runs, "--databases", 1) == 0
    assert json.loads((runs / "one.anew.json").read_text())["databases"][0][new] == 1.0


def test_prices_of_other_kernels_are_not_added_to(runs, monkeypatch, capsys):
    (runs / "one.anew.json").write_text(json.dumps({"prices": "another machine", "databases": []}))
    with pytest.raises(SystemExit):
        call(monkeypatch, runs)
    assert "is of another machine" in capsys.readouterr().err
    assert not list(runs.glob("*.sqlite"))


def test_runs_of_another_machine_are_priced_there(runs, monkeypatch, capsys):
    for path in (runs / "one").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "prices": "another machine"}))
    with pytest.raises(SystemExit):
        call(monkeypatch, runs)
    assert "runs of zoo:one are of another machine" in capsys.readouterr().err
    assert not (runs / "one.anew.json").exists()


def test_a_damaged_file_is_told_in_one_line(runs, monkeypatch, capsys):
    (runs / "one.anew.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["agents_report.py", str(runs)])
    with pytest.raises(SystemExit):
        agents_report.main()
    assert "one.anew.json: is no JSON" in capsys.readouterr().err


def test_a_plan_that_cannot_be_replayed_ends_it(runs, monkeypatch, capsys):
    path = runs / "one" / "random.100.0.json"
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "plan": {**row["plan"], "start_hash": 1}}))
    assert call(monkeypatch, runs, "--databases", 1) != 0
    assert capsys.readouterr().err.count("error:") == 1


def test_of_how_many_seeds_prices_anew_are(runs, monkeypatch, capsys):
    """And of another machine's they are none."""
    call(monkeypatch, runs, "--databases", 1)
    (random,) = runs.glob("*/random.*.json")
    row = json.loads(random.read_text())
    write_runs(runs, {**row, "seed": 1})
    monkeypatch.setattr("sys.argv", ["agents_report.py", str(runs)])
    agents_report.main()
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| random"))
    assert "(1 of 2)" in told
    anew = runs / "one.anew.json"
    anew.write_text(json.dumps({**json.loads(anew.read_text()), "prices": "another machine"}))
    with pytest.raises(SystemExit):
        agents_report.main()
    assert "is of another machine, the runs are not; price them anew" in capsys.readouterr().err
