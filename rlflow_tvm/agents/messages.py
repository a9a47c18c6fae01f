"""What a training and its workers send each other: a JSON object and tensors, as the bytes of a safetensors file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from rlflow_tvm.agents.rollout import Episode

_TEXT = "message"
_REST = [field.name for field in dataclasses.fields(Episode) if field.name != "observations"]


def pack(message: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """The message as bytes; no tensor may be called "message"."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    return save({_TEXT: text, **{name: tensor.contiguous() for name, tensor in (tensors or {}).items()}})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The inverse of `pack`."""
    tensors = load(data)
    return json.loads(tensors.pop(_TEXT).numpy().tobytes()), tensors


def pack_episode(episode: Episode) -> bytes:
    """An episode as bytes; Python writes floats into JSON with all their digits, so that none is changed. What is kept
    of observations is a dataclass of arrays."""
    arrays: dict[str, np.ndarray] = {}
    for name in (field.name for field in dataclasses.fields(episode.observations[0])):
        parts = [getattr(observation, name) for observation in episode.observations]
        arrays[name] = np.concatenate(parts)
        arrays[f"{name} lengths"] = np.array([len(part) for part in parts])
    return pack(
        {name: getattr(episode, name) for name in _REST},
        {name: torch.from_numpy(array) for name, array in arrays.items()},
    )


def unpack_episode(data: bytes, kept: type) -> Episode:
    """The inverse of `pack_episode`, for observations kept as `kept`."""
    message, tensors = unpack(data)
    names = [field.name for field in dataclasses.fields(kept)]
    parts = {name: torch.split(tensors[name], tensors[f"{name} lengths"].tolist()) for name in names}
    steps = zip(*parts.values(), strict=True)
    observations = [kept(**{name: part.numpy() for name, part in zip(parts, step, strict=True)}) for step in steps]
    return Episode(observations=observations, **message)
