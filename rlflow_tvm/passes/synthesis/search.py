"""The search for rules: enumerate, pair, leave out what is implied, generalise and prove, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.passes.synthesis.coverage import RuleIndex, done_by, few_instances
from rlflow_tvm.passes.synthesis.decide import Found, decide
from rlflow_tvm.passes.synthesis.generalise import Point
from rlflow_tvm.passes.synthesis.ground import parts_of
from rlflow_tvm.passes.synthesis.journal import Journal
from rlflow_tvm.passes.synthesis.pairs import Paired, Sides, paired
from rlflow_tvm.passes.synthesis.world import WORLDS, worlds_for
from rlflow_tvm.passes.verify import PROOF_VERSION, worker_pool

WAVE = 64
"""Groups that are decided at once, whatever the number of processes: what is implied does not depend on it."""
_POINTS = 24  # of a group, at most: from these its equations are made
_VALUATIONS = len(WORLDS[0].valuations)

Progress = Callable[[int, int, str], None]


@dataclass
class Counts:
    """How many terms were enumerated, pairs of equal ones found, groups of pairs alike but for attributes; of the
    groups: implied by smaller rules, undecided or wrong; rules proved, and kept."""

    enumerated: int = 0
    paired: int = 0
    groups: int = 0
    implied: int = 0
    unproved: int = 0
    proved: int = 0
    kept: int = 0

    def __str__(self) -> str:
        return (
            f"{self.enumerated} terms enumerated, {self.paired} pairs of equal ones in {self.groups} groups: "
            f"{self.implied} implied by smaller rules, {self.unproved} not proved; {self.proved} rules proved, "
            f"{self.kept} kept"
        )


@dataclass(frozen=True)
class Group:
    """Pairs of equal terms that are alike but for attributes; `key` names it."""

    key: str
    points: tuple[Point, ...]

    @property
    def order(self) -> tuple[int, int, bytes]:
        """Small terms first; among those of a size mixed, so that what is alike is not decided in one wave."""
        first = self.points[0]
        larger, smaller = (sum(node.size for node in side) for side in (first.left, first.right))
        return larger, smaller, blake2b(self.key.encode()).digest()


def find_rules(
    operators: tuple[str, ...],
    depth: int,
    seed: int = 0,
    jobs: int = 1,
    journal: Path | None = None,
    on_progress: Progress = lambda done, total, text: None,
) -> tuple[list[Found], Counts]:
    """The rules over `operators` with terms of up to `depth` operators that follow from no smaller ones, in the order
    in which they were found. With `journal`, decisions are written down there, and those that stand there are not
    taken again."""
    counts = Counts()
    rules = _Rules()
    with worker_pool(jobs) as pool:
        run = map if jobs == 1 else pool.map
        worlds = worlds_for(operators)
        equals = run(partial(paired, operators=operators, depth=depth, seed=seed), worlds)
        groups = _groups(_counted(equals, len(worlds), counts, on_progress))
        counts.groups = len(groups)
        decided = Journal(journal, _settings(operators, depth, seed, groups, counts))
        work = partial(_decide_group, seed=seed)
        for start in range(0, len(groups), WAVE):
            on_progress(start, len(groups), f"{counts.proved} proved, {counts.implied} implied")
            wave = [left for group in groups[start : start + WAVE] if (left := rules.unimplied(group)) is not None]
            counts.implied += len(groups[start : start + WAVE]) - len(wave)
            new = [group for group in wave if not decided.has(group.key)]
            outcomes = dict(zip((group.key for group in new), run(work, [group.points for group in new]), strict=True))
            grown = False  # by rules of this wave, which may imply what comes after them
            for group in wave:
                found = decided.get(group.key) if decided.has(group.key) else outcomes[group.key]
                decided.put(group.key, found)
                if grown and rules.unimplied(group) is None:
                    counts.implied += 1
                elif not found:
                    counts.unproved += 1
                else:
                    counts.proved += len(found)
                    rules.add(found)
                    grown = True
        on_progress(len(groups), len(groups), "leaving out what others do")
        kept = rules.kept(list(run(few_instances, [one.rule for one in rules.found])))
    catalogue = RuleIndex(CATALOGUE)
    named = [replace(one, rule=replace(one.rule, name=f"found_{number}"), catalogue=done_by(points, catalogue))
             for number, (one, points) in enumerate(kept, start=1)]  # fmt: skip
    counts.kept = len(named)
    return named, counts


def _settings(
    operators: tuple[str, ...], depth: int, seed: int, groups: Sequence[Group], counts: Counts
) -> dict[str, Any]:
    """What a decision depends on: what was asked for, and by what was found whether the worlds are still the same."""
    keys = blake2b("\n".join(group.key for group in groups).encode(), digest_size=8).hexdigest()
    asked = {"operators": sorted(operators), "depth": depth, "seed": seed}
    return {**asked, "proofs": PROOF_VERSION, "terms": counts.enumerated, "pairs": counts.paired, "groups": keys}


def _decide_group(points: Sequence[Point], seed: int) -> list[Found]:
    """Rules in both directions."""
    found = decide(points, seed)
    back = [Point(point.right, point.left) for point in points]
    if all(root.operator for root in back[0].left) and not _grows_idly(points[0]):
        found += decide(back, seed)
    return found


def _grows_idly(point: Point) -> bool:
    """Whether the smaller side stands within the larger one: to rewrite back is to add work that changes nothing."""
    small = set(point.right)
    return any(part in small for root in point.left for part in parts_of(root))


def _counted(found: Iterable[Paired], worlds: int, counts: Counts, on_progress: Progress) -> Iterator[Paired]:
    """The same, added up and told."""
    on_progress(0, worlds, "enumerating")
    for done, world in enumerate(found, start=1):
        counts.enumerated += world.terms
        counts.paired += world.pairs
        on_progress(done, worlds, f"{counts.enumerated} terms, {counts.paired} pairs")
        yield world


def _groups(found: Iterable[Paired]) -> list[Group]:
    by_key: dict[str, dict[Sides, list[Point]]] = {}
    for world in found:
        for key, pairs in world.by_key.items():
            for sides, points in pairs.items():
                by_key.setdefault(key, {}).setdefault(sides, points)
    return sorted((Group(key, _spread(list(pairs.values()))) for key, pairs in by_key.items()), key=lambda g: g.order)


def _spread(pairs: list[list[Point]]) -> tuple[Point, ...]:
    """Points of pairs taken evenly, at most `_POINTS`."""
    most = _POINTS // len(pairs[0])
    step = max(1, -(-len(pairs) // most))
    return tuple(point for pair in pairs[::step] for point in pair)


class _Rules:
    """The rules found so far."""

    def __init__(self) -> None:
        self._index = RuleIndex()
        self._found: dict[str, Found] = {}

    def add(self, found: Sequence[Found]) -> None:
        for one in found:
            if self._found.setdefault(one.rule.digest, one) is one:
                self._index.add(one.rule)

    def unimplied(self, group: Group) -> Group | None:
        """The group's pairs of which one or two steps of rules found already do not make the larger term smaller than
        it is, or into the other one; None if there are none."""
        points = group.points
        pairs = [points[i : i + _VALUATIONS] for i in range(0, len(points), _VALUATIONS)]
        left = [pair for pair in pairs if not self._implies(pair[0])]
        return replace(group, points=tuple(point for pair in left for point in pair)) if left else None

    def _implies(self, point: Point) -> bool:
        if len(point.left) > 1:
            return any(result == point.right for _, result in self._index.rewritten(point.left))
        (start,), (goal,) = point.left, point.right
        between = []
        for result in self._index.everywhere(start):
            if result is goal or result < start:
                return True
            if result.size <= start.size:
                between.append(result)
        return any(
            result is goal or result < start
            for middle in dict.fromkeys(between) for result in self._index.everywhere(middle)
        )  # fmt: skip

    @property
    def found(self) -> list[Found]:
        return list(self._found.values())

    def kept(self, samples: Sequence[Sequence[Point]]) -> list[tuple[Found, Sequence[Point]]]:
        """Without those that others do alike: what a class of operators does, found before the class was. `samples`:
        `few_instances` of each rule that was found; they are handed back with it."""
        kept = []
        for one, points in zip(self.found, samples, strict=True):
            self._index.remove(one.rule)
            if not done_by(points, self._index):
                self._index.add(one.rule)
                kept.append((one, points))
        return kept
