"""Checkpoints: tensors and a JSON description in one safetensors file; no pickle anywhere.

One file and not one each for parameters and training state: `os.replace` is atomic for a single name, so a kill at any
moment leaves either the previous checkpoint or the new one, and never parameters of one update beside optimizer
moments of another. An agent that only acts reads the `policy.` tensors and skips the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlflow_tvm.errors import AgentError

FORMAT = "rlflow_tvm.agent"
VERSION = 7  # raised when an older file could no longer be read right
FILE_NAME = "agent.safetensors"


def save_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically.

    Args:
        path: file to write or replace; its folder exists. One writer at a time.
        tensors: by name; the policy's begin with `policy.`.
        description: whatever JSON takes.

    Raises:
        AgentError: the file cannot be written; the previous checkpoint, if any, is still whole.
    """
    header = {"format": FORMAT, "version": str(VERSION), "description": json.dumps(description, allow_nan=False)}
    # A fixed name: what a killed process leaves behind is overwritten by the next save.
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)
        # Without the sync a power cut could leave the new name with none of its contents.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        with suppress(OSError):  # what there is of it takes space
            temporary.unlink(missing_ok=True)
        raise AgentError(f"{path}: cannot be written ({error}); free space or give another folder") from error


def load_checkpoint(path: Path, prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors whose names begin with `prefix`, and the description.

    Raises:
        AgentError: the file is missing, truncated, no checkpoint, or of another version.
    """
    if not os.path.isfile(path):  # which is no error either where the name is too long for one
        raise AgentError(f"{path}: no such checkpoint; train one with python -m rlflow_tvm.train, or mend the path")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            description = _description(path, header)
            # safe_open is no mapping: it has keys() and does not iterate
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}, description
    except (SafetensorError, OSError) as error:
        raise AgentError(
            f"{path}: truncated or not a safetensors file ({error}); take another checkpoint or train anew"
        ) from error


def _description(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    if header.get("format") != FORMAT:
        raise AgentError(
            f"{path}: a safetensors file, but no rlflow_tvm agent; give the agent.safetensors of a training"
        )
    if header.get("version") != str(VERSION):
        raise AgentError(
            f"{path}: checkpoint version {header.get('version')}, this rlflow_tvm reads version {VERSION}; "
            "use the rlflow_tvm that wrote it, or train anew"
        )
    return dict(json.loads(header["description"]))
