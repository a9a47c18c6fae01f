"""A training's folder read again, and what is said of one that is none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from report_parts import BEST, LOG, planned, write_checkpoint, write_run

from rlflow_tvm.errors import ReportError
from rlflow_tvm.run_folder import FORMAT, RunFolder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_run(tmp_path / "run", planned(), "zoo:small", shapes={"x": [1, 2]})


def test_what_train_left_is_read(folder):
    run = RunFolder.read(folder)
    assert run.plans == {"zoo:small": folder / "best.plan.json"}
    assert (run.agent, run.shapes, run.target, run.rpc_key) == ("ppo", {"x": (1, 2)}, "llvm", None)
    assert list(run.progress) == LOG  # without the line that was cut
    assert list(run.best) == BEST


def test_checkpoints_are_read_as_agents_write_them(folder):
    checkpoint = pytest.importorskip("rlflow_tvm.agents.checkpoint", reason="agents need torch")
    import torch

    assert checkpoint.FORMAT == FORMAT
    description = {"agent": "world-model", "metadata": {"models": ["a.onnx"], "shapes": {}, "target": "t rpc:lab"}}
    checkpoint.save_checkpoint(folder / checkpoint.FILE_NAME, {"policy.w": torch.ones(3)}, description)
    run = RunFolder.read(folder)
    assert (run.agent, run.target, run.rpc_key, list(run.plans)) == ("world-model", "t", "lab", ["a.onnx"])


def test_several_models_have_a_plan_each(folder):
    metadata = {"models": ["zoo:a", "b.onnx"], "shapes": {}, "target": "llvm"}
    write_checkpoint(folder / "agent.safetensors", {"agent": "ppo", "metadata": metadata})
    assert RunFolder.read(folder).plans == {
        "zoo:a": folder / "best.a.plan.json",
        "b.onnx": folder / "best.b.plan.json",
    }


def test_logs_need_not_be_there(folder):
    (folder / "progress.jsonl").unlink()
    (folder / "best.jsonl").unlink()
    run = RunFolder.read(folder)
    assert (run.progress, run.best) == ((), ())


def test_no_folder(tmp_path):
    with pytest.raises(ReportError, match="no such folder"):
        RunFolder.read(tmp_path / "none")
    with pytest.raises(ReportError, match=r"no agent\.safetensors"):
        RunFolder.read(tmp_path)


HEADER = json.dumps({"__metadata__": {"format": "pt"}}).encode()
DEEP = b'{"__metadata__": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 64,
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", len(HEADER)) + HEADER,
        struct.pack("<Q", len(DEEP)) + DEEP,
        b"\x80\x04cposix\nsystem\n.",
    ],
    ids=["empty", "short", "long", "null", "another format", "deep", "pickle"],
)
def test_damaged_agent(folder, content):
    (folder / "agent.safetensors").write_bytes(content)
    with pytest.raises(ReportError, match=r"agent\.safetensors: truncated, or no agent"):
        RunFolder.read(folder)


@pytest.mark.parametrize("description", [{}, {"agent": "ppo", "metadata": {"models": 3, "shapes": {}, "target": ""}}])
def test_agent_of_something_else(folder, description):
    write_checkpoint(folder / "agent.safetensors", description)
    with pytest.raises(ReportError, match="order of passes"):
        RunFolder.read(folder)


@pytest.mark.parametrize("line", ["no json", "[1]", "{"])
def test_damaged_log(folder, line):
    (folder / "progress.jsonl").write_text(f'{{"env_steps": 1}}\n{line}\n')
    with pytest.raises(ReportError, match=r"progress\.jsonl: line 2"):
        RunFolder.read(folder)


def test_log_that_is_no_text(folder):
    (folder / "best.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ReportError, match=r"best\.jsonl: cannot be read"):
        RunFolder.read(folder)
