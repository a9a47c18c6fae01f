"""Checkpoints: round trips, one-line errors, kills at any moment, and full disks, of what stands beside them too."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.tensorboard import SummaryWriter

from rlflow_tvm.agents.checkpoint import FORMAT, VERSION, load_checkpoint, save_checkpoint
from rlflow_tvm.agents.progress import ProgressLog
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.rollouts import Rollouts
from rlflow_tvm.errors import AgentError
from rlflow_tvm.jsonl import keep_lines


def test_tensors_and_description_round_trip(tmp_path):
    path = tmp_path / "agent.safetensors"
    tensors = {
        "policy.w": torch.randn(3, 4).t(),
        "optimizer.w.step": torch.tensor(7.0),
        "random.torch": torch.arange(9, dtype=torch.uint8),
    }
    description = {"counts": {"updates": 3, "best": None}, "state": 2**127 + 1, "name": "é", "x": 0.1}
    save_checkpoint(path, tensors, description)
    read, described = load_checkpoint(path)
    assert described == description
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors.items())
    assert load_checkpoint(path, prefix="policy.")[0].keys() == {"policy.w"}
    assert os.listdir(tmp_path) == ["agent.safetensors"]


def one_line_error(path):
    """The message with which loading fails; it names the file."""
    with pytest.raises(AgentError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert "train" in message
    return message


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    assert "no such checkpoint" in one_line_error(tmp_path / "none.safetensors")
    assert "no such checkpoint" in one_line_error(tmp_path)
    assert "no such checkpoint" in one_line_error(tmp_path / ("n" * 300))


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 40, 200, -1])
def test_a_truncated_file_is_an_error(tmp_path, kept):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"policy.w": torch.ones(100)}, {"a": 1})
    path.write_bytes(path.read_bytes()[:kept])
    assert "truncated" in one_line_error(path)


def test_another_version_and_another_format_are_errors(tmp_path):
    path = tmp_path / "agent.safetensors"
    newer = {"format": FORMAT, "version": str(VERSION + 1), "description": "{}"}
    save_file({"w": torch.ones(2)}, path, metadata=newer)
    assert f"version {VERSION + 1}, this rlflow_tvm reads version {VERSION}" in one_line_error(path)
    save_file({"w": torch.ones(2)}, path)
    assert "no rlflow_tvm agent" in one_line_error(path)
    path.write_bytes(b"PK\x03\x04 a pickle in a zip, perhaps")
    assert "not a safetensors file" in one_line_error(path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(AgentError, match="cannot be written"):
        save_checkpoint(tmp_path / "none" / "agent.safetensors", {"policy.w": torch.ones(2)}, {})


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_and_nothing_half_written_is_left(tmp_path, monkeypatch):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"policy.w": torch.zeros(5)}, {})
    monkeypatch.setattr("rlflow_tvm.agents.checkpoint.os.fsync", full_disk)
    with pytest.raises(AgentError, match=r"No space left on device.*free space"):
        save_checkpoint(path, {"policy.w": torch.ones(5)}, {})
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_no_half_of_an_episode_or_of_a_log(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text("{}\n")
    monkeypatch.setattr("rlflow_tvm.agents.world.rollouts.pack_episode", lambda _: b"an episode")
    monkeypatch.setattr("rlflow_tvm.agents.world.rollouts.os.replace", full_disk)
    with pytest.raises(AgentError, match=r"No space left on device.*free space, then resume"):
        Rollouts(tmp_path).add(Episode())
    with pytest.raises(AgentError, match=r"No space left on device.*free space, then resume"):
        keep_lines(tmp_path / "log.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("call", ["__init__", "add_scalar", "close"])
def test_a_full_disk_is_told_where_tensorboard_meets_it(tmp_path, monkeypatch, call):
    monkeypatch.setattr(SummaryWriter, call, full_disk)
    said = f"^{tmp_path}: TensorBoard cannot write its events .No space left on device.; free space, then resume$"
    with pytest.raises(AgentError, match=said), ProgressLog(tmp_path, 0, 0) as log:
        log.write({"update": 1, "env_steps": 3})


def test_an_error_is_not_hidden_by_one_of_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(SummaryWriter, "close", full_disk)
    with pytest.raises(KeyboardInterrupt), ProgressLog(tmp_path, 0, 0):
        raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["save_file", "os.fsync", "os.replace"])
def test_a_save_that_dies_leaves_the_previous_checkpoint_whole(tmp_path, monkeypatch, stage):
    path = tmp_path / "agent.safetensors"
    save_checkpoint(path, {"policy.w": torch.zeros(5)}, {"number": 0})

    class Killed(BaseException):
        pass

    def die(*arguments, **_):
        # a half-written file first, where it is the writing that dies
        if stage == "save_file":
            arguments[1].write_bytes(b"\x10\x00")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"rlflow_tvm.agents.checkpoint.{stage}", die)
        with pytest.raises(Killed):
            save_checkpoint(path, {"policy.w": torch.ones(5)}, {"number": 1})
    tensors, description = load_checkpoint(path)
    assert (description["number"], tensors["policy.w"].tolist()) == (0, [0.0] * 5)
    save_checkpoint(path, {"policy.w": torch.ones(5)}, {"number": 2})
    assert load_checkpoint(path)[1] == {"number": 2}


WRITER = """
import sys
from pathlib import Path
import torch
from rlflow_tvm.agents.checkpoint import save_checkpoint

path, number = Path(sys.argv[1]), 0
while True:
    number += 1
    save_checkpoint(path, {f"policy.{i}": torch.full((20_000,), float(number)) for i in range(8)}, {"number": number})
    print(number, flush=True)
"""


def test_kill_9_while_writing_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "agent.safetensors"
    # one thread: the writer's start-up is most of this test
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for saves in (1, 6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as writer:
            assert writer.stdout is not None
            for _ in range(saves):
                finished = int(writer.stdout.readline())
            # it is in the middle of a later save now
            writer.send_signal(signal.SIGKILL)
        tensors, description = load_checkpoint(path)
        assert description["number"] >= finished
        values = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
        assert values == {float(description["number"])}
