"""What a training leaves in its folder, read again without torch: models, target, plans, and the logs."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import AgentError, ReportError
from rlflow_tvm.jsonl import read_lines
from rlflow_tvm.training_files import plan_paths

CHECKPOINT, PROGRESS, BEST = "agent.safetensors", "progress.jsonl", "best.jsonl"
FORMAT = "rlflow_tvm.agent"  # as agents.checkpoint, which needs torch, has it


@dataclass(frozen=True)
class RunFolder:
    """A training's folder.

    `plans`: model, as the training was told of it, -> the file of its best plan, which need not be there yet. `shapes`:
    of inputs. `target`: of the kernels, as JSON; `rpc_key`: of the machines that they were measured on, None for this
    one. `progress`, `best`: the lines of the logs, empty where there is none.
    """

    folder: Path
    agent: str
    plans: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    target: str
    rpc_key: str | None
    progress: tuple[dict[str, Any], ...]
    best: tuple[dict[str, Any], ...]

    @staticmethod
    def read(folder: Path) -> RunFolder:
        """ReportError, naming file and remedy, for what is no folder of a training of rewrites or is damaged."""
        if not os.path.isdir(folder):  # which is no error either where the name is too long for one
            raise ReportError(f"{folder}: no such folder: give what train left in its --out, or a model with --plan")
        path = folder / CHECKPOINT
        if not path.is_file():
            raise ReportError(
                f"{folder}: no {CHECKPOINT} in it: give a folder that train left, or a model with --plan PLAN"
            )
        description = _description(path)
        try:
            told = description["metadata"]
            target, _, rpc_key = str(told["target"]).partition(" rpc:")
            models = [str(model) for model in told["models"]]
            shapes = {str(name): tuple(map(int, shape)) for name, shape in told["shapes"].items()}
            agent = str(description["agent"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ReportError(
                f"{path}: says nothing of models and rules: a report is made of trainings of rewrites, "
                "not of the order of passes"
            ) from None
        logs = [_lines(folder / name) for name in (PROGRESS, BEST)]
        return RunFolder(folder, agent, plan_paths(folder, models), shapes, target, rpc_key or None, *logs)


def _description(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: JSON in the JSON at the head of a safetensors file, behind that one's length in
    eight bytes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("truncated")
            header = json.loads(file.read(length))["__metadata__"]
        if header["format"] != FORMAT:
            raise ValueError("another format")
        description = json.loads(header["description"])
        if not isinstance(description, dict):
            raise TypeError("no description")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}): check its permissions") from None
    except (struct.error, ValueError, KeyError, TypeError, RecursionError):
        raise ReportError(
            f"{path}: truncated, or no agent of this package: give the folder of a training, or a model with --plan"
        ) from None
    return description


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        return tuple(read_lines(path))
    except AgentError as error:
        raise ReportError(f"{error}, and the report does without") from None
