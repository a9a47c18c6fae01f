"""`python -m rlflow_tvm.rules`: the whole catalogue is proved; files are listed, proved, recorded, refused."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import typer

from rlflow_tvm import rules
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.passes.proofs import read_rules
from rlflow_tvm.passes.rules import FAMILIES
from rlflow_tvm.passes.verify import verify_rule

RIGHT = {"name": "commuted", "family": "test", "equation": "add(x, y) => add(y, x)", "when": []}
WRONG = {"name": "swapped", "family": "test", "equation": "subtract(x, y) => subtract(y, x)",
         "when": ["shape(x) == shape(y)"]}  # fmt: skip


def written(folder: Path, *rules: dict) -> Path:
    file = folder / "rules.json"
    file.write_text(json.dumps({"format": 1, "rules": rules}))
    return file


@pytest.mark.slow
def test_the_catalogue_is_proved_and_holds_when_compiled(run):
    result = run("rules", "verify", "--seed", 1, "--jobs", 1)
    assert result.returncode == 0, result.stderr
    assert f"{len(CATALOGUE)} rules proved on " in result.stdout
    assert f"{len(CATALOGUE)} rules checked compiled" in result.stdout


def test_a_wrong_rule_is_told_with_a_counterexample(run, tmp_path):
    result = run("rules", "verify", written(tmp_path, RIGHT, WRONG))
    assert result.returncode == 1
    assert "not proved: swapped: subtract(x, y) => subtract(y, x)" in result.stderr
    assert "left is" in result.stderr
    assert len(result.stderr.splitlines()) < 10


def test_a_proof_is_recorded_in_the_file(run, tmp_path):
    file = written(tmp_path, RIGHT)
    assert "proof: none" in run("rules", "list", file).stdout
    result = run("rules", "verify", file, "--record", "--jobs", 1)
    assert result.returncode == 0, result.stderr
    assert [rule.name for rule in read_rules(file)] == ["commuted"]
    listed = run("rules", "list", file).stdout
    assert "over prime fields" in listed
    assert "proof: none" not in listed


def test_recording_leaves_the_rest_of_a_file_and_an_unproved_one_names_its_command(run, tmp_path):
    file = written(tmp_path, {**RIGHT, "sites": 3}, {**RIGHT, "name": "again", "when": ["not is_float(x)"]})
    data = json.loads(file.read_text()) | {"search": {"seed": 0}}
    file.write_text(json.dumps(data))
    with pytest.raises(RewriteError, match=f"python -m rlflow_tvm.rules verify {file} --record"):
        read_rules(file)
    result = run("rules", "verify", file, "--record", "--jobs", 1)
    assert result.returncode == 0, result.stderr
    written_down = json.loads(file.read_text())
    assert all(rule.pop("proof") for rule in written_down["rules"])
    assert written_down == data
    only_integers = run("rules", "verify", file, "--rule", "again", "--jobs", 1)
    assert only_integers.returncode == 0, only_integers.stderr


def test_what_is_read_is_not_written_over(run, tmp_path):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"kept")
    for arguments in (("list", "--json", model), ("generate", "--out", model)):
        result = run("rules", *arguments, "--model", model)
        assert result.returncode == 2
        assert "is read too" in result.stderr
        assert model.read_bytes() == b"kept"


@pytest.mark.parametrize("wrong", ["--model", "--target", "journal"])
def test_what_is_wrong_is_told_before_rules_are_looked_for(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlflow_tvm.passes.synthesis.search.find_rules", lambda *_: pytest.fail("it looked for them"))
    out = tmp_path / "found.json"
    options = {"--model": {"model": ["nowhere.onnx"]}, "--target": {"target": "abacus"}, "journal": {}}[wrong]
    if wrong == "journal":
        out.with_name("found.json.journal").mkdir()
    with pytest.raises(typer.Exit):
        rules.generate(out, **options)
    said = {"--model": "nowhere.onnx", "--target": "abacus", "journal": "is a folder"}[wrong]
    assert said in capsys.readouterr().err


def test_a_file_without_rules_is_told(run, tmp_path):
    result = run("rules", "verify", written(tmp_path))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "rules.json: there is no rule in it to prove" in line


def test_what_cannot_be_recorded_is_told_before_the_proofs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlflow_tvm.passes.verify.verify_all", lambda *_: pytest.fail("it proved"))
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    with pytest.raises(typer.Exit) as ended:
        rules.verify(written(tmp_path, RIGHT), record=True)
    assert ended.value.exit_code == 2
    assert "rules.json: the folder" in capsys.readouterr().err


def test_a_file_that_changes_while_it_is_proved_is_not_recorded_in(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, RIGHT)
    changed = {**RIGHT, "equation": "multiply(x, y) => multiply(y, x)"}

    def proved_meanwhile(rules, *_):
        written(tmp_path, changed, {**RIGHT, "name": "another"})
        return [(rule, verify_rule(rule, 12)) for rule in rules]

    monkeypatch.setattr("rlflow_tvm.passes.verify.verify_all", proved_meanwhile)
    with pytest.raises(typer.Exit) as ended:
        rules.verify(file, compiled=False, record=True)
    assert ended.value.exit_code == 1
    assert "rules.json: has changed while it was proved: verify it again" in capsys.readouterr().err
    assert "proof" not in file.read_text()


def test_the_catalogue_is_listed_with_its_sites(run, tmp_path):
    out = tmp_path / "rules.json"
    result = run("rules", "list", "--family", "cancel", "--model", "zoo:demo", "--json", out)
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == [rule.name for rule in CATALOGUE if rule.family == "cancel"]
    assert all(row["sites"]["zoo:demo"] >= 0 and "over" in row["proof"] for row in rows)
    assert "relu(relu(x)) => relu(x)" in result.stdout


def test_a_file_of_the_catalogue_is_listed_with_sites_in_shapes_of_ones_own(tmp_path, capsys):
    """By the name that orders of passes give it."""
    path, out = tmp_path / "relus.onnx", tmp_path / "rules.json"
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy")
    nodes = [onnx.helper.make_node("Relu", [a], [b]) for a, b in ("xa", "ay")]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]), ir_version=8), path)
    model = f"{path}@x=3,4"
    rules.list_rules(family="elementwise", model=[model], json=out)
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert list(rows) == [rule.name for rule in FAMILIES["elementwise"]]
    assert rows["relu_idempotent"]["sites"] == {model: 1}
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        rules.list_rules(model=[str(path)])
    assert "FILE@x=1,4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "--family", "none"), "no such family; there are activation"),
        (("verify", "--rule", "none"), "there is no such rule"),
        (("verify", "nowhere.json"), "cannot be read"),
        (("verify", "--record", "--rule", "relu_idempotent"), "leave --rule out"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, said):
    result = run("rules", *arguments)
    assert result.returncode != 0
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_rules_are_found_proved_and_written(run, tmp_path):
    out = tmp_path / "found.json"
    result = run("rules", "generate", "--ops", "relu,permute_dims", "--depth", 2, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "terms enumerated" in result.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]  # the journal is gone
    found = read_rules(out)  # each with its proof
    assert any(str(rule.equation) == "Unary[f](permute_dims(x, axes=p)) => permute_dims(Unary[f](x), axes=p)"
               for rule in found)  # fmt: skip
    data = json.loads(out.read_text())
    assert data["search"]["kept"] == len(found)
    assert {entry["catalogue"] for entry in data["rules"]} >= {"permute_after_unary", "relu_idempotent"}
    verified = run("rules", "verify", out, "--seed", 3, "--jobs", 1)
    assert verified.returncode == 0, verified.stderr


def test_an_operator_that_rules_are_not_found_over_is_told(run, tmp_path):
    result = run("rules", "generate", "--ops", "relu,frobnicate", "--out", tmp_path / "found.json")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --ops frobnicate: rules are found over matmul,") or (
        "--ops frobnicate: rules are found over" in result.stderr
    )
    assert not list(tmp_path.iterdir())
