"""What is known of places: what actions saved there when they were tried.

An environment tells of each legal action the keys of its place, from coarse to fine (`envs.places`). What an action
saves is nearly a matter of its place alone, but of the exact shapes there, which a network blurs; so it is looked up,
as in neural episodic control (Pritzel et al. 2017), and the network decides what to make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed


class Places:
    """Of each key how often it was tried, and the mean of what that saved (squeezed: `savings`).

    Args:
        keys: int64 (K,), ascending.
        tries: float64 (K,).
        means: float64 (K,).
    """

    def __init__(
        self, keys: np.ndarray | None = None, tries: np.ndarray | None = None, means: np.ndarray | None = None
    ) -> None:
        self.keys = np.zeros(0, np.int64) if keys is None else keys
        self.tries = np.zeros(0) if tries is None else tries
        self.means = np.zeros(0) if means is None else means

    def known(self, places: np.ndarray) -> np.ndarray:
        """What is known of places with keys (S, P), float32 (S, 2P): of each key the mean saving, 0 where it was not
        tried, and n / (n + 1) for n tries."""
        if not len(self.keys):
            return np.zeros((len(places), 2 * places.shape[1]), np.float32)
        rows = np.minimum(np.searchsorted(self.keys, places), len(self.keys) - 1)
        there = self.keys[rows] == places
        tries = np.where(there, self.tries[rows], 0.0)
        return np.concatenate([np.where(there, self.means[rows], 0.0), tries / (tries + 1.0)], axis=1, dtype=np.float32)

    def add(self, places: np.ndarray, saved: np.ndarray) -> None:
        """Take in what actions at places with keys (T, P) saved, squeezed (T,). Keys of 0 are no place: stop."""
        there = places.any(axis=1)
        places, saved = places[there], saved[there]
        keys, where = np.unique(np.concatenate([self.keys, places.ravel()]), return_inverse=True)
        told = np.repeat(np.asarray(saved, np.float64), places.shape[1])
        weights = np.concatenate([self.tries, np.ones(len(told))])
        tries = np.bincount(where, weights, len(keys))
        sums = np.bincount(where, weights * np.concatenate([self.means, told]), len(keys))
        self.keys, self.tries, self.means = keys, tries, sums / tries

    def tried(self, observations: Sequence[Mapping[str, Any]], actions: np.ndarray, saved: Sequence[float]) -> None:
        """Take in what actions (T, 2) on an environment's observations saved, each in percent of its episode's first
        graph."""
        places = [seen["location_places"][tuple(action)] for seen, action in zip(observations, actions, strict=True)]
        self.add(np.stack(places), squeezed(torch.tensor(saved, dtype=torch.float64)).numpy())

    def learn(self, episodes: Sequence[Episode]) -> None:
        """Take in what the steps of episodes saved; of those whose environment told no times, nothing."""
        told = [episode for episode in episodes if len(episode.run_secs) == len(episode) + 1]
        if not told:
            return
        chosen = [
            kept.site_places[site]
            for episode in told
            for kept, site in zip(episode.observations, episode.sites, strict=True)
        ]
        places, saved = np.stack(chosen), np.concatenate([savings(episode) for episode in told])
        self.add(places, squeezed(torch.from_numpy(saved)).numpy())

    def copy(self) -> Places:
        """One that learns for itself."""
        return Places(self.keys, self.tries, self.means)  # arrays are replaced, never written into

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, for checkpoints and workers."""
        return {name: torch.from_numpy(array) for name, array in vars(self).items()}

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Places:
        """The inverse of `tensors`."""
        return Places(**{name: tensor.numpy() for name, tensor in tensors.items()})
