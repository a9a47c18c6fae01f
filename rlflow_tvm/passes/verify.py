"""Proving a rule: both sides evaluated over random tensors, on many samples of what the rule matches.

Over prime fields an equation of polynomials that does not hold is met with equality by chance only, with probability
degree / size of the field at each trial (Schwartz-Zippel); functions that are no polynomials (erf, sqrt) are random
functions there, exponentials, which have no such bound, live on a second field (as in Mirage), and what compares is
evaluated over the rationals. What a rule may match in integers is evaluated in a machine's integers, which wrap round.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.proof.domains import (
    Degrees,
    Domain,
    MachineIntegers,
    PrimeFields,
    Q,
    Rationals,
    Shapes,
    Tensor,
    Undefined,
    Unfit,
    same,
    shape_of,
)
from rlflow_tvm.passes.proof.meaning import EXPONENTIAL, ORDERED
from rlflow_tvm.passes.proof.sampling import (
    FLOAT,
    CannotDecide,
    Sample,
    Sampler,
    drawn_tensors,
    evaluate,
    operators_of,
)
from rlflow_tvm.passes.rule import RewriteRule

PROOF_VERSION = 8
"""Of the proofs: raise it when meanings, domains or samples change, and prove the catalogue again."""

INSTANCES = 60
LEAST_INSTANCES = 12
ATTEMPTS = 20000
_WORTH_PROCESSES = 16  # rules: a process imports TVM for as long as it takes to prove some dozens
_SMALL = 3  # rationals within it of zero: equal ones among them, and numbers that can be read
_PARTS = (1, 2, 4)  # of whole numbers, of which the small ones are
_REDRAWS = 20  # of tensors, after a division by zero
_SHOWN = 16  # elements of a tensor that a counterexample prints


@dataclass(frozen=True)
class Proof:
    """What a rule was proved on. `instances`: samples by domain. `degree`: of the difference of the two sides, at most.
    `bound`: with what probability one trial over the prime fields misses a difference; None for a rule that is not
    evaluated there, or has an exponential there, which is no polynomial."""

    instances: dict[str, int]
    degree: int
    bound: float | None

    def to_json(self) -> dict[str, Any]:
        return {"instances": self.instances, "degree": self.degree, "bound": self.bound}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Proof:
        """Read `to_json`'s form; RewriteError if it is not that."""
        counts, degree, bound = data.get("instances"), data.get("degree"), data.get("bound")
        if not isinstance(counts, dict) or not all(type(count) is int and count > 0 for count in counts.values()):
            raise RewriteError("its proof holds no instances by domain")
        if sum(counts.values()) < LEAST_INSTANCES:
            raise RewriteError(f"its proof rests on {sum(counts.values())} instances: {LEAST_INSTANCES} are needed")
        chance = bound is None or (type(bound) in (float, int) and 0 <= bound <= 1)
        if type(degree) is not int or not chance:
            raise RewriteError("its proof holds no degree, or no bound from 0 to 1")
        return Proof(counts, degree, bound)

    def __str__(self) -> str:
        told = ", ".join(f"{count} over {domain}" for domain, count in self.instances.items())
        return f"{told}; degree {self.degree}" + ("" if self.bound is None else f", missed with p < {self.bound:.1e}")


@dataclass(frozen=True)
class Counterexample:
    """Why a rule is wrong: what goes wrong, and for what shapes, attributes and values."""

    rule: RewriteRule
    reason: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.rule}\n{self.reason}"


@dataclass(frozen=True)
class Undecided:
    """A rule of which no, or too few, instances were found."""

    rule: RewriteRule
    reason: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.rule}\n{self.reason}"


Outcome = Proof | Counterexample | Undecided


@dataclass(frozen=True)
class Differing:
    """A sample whose two sides differ. `number`: which sample it was, the seed of the values they differ for."""

    sample: Sample
    number: int


def verify_rule(rule: RewriteRule, instances: int = INSTANCES, seed: int = 0, attempts: int = ATTEMPTS) -> Outcome:
    """Evaluate both sides of `rule` on that many samples of what it matches, or those of so many `attempts`."""
    outcome = examined(rule, instances, seed, attempts)
    return _smallest(outcome, seed) if isinstance(outcome, Differing) else outcome


def examined(
    rule: RewriteRule, instances: int = INSTANCES, seed: int = 0, attempts: int = ATTEMPTS
) -> Outcome | Differing:
    """As `verify_rule`, but for the first sample with a difference as it was found."""
    counts: dict[str, int] = {}
    degree, polynomial = 0, list[bool]()
    try:
        for number, (sample, equal) in enumerate(compared(rule, instances, seed, attempts)):
            if not equal:
                return Differing(sample, number)
            domain = domains_of(sample)[-1]
            counts[domain.name] = counts.get(domain.name, 0) + 1
            if isinstance(domain, PrimeFields):
                polynomial.append(not _operators(sample) & EXPONENTIAL)
            degree = max(degree, _degree(sample))
    except CannotDecide as error:
        return Counterexample(rule, str(error))
    if sum(counts.values()) < LEAST_INSTANCES:
        return Undecided(rule, f"{sum(counts.values())} instances in {attempts} draws: {LEAST_INSTANCES} are needed")
    return Proof(dict(sorted(counts.items())), degree, degree / Q if polynomial and all(polynomial) else None)


def compared(rule: RewriteRule, instances: int, seed: int, attempts: int = ATTEMPTS) -> Iterator[tuple[Sample, bool]]:
    """Samples of what `rule` matches, up to `instances` in as many `attempts`, each with whether the two sides are
    equal. CannotDecide where a condition fails to be true or false."""
    for number, sample in zip(range(instances), Sampler(rule, seed).samples(attempts), strict=False):
        yield sample, all(_difference(sample, domain, number) is None for domain in domains_of(sample, number))


def verify_all(
    rules: Sequence[RewriteRule], instances: int = INSTANCES, seed: int = 0, jobs: int = 1
) -> Iterator[tuple[RewriteRule, Outcome]]:
    """Each rule with its outcome, in order, proved by `jobs` processes, or here where they are too few to start any."""
    work = partial(verify_rule, instances=instances, seed=seed)
    if jobs == 1 or len(rules) < _WORTH_PROCESSES:
        yield from zip(rules, map(work, rules), strict=True)
        return
    with worker_pool(jobs) as pool:
        yield from zip(rules, pool.map(work, rules), strict=True)


@contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, even where it is killed; what they have not begun at the end is left."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _operators(sample: Sample) -> set[str]:
    equation = sample.rule.equation
    return operators_of((*equation.left, *equation.right), sample.env)


def domains_of(sample: Sample, seed: int = 0) -> list[Domain]:
    """Where a sample's two sides are compared, last where their values are. `seed`: of the functions of which nothing
    is known."""
    if sample.dtype != FLOAT:
        return [MachineIntegers(sample.dtype)]
    types = Shapes(sample.dtype)  # of which exact arithmetic knows nothing
    if _operators(sample) & ORDERED:
        return [types, Rationals(seed, _SMALL, _PARTS), Rationals(seed)]
    return [types, PrimeFields(seed)]


@dataclass(frozen=True)
class _Difference:
    reason: str
    tensors: dict[str, Tensor]


def _difference(sample: Sample, domain: Domain, seed: int) -> _Difference | None:
    """What goes wrong with the sample over `domain`; None if the two sides are equal.

    Where the drawn values divide by zero on either side, others are drawn.
    """
    equation = sample.rule.equation
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    why = ""
    for _ in range(_REDRAWS):
        tensors = drawn_tensors(sample, domain, rng)
        first = next(iter(tensors.values()))
        try:
            with np.errstate(over="ignore"):
                left = [evaluate(term, domain, tensors, sample.env, first) for term in equation.left]
        except Undefined as error:
            why = str(error)
            continue
        try:
            with np.errstate(over="ignore"):
                right = [evaluate(term, domain, tensors, sample.env, left[0]) for term in equation.right]
        except Undefined as error:
            if isinstance(error, Unfit) or isinstance(domain, MachineIntegers):
                return _Difference(f"the right side is ill-typed: {error}", tensors)
            why = str(error)
            continue
        except RewriteError as error:
            return _Difference(f"the right side cannot be built: {error}", tensors)
        return None if same(left, right) else _Difference(_told(left, right), tensors)
    return _Difference(f"the two sides cannot be evaluated, whatever is drawn: {why}", tensors)


def _told(left: list[Tensor], right: list[Tensor]) -> str:
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if shape_of(a) != shape_of(b):
            return f"term {number}: left has the shape {list(shape_of(a))}, right {list(shape_of(b))}"
        if a[0].dtype != b[0].dtype:
            return f"term {number}: left is {a[0].dtype}, right {b[0].dtype}"
        places = np.argwhere(np.asarray(a[0] != b[0]))
        if len(places):
            place = tuple(int(i) for i in places[0])
            return (
                f"term {number}: {len(places)} of {a[0].size} elements differ, at {list(place)} left is {a[0][place]}, "
                f"right {b[0][place]}"
            )
    raise AssertionError("the two sides are equal")


def _smallest(found: Differing, seed: int) -> Counterexample:
    """Of the samples with a difference, the one with the fewest elements; with numbers that can be read, if it has a
    difference with such numbers too."""
    best, rule = found.sample, found.sample.rule
    for sample in _some(rule, seed + 1):
        if sample.size < best.size and any(_difference(sample, domain, 0) is not None for domain in domains_of(sample)):
            best = sample
    readable = [] if best.dtype != FLOAT or _operators(best) & EXPONENTIAL else [Rationals(extent=_SMALL, parts=(1,))]
    for trial in dict.fromkeys((found.number, 0, 1, 2)):  # the values that told, if it is what was found
        for domain in (*readable, *domains_of(best, trial)):
            difference = _difference(best, domain, trial)
            if difference is not None:
                values = [f"{name} = {_list(x[0])}" for name, x in difference.tensors.items() if x[0].size <= _SHOWN]
                return Counterexample(rule, "\n".join([str(best), *values, difference.reason]))
    raise AssertionError(f"{rule.name}: the difference is not found again for {best}")


def _list(plane: np.ndarray) -> str:
    return str([str(item) for item in plane.reshape(-1)] if plane.dtype == object else plane.reshape(-1).tolist())


def _some(rule: RewriteRule, seed: int) -> Iterator[Sample]:
    try:
        yield from Sampler(rule, seed).samples(ATTEMPTS // 50)
    except CannotDecide:
        return


def _degree(sample: Sample) -> int:
    """Degree of the numerator of left minus right."""
    domain, equation = Degrees(), sample.rule.equation
    tensors = drawn_tensors(sample, domain, np.random.default_rng(0))
    first = next(iter(tensors.values()))
    worst = 0
    for a, b in zip(equation.left, equation.right, strict=True):
        left, right = (evaluate(term, domain, tensors, sample.env, first) for term in (a, b))
        worst = max(worst, int(np.maximum(left[0] + right[1], right[0] + left[1]).max(initial=0)))
    return worst
