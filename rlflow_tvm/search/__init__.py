"""Searches without learning, over the same problem as the environments. Adding one: a class, a line in `SEARCHES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rlflow_tvm.envs import Beginning, RewriteProblem
from rlflow_tvm.errors import UsageError
from rlflow_tvm.search.backtracking import Backtracking
from rlflow_tvm.search.beam import Beam
from rlflow_tvm.search.budget import Budget
from rlflow_tvm.search.family import FamilySearch
from rlflow_tvm.search.greedy import Greedy
from rlflow_tvm.search.random_walk import RandomSearch, random_action, random_states
from rlflow_tvm.search.result import Progress, SearchResult
from rlflow_tvm.search.settled import beginnings
from rlflow_tvm.search.variable_depth import VariableDepth


class Search(Protocol):
    """Finds a cheap state from a problem's start."""

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult: ...


_Made = Greedy | Backtracking | Beam | RandomSearch | FamilySearch | VariableDepth

SEARCHES: dict[str, Callable[[int], _Made]] = {
    "greedy": lambda _seed: Greedy(),
    "backtracking": lambda _seed: Backtracking(),
    "beam": lambda _seed: Beam(),
    "random": lambda seed: RandomSearch(seed=seed),
    "random-restarts": lambda seed: RandomSearch(seed=seed, remembered=16, limit=1.1, settled=True),
    "family": lambda _seed: FamilySearch(),
    "variable-depth": lambda _seed: VariableDepth(),
}
DEFAULT_SEARCH = "family"
"""Greedy search, from more than the model: what gains only where a whole network is in blocked layouts, all branches of
a block are one convolution, pixels are convolved before there are more of them, or a few rows are led back through one,
greedy search alone does not reach."""


def check_seed(seed: int) -> None:
    """UsageError for a seed that some generator does not take: torch's have 64 bits."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed {seed}: give 0 or more, below 2^64")


def make_search(name: str, seed: int = 0, budget: Budget | str | int | None = None) -> Search:
    """The search called `name`, with its own budget by default, which may be what `Budget.parse` takes; UsageError
    lists the names; `seed`: see `check_seed`."""
    check_seed(seed)
    if name not in SEARCHES:
        raise UsageError(f"no search is called {name!r}: there are {', '.join(SEARCHES)}")
    search = SEARCHES[name](seed)
    if budget is None:
        return search
    return replace(search, budget=budget if isinstance(budget, Budget) else Budget.parse(budget))


__all__ = [
    "DEFAULT_SEARCH",
    "SEARCHES",
    "Backtracking",
    "Beam",
    "Beginning",
    "Budget",
    "FamilySearch",
    "Greedy",
    "Progress",
    "RandomSearch",
    "Search",
    "SearchResult",
    "VariableDepth",
    "beginnings",
    "check_seed",
    "make_search",
    "random_action",
    "random_states",
]
