"""The papers' tables: known numbers from the runs that are kept, closed forms from made-up ones, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper import TABLES, main
from run_rows import bench_row, run_row, with_metrics, world_row, write_runs
from scipy import stats

from rlflow_tvm.errors import UsageError


def table(name: str, *paths: Path) -> dict[str, dict[str, str]]:
    """A table's rows by their first cell, or where that stands in several rows by the first two."""
    lines = [line for line in TABLES[name].make(paths).lines if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    firsts = [row[0] for row in rows]
    return {" ".join(row[: 1 if firsts.count(row[0]) == 1 else 2]): dict(zip(header, row, strict=True)) for row in rows}


def test_speed_ups_of_the_runs_that_are_kept(compared):
    """Means and 95 % intervals of each method's seeds; the last row is of what was run on all models."""
    found = table("xrlflow-speedup", compared / "runs")
    gains = {
        folder.name: {method: kept_gains(folder, method) for method in kept_methods(folder)}
        for folder in sorted(path for path in (compared / "runs").iterdir() if path.is_dir())
    }
    assert list(found) == [*gains, "geometric mean"]
    for model, methods in gains.items():
        for method, each in methods.items():
            mean = np.mean(each)
            spread = stats.sem(each) * stats.t.ppf(0.975, len(each) - 1) if len(each) > 1 else 0.0
            cell = f"{mean:.3f} ± {spread:.3f}" if len(each) > 1 else f"{mean:.3f}"
            assert found[model][f"{method}, 2000 steps"] == cell, (model, method)
    for method in set().union(*gains.values()):
        each = [methods.get(method) for methods in gains.values()]
        cell = "-" if None in each else f"{stats.gmean([np.mean(one) for one in each]):.3f}"
        assert found["geometric mean"][f"{method}, 2000 steps"] == cell, method


def kept_methods(folder: Path) -> set[str]:
    return {path.name.split(".")[0] for path in folder.glob("*.2000.*.json")}


def kept_gains(folder: Path, method: str) -> list[float]:
    """Of each seed: the first graph's time over the cheapest one's."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{method}.2000.*.json"))]
    return [row["start_secs"] / row["best_secs"] for row in rows]


def test_times_and_rules_of_the_runs_that_are_kept(compared):
    times = table("rlflow-figure7", compared / "runs")["squeezenet1.1 greedy, 2000 steps"]
    assert times["searching or training, s"] == "71.1"
    assert times["kernels measured meanwhile"] == "11"
    row = json.loads((compared / "runs" / "vit-base" / "greedy.2000.0.json").read_text())
    count = sum(action.startswith("split_matmul_columns@") for action in row["actions"])
    assert count > 30
    assert table("rlflow-figure10", compared / "runs")["`split_matmul_columns`"]["vit-base greedy"] == f"{count:.1f}"


def test_runs_without_metrics_can_still_be_read(compared):
    rows = table("rlflow-table2", compared / "runs", compared / "bert")
    greedy = rows["bert-base greedy, 2000 steps"]
    assert (greedy["before, ms"], greedy["after, ms"], greedy["less, %"]) == ("205.779", "202.666", "-")
    assert rows["squeezenet1.1 ppo, 2000 steps"]["after, ms"] == "4.929"


def test_rewards_of_the_runs_that_are_kept(compared):
    rows = table("rlflow-figure5", compared / "rewards")
    gains = {name.removeprefix("squeezenet1.1 "): row["gain"] for name, row in rows.items()}
    assert list(gains.items())[:2] == [("mixed", "1.128 ± 0.004"), ("shaped", "1.126 ± 0.015")]
    assert gains["improvement (the default)"] == "1.121 ± 0.005"
    assert gains["relative"] == "1.117 ± 0.011"


def test_world_models_of_the_runs_that_are_kept(compared):
    report = (compared / "runs" / "report.md").read_text().splitlines()
    known = [line for line in report if line.startswith("| zoo:squeezenet1.1 | 2000 | 5 |")]
    assert len(known) == 4
    assert set(known) <= set(TABLES["rlflow-figure8"].make([compared / "runs"]).lines)
    rows = TABLES["rlflow-figure9"].make([compared / "bert"]).lines
    assert [line.split("|")[4].strip() for line in rows if line.startswith("| bert-base")] == ["1", "2", "3", "4"]


def test_temperatures_and_unseen_models_that_are_kept(compared):
    rows = table("rlflow-table3", compared / "bert" / "temperature.json")
    assert (rows["0.1"]["dream"], rows["0.1"]["real"]) == ("0.270 ± 0.112", "0.053 ± 0.052")
    assert rows["1.5"]["seeds"] == "5"
    rows = table("xrlflow-shapes", compared / "general")
    assert rows["resnet18@192"]["agent"] == "1.007 ± 0.003"
    assert rows["squeezenet1.1"]["random walks"] == "1.041 ± 0.039 (random)"
    found = rows["bert-base@64"]
    assert (found["search"], found["its gain"], found["its steps"]) == ("greedy", "1.027", "7129")


def test_percentages_and_intervals(tmp_path):
    write_runs(
        tmp_path,
        run_row("ppo", 0, 9.0, **with_metrics(kernels=6, flops=90, peak_bytes=1_000_000)),
        run_row("ppo", 1, 8.0, **with_metrics(kernels=7, flops=110, peak_bytes=1_500_000)),
        run_row("greedy", 0, 5.0),
    )
    rows = table("rlflow-table2", tmp_path)
    assert list(rows) == ["one greedy, 100 steps", "one ppo, 100 steps"]  # the best first
    cells = next(line for line in TABLES["rlflow-table2"].make([tmp_path]).lines if "ppo" in line).split("|")
    told = [cell.strip() for cell in cells[3:-1]]
    # of two values that differ by d: half an interval is 12.706 d / 2, by Student's t for one degree of freedom
    assert told == [
        "2", "10000.000", "8500.000", "15.00 ± 63.53", "2.00", "37.5 ± 158.8", "8", "6.5", "0.0 ± 127.1", "0.0 ± 0.0",
    ]  # fmt: skip


def test_gains_and_their_geometric_mean(tmp_path):
    write_runs(tmp_path, run_row(best=5.0), run_row(best=8.0, model="zoo:two"), run_row("ppo", best=4.0))
    rows = table("xrlflow-speedup", tmp_path)
    assert rows["one"] == {"model": "one", "ppo, 100 steps": "2.500", "greedy, 100 steps": "2.000"}
    assert rows["two"]["ppo, 100 steps"] == "-"
    assert rows["geometric mean"]["greedy, 100 steps"] == f"{(2.0 * 1.25) ** 0.5:.3f}"


def test_rewards_halfway(tmp_path):
    asked = run_row(best=4.0)
    write_runs(tmp_path, run_row("ppo", best=5.0), run_row("ppo-for-mixed", best=8.0, asked=asked))
    rows = table("rlflow-figure5", tmp_path)
    assert list(rows) == ["one improvement (the default)", "one mixed"]
    assert rows["one mixed"]["after half of the steps"] == f"{10 / 9:.3f}"
    assert rows["one mixed"]["16 sampled plans"] == "2.500"
    assert "ppo-for-mixed" not in str(table("xrlflow-speedup", tmp_path))  # other rewards have a table of their own


def test_dreams_and_what_came_of_them(tmp_path):
    write_runs(tmp_path, world_row(0), world_row(1), run_row())
    first, second = [line.split("|") for line in TABLES["rlflow-figure9"].make([tmp_path]).lines if "| one" in line]
    assert [cell.strip() for cell in first[3:-1]] == ["2", "1", "3.50 ± 6.35", "2.00 ± 0.00", "0.50 ± 0.00"]
    assert second[-2].strip() == "1.50 ± 0.00"


def test_whole_models_and_prices(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([bench_row()]))
    rows = table("rlflow-figure6", path)
    assert rows["one ONNX Runtime"]["ONNX Runtime's time over it"] == "1.000"
    greedy = rows["one greedy, 100 steps"]
    assert (greedy["run time, ms"], greedy["quartiles"], greedy["graph gain"]) == ("1.000", "0.900 to 1.200", "1.900")
    assert greedy["ONNX Runtime's time over it"] == "3.000"
    costs = tmp_path / "cost.json"
    row = {"model": "zoo:one", "rewrites": 0, "kernels": 3, "cost_secs": [1e-3, 2e-3, 4e-3]}
    ends = {"end_to_end_secs": [2e-3, 2e-3, 2e-3], "ratio": 0.95, "disturbed_rounds": 1}
    costs.write_text(json.dumps([{**row, **ends}, {**row, **ends, "rewrites": 20, "ratio": 1.01}]))
    page = TABLES["xrlflow-cost"].make([costs])
    assert page.lines[2] == "| one | 0 | 3 | 2.000 | 2.000 | -5.0 | 1 |"
    assert "median 3.0 %, worst 5.0 %" in page.lines[-1]


def test_steps_of_dreams(tmp_path):
    path = tmp_path / "steps.json"
    dreams = [{"batch": 1, "step_secs": 5e-3}, {"batch": 10, "step_secs": 1e-2}]
    path.write_text(json.dumps([{"model": "zoo:one", "real_secs": 0.1, "dreams": dreams}]))
    rows = table("rlflow-steps", path)
    assert rows["one 1 dreams at once"]["of a real one"] == "1/20"
    assert rows["one 10 dreams at once"]["ms"] == "1.000"


def test_a_score_that_says_nothing_is_no_number(tmp_path):
    """R2 of rewards that are all the same; the log has None for it."""
    rows = [world_row(seed) for seed in (0, 1)]
    for line in rows[0]["log"]:
        line.update({"held_out/reward_r2": None} if "held_out/reward_r2" in line else {})
    write_runs(tmp_path, *rows)
    page = TABLES["rlflow-figure8"].make([tmp_path])
    first = next(line for line in page.lines if line.startswith("| zoo:one"))
    assert [cell.strip() for cell in first.split("|")][5:8] == ["50", "0.5", "0.5"]
    assert page.draw is not None
    page.draw(tmp_path / "plot.png")
    for line in rows[1]["log"]:
        line.update({"held_out/reward_r2": None} if "held_out/reward_r2" in line else {})
    write_runs(tmp_path, *rows)
    first = next(line for line in TABLES["rlflow-figure8"].make([tmp_path]).lines if line.startswith("| zoo:one"))
    assert [cell.strip() for cell in first.split("|")][5:8] == ["50", "0.5", ""]


def empty(folder: Path) -> list[Path]:
    return [folder]


def no_json(folder: Path) -> list[Path]:
    write_runs(folder, run_row())
    (folder / "one" / "ppo.100.0.json").write_text("{")
    return [folder]


def no_run(folder: Path) -> list[Path]:
    row = run_row()
    del row["curve"]
    (folder / "one").mkdir()
    (folder / "one" / "greedy.100.0.json").write_text(json.dumps(row))
    return [folder]


def two_machines(folder: Path) -> list[Path]:
    return [write_runs(folder, run_row(), run_row("ppo", prices="another"))]


def no_world(folder: Path) -> list[Path]:
    return [write_runs(folder, run_row())]


def no_log(folder: Path) -> list[Path]:
    return [write_runs(folder, run_row("world-model"))]


def not_there(folder: Path) -> list[Path]:
    return [folder / "missing.json"]


def other_rows(folder: Path) -> list[Path]:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"model": "zoo:one"}]))
    return [path]


def no_rows(folder: Path) -> list[Path]:
    path = folder / "rows.json"
    path.write_text("{}")
    return [path]


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("rlflow-table2", empty, "no results here; run scripts/agents.py"),
        ("rlflow-table2", no_json, "ppo.100.0.json: is no JSON"),
        ("rlflow-table2", no_run, "curve is missing"),
        ("xrlflow-speedup", two_machines, "results of a machine and another cannot be held against each other"),
        ("rlflow-figure5", no_world, "no run in these folders is of a method"),
        ("rlflow-figure8", no_world, "world-model"),
        ("rlflow-figure9", no_log, "has no log"),
        ("rlflow-table1", not_there, "cannot be read"),
        ("rlflow-table3", other_rows, "has no temperature; give what scripts/temperature.py writes"),
        ("rlflow-figure6", no_rows, "holds no list of rows"),
        ("xrlflow-cost", lambda folder: [*not_there(folder), *not_there(folder)], "one file or folder"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, name, made: Callable[[Path], list[Path]], message):
    with pytest.raises(UsageError) as raised:
        TABLES[name].make(made(tmp_path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_command(tmp_path, monkeypatch, capsys):
    runs, out = write_runs(tmp_path / "runs", run_row()), tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["paper.py", "rlflow-table2", str(runs), "--out", str(out)])
    assert main() == 0
    assert out.read_text() == capsys.readouterr().out
    assert out.read_text().startswith("## RLFlow, table 2: run time and memory\n\n| model |")
    monkeypatch.setattr("sys.argv", ["paper.py", "rlflow-table2", str(runs), "--plot", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "has no figure" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["paper.py", "rlflow-table2", str(runs), "--out", str(tmp_path / "no" / "a.md")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "does not exist or cannot be written; make it first" in capsys.readouterr().err


def figures(folder: Path) -> dict[str, Path]:
    """What each figure is drawn of."""
    log: list[dict[str, Any]] = [{"env_steps": 50, "mean_return": 1.0}, {"env_steps": 100, "mean_return": 2.0}]
    asked = run_row(best=4.0)
    runs = write_runs(folder / "runs", run_row(), run_row("ppo", asked=asked), world_row(0), world_row(1))
    rewards = write_runs(folder / "rewards", run_row("ppo", log=log), run_row("ppo-for-mixed", log=log))
    bench = folder / "bench.json"
    bench.write_text(json.dumps([bench_row()]))
    names = {"rlflow-figure7", "rlflow-figure8", "rlflow-figure9", "rlflow-figure10", "xrlflow-speedup"}
    return {**dict.fromkeys(names, runs), "rlflow-figure5": rewards, "rlflow-figure6": bench}


@pytest.mark.parametrize("name", sorted(name for name in TABLES if "figure" in name or "speedup" in name))
def test_figures_are_drawn(tmp_path, name, monkeypatch):
    pytest.importorskip("matplotlib")
    page = TABLES[name].make([figures(tmp_path)[name]])
    assert page.draw is not None
    drawn = tmp_path / "drawn.png"
    page.draw(drawn)
    assert drawn.read_bytes().startswith(b"\x89PNG")
