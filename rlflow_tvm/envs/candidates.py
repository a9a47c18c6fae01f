"""X-RLflow's environment: choose one of the graphs that are a rewrite away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np

from rlflow_tvm.envs.changes import Candidate, Change, candidate_space, observe_candidates
from rlflow_tvm.envs.episode import RewritingEnv, StepResult
from rlflow_tvm.errors import EnvError, RewriteError
from rlflow_tvm.passes import RewriteAction
from rlflow_tvm.passes.difference import Difference
from rlflow_tvm.passes.fingerprint import distinct
from rlflow_tvm.passes.match import Match

MOST = 500
"""Candidates of a step, by default (X-RLflow's number)."""

Known = WeakKeyDictionary[Match, tuple[Difference, Change]]
"""What was found out of matches that are still somebody's."""


class CandidateEnv(RewritingEnv[int]):
    """Rewrite one graph by choosing the next one; episodes, rewards and arguments as in `RewritingEnv`.

    Action: the number of a candidate in `candidates`; number `most` stops. Candidates are all graphs one rewrite away,
    equal ones once, in the order of rules and sites; up to `most`. Where there are more, each rule has as many as any
    other while it has any, drawn by the graph's structure: a graph has the same candidates whenever it is met.
    Observation: see `rlflow_tvm.envs.changes.observe_candidates`. An info tells besides how many `candidates` there
    were and how many of them were `duplicates` or, beyond `most`, `dropped`.
    """

    def __init__(self, *args: Any, most: int = MOST, **options: Any) -> None:
        if most < 1:
            raise EnvError(f"most {most}: a step needs at least one candidate")
        self.most = most
        self._known = Known()
        super().__init__(*args, **options)

    @classmethod
    def observations(cls, rules: int) -> gymnasium.Space[dict[str, Any]]:
        return candidate_space(rules, MOST)

    def _spaces(self) -> tuple[gymnasium.Space[dict[str, Any]], gymnasium.Space[int]]:
        space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(self.most + 1)
        return candidate_space(len(self.rule_names), self.most), space

    def _begin(self) -> None:
        super()._begin()
        self.candidates: tuple[Candidate, ...] = ()
        self._found = self._duplicates = 0

    @property
    def stop(self) -> int:
        """The action that stops."""
        return self.most

    def step(self, action: int) -> StepResult:
        number = int(action)
        if number == self.stop:
            return self._stop()
        if not 0 <= number < len(self.candidates):
            return self._refuse("none")
        return self._take(self.candidates[number].action)

    def _observe(self) -> tuple[dict[str, Any], bool]:
        told: list[Candidate] = []
        differences: list[Difference] = []
        for number, rule in enumerate(self.rule_names):
            for site, match in self.state.located(rule):
                try:
                    difference, change = self._difference(match)
                except RewriteError:  # nothing would change, or not as the types allow: there is no graph to choose
                    continue
                told.append(Candidate(RewriteAction(rule, site), number, match, change))
                differences.append(difference)
        refused = [i for i, each in enumerate(told) if each.action in self._refused]
        found = [told[i] for i in distinct(self.state.graph, differences, refused)]
        self._found, self._duplicates = len(found), len(told) - len(refused) - len(found)
        self.candidates = tuple(found[i] for i in self._fairly([each.rule for each in found]))
        observation = observe_candidates(
            self.state.graph, self.candidates, len(self.rule_names), self.most, self.whole_work
        )
        return observation, bool(self.candidates)

    def _difference(self, match: Match) -> tuple[Difference, Change]:
        graph = self.state.graph
        known = self._known.get(match)
        if known is None or not known[0].holds(graph):
            difference = Difference.of(graph, match, self.state.matches.parameters)
            self._known[match] = known = difference, Change.of(graph, difference)
        return known

    def _fairly(self, rules: Sequence[int]) -> list[int]:
        """Which of so many candidates, given by their rules, are offered: their numbers, ascending."""
        if len(rules) <= self.most:
            return list(range(len(rules)))
        rng = np.random.default_rng(self.state.structural_hash)
        names, counts = np.unique(rules, return_counts=True)
        shares, left = dict[int, int](), self.most
        for position, i in enumerate(np.argsort(counts, kind="stable")):  # what a rule leaves goes to those after it
            shares[int(names[i])] = share = min(int(counts[i]), left // (len(names) - position))
            left -= share
        chosen = [
            rng.choice(np.flatnonzero(np.array(rules) == rule), shares[rule], replace=False) for rule in sorted(shares)
        ]
        return sorted(int(i) for i in np.concatenate(chosen))

    def _info(self, rule: str) -> dict[str, Any]:
        told = {
            "candidates": self._found,
            "duplicates": self._duplicates,
            "dropped": self._found - len(self.candidates),
        }
        return super()._info(rule) | told
