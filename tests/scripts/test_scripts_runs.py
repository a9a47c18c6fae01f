"""What the run scripts write for the tables: graphs' properties, work and memory before and after, graphs left."""

from __future__ import annotations

import argparse
import dataclasses
import json
from types import SimpleNamespace

import agents
import agents_plans
import bench_models
import onnx
import pytest
from agents_plots import rule_means
from agents_results import check_made, rows_of
from fake_cost import FakeCostModel
from graph_properties import properties, rewrites_away
from run_rows import run_row, write_runs
from small_models import LANES, TARGET, bound, conv_chain, conv_net

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import AgentError, RewriteError, UsageError
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.kernels import extract_kernels, vector_lanes
from rlflow_tvm.passes import GraphState, Plan, default_rules
from rlflow_tvm.search import make_search
from rlflow_tvm.search.result import moves


def test_properties_of_a_model(network):
    row = properties(str(network), TARGET)
    mod = from_onnx(network)
    state = GraphState.from_module(mod, default_rules(vector_lanes(TARGET)))
    kernels = extract_kernels(mod, TARGET)
    assert row["kernels"] == sum(kernel.count for kernel in kernels)
    assert row["sites"] == sum(map(len, state.sites.values()))
    assert row["rules"] == len({action.rule for action in moves(state)})
    tensors = onnx.load(network).graph.initializer
    assert row["weights"] == sum(onnx.numpy_helper.to_array(tensor).size for tensor in tensors)
    # the stem: 16 x 16 pixels, 16 channels out of 3 by 3 x 3, a product and a sum each; the rest comes on top of it
    assert row["flops"] > 2 * 16 * 16 * 16 * 3 * 9
    assert row["bytes_moved"] > 4 * row["weights"]
    assert 0 < row["peak_bytes"] < row["bytes_moved"]
    assert 1 < row["kinds"] < row["operators"]


@pytest.mark.parametrize("build", [conv_chain, conv_net])
def test_graphs_one_rewrite_away(build):
    state = GraphState.from_module(build(), default_rules(LANES))
    reached = set()
    for action in moves(state):
        try:
            reached.add(state.apply(action).structural_hash)
        except RewriteError:
            continue
    assert rewrites_away(state) == len(reached - {state.structural_hash})


def test_metrics_before_and_after():
    problem = RewriteProblem(conv_net(), FakeCostModel(), default_rules(LANES))
    result = make_search("greedy").run(problem)
    assert result.state.actions
    told = json.loads(json.dumps(agents.metrics(problem, result.state)))
    assert told["before"]["run_secs"] == problem.start_secs
    assert told["after"]["run_secs"] == result.run_secs_after < problem.start_secs
    assert told["after"]["kernels"] == problem.cost(result.state).kernels
    assert set(told["after"]) == set(agents.METRICS)
    row = json.loads(json.dumps(agents.told_of_plan(result.plan)))
    assert Plan.of({**row["plan"], "actions": row["actions"]}) == result.plan


def planned(state: GraphState, seed: int, best: float, method: str = "random") -> dict[str, object]:
    """A run that left this state."""
    return run_row(method, seed, best, model="zoo:one", **agents.told_of_plan(state.plan))


def test_graphs_that_methods_left(tmp_path):
    mod = bound(conv_chain())
    start = GraphState.from_module(mod, default_rules(vector_lanes(TARGET)))
    first, second, third = [start.apply(action) for action in moves(start)[:3]]
    rows = [planned(first, 0, 9.0), planned(second, 1, 7.0), planned(third, 2, 8.0), planned(first, 0, 6.0, "greedy")]
    priced: list[int] = []
    model = SimpleNamespace(target=TARGET, kernels=lambda graph: priced.append(graph.structural_hash))
    chosen = bench_models.chosen_runs(write_runs(tmp_path, *rows), "zoo:one")
    left = bench_models.left_by_methods(chosen, mod, model)
    assert list(left) == ["as imported", "ConvertLayout", "greedy, 100 steps", "random, 100 steps, median seed"]
    assert priced == [first.structural_hash, third.structural_hash]  # of 7, 8 and 9 seconds the middle one
    again = GraphState.from_module(left["random, 100 steps, median seed"], start.ruleset)
    assert again.structural_hash == third.structural_hash
    known = bench_models.names_of_runs(chosen)
    write_runs(tmp_path, planned(second, 2, 8.0))  # made again, it has found something else
    assert bench_models.names_of_runs(bench_models.chosen_runs(tmp_path, "zoo:one")) != known
    with pytest.raises(UsageError, match="no run of zoo:two"):
        bench_models.chosen_runs(tmp_path, "zoo:two")
    write_runs(tmp_path, run_row("beam", model="zoo:one"))
    with pytest.raises(UsageError, match=r"beam of zoo:one is of an earlier version of agents\.py"):
        bench_models.chosen_runs(tmp_path, "zoo:one")


def test_of_two_seeds_the_lower_one_is_taken(tmp_path):
    state = GraphState.from_module(bound(conv_chain()), default_rules(LANES))
    write_runs(tmp_path, planned(state, 0, 8.0), planned(state, 1, 5.0))
    (row,) = bench_models.chosen_runs(tmp_path, "zoo:one").values()
    assert row["seed"] == 0


def test_two_models_of_one_name_are_not_mixed(tmp_path):
    with pytest.raises(UsageError, match=r"a/net\.onnx and b/net\.onnx: are called the same"):
        agents.check_names(["a/net.onnx", "zoo:one", "a/net.onnx", "b/net.onnx"])
    write_runs(tmp_path, run_row(begun=agents.BEGUN))
    run = agents.Run("one.onnx", "greedy", 0, 100, 60, 0.3, "llvm")
    with pytest.raises(UsageError, match=r"greedy\.100\.0\.json: is of zoo:one, a model of the same name"):
        agents.check_options(run, tmp_path)


@pytest.mark.parametrize(
    ("name", "values"), [("predict", (0.0, 0.3)), ("settings", ({}, {"n_epochs": 1})), ("horizon", (20, 60))]
)
def test_runs_of_other_options_are_not_averaged(name, values, tmp_path):
    made = {"predict": 0.3, "settings": {}, "horizon": 60}
    rows = [run_row("ppo", seed, **{**made, name: value}) for seed, value in enumerate(values)]
    with pytest.raises(UsageError, match=f"zoo:one ppo: runs of different --{name} cannot be averaged"):
        rows_of(write_runs(tmp_path, *rows))
    for row in rows:  # a search has no episodes
        row["method"] = "random"
    if name == "horizon":
        for path in tmp_path.glob("*/*.json"):
            path.unlink()
        assert len(rows_of(write_runs(tmp_path, *rows))["zoo:one"]["random", 100]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no JSON"), ("[]", "an object of objects"), ('{"ppo": 3}', "an object"), ('{"dqn": {}}', "no agent dqn")],
)
def test_settings_that_cannot_be(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        agents.parse_settings(text)


def test_results_of_other_options_are_not_taken(tmp_path):
    run = agents.Run("zoo:one", "ppo", 0, 100, 20, 0.3, "llvm", {"n_epochs": 4})
    agents.check_options(run, tmp_path)  # nothing is there
    same = {"horizon": 20, "predict": 0.3, "settings": {"n_epochs": 4}}
    write_runs(tmp_path, run_row("ppo", **same))
    with pytest.raises(UsageError, match=r"one/ppo\.100\.0\.json: is of a version .* began elsewhere; give another"):
        agents.check_options(run, tmp_path)
    same["begun"] = agents.BEGUN
    write_runs(tmp_path, run_row("ppo", **same))
    agents.check_options(run, tmp_path)
    for name, other in (("horizon", 60), ("predict", 0.0), ("settings", {})):
        write_runs(tmp_path, run_row("ppo", **{**same, name: other}))
        with pytest.raises(UsageError, match=rf"one/ppo\.100\.0\.json: was made with another --{name}; give that"):
            agents.check_options(run, tmp_path)
    del same["settings"]  # as earlier versions wrote the usual ones
    write_runs(tmp_path, run_row("ppo", **same), run_row("greedy", **{**same, "horizon": 60}))
    agents.check_options(dataclasses.replace(run, settings={}), tmp_path)
    with pytest.raises(UsageError, match="another --settings"):
        agents.check_options(run, tmp_path)
    agents.check_options(agents.Run("zoo:one", "greedy", 0, 100, 20, 0.3, "llvm"), tmp_path)  # it has no episodes


def test_a_training_after_a_search_goes_on_from_what_that_found(tmp_path, monkeypatch):
    """Each seed of its own; an interrupted one, which has more kernels in the database, does not search again."""
    plans = [Plan((f"a@{seed}",), 7, 8 + seed, 16) for seed in range(2)]
    searched, began = [], []

    def search(run: agents.Run, _search: object) -> tuple[None, dict[str, object]]:
        searched.append((run.seed, run.predict))
        row = {"env_steps": 40, "wall_secs": 1.0, "curve": [[0, 10.0], [40, 8.0]]}
        return None, {**row, **agents.told_of_plan(plans[run.seed])}

    def killed(*_: object, **options: dict) -> None:
        began.append((Plan.load(options["starts"]["zoo:one"]), options["steps"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(agents, "searched", search)
    monkeypatch.setattr(agents, "train_on_models", killed)
    monkeypatch.setattr(agents, "model_path", str)
    monkeypatch.setattr(agents, "prices", lambda _: "here")
    first = agents.Run("zoo:one", "ppo-after-greedy", 0, 100, 20, 0.3, "llvm")
    second = dataclasses.replace(first, seed=1)
    for run in (first, second, first, second):
        with pytest.raises(KeyboardInterrupt):
            agents.agent_run(run, run.path(tmp_path).with_suffix(""))
    assert searched == [(0, 0.3), (1, 0.3)]
    assert began == [(plan, 60) for plan in (*plans, *plans)]
    assert not list(tmp_path.glob("*/*.json"))  # where only results lie
    other = dataclasses.replace(first, predict=0.0)
    with pytest.raises(KeyboardInterrupt):
        agents.agent_run(other, first.path(tmp_path).with_suffix(""))
    assert searched[2:] == [(0, 0.0)]
    (first.path(tmp_path).with_suffix("") / "agent.safetensors").touch()  # it has begun, from what that search found
    with pytest.raises(UsageError, match=r"a training began there after a search made by .*'predict': 0.0"):
        agents.agent_run(first, first.path(tmp_path).with_suffix(""))
    assert len(searched) == 3


def test_a_run_that_cannot_be_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    def busy(*_: object) -> None:
        raise AgentError("runs/one: another process is training in it")

    monkeypatch.setattr(agents, "agent_run", busy)
    with pytest.raises(SystemExit) as ended:
        agents.done(agents.Run("zoo:one", "ppo", 0, 100, 20, 0.3, "llvm"), tmp_path)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "  error: runs/one: another process is training in it\n"


def test_a_run_is_done_by_one_process(tmp_path):
    run = agents.Run("zoo:one", "ppo", 0, 100, 20, 0.3, "llvm")
    with agents.claimed(run, tmp_path) as ours, agents.claimed(run, tmp_path) as theirs:
        assert (ours, theirs) == (True, False)
        with agents.claimed(dataclasses.replace(run, seed=1), tmp_path) as other:
            assert other
    with agents.claimed(run, tmp_path) as after_a_failure:
        assert after_a_failure
    write_runs(tmp_path, run_row("ppo", model="zoo:one"))
    assert run.path(tmp_path).exists()
    with agents.claimed(run, tmp_path) as after_a_result:
        assert not after_a_result


def test_plans_of_median_seeds(tmp_path):
    plan = {"start_hash": 1, "end_hash": 2, "lanes": 8}
    gains = enumerate((8.0, 5.0, 9.0, 6.0))
    runs = [run_row("ppo", seed, best, plan=plan, actions=[f"fold@{seed}#0"]) for seed, best in gains]
    write_runs(tmp_path, *runs, run_row("greedy", best=4.0, plan=plan), run_row("beam", plan=plan, actions=[]))
    written = agents_plans.save_plans(rows_of(tmp_path), tmp_path / "plans")
    # of 10 / 9, 10 / 8, 10 / 6 and 10 / 5 the second; the best method first, none for a search that rewrote nothing
    assert written == {"zoo:one": [tmp_path / "plans" / "one" / f"{name}.json" for name in ("greedy", "ppo")]}
    assert Plan.load(written["zoo:one"][1]) == Plan(("fold@0#0",), 1, 2, 8)
    (run_2,) = write_runs(tmp_path, {**runs[2], "steps": 50}).glob("one/ppo.50.2.json")
    written = agents_plans.save_plans(rows_of(run_2.parents[1]), tmp_path / "plans")
    assert [path.name for path in written["zoo:one"]] == ["greedy.json", "ppo.100.json", "ppo.50.json"]


def test_plans_of_runs_that_told_none(tmp_path):
    found = rows_of(write_runs(tmp_path, run_row("ppo", 3)))
    with pytest.raises(UsageError, match=r"zoo:one ppo 3: an earlier version .* run it again"):
        agents_plans.save_plans(found, tmp_path / "plans")
    assert not (tmp_path / "plans").exists()


def test_rules_of_a_method_with_several_numbers_of_steps(tmp_path):
    few, many = run_row(actions=["fold@1#0"]), run_row(steps=200, actions=["move@1#0"])
    rules, columns, means = rule_means(rows_of(write_runs(tmp_path, few, many)))
    assert (rules, columns) == (["fold", "move"], ["one greedy.100", "one greedy.200"])
    assert means.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_results_that_were_made_otherwise_are_not_gone_on_with(tmp_path):
    made = {"steps": 100, "models": ["a"], "prices": "here"}
    check_made(tmp_path, [], made)
    check_made(tmp_path, [{"made": json.loads(json.dumps(made))}], made)
    with pytest.raises(UsageError, match="models was None, is \\['a'\\]"):
        check_made(tmp_path, [{"made": {"steps": 100}}], made)
    with pytest.raises(UsageError, match="steps was None, is 100"):
        check_made(tmp_path, [{"seed": 0}], made)


def test_what_a_training_finds_beyond_its_steps_is_not_counted(tmp_path):
    last, start = Plan(("a@1", "b@2"), 7, 9, 16), Plan(("a@1",), 7, 8, 16)
    start.save(tmp_path / "start.json")
    found = {"env_steps": 90, "run_secs": 1.0, "plan": dataclasses.asdict(start)}
    assert agents.plan_of(json.loads(json.dumps(found)), None, last) == start
    assert agents.plan_of({"env_steps": 0, "run_secs": 2.0}, None, last) == Plan((), 7, 7, 16)
    assert agents.plan_of({}, tmp_path / "start.json", last) == start
