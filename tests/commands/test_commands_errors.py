"""Bad input: one line that names the thing and the remedy, exit code 1 or 2, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from rlflow_tvm import cli
from rlflow_tvm.cost import default_path
from rlflow_tvm.errors import RlflowError, UsageError
from rlflow_tvm.frontend import save_onnx, zoo
from rlflow_tvm.passes import Plan
from tests.error_lines import one_line


def relu_model(path: Path, op: str = "Relu", domain: str = "", extent: int | str = 8) -> Path:
    node = helper.make_node(op, ["x"], ["y"], name="the_node", domain=domain)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, extent]) for name in ("x", "y")]
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(helper.make_graph([node], "g", value[:1], value[1:]), opset_imports=opsets, ir_version=8)
    onnx.save(model, path)
    return path


def test_missing_file(run, tmp_path):
    one_line(run("optimize", tmp_path / "no.onnx"), 1, "no.onnx")


def test_text_file(run, tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("this is no model\n" * 20)
    one_line(run("optimize", path), 1, "text.onnx")


def test_truncated_file(run, tmp_path):
    whole = relu_model(tmp_path / "whole.onnx").read_bytes()
    path = tmp_path / "cut.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    one_line(run("optimize", path), 1, "cut.onnx")


def test_dynamic_dimension(run, tmp_path):
    path = relu_model(tmp_path / "dynamic.onnx", extent="length")
    one_line(run("optimize", path), 1, "length", "--shape")
    assert run("optimize", path, "--shape", "x=1,4").returncode == 0


def test_unsupported_operator(run, tmp_path):
    path = relu_model(tmp_path / "strange.onnx", op="Frobnicate", domain="my.domain")
    one_line(run("optimize", path), 1, "Frobnicate", "the_node")


def test_unknown_target(run, tmp_path):
    path = relu_model(tmp_path / "relu.onnx")
    one_line(run("optimize", path, "--target", "abacus"), 2, "abacus")
    one_line(run("optimize", path, "--target", "{not json"), 2, "--target")
    one_line(run("optimize", path, "--target", '{"kind": "llvm", "mcpu": "abacus"}'), 2, "abacus")


def test_unknown_names(run, tmp_path):
    path = relu_model(tmp_path / "relu.onnx")
    one_line(run("optimize", path, "--search", "clever"), 2, "clever", "greedy")
    one_line(run("compare", path, "--against", "everything"), 2, "everything", "tvm-default")
    one_line(run("optimize", "zoo:nothing"), 1, "nothing")
    one_line(run("optimize", path, "--shape", "x:1,2"), 2, "--shape")


@pytest.mark.parametrize("name", ["model", "libmodel.so.1", "model.tar"])
def test_a_library_that_could_not_be_loaded(run, tmp_path, name):
    path = relu_model(tmp_path / "relu.onnx")
    one_line(run("optimize", path, "--library", tmp_path / name), 2, f"call it {name}.so")
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_given_twice(run, tmp_path):
    path = relu_model(tmp_path / "relu.onnx")
    one_line(run("train", path, path, "--out", tmp_path / "out"), 2, "relu.onnx: is given twice; leave one out")
    assert not (tmp_path / "out").exists()


def test_plan_for_another_model(run, tmp_path):
    first, second = relu_model(tmp_path / "first.onnx"), relu_model(tmp_path / "second.onnx", extent=9)
    plan = tmp_path / "plan.json"
    assert run("optimize", first, "--plan", plan).returncode == 0
    one_line(run("compare", second, "--plan", plan, "--against", "onnxruntime"), 1, "another module")
    damaged = json.loads(plan.read_text()) | {"format": 99}
    plan.write_text(json.dumps(damaged))
    one_line(run("compare", first, "--plan", plan, "--against", "onnxruntime"), 1, "plan.json", "format")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_unusable_checkpoint(run, tmp_path, content):
    path = relu_model(tmp_path / "relu.onnx")
    agent = tmp_path / "agent.safetensors"
    agent.write_bytes(content)
    one_line(run("optimize", path, "--agent", agent), 1, "agent.safetensors")


def test_what_says_the_same_twice_or_nothing_is_told(run, tmp_path):
    model = relu_model(tmp_path / "model.onnx")
    done = run("optimize", model, "--search", "greedy", "--agent", tmp_path / "agent.safetensors")
    assert (done.returncode, "give one of them" in done.stderr) == (2, True)
    done = run("optimize", model, "--search", "greedy", "--budget", 1, "--plan", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    for option in (("--budget", 5), ("--plans", tmp_path / "plans")):
        done = run("compare", model, "--plan", tmp_path / "plan.json", *option)
        assert (done.returncode, f"error: {option[0]}: is for searches and agents" in done.stderr) == (2, True)
    assert not (tmp_path / "plans").exists()


def test_lines_of_the_log_are_whole_where_nobody_sits_before_them():
    """A path that is folded can be neither looked for nor copied."""
    program = """
import logging
from rlflow_tvm import cli

def warn():
    logging.getLogger("rlflow_tvm").warning("it lies in %s", "/x" * 100)
    with cli.progress_bar("searching") as bar:
        cli._TOLD_EVERY_SECS = 0.0
        bar(1, 2, "/y" * 100)

cli.reports_errors(warn)()
"""
    environment = {**os.environ, "COLUMNS": "40"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"WARNING: it lies in {'/x' * 100}", f"searching: 1 of 2 {'/y' * 100}"]


def test_a_home_folder_with_a_tilde_is_the_same_for_times_and_models(tmp_path, monkeypatch):
    """As it comes from where no shell has read it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RLFLOW_TVM_HOME", "~/kept")
    assert default_path() == tmp_path / "kept" / "kernels.sqlite"
    assert zoo.cache_folder() == tmp_path / "kept" / "zoo"
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("RLFLOW_TVM_HOME")
    with pytest.raises(UsageError, match="set RLFLOW_TVM_HOME to a folder"):
        zoo.cache_folder()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_nothing_is_left_behind(run, tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("this is no model\n" * 20)
    out = tmp_path / "out"
    out.mkdir()
    completed = run("optimize", path, "--plan", out / "plan.json", "--json", out / "figures.json")
    one_line(completed, 1, "text.onnx")
    one_line(run("train", path, "--out", out / "agent"), 1, "text.onnx")
    assert not list(out.iterdir())


def test_unwritable_output_is_refused_before_the_work(run, tmp_path):
    path = relu_model(tmp_path / "relu.onnx")
    one_line(run("optimize", path, "--plan", tmp_path / "nowhere" / "plan.json"), 2, "nowhere")
    for option in ("--plan", "--json"):
        one_line(run("optimize", tmp_path / "no.onnx", option, tmp_path), 2, "is a folder")


def test_outputs_that_would_take_the_place_of_something_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "one.json")
    for paths, told in (
        ((tmp_path / "pipe",), "pipe: is no regular file"),
        ((tmp_path / "one.json", None, tmp_path / "one.json"), "given for two things"),
        ((tmp_path / "one.json", tmp_path / "link"), "given for two things"),
        ((tmp_path / ("n" * 300),), "File name too long"),
    ):
        with pytest.raises(UsageError, match=told):
            cli.check_writable(*paths)
    cli.check_writable(tmp_path / "link", None, tmp_path / "two.json")


def test_what_is_read_is_not_written_over(run, tmp_path):
    path = relu_model(tmp_path / "relu.onnx")
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()
    one_line(run("optimize", path, "--onnx", path), 2, "relu.onnx: is read too")
    one_line(run("optimize", path, "--plan", tmp_path / "link"), 2, "link: is read too")
    one_line(run("compare", path, "--json", path), 2, "relu.onnx: is read too")
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match=r"relu\.onnx: is read too"):
        cli.check_writable(tmp_path / "new", path, inputs=[None, tmp_path / "link"])
    cli.check_writable(tmp_path / "new", inputs=[path])


def test_a_folder_that_cannot_take_files_is_refused(tmp_path):
    (tmp_path / "file").touch()
    cli.check_folder(tmp_path, "a.json", "b.json")
    cli.check_folder(tmp_path / "new", "a.json")
    for folder, names, told in (
        (tmp_path / "file", ["a.json"], "file: is a file; give a folder"),
        (tmp_path / "no" / "new", ["a.json"], "does not exist"),
        (tmp_path, ["a.json", "a.json"], "given for two things"),
    ):
        with pytest.raises(UsageError, match=told):
            cli.check_folder(folder, *names)
    with pytest.raises(UsageError, match="is read too"):
        cli.check_folder(tmp_path, "file", inputs=[tmp_path / "file"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_link_leads_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "one.json")
    cli.write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "one.json").read_text()) == [1]
    plan = Plan(("a@1#0",), 7, 9, 16)
    plan.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Plan.load(tmp_path / "one.json") == plan
    model = onnx.load(relu_model(tmp_path / "relu.onnx"))
    save_onnx(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert onnx.load(tmp_path / "one.json", format="protobuf") == model


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_half_written(tmp_path, number):
    """Whatever a command is at: not in a search alone."""
    before = signal.getsignal(number)

    @cli.reports_errors
    def command() -> None:
        with cli.written_whole(tmp_path / "figures.json") as temporary:
            temporary.write_text("half of ")
            signal.raise_signal(number)

    signal.signal(number, signal.SIG_DFL)  # as a user's process has it
    try:
        with pytest.raises(SystemExit) as ended:
            command()
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert not list(tmp_path.iterdir())


def test_figures_that_cannot_be_written_leave_nothing_behind(tmp_path):
    path = tmp_path / "figures.json"
    path.mkdir()  # made after the check
    with pytest.raises(RlflowError, match=r"figures\.json: cannot be written") as caught:
        cli.write_json(path, {"a": 1})
    assert "\n" not in str(caught.value)
    assert [found.name for found in tmp_path.iterdir()] == ["figures.json"]
    with pytest.raises(RlflowError, match="cannot be written"):
        cli.write_json(tmp_path / "nowhere" / "figures.json", {"a": 1})


@pytest.mark.parametrize("command", ["optimize", "train", "compare"])
def test_help_names_every_option(run, command):
    completed = run(command, "--help")
    assert completed.returncode == 0
    for option in ("--json", "--seed", "--target", "--shape"):
        assert option in completed.stdout


def test_wrong_use_exits_with_two(run):
    assert run("optimize").returncode == 2
    assert run("train", "--no-such-option").returncode == 2
    for command, option, value in (("optimize", "seed", -1), ("compare", "seed", -1), ("train", "predict", 1.5)):
        completed = run(command, "no.onnx", f"--{option}", value)
        assert completed.returncode == 2
        assert "Traceback" not in completed.stderr
        assert option in completed.stderr
