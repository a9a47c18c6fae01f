"""The legal actions of dreamt graphs: those of the real graph that a dream began with, as M's counts change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.world.vision import site_counts


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of N graphs (S in all), one graph after another, of each by rule; stop is the last one.

    A dream knows how many sites each rule has, not which: one that is new has no nodes, and nothing is known of it.
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

    def after(self, chosen: np.ndarray, counts: np.ndarray, drawn: np.ndarray) -> Sites:
        """The sites after one of each graph was rewritten and M has foreseen how many there are.

        The rewritten one is gone; of a rule that is to have fewer those go first that share a node with it, then any;
        where it is to have more, new ones come.

        Args:
            chosen: sites of each graph, (N,).
            counts: int64 (N, R+1).
            drawn: random numbers, (S,), in [0, 1).
        """
        groups, numbers = self._ranges
        touched = self._touched(chosen)
        # a rule's sites in the order in which they stay; the rewritten one, the last, in no case
        order = drawn + touched
        order[chosen] = np.inf
        ranked = np.lexsort((order, groups))
        wanted = np.minimum(counts.ravel(), self.counts.ravel() - np.bincount(groups[chosen], minlength=counts.size))
        stays = np.zeros(len(groups), bool)
        stays[ranked] = numbers < wanted[groups]
        new = np.repeat(np.arange(counts.size), counts.ravel() - wanted)
        merged = np.argsort(np.concatenate([groups[stays], new]), kind="stable")
        known = np.concatenate([self.known[stays], np.zeros((len(new), self.known.shape[1]), np.float32)])
        nodes = np.concatenate([self.nodes[stays], np.full((len(new), self.nodes.shape[1]), -1, self.nodes.dtype)])
        return Sites(counts, known[merged], nodes[merged])

    def _touched(self, chosen: np.ndarray) -> np.ndarray:
        """Which sites share a node with the one chosen in their graph, (S,)."""
        rewritten = np.zeros((len(self.counts), self.nodes.max(initial=-1) + 2), bool)
        rewritten[np.arange(len(chosen))[:, None], self.nodes[chosen]] = True
        rewritten[:, -1] = False  # none
        return rewritten[self.graphs[:, None], self.nodes].any(axis=1)
