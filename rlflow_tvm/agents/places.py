"""What is known of places: what actions saved there when they were tried.

An environment tells of each legal action the keys of its place, from coarse to fine, the first of them that of the rule
alone (`envs.places`). What an action saves is nearly a matter of its place alone, but of the exact shapes there, which
a network blurs; so it is looked up, as in neural episodic control (Pritzel et al. 2017), and the network decides what
to make of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.savings import savings, squeezed

SPREAD = 1.7
"""The standard deviation of what actions save (squeezed), measured: of one of whose place nothing is known."""
_CURIOUS = 0.5
"""Of the episodes of a training that look at what is known, those that imagine the rest."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


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

    def known(self, places: np.ndarray, by_rule: bool = False) -> np.ndarray:
        """What is known of places with keys (S, P), float32 (S, 2P+1): of each key the mean saving, 0 where it was not
        tried; n / (n + 1) for n tries of each; and what an action there should save by that, `by_rule` by what others
        of its rule saved too. That leads straight to what can be had at once, and away from what pays later."""
        means, weights = self._looked_up(places)
        expected = expected_saving(means if by_rule else means[:, 1:], weights if by_rule else weights[:, 1:])
        return np.concatenate([means, weights, expected[:, None]], axis=1, dtype=np.float32)

    def imagined(self, places: np.ndarray, draw: int) -> np.ndarray:
        """As `known`, but that what an action should save is drawn where little is known, with the deviation that is
        left: the same for a place in each call with this `draw`, below 2^63.

        An episode that acts on it tries out what may save most, and goes on with that (posterior sampling: Thompson
        1933; Osband et al. 2013, "(More) efficient reinforcement learning via posterior sampling").
        """
        means, weights = self._looked_up(places)
        means_here, weights_here = means[:, 1:], weights[:, 1:]  # what its rule saves elsewhere is no reason to look
        # keys are hashes already: multiplied, all their digits are in the first ones
        mixed = ((places[:, -1].view(np.uint64) ^ np.uint64(draw)) * _ODD) >> np.uint64(12)
        drawn = torch.special.ndtri(torch.from_numpy((mixed.astype(np.float64) + 0.5) / 2.0**52)).numpy()
        left = np.where(places.any(axis=1), SPREAD * np.prod(1.0 - weights_here, axis=1), 0.0)  # stop is no place
        saves = expected_saving(means_here, weights_here) + left * drawn
        return np.concatenate([means, weights, saves[:, None]], axis=1, dtype=np.float32)

    def _looked_up(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of keys (S, P) the mean savings and n / (n + 1), (S, P) each."""
        if not len(self.keys):
            return np.zeros(places.shape), np.zeros(places.shape)
        rows, there = self._rows(places)
        tries = np.where(there, self.tries[rows], 0.0)
        return np.where(there, self.means[rows], 0.0), tries / (tries + 1.0)

    def _rows(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where keys would be found, and which of them are there; both of the shape of `keys`."""
        if not len(self.keys):
            return np.zeros(keys.shape, np.int64), np.zeros(keys.shape, bool)
        rows = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return rows, self.keys[rows] == keys

    def add(self, places: np.ndarray, saved: np.ndarray) -> None:
        """Take in what actions at places with keys (T, P) saved, squeezed (T,). Keys of 0 are no place: stop."""
        there = places.any(axis=1)
        keys, which = np.unique(places[there].ravel(), return_inverse=True)
        new = keys[~self._rows(keys)[1]]
        at = np.searchsorted(self.keys, new)  # what is known of others is not touched: it is added to after each step
        tries, means = np.insert(self.tries, at, 0.0), np.insert(self.means, at, 0.0)
        self.keys = np.insert(self.keys, at, new)
        rows = np.searchsorted(self.keys, keys)
        sums = tries[rows] * means[rows]
        np.add.at(sums, which, np.repeat(np.asarray(saved[there], np.float64), places.shape[1]))
        tries[rows] += np.bincount(which, minlength=len(keys))
        means[rows] = sums / tries[rows]
        self.tries, self.means = tries, means

    def tried(self, places: Sequence[np.ndarray], saved: Sequence[float]) -> None:
        """Take in what actions at places with keys (P,) each saved, each in percent of its episode's first graph."""
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


def expected_saving(means: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What actions should save, (S,), by the mean savings of their places' keys, coarse to fine, and how far each is to
    be believed, (S, P) each: by the finest key, as far as it was tried, else by coarser ones; 0 where none was."""
    expected = np.zeros(len(means))
    for mean, weight in zip(means.T, weights.T, strict=True):
        expected = expected + weight * (mean - expected)
    return expected


class Outlook:
    """What a policy is told of places in an episode of a training: nothing, or what is `known`, or with a draw what is
    `imagined`, given what was known before and what the episode's own steps have saved since. `by_rule`: as in
    `Places.known`."""

    def __init__(self, places: Places, informed: bool, draw: int | None = None, by_rule: bool = False) -> None:
        self._places, self._draw, self._by_rule = places.copy() if informed else None, draw, by_rule

    @staticmethod
    def of(places: Places, informed_share: float, rng: np.random.Generator) -> Outlook:
        """An episode's: in such a share of them something is told, in some of those what is imagined."""
        informed, draw = bool(rng.random() < informed_share), int(rng.integers(2**63))
        return Outlook(places, informed, draw if rng.random() < _CURIOUS else None)

    def told(self, where: np.ndarray) -> np.ndarray:
        """Of places with keys (S, P), float32 (S, 2P+1)."""
        if self._places is None:
            return Places().known(where)
        if self._draw is not None:
            return self._places.imagined(where, self._draw)
        return self._places.known(where, self._by_rule)

    def tried(self, place: np.ndarray, saved: float) -> None:
        """Take in what an action at a place with keys (P,) saved, in percent of the episode's first graph."""
        if self._places is not None:
            self._places.tried([place], [saved])
