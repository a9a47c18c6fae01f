"""Plans: files that repeat a search's rewrites on the module they were made for, and on no other."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from small_models import LANES, bound, conv_chain, conv_net, transformer_block
from tvm import relax, topi

import rlflow_tvm
from rlflow_tvm.errors import PlanError, RewriteError
from rlflow_tvm.ir import detach
from rlflow_tvm.passes import CATALOGUE, GraphState, Plan, RewriteAction, RuleSet, Site, default_rules
from rlflow_tvm.replay import replay
from rlflow_tvm.search import random_action

REPLAY = """
import sys
sys.modules["torch"] = None  # TVM would import it, for nothing
import tvm
from rlflow_tvm.passes import Plan
from rlflow_tvm.replay import replay

with open(sys.argv[1]) as file:
    mod = tvm.ir.load_json(file.read())
print(replay(mod, Plan.load(sys.argv[2])).structural_hash)
"""


def walked(mod: tvm.IRModule, steps: int = 10, seed: int = 0) -> GraphState:
    """The state after `steps` random rewrites."""
    rng = np.random.default_rng(seed)
    state = GraphState.from_module(mod, default_rules(LANES))
    while len(state.actions) < steps:
        action = random_action(state, rng)
        state = state if action is None else state.apply(action)
    return state


@pytest.fixture(scope="module")
def state() -> GraphState:
    return walked(bound(conv_net()))


@pytest.fixture
def saved(state: GraphState, tmp_path: Path) -> Path:
    path = tmp_path / "best.plan.json"
    state.plan.save(path)
    return path


def test_plan_survives_its_file(state, saved):
    assert Plan.load(saved) == state.plan
    assert len(state.plan) == 10
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_plan_file_is_readable_json(state, saved):
    data = json.loads(saved.read_text())
    assert data["format"] == 1
    assert data["lanes"] == LANES
    assert data["actions"] == [str(action) for action in state.actions]
    assert int(data["start_hash"], 16) == state.start_hash
    assert int(data["end_hash"], 16) == state.structural_hash


def test_folder_is_made(state, tmp_path):
    path = tmp_path / "not" / "there" / "plan.json"
    state.plan.save(path)
    assert Plan.load(path) == state.plan


def test_place_that_cannot_be_written(state, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written"):
        state.plan.save(tmp_path / "file" / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match="cannot be written"):
        state.plan.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_replay_gives_the_same_state(state, saved):
    again = replay(state.start.bind(), Plan.load(saved))
    assert again.structural_hash == state.structural_hash
    assert again.actions == state.actions
    assert again.sites == state.sites
    tvm.ir.assert_structural_equal(again.mod, state.mod)


def test_apply_plan_is_a_pass(state, saved):
    mod = rlflow_tvm.ApplyPlan(saved)(state.start.bind())
    tvm.ir.assert_structural_equal(mod, state.bound())
    in_sequence = tvm.transform.Sequential([rlflow_tvm.ApplyPlan(state.plan)])(state.start.bind())
    tvm.ir.assert_structural_equal(in_sequence, mod)


def test_a_plan_is_repeated_for_targets_that_have_pipelines_of_their_own(state, caplog):
    with tvm.target.Target("metal"), caplog.at_level("WARNING", "rlflow_tvm"):
        mod = rlflow_tvm.ApplyPlan(state.plan)(bound(conv_net()))
    tvm.ir.assert_structural_equal(mod["main"], state.bound()["main"])
    assert not caplog.text


def replayed(state: GraphState, plan: Path, folder: Path) -> int:
    """The hash of what another process makes of the plan."""
    module = folder / "module.json"
    module.write_text(tvm.ir.save_json(state.start.mod))
    command = [sys.executable, "-c", REPLAY, str(module), str(plan)]
    there = Path(rlflow_tvm.__file__).parents[1]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_replay_in_another_process_gives_the_same_structure(state, saved, tmp_path):
    assert replayed(state, saved, tmp_path) == state.structural_hash


def test_a_plan_of_a_graph_with_kernels_of_its_own_is_repeated_in_another_process(tmp_path):
    """Which its function names, as importers leave what Relax has no operator for."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 4), "float32"))
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            first = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.relu(x))))
            output = builder.emit_output(relax.op.add(first, builder.emit_te(topi.tanh, first)))
        builder.emit_func_output(output)
    state = walked(builder.get(), 1)
    state.plan.save(tmp_path / "best.plan.json")
    assert replayed(state, tmp_path / "best.plan.json", tmp_path) == state.structural_hash


def test_empty_plan_changes_nothing():
    state = GraphState.from_module(conv_chain(), default_rules(LANES))
    assert len(state.plan) == 0
    assert replay(conv_chain(), state.plan).structural_hash == state.structural_hash


@pytest.mark.parametrize("model", [conv_net, transformer_block])
def test_plan_is_the_same_for_bound_and_detached(model):
    mod = bound(model())
    from_bound, from_detached = walked(mod), walked(detach(mod).mod)
    assert from_bound.plan == from_detached.plan
    assert replay(detach(mod).mod, from_bound.plan).structural_hash == from_bound.structural_hash


def test_plan_does_not_depend_on_the_weights(state):
    other = bound(conv_net(), seed=1)
    assert replay(other, state.plan).structural_hash == state.structural_hash


def test_plan_of_another_module_is_refused(state):
    with pytest.raises(PlanError, match="for another module"):
        replay(bound(conv_chain()), state.plan)


def test_plan_that_ends_elsewhere_is_refused(state):
    plan = dataclasses.replace(state.plan, end_hash=state.start_hash)
    with pytest.raises(PlanError, match="instead of"):
        replay(state.start.bind(), plan)


def test_plan_for_other_lanes_is_refused(state):
    other = GraphState.from_module(state.start.bind(), RuleSet(CATALOGUE, 2 * LANES))
    with pytest.raises(PlanError, match=f"for {LANES} vector lanes"):
        other.replay(state.plan)


@pytest.mark.parametrize(
    "action",
    ["no_such_rule@0#0", "block_conv@999#0", "nonsense", pytest.param(f"block_conv@{'1' * 5000}#0", id="digits")],
)
def test_plan_whose_action_is_not_possible_is_refused(state, action):
    plan = dataclasses.replace(state.plan, actions=(action, *state.plan.actions[1:]))
    with pytest.raises(PlanError, match="action 1 of the plan cannot be repeated"):
        replay(state.start.bind(), plan)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"nothing\.json: no such plan file"):
        Plan.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe", b"\x00",
        pytest.param(b'{"format": 1, "lanes": %s}' % (b"9" * 5000), id="digits"),
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)  # fmt: skip
def test_file_that_is_not_json_is_refused(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.load(path)


def test_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.load(tmp_path)


@pytest.mark.parametrize("data", [[], 1, {}, {"format": 2}, {"format": "1"}])
def test_other_format_is_refused(data, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="plan format"):
        Plan.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"actions": None}, {"actions": "block_conv@0#0"}, {"actions": [1]}, {"start_hash": 12}, {"start_hash": "xyz"},
        {"end_hash": None}, {"lanes": "many"}, {"lanes": None}, {"lanes": 2.9}, {"lanes": float("inf")},
        {"lanes": True}, {"lanes": 0}, {"lanes": [LANES]},
    ],
)  # fmt: skip
def test_damaged_file_is_refused(change, saved):
    saved.write_text(json.dumps({**json.loads(saved.read_text()), **change}))
    with pytest.raises(PlanError, match="damaged plan file"):
        Plan.load(saved)


@pytest.mark.parametrize("field", ["actions", "start_hash", "end_hash", "lanes"])
def test_file_without_a_field_is_refused(field, saved):
    data = json.loads(saved.read_text())
    del data[field]
    saved.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="damaged plan file"):
        Plan.load(saved)


@pytest.mark.parametrize("site", [Site((0,), (0,)), Site((12, 3), (0, 1))])
def test_action_round_trips_as_text(site):
    action = RewriteAction("some_rule", site)
    assert RewriteAction.parse(str(action)) == action
    named = RewriteAction("relu@twice", site)
    assert RewriteAction.parse(str(named)) == named
    assert Site.parse(str(site)) == site


def test_action_text_is_what_plan_files_hold():
    assert str(RewriteAction("merge_convs", Site((12, 3), (0, 1)))) == "merge_convs@12,3#0,1"


@pytest.mark.parametrize(
    "text", ["", "rule", "rule@", "rule@1", "rule@#1", "rule@1#", "rule@1#0 ", "rule@-1#0", "r@a#0"]
)
def test_malformed_action_text_is_refused(text):
    with pytest.raises(RewriteError, match="is expected"):
        RewriteAction.parse(text)
