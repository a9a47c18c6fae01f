"""A training's real episodes, one file each."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from rlflow_tvm.agents.messages import pack_episode, unpack_episode
from rlflow_tvm.agents.observation import CompactObservation
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.errors import AgentError


class Rollouts:
    """Episodes in a folder, numbered from 0; a file is whole or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.episodes: list[Episode] = []

    @property
    def steps(self) -> int:
        """Of all episodes."""
        return sum(map(len, self.episodes))

    def add(self, episode: Episode) -> None:
        """Keep one more."""
        path = self._path(len(self.episodes))
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:  # on disk before a checkpoint that has learnt from it
                file.write(pack_episode(episode))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise AgentError(f"{path}: cannot be written ({error.strerror}); free space, then resume") from error
        self.episodes.append(episode)

    def load(self) -> None:
        """Those that are there."""
        while (path := self._path(len(self.episodes))).exists():
            try:
                self.episodes.append(unpack_episode(path.read_bytes(), CompactObservation))
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                raise AgentError(f"{path}: is no episode ({error}); delete it and those after it, resume") from error

    def split(self, share: float, steps: int) -> tuple[list[Episode], list[Episode]]:
        """(`share` of the episodes; the others): by their numbers, spread evenly. Of those of the first `steps` steps
        at least two, where there are four; of more that come later none changes sides, and an odd number lies between,
        as a controller's take turns. A single episode is both."""
        if len(self.episodes) == 1:
            return self.episodes, self.episodes
        first = int(np.searchsorted(np.cumsum([len(episode) for episode in self.episodes]), steps)) + 1
        every = max(2, min(round(1 / share), min(first, len(self.episodes)) // 2))
        first, later = max(first, every), round(1 / share) | 1
        parts: tuple[list[Episode], list[Episode]] = [], []
        for number, episode in enumerate(self.episodes):
            turn = number % every == every - 1 if number < first else (number - first) % later == later - 1
            parts[not turn].append(episode)
        return parts

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"
