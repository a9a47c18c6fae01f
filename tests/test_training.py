"""Training on models: which folders are taken, and which trainings go on."""

from __future__ import annotations

import fcntl
import json
from contextlib import AbstractContextManager
from pathlib import Path

import onnx
import pytest
from fake_cost import FakeCostModel
from onnx import TensorProto, helper

from rlflow_tvm import rollouts, training, training_files
from rlflow_tvm.agents.candidate.config import PRESETS, CandidateConfig
from rlflow_tvm.agents.checkpoint import load_checkpoint, save_checkpoint
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.registry import AgentKind
from rlflow_tvm.agents.world.config import WorldModelConfig
from rlflow_tvm.cost import RpcDevices
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import AgentError, PlanError, RlflowError, UsageError
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.kernels import as_target
from rlflow_tvm.passes import Plan
from rlflow_tvm.search import Beginning, Budget, Greedy, beginnings
from rlflow_tvm.search import agent_search as agent_search_module
from rlflow_tvm.search.result import moves
from rlflow_tvm.superoptimize import agent_search

HERE = as_target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
THERE = as_target({"kind": "llvm", "mcpu": "znver4", "num-cores": 4})
CONFIGS = {
    "ppo": PPOConfig(hidden=8, rounds=1, steps_per_update=4, n_epochs=1, minibatch_size=16),
    "candidate": CandidateConfig(hidden=8, heads=2, rounds=1, change_rounds=1, steps_per_update=4, n_epochs=1),
    "world-model": WorldModelConfig(
        hidden=8, rounds=1, memory=8, gaussians=2, members=1, vision_steps=2, memory_steps=2, held_out=0.3,
        iterations=1, controller_updates=1, dreams=2, controller=PPOConfig(hidden=8, n_epochs=1),
    ),
}  # fmt: skip


class Priced(FakeCostModel, AbstractContextManager):
    """A cost model as a training opens it; counts what all of them are asked."""

    questions = 0
    blocked_conv = 60.0

    def __init__(self, target, timer=None, policy=None) -> None:
        super().__init__(blocked_conv=self.blocked_conv)
        self.target = target

    def cost(self, mod, *, reach=None, confirmed=False):
        Priced.questions += 1
        return super().cost(mod, reach=reach, confirmed=confirmed)

    def __exit__(self, *_) -> None:
        self.close()


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(rollouts, "CostModel", Priced)
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: CONFIGS["ppo"])
    monkeypatch.setattr(Priced, "questions", 0)


def model(path: Path, *operators: str) -> Path:
    """A chain of operators on x of shape (1, n)."""
    nodes = [helper.make_node(op, [f"x{i}" if i else "x"], [f"x{i + 1}"]) for i, op in enumerate(operators)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "n"]) for n in ("x", f"x{len(operators)}")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def chain(tmp_path) -> Path:
    return model(tmp_path / "chain.onnx", "Relu", "Relu", "Relu", "Tanh")


def train(path: Path, out: Path, target=HERE, extent: int = 4, **options):
    return training.train_on_models(
        {"chain": path}, options.pop("agent", "ppo"), target, out=out, horizon=5,
        **{"steps": 4, "seed": 0, "shapes": {"x": (1, extent)}, **options},
    )  # fmt: skip


def test_a_training_goes_on_with_its_best_plan(chain, tmp_path):
    first = train(chain, tmp_path / "out", steps=20)
    assert first.models[0].run_secs_after < first.models[0].run_secs_before
    assert not (tmp_path / "out" / "end_to_end.jsonl").exists(), "this reward runs nothing as a whole"
    again = train(chain, tmp_path / "out", steps=first.env_steps + 1, resume=True)
    assert again.env_steps > first.env_steps
    assert again.models[0].run_secs_after <= first.models[0].run_secs_after
    finished = train(chain, tmp_path / "out", steps=1, resume=True)
    assert finished.models == again.models
    curve = [json.loads(line) for line in (tmp_path / "out" / "best.jsonl").read_text().splitlines()]
    assert curve[-1]["run_secs"] == again.models[0].run_secs_after
    assert [each["run_secs"] for each in curve] == sorted({each["run_secs"] for each in curve}, reverse=True)
    assert all(0 < each["env_steps"] <= again.env_steps for each in curve)
    assert Plan.of(curve[-1]["plan"]) == Plan.load(again.models[0].plan)


def test_a_best_plan_survives_a_kill_between_its_line_and_its_file(chain, tmp_path):
    """And half of a line is nothing: what is written next is a line of its own."""
    problem, curve = RewriteProblem(from_onnx(chain, {"x": (1, 4)}), Priced(HERE)), tmp_path / "best.jsonl"
    found = Greedy().run(problem)
    plans = training_files.BestPlans(tmp_path, {"chain": problem})
    plans.offer("chain", found.plan, found.run_secs_after, 3)
    whole = curve.read_text()
    assert len(whole.splitlines()) == 1
    plans.paths["chain"].unlink()
    curve.write_text(whole + whole[:40])
    again = training_files.BestPlans(tmp_path, {"chain": problem})
    assert Plan.load(again.paths["chain"]) == found.plan
    assert again.outcomes() == plans.outcomes()
    assert curve.read_text() == whole
    curve.write_text(f"{whole}3\n")
    with pytest.raises(AgentError, match=r"best\.jsonl: line 2 is no JSON object: mend it"):
        training_files.BestPlans(tmp_path, {"chain": problem})


def test_a_training_remembers_the_plan_it_is_given(chain, tmp_path):
    problem = RewriteProblem(from_onnx(chain, {"x": (1, 4)}), Priced(HERE))
    found = Greedy().run(problem)
    found.plan.save(tmp_path / "greedy.json")
    outcome = train(chain, tmp_path / "out", starts={"chain": tmp_path / "greedy.json"})
    assert outcome.models[0].run_secs_after <= found.run_secs_after < found.run_secs_before
    curve = [json.loads(line) for line in (tmp_path / "out" / "best.jsonl").read_text().splitlines()]
    assert (curve[0]["env_steps"], curve[0]["run_secs"]) == (0, found.run_secs_after)
    with pytest.raises(AgentError, match=r"metadata starts was .*, is None"):
        train(chain, tmp_path / "out", steps=outcome.env_steps + 1, resume=True)
    other = model(tmp_path / "other.onnx", "Tanh", "Relu", "Relu")
    Priced.questions = 0
    with pytest.raises(PlanError, match="another module"):
        train(other, tmp_path / "other", starts={"chain": tmp_path / "greedy.json"})
    assert Priced.questions == 0
    assert not (tmp_path / "other").exists()


def test_a_start_that_is_no_plan_is_told_before_anything_is_imported(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "import_models", lambda *_: pytest.fail("it was imported"))
    with pytest.raises(PlanError, match=r"none\.json: no such plan file"):
        train(chain, tmp_path / "out", starts={"chain": tmp_path / "none.json"})
    assert not (tmp_path / "out").exists()


def test_two_processes_do_not_train_in_one_folder(chain, tmp_path):
    """As where one that `agents.py` began outlives it."""
    out = tmp_path / "out"
    steps = train(chain, out).env_steps + 1
    before = (out / "agent.safetensors").read_bytes()
    with (out / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AgentError, match=rf"^{out}: another process is training in it .*another output folder$"):
            train(chain, out, steps=steps, resume=True)
    assert (out / "agent.safetensors").read_bytes() == before
    assert train(chain, out, steps=steps, resume=True).env_steps >= steps


def test_a_training_begins_where_a_family_is_settled(network, tmp_path, monkeypatch):
    problem = RewriteProblem(from_onnx(network), Priced(HERE))
    begin = beginnings(problem)[0]
    assert begin.run_secs < problem.start_secs
    dearer = problem.start.apply(next(move for move in moves(problem.start) if move.rule == "block_conv"))
    assert begin.run_secs < problem.cost(dearer).run_secs
    dearer.plan.save(tmp_path / "dearer.json")

    def train_it(steps: int, **options):
        return training.train_on_models(
            {"net": network}, "ppo", HERE, seed=0, out=tmp_path / "out", horizon=5, steps=steps,
            starts={"net": tmp_path / "dearer.json"}, **options,
        )  # fmt: skip

    def curve():
        return [json.loads(line) for line in (tmp_path / "out" / "best.jsonl").read_text().splitlines()]

    first = train_it(30)
    begun = [each["run_secs"] for each in curve() if each["env_steps"] == 0]
    assert begun[-1] == begin.run_secs
    way = begin.state.plan.actions
    assert all(tuple(each["plan"]["actions"][: len(way)]) == way for each in curve()[len(begun) :])
    remembered = load_checkpoint(first.checkpoint, prefix="none")[1]["archive"]["net"]
    assert remembered
    assert max(each["run_secs"] for each in remembered) < begin.run_secs  # what is dearer is nothing to go on from
    asked = agent_search(first.checkpoint, budget=Budget(1)).run(RewriteProblem(from_onnx(network), Priced(HERE)))
    assert asked.plan.actions[: len(way)] == way
    tensors, told = load_checkpoint(first.checkpoint)
    del told["metadata"]["begins"]  # as former versions left it: those began at the model
    save_checkpoint(tmp_path / "former.safetensors", tensors, told)
    asked = agent_search(tmp_path / "former.safetensors", budget=Budget(1)).run(problem)
    assert asked.plan.actions[: len(way)] != way
    monkeypatch.setattr(Priced, "blocked_conv", 150.0)  # as where kernels have been measured again: it goes on there
    problem = RewriteProblem(from_onnx(network), Priced(HERE))
    assert not beginnings(problem)[0].state.actions
    again = train_it(first.env_steps + 1, resume=True)
    assert again.env_steps > first.env_steps


def test_a_start_that_no_episode_would_begin_at_is_refused(chain, tmp_path, monkeypatch):
    Greedy().run(RewriteProblem(from_onnx(chain, {"x": (1, 4)}), Priced(HERE))).plan.save(tmp_path / "greedy.json")
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: CandidateConfig(**settings))
    Priced.questions = 0
    with pytest.raises(UsageError, match="no episode begins at a given plan with these settings: leave out --start"):
        train(chain, tmp_path / "out", agent="candidate", settings=PRESETS["x-rlflow"],
              starts={"chain": tmp_path / "greedy.json"})  # fmt: skip
    assert Priced.questions == 0
    assert not (tmp_path / "out").exists()


def test_whole_models_are_not_run_on_other_machines(chain, tmp_path):
    with pytest.raises(UsageError, match="end-to-end has models run as a whole, which --rpc does not: leave out one"):
        train(chain, tmp_path / "out", reward="end-to-end", remote=RpcDevices("localhost", 9190, "key"))
    assert Priced.questions == 0
    assert not (tmp_path / "out").exists()


def test_a_reward_that_cannot_be_is_refused_at_once(chain, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no reward is called 'gold': there are incremental"):
        train(chain, tmp_path / "out", reward="gold")
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: PPOConfig(**settings))
    with pytest.raises(UsageError, match=r"reward shaped is made for gamma = 0\.99"):  # else standing still would pay
        train(chain, tmp_path / "out", reward="shaped", settings={"gamma": 0.9})
    assert not (tmp_path / "out").exists()


def test_a_seed_of_more_than_64_bits_is_refused_at_once(chain, tmp_path):
    with pytest.raises(UsageError, match=f"seed {2**64}: give 0 or more, below 2.64"):
        train(chain, tmp_path / "out", seed=2**64)
    assert Priced.questions == 0
    assert train(chain, tmp_path / "out", seed=2**64 - 1).episodes


@pytest.mark.parametrize("what", ["target", "shapes", "structures"])
def test_a_training_does_not_go_on_with_something_else(what, chain, tmp_path):
    out = tmp_path / "out"
    train(chain, out)
    plan = (out / "best.plan.json").read_text()
    if what == "structures":
        model(chain, "Relu", "Relu", "Tanh")
    options = {"target": {"target": THERE}, "shapes": {"extent": 5}, "structures": {}}[what]
    with pytest.raises(AgentError, match=rf"cannot resume .*metadata {what} was"):
        train(chain, out, steps=100, resume=True, **options)
    assert (out / "best.plan.json").read_text() == plan


def test_a_plan_of_something_else_is_not_taken_over(chain, tmp_path):
    out = tmp_path / "out"
    found = Greedy().run(RewriteProblem(from_onnx(chain, {"x": (1, 4)}), Priced(HERE)))
    found.plan.save(out / "best.plan.json")
    Priced.questions = 0
    with pytest.raises(UsageError, match=r"best\.plan\.json: is a plan of another training"):
        train(chain, out)
    assert Priced.questions == 0
    assert [path.name for path in out.iterdir()] == ["best.plan.json"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("pass-ordering", "is an agent that puts passes in order"), ("world-model", "is an agent of another kind")],
)
def test_an_agent_of_another_kind_is_refused_before_anything_is_priced(kind, message, chain, tmp_path):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {}, {"agent": kind, "metadata": {}})
    before, Priced.questions = path.read_bytes(), 0
    with pytest.raises(AgentError, match=f"^{path}: {message}"):
        train(chain, tmp_path, resume=True)
    assert Priced.questions == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("case", ["used", "file", "below a file", "nothing to resume"])
def test_unusable_folders_are_refused_before_anything_is_priced(case, chain, tmp_path):
    out = tmp_path / "out"
    if case == "used":
        train(chain, out)
    if "file" in case:
        out.write_text("")
    Priced.questions = 0
    with pytest.raises(RlflowError, match=str(out)):
        train(chain, out / "folder" if case == "below a file" else out, resume=case == "nothing to resume")
    assert Priced.questions == 0


def test_names_that_are_too_long_are_refused_before_anything_is_priced(chain, tmp_path):
    with pytest.raises(AgentError, match=r"n: cannot be looked into \(File name too long\); give another"):
        train(chain, tmp_path / ("n" * 300))
    models = dict.fromkeys(("a" * 300, "b"), chain)
    with pytest.raises(UsageError, match=r"a\.plan\.json: cannot be a plan's file \(File name too long\); rename"):
        training.train_on_models(models, "ppo", HERE, steps=1, seed=0, out=tmp_path)
    assert Priced.questions == 0


def test_models_of_one_name_are_refused(chain, tmp_path):
    with pytest.raises(UsageError, match="same file name"):
        training.train_on_models({"a/m.onnx": chain, "b/m.onnx": chain}, "ppo", HERE, steps=1, seed=0, out=tmp_path)


def test_each_model_has_a_plan_of_its_own_name(tmp_path):
    plans = training_files.plan_paths(tmp_path, ["zoo:squeezenet1.1", "models/net.v2.onnx"])
    assert [path.name for path in plans.values()] == ["best.squeezenet1.1.plan.json", "best.net.v2.plan.json"]
    assert training_files.model_name("models/m.onnx@serving/x=1,4") == "m@serving_x=1,4"


def test_a_model_at_two_shapes_is_two_models(chain, tmp_path):
    names = [f"{chain}@x=1,4", f"{chain}@x=1,6"]
    outcome = training.train_on_models(
        dict.fromkeys(names, chain), "ppo", HERE, steps=12, seed=0, out=tmp_path / "out", horizon=5
    )
    assert [each.model for each in outcome.models] == names
    assert [each.plan.name for each in outcome.models] == ["best.chain@x=1,4.plan.json", "best.chain@x=1,6.plan.json"]
    assert all(each.plan.exists() for each in outcome.models)


def test_a_candidate_agent_is_trained_and_searches(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: CONFIGS["candidate"])
    outcome = train(chain, tmp_path / "out", steps=80, agent="candidate", reward="end-to-end")
    assert outcome.agent == "candidate"
    assert outcome.models[0].run_secs_after < outcome.models[0].run_secs_before
    logged = [json.loads(line) for line in (tmp_path / "out" / "end_to_end.jsonl").read_text().splitlines()]
    assert logged, "each episode ends with a run of the whole"
    assert all(line["model"] == "chain" and line["env_steps"] <= outcome.env_steps for line in logged)
    assert all(abs(line["discrepancy"]) < 1e-9 for line in logged), "these costs are sums, whichever way"
    late = {"env_steps": outcome.env_steps + 7, "model": "chain"}
    log = tmp_path / "out" / "end_to_end.jsonl"
    log.write_text(log.read_text() + json.dumps(late) + "\n" + '{"env_steps": 1')  # killed in the next update
    problem = RewriteProblem(from_onnx(chain, {"x": (1, 4)}), Priced(HERE))
    found = agent_search(outcome.checkpoint).run(problem)
    assert found.run_secs_after < found.run_secs_before
    assert found.env_steps > 0
    again = train(chain, tmp_path / "out", steps=outcome.env_steps + 1, agent="candidate", reward="end-to-end",
                  resume=True)  # fmt: skip
    gone_on = [json.loads(line) for line in log.read_text().splitlines()]
    assert gone_on[: len(logged)] == logged
    assert outcome.env_steps < gone_on[len(logged)]["env_steps"] <= again.env_steps
    assert again.models[0].run_secs_after <= outcome.models[0].run_secs_after


def test_a_world_model_is_trained_on_a_model(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: CONFIGS["world-model"])
    options = {"steps": 40, "agent": "world-model", "reward": "end-to-end"}
    outcome = train(chain, tmp_path / "out", **options)
    assert outcome.models[0].run_secs_after < outcome.models[0].run_secs_before
    log = tmp_path / "out" / "end_to_end.jsonl"
    steps = [json.loads(line)["env_steps"] for line in log.read_text().splitlines()]
    assert steps[-1] == outcome.env_steps
    assert steps == sorted(steps)
    text = log.read_text()
    late = json.dumps({"env_steps": outcome.env_steps + 5})  # of an episode that was not kept, and comes again
    log.write_text(text + late + '\n{"env_steps": 1')  # killed while it wrote
    assert train(chain, tmp_path / "out", resume=True, **options).env_steps == outcome.env_steps
    training_files.EndToEndLog(tmp_path / "out")
    assert log.read_text() == text


@pytest.fixture
def free(tmp_path) -> Path:
    """Transposes that cancel, and a view: rewritten it costs nothing."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 4, 6]), ("y", [1, 24]))]
    nodes = [helper.make_node("Transpose", [a], [b], perm=[0, 2, 1]) for a, b in ("xa", "ab")]
    graph = helper.make_graph([*nodes, helper.make_node("Flatten", ["b"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "free.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("agent", CONFIGS)
def test_a_model_may_become_free(agent, free, tmp_path, monkeypatch):
    monkeypatch.setattr(AgentKind, "config", lambda self, settings=None: CONFIGS[agent])
    told, out = [], tmp_path / "out"
    options = {"agent": agent, "steps": 60, "shapes": None, "progress": lambda done, total, text: told.append(text)}
    outcome = train(free, out, **options)
    assert outcome.models[0].run_secs_before > outcome.models[0].run_secs_after == 0.0
    assert "best 0.0 % of the start's cost" in told
    assert train(free, out, resume=True, **options).env_steps == outcome.env_steps
    assert all(value.isfinite().all() for value in load_checkpoint(outcome.checkpoint)[0].values())
    problem = RewriteProblem(from_onnx(free), Priced(HERE))
    assert agent_search(outcome.checkpoint).run(problem).run_secs_after == 0.0


def test_a_free_graph_is_nothing_to_begin_at(free, tmp_path, monkeypatch):
    """But the best there is: where settling a family leads to it, too."""

    def settled(problem: RewriteProblem) -> list[Beginning]:
        found = Greedy().run(problem)
        assert found.run_secs_after == 0.0
        problem.settled = Beginning(found.run_secs_after, found.state)
        return [problem.settled, Beginning(problem.start_secs, problem.start)]

    monkeypatch.setattr(training, "beginnings", settled)
    monkeypatch.setattr(agent_search_module, "beginnings", settled)
    outcome = train(free, tmp_path / "out", shapes=None)
    assert outcome.models[0].run_secs_after == 0.0
    problem = RewriteProblem(from_onnx(free), Priced(HERE))
    assert load_checkpoint(outcome.checkpoint)[1]["metadata"]["begins"] == {
        "chain": f"{problem.start.structural_hash:016x}"
    }
    assert agent_search(outcome.checkpoint).run(problem).run_secs_after == 0.0
