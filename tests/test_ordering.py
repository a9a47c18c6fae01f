"""Training agents to put passes in order, as the command does it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax

from rlflow_tvm import ir, train
from rlflow_tvm.envs import PassOrderingEnv
from rlflow_tvm.errors import AgentError, EnvError, UsageError
from rlflow_tvm.ordering import (
    LearnedOrder,
    RandomPasses,
    common_order,
    find_order,
    greedy_order,
    left_by,
    train_on_graphs,
)
from rlflow_tvm.passes import OrderedPasses
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.operations import Operations
from rlflow_tvm.passes.ordering import PASSES
from tests.command_process import run_command
from tests.small_models import bound, module, wasteful


def count(mod: tvm.IRModule) -> int:
    return Operations.of(Graph.from_module(ir.detach(mod).mod)).total


def test_a_training_leaves_an_agent_an_order_and_a_log(tmp_path):
    graphs = {"a": wasteful(), "b": wasteful(16)}
    told = []
    outcome = train_on_graphs(
        graphs, "maskable-ppo", steps=1024, seed=0, out=tmp_path, horizon=6, progress=lambda *each: told.append(each)
    )
    assert outcome.left < 0.7
    assert outcome.common_left < 0.7
    assert told[-1][:2] == (1024, 1024)
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert lines[-1]["env_steps"] <= 1024
    assert lines[-1]["episodes"] > 100
    assert count(OrderedPasses.load(tmp_path / "best.order.json")(graphs["a"])) == round(6 * outcome.common_left)
    mod = bound(wasteful())
    assert count(LearnedOrder(tmp_path / "agent.safetensors")(mod)) < 6
    with pytest.raises(UsageError, match="there is a training in it"):
        train_on_graphs(graphs, "ppo", steps=10, seed=0, out=tmp_path)


def test_a_graph_of_which_nothing_is_left_ends_no_training(tmp_path, monkeypatch):
    """As where all that a model does is undone by what it does next."""
    made = PassOrderingEnv

    def free_when_small(graphs, **options):
        return made(graphs, objective=lambda _mod, operations: float(max(operations.total - 5, 0)), **options)

    monkeypatch.setattr("rlflow_tvm.ordering.PassOrderingEnv", free_when_small)
    told = []
    outcome = train_on_graphs(
        {"a": wasteful()}, "ppo", steps=128, seed=0, out=tmp_path, horizon=6, progress=lambda *each: told.append(each)
    )
    assert outcome.left == outcome.common_left == 0.0
    assert any("0.0 % of the operations left" in text for *_, text in told)


def test_a_graph_that_nothing_can_be_done_with_is_told_before_the_training(tmp_path):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            output = builder.emit_output(x)
        builder.emit_func_output(output)
    graphs = {f"g{i}": wasteful() for i in range(20)} | {"empty": builder.get()}
    with pytest.raises(EnvError, match="graph empty has no operations at run time: leave it out"):
        train_on_graphs(graphs, "ppo", steps=1, seed=0, out=tmp_path / "out", progress=lambda *_: pytest.fail("began"))
    assert not (tmp_path / "out").exists()


def test_an_interrupted_training_leaves_what_it_has_learnt(tmp_path, caplog):
    def interrupt(done: int, _total: int, _what: str) -> None:
        if done == 300:
            raise KeyboardInterrupt

    outcome = train_on_graphs(
        {"a": wasteful()}, "maskable-ppo", steps=4096, seed=0, out=tmp_path, horizon=6, progress=interrupt
    )
    assert outcome.env_steps == 300
    assert "interrupted: the agent is what it has learnt by now" in caplog.text
    OrderedPasses.load(tmp_path / "best.order.json")
    assert count(LearnedOrder(tmp_path / "agent.safetensors")(bound(wasteful()))) <= 6


@pytest.mark.parametrize("simplified", [False, True])
def test_a_module_that_computes_nothing_is_left_as_it_is(simplified, monkeypatch):
    agent = SimpleNamespace(metadata={"passes": list(PASSES), "reward": "saving", "horizon": 4, "operators": ()})
    monkeypatch.setattr("rlflow_tvm.agents.registry.named", lambda _: SimpleNamespace(load=lambda _path: agent))
    mod = bound(module({"x": (2, 3)}, {}, lambda _emit, x: x))
    mod = tvm.relax.transform.CanonicalizeBindings()(mod) if simplified else mod
    tvm.ir.assert_structural_equal(LearnedOrder("agent.safetensors")(mod), mod)


@pytest.mark.parametrize("left", ["progress.jsonl", "best.order.json"])
def test_what_an_interrupted_training_left_is_not_mixed_with_a_new_one(tmp_path, left):
    (tmp_path / left).write_text("{}\n")
    with pytest.raises(UsageError, match=rf"there is a training in it \({left}\)"):
        train_on_graphs({"a": wasteful()}, "a2c", steps=64, seed=0, out=tmp_path, horizon=2)
    assert (tmp_path / left).read_text() == "{}\n"


def test_a_short_training_leaves_a_log_too(tmp_path):
    train_on_graphs({"a": wasteful()}, "a2c", steps=32, seed=0, out=tmp_path, horizon=8)
    assert (tmp_path / "progress.jsonl").read_text() == ""


def test_a_log_that_cannot_be_written_is_told_before_the_training(monkeypatch):
    monkeypatch.setattr("rlflow_tvm.agents.ordering.train_ordering", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(AgentError, match=r"^/proc/self/progress\.jsonl: cannot be written \(.*\): give another --out$"):
        train_on_graphs({"a": wasteful()}, "a2c", steps=64, seed=0, out=Path("/proc/self"))


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match=r"file: cannot be made \(File exists\): give another --out"):
        train_on_graphs({"a": wasteful()}, "a2c", steps=64, seed=0, out=tmp_path / "file")


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path, monkeypatch):
    def refused(*_arguments, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(AgentError, match=r"cannot be looked into \(Permission denied\): give another --out"):
        train_on_graphs({"a": wasteful()}, "a2c", steps=64, seed=0, out=tmp_path)


def test_the_common_order_is_the_best_for_all():
    env = PassOrderingEnv({"a": wasteful(), "b": wasteful(16)})
    good, poor = ("DeadCodeElimination", "rules:transpose"), ("EliminateCommonSubexpr",)
    assert left_by(env, good, "a") == pytest.approx(3 / 6)
    assert common_order(env, {"a": (poor, 0.1), "b": (good, 0.5)}) == (good, pytest.approx(0.5))


def test_greedy_search_takes_what_leaves_least_and_stops():
    env = PassOrderingEnv({"a": wasteful()}, passes=("DeadCodeElimination", "LambdaLift", "rules:transpose"))
    order, left, tried = greedy_order(env, "a")
    assert (order, left, tried) == (("rules:transpose",), pytest.approx(3 / 6), 6)
    assert greedy_order(env, "a", budget=2) == (("DeadCodeElimination",), pytest.approx(5 / 6), 2)
    assert env.after("DeadCodeElimination") is None


def test_random_passes_are_of_those_that_may_change_something():
    act = RandomPasses(0).act
    assert {act(np.zeros(1), np.array([True, False, True, True])) for _ in range(50)} == {0, 2}
    assert act(np.zeros(1), np.array([False, False, True])) == 2
    env = PassOrderingEnv({"a": wasteful()})
    assert find_order(env, RandomPasses(0), "a") == find_order(env, RandomPasses(0), "a")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("rlflow_tvm.train", ["--env", "pass-ordering", *arguments], os.environ, 300.0)


def test_the_command_trains_on_models(tmp_path):
    done = run("zoo:demo", "--agent", "a2c", "--steps", "64", "--horizon", "8", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "% of the operations left by the agent" in done.stdout
    assert (tmp_path / "out" / "best.order.json").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--predict", "0.3"], "--predict does not go with --env pass-ordering"),
        (["--agent", "world-model"], "no agent world-model puts passes in order"),
        (["--reward", "gold"], "no reward is called 'gold'"),
        (["--reward", "improvement"], "no reward is called 'improvement'"),  # of the other environment
        (["--seed", f"{2**64}"], f"seed {2**64}: give 0 or more, below 2^64"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, arguments, told):
    done = run("zoo:demo", "--out", str(tmp_path / "out"), *arguments)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_agent_is_told_before_the_corpus_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("rlflow_tvm.frontend.corpus.corpus", lambda: pytest.fail("it was made"))
    with pytest.raises(AgentError, match="no agent world-model puts passes in order"):
        train._order_passes(None, "world-model", {}, lambda *_: None, steps=1, seed=0, out=tmp_path / "out")


def test_shapes_of_no_model_are_refused(tmp_path):
    done = run("--shape", "x=1,4", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "error: --shape is for MODELS: give one, or leave it out" in done.stderr
    assert not (tmp_path / "out").exists()
