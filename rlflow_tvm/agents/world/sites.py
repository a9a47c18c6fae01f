"""The legal actions of dreamt graphs: those of the real graph that a dream began with, as M's counts change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.vision import site_counts

Uniform = Callable[[int], np.ndarray]


class Newcomers:
    """The sites that came with rewrites of real episodes: of each rule, by the rule that was applied.

    Args:
        known: float32 (Q, 2P+1), what is known of their places.
        applied: int64 (Q,), the rules that were applied.
        rules: int64 (Q,), the rules that they are sites of.
        num_rules: R+1.

    Attributes:
        number: Q.
    """

    def __init__(self, known: np.ndarray, applied: np.ndarray, rules: np.ndarray, num_rules: int) -> None:
        # by both rules; then, for what never came with the rule that is applied, by their own alone
        keys = np.concatenate([applied * num_rules + rules, num_rules**2 + rules])
        order = np.argsort(keys, kind="stable")
        self._known = np.concatenate([known, known])[order]
        self._counts = np.bincount(keys, minlength=num_rules * (num_rules + 1))
        self._starts = np.cumsum(self._counts) - self._counts
        self._num_rules = num_rules
        self.number = len(known)

    @staticmethod
    def of(episodes: Sequence[Episode], sizes: ObservationSizes, places: Places) -> Newcomers:
        """Those of some episodes."""
        found = []
        for episode in episodes:
            for before, site, after in zip(episode.observations, episode.sites, episode.observations[1:], strict=False):
                came = _came(before.site_places, after.site_places)
                rules = after.site_rules[came].astype(np.int64)
                found.append((after.site_places[came], rules, np.full(len(rules), before.site_rules[site], np.int64)))
        if not found:
            none = np.zeros(0, np.int64)
            return Newcomers(np.zeros((0, sizes.num_known), np.float32), none, none, sizes.num_rules)
        where, rules, applied = (np.concatenate(each) for each in zip(*found, strict=True))
        return Newcomers(places.known(where), applied, rules, sizes.num_rules)

    def known(self, applied: np.ndarray, rules: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """What is known of new sites of `rules` (Q,) after `applied` ones (Q,), float32 (Q, 2P+1), one of those that
        came for each number `drawn` (Q,) in [0, 1); nothing, where none ever did."""
        keys = applied * self._num_rules + rules
        keys = np.where(self._counts[keys] > 0, keys, self._num_rules**2 + rules)
        told = np.zeros((len(keys), self._known.shape[1]), np.float32)
        some = self._counts[keys] > 0
        told[some] = self._known[(self._starts[keys] + (drawn * self._counts[keys]).astype(np.int64))[some]]
        return told


def _came(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Which sites of a graph, by their keys (S, P) and those before, came with a rewrite: sites of a sort (the coarsest
    key) of which there are more now, at places (the finest key) that were not there. (S,)"""
    sorts, which, now = np.unique(after[:, 0], return_inverse=True, return_counts=True)
    old = np.sort(before[:, 0])
    number = np.searchsorted(old, sorts, side="right") - np.searchsorted(old, sorts, side="left")
    return (now > number)[which] & ~np.isin(after[:, -1], before[:, -1])


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of N graphs (S in all), one graph after another, of each by rule; stop is the last one.

    A dream knows how many sites each rule has, not which: one that is new has no nodes, and what is known of it is what
    is known of a newcomer.
    """

    counts: np.ndarray  # int64 (N, R+1), of each rule
    known: np.ndarray  # float32 (S, 2P+1), what is known of their places
    nodes: np.ndarray  # int32 (S, K), of the graph that the dream began with, -1 = none

    @staticmethod
    def of(observations: Sequence[CompactObservation], sizes: ObservationSizes, places: Places) -> Sites:
        """Those of real graphs, with what is known now."""
        known = places.known(np.concatenate([each.site_places for each in observations]))
        nodes = np.concatenate([each.site_nodes for each in observations])
        return Sites(site_counts(observations, sizes), known, nodes)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each graph's sites begin, and the last one's end, (N+1,)."""
        return np.concatenate([[0], self.counts.sum(axis=1).cumsum()])

    @cached_property
    def graphs(self) -> np.ndarray:
        """Of each site, (S,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(axis=1))

    @property
    def rules(self) -> np.ndarray:
        """Of each site, (S,)."""
        return self._ranges[0] % self.counts.shape[1]

    @property
    def locations(self) -> np.ndarray:
        """Of each site, its number among its rule's, (S,)."""
        return self._ranges[1]

    @cached_property
    def _ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each site, the number of its graph and rule, and its number among theirs."""
        each = self.counts.ravel()
        groups = np.repeat(np.arange(each.size), each)
        return groups, np.arange(len(groups)) - (np.cumsum(each) - each)[groups]

    def __getitem__(self, graphs: np.ndarray) -> Sites:
        """The sites of some of the graphs, in their order; one may come several times."""
        starts, lengths = self.offsets[:-1][graphs], self.counts.sum(axis=1)[graphs]
        rows = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        return Sites(self.counts[graphs], self.known[rows], self.nodes[rows])

    def after(self, chosen: np.ndarray, counts: np.ndarray, newcomers: Newcomers, uniform: Uniform) -> Sites:
        """The sites after one of each graph was rewritten and M has foreseen how many there are.

        The rewritten one is gone; of a rule that is to have fewer those go first that share a node with it, then any;
        where it is to have more, new ones come.

        Args:
            chosen: sites of each graph, (N,).
            counts: int64 (N, R+1).
            newcomers: what new ones are like.
            uniform: makes so many random numbers in [0, 1).
        """
        groups, numbers = self._ranges
        touched = self._touched(chosen)
        # a rule's sites in the order in which they stay; the rewritten one, the last, in no case
        order = uniform(len(groups)) + touched
        order[chosen] = np.inf
        ranked = np.lexsort((order, groups))
        wanted = np.minimum(counts.ravel(), self.counts.ravel() - np.bincount(groups[chosen], minlength=counts.size))
        stays = np.zeros(len(groups), bool)
        stays[ranked] = numbers < wanted[groups]
        new = np.repeat(np.arange(counts.size), counts.ravel() - wanted)
        merged = np.argsort(np.concatenate([groups[stays], new]), kind="stable")
        applied = self.rules[chosen][new // counts.shape[1]]
        drawn = newcomers.known(applied, new % counts.shape[1], uniform(len(new)))
        known = np.concatenate([self.known[stays], drawn])
        nodes = np.concatenate([self.nodes[stays], np.full((len(new), self.nodes.shape[1]), -1, self.nodes.dtype)])
        return Sites(counts, known[merged], nodes[merged])

    def _touched(self, chosen: np.ndarray) -> np.ndarray:
        """Which sites share a node with the one chosen in their graph, (S,)."""
        rewritten = np.zeros((len(self.counts), self.nodes.max(initial=-1) + 2), bool)
        rewritten[np.arange(len(chosen))[:, None], self.nodes[chosen]] = True
        rewritten[:, -1] = False  # none
        return rewritten[self.graphs[:, None], self.nodes].any(axis=1)
