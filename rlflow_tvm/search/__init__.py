"""Searches without learning, over the same problem as the environments. Adding one: a class, a line in `SEARCHES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.errors import UsageError
from rlflow_tvm.search.family import FamilySearch
from rlflow_tvm.search.greedy import Greedy
from rlflow_tvm.search.random_walk import RandomSearch, random_action, random_states
from rlflow_tvm.search.result import Progress, SearchResult


class Search(Protocol):
    """Finds a cheap state from a problem's start."""

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult: ...


SEARCHES: dict[str, Callable[[int], Search]] = {
    "greedy": lambda _seed: Greedy(),
    "family": lambda _seed: FamilySearch(),
    "random": lambda seed: RandomSearch(seed=seed),
}


def check_seed(seed: int) -> None:
    """UsageError for a seed that no generator takes."""
    if seed < 0:
        raise UsageError(f"seed {seed}: give 0 or more")


def make_search(name: str, seed: int = 0) -> Search:
    """The search called `name`; UsageError lists the names. `seed` is at least 0."""
    check_seed(seed)
    if name not in SEARCHES:
        raise UsageError(f"no search is called {name!r}: there are {', '.join(SEARCHES)}")
    return SEARCHES[name](seed)


__all__ = [
    "SEARCHES",
    "FamilySearch",
    "Greedy",
    "Progress",
    "RandomSearch",
    "Search",
    "SearchResult",
    "check_seed",
    "make_search",
    "random_action",
    "random_states",
]
