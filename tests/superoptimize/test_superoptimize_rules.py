"""Rules of one's own beside the catalogue: through the passes and the commands, by a file or as they are."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import tvm
import typer
from fake_workers import workers_by

import rlflow_tvm as rl
from rlflow_tvm import compare, optimize
from rlflow_tvm.cost import RpcDevices, timer
from rlflow_tvm.errors import CostError, PlanError, RewriteError, UsageError
from rlflow_tvm.passes import CATALOGUE, default_rules
from rlflow_tvm.passes.proofs import record, rules_as_json
from rlflow_tvm.passes.verify import Proof, verify_rule

BACK = rl.RewriteRule(
    "subtract_back", "mine", "subtract(x, subtract(x, y)) => y", when=("shape(x) == shape(y)",)
)  # fmt: skip


@pytest.fixture
def by_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "LocalWorkers", workers_by(lambda features, _cold: 1e-6 + 1e-9 * features["flops"]))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BACK with its proof."""
    path = tmp_path_factory.mktemp("rules") / "mine.json"
    proof = verify_rule(BACK)
    assert isinstance(proof, Proof)
    path.write_text(json.dumps(rules_as_json([BACK], {BACK.name: record(BACK, proof)})))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """relu(x - (x - y))."""
    path = tmp_path_factory.mktemp("model") / "back.onnx"
    x, y, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64, 33]) for name in "xyz")
    nodes = [
        onnx.helper.make_node("Sub", ["x", "y"], ["d"]),
        onnx.helper.make_node("Sub", ["x", "d"], ["b"]),
        onnx.helper.make_node("Relu", ["b"], ["z"]),
    ]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x, y], [z]), ir_version=8), path)
    return path


def operators(mod: tvm.IRModule) -> list[str]:
    return [binding.value.op.name for binding in mod["main"].body.blocks[0].bindings]


@pytest.mark.usefixtures("by_flops")
@pytest.mark.parametrize("given", ["file", "text", "rules"])
def test_passes_take_them(file: Path, model: Path, given: str) -> None:
    rules = {"file": file, "text": str(file), "rules": [BACK]}[given]
    mod = rl.from_onnx(model)
    superoptimize = rl.Superoptimize("llvm", search="greedy", rules=rules)
    rewritten = superoptimize(mod)
    plan = superoptimize.result.plan
    assert [action.partition("@")[0] for action in plan.actions] == [BACK.name]
    assert operators(rewritten) == ["relax.nn.relu"]
    again = rl.ApplyPlan(plan, rules)(mod)
    tvm.ir.assert_structural_equal(again["main"], rewritten["main"])
    with pytest.raises(PlanError, match=r"subtract_back@1#0: no rule of that name here .*file"):
        rl.ApplyPlan(plan)(mod)


@pytest.mark.usefixtures("by_flops")
def test_commands_take_them(file: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, table = tmp_path / "plan.json", tmp_path / "table.json"
    optimize.main(str(model), search="greedy", rules=file, plan=plan)
    assert BACK.name in plan.read_text()
    compare.main(str(model), against=["tvm-default"], plan=[plan], search=["greedy"], rules=file, rounds=1, json=table)
    assert [each["plan_length"] for each in json.loads(table.read_text())["searches"]] == [1, 1]
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        compare.main(str(model), against=["tvm-default"], plan=[plan], rounds=1)
    assert "no rule of that name" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        optimize.main(str(model), agent=tmp_path / "no.safetensors", rules=file)
    assert "agents know the rules of the catalogue alone" in capsys.readouterr().err


def test_what_cannot_be_taken_is_told_at_once(file: Path, tmp_path: Path) -> None:
    assert default_rules(8, file).rules == (*CATALOGUE, BACK)
    unproved = tmp_path / "unproved.json"
    unproved.write_text(json.dumps(rules_as_json([BACK], {})))
    with pytest.raises(RewriteError, match="subtract_back has no proof"):
        rl.Superoptimize("llvm", rules=unproved)
    with pytest.raises(RewriteError, match="subtract_back has no proof"):
        rl.ApplyPlan(rl.Plan((), 0, 0, 16), unproved)
    with pytest.raises(UsageError, match="agents know the rules of the catalogue alone"):
        rl.Superoptimize("llvm", agent="no.safetensors", rules=[BACK])
    with pytest.raises(RewriteError, match="two rules are called"):
        default_rules(8, [CATALOGUE[0]])
    with pytest.raises(CostError, match="num-cores"):
        rl.Superoptimize("llvm", remote=RpcDevices("localhost", 9190, "pair"))
