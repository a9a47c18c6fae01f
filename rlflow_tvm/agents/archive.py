"""Graphs worth going on from: the cheapest that a training has met, where some of its episodes begin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from rlflow_tvm.agents.rollout import Episode

_ARCHIVE = 1  # apart from an episode's own random numbers
_KEPT = ("model", "run_secs", "plan")


@dataclass
class Archive:
    """The `size` cheapest graphs of each model, by what the environment told of whole episodes (`Episode.summary`).

    As in Go-Explore (Ecoffet et al. 2021): first return, then explore. `share` of the episodes begin at one of them:
    what was hard to reach once need not be reached again. Graphs of one model that cost the same count as one, and so
    does one that has two prices, as machines differ. Models
    of which none is kept yet have their part of those episodes too, from the beginning.
    """

    size: int
    share: float
    kept: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # cheapest first
    favour: float = 0.0
    """0: of a model's graphs each is as likely as the others; else the cheapest has this chance, and each further one
    this chance of what is left."""

    @staticmethod
    def of(
        env: gymnasium.Env, size: int, share: float, starts: Iterable[Mapping[str, Any]], favour: float = 0.0
    ) -> Archive:
        """With the graphs that a training is given, `starts`, and where `env` tells its `models` all of their names."""
        archive = Archive(size, share, {model: [] for model in getattr(env.unwrapped, "models", ())}, favour)
        for each in starts:
            archive.take(each)
        return archive

    def add(self, episode: Episode) -> None:
        """Take in an episode's cheapest graph, where the environment told one that it did not begin with."""
        if all(name in episode.summary for name in _KEPT) and episode.summary.get("step") != 0:
            self.take(episode.summary)

    def take(self, summary: Mapping[str, Any]) -> None:
        """Take in a graph: {"model", "run_secs", "plan"}, as an environment tells it."""
        # a kernel may fail when it is measured in the end; from a graph that is free there is nowhere to go on to
        if not self.share or not 0.0 < summary["run_secs"] < math.inf:
            return
        found = {name: summary[name] for name in _KEPT}
        kept = self.kept.setdefault(found["model"], [])
        same = next((each for each in kept if _are_one(each, found)), None)
        if same is not None and same["run_secs"] <= found["run_secs"]:
            return
        if same is not None:
            kept.remove(same)
        kept.append(found)
        kept.sort(key=lambda each: each["run_secs"])
        del kept[self.size :]

    def start(self, seed: int, number: int) -> Mapping[str, Any] | None:
        """Where episode `number` begins: `reset`'s option "start", of a model of which no graph is kept its name alone;
        None for the beginning of whichever model the environment draws."""
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, _ARCHIVE)))
        if not self.kept or rng.random() >= self.share:
            return None
        model = sorted(self.kept)[int(rng.integers(len(self.kept)))]
        graphs = self.kept[model]
        if not graphs:
            return {"model": model}
        number = int(rng.geometric(self.favour)) - 1 if self.favour else int(rng.integers(len(graphs)))
        return graphs[min(number, len(graphs) - 1)]


def _are_one(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    plans = [each["plan"] for each in (a, b)]
    ends = {plan.get("end_hash") if isinstance(plan, Mapping) else None for plan in plans}
    return bool(a["run_secs"] == b["run_secs"]) or (len(ends) == 1 and None not in ends)
