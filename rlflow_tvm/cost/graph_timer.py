"""Times of a graph's launches: built and played by a worker, in as calm a moment as there is, and reckoned to those
that are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import tvm

from rlflow_tvm.cost.calibration import Moment, Patience, Told
from rlflow_tvm.cost.kernel_worker import Answer, Request
from rlflow_tvm.cost.known_times import KnownTimes, known_as
from rlflow_tvm.cost.metrics import cold_bytes
from rlflow_tvm.cost.rehearsal import Rehearsal, Step

TRIES = 2  # a busy machine makes timeouts too: what is remembered for good has happened twice
_PAUSE_SECS = 1.0  # after an uneasy moment
_BUILDS = 3  # rounds of building what a rehearsal needs: a kernel that kills the worker takes the built ones with it

Progress = Callable[[int, int], None]
Ask = Callable[[Sequence[Request], float, int], Iterable[tuple[int, Answer]]]
"""As `Workers.answers`."""


class Played(NamedTuple):
    """What came of a graph: seconds and more by kernels' names, or why there are none, for some kernels or for all."""

    times: Mapping[str, Answer]
    failed: Mapping[str, Answer]
    """By kernels' keys."""
    lost: Answer
    """Empty where there are times."""


class GraphTimer:
    """Has a worker build what it has not of a graph, and then play all of its launches; what fails is left out.

    Args:
        times: what is known, of which nothing is changed.
        version: of the times.
        ask: a worker.
        timeout_secs: of one kernel.
    """

    def __init__(self, times: KnownTimes, version: str, ask: Ask, timeout_secs: float) -> None:
        self._times, self._version, self._ask, self._timeout_secs = times, version, ask, timeout_secs
        self._patience = Patience()

    def time(
        self,
        steps: Rehearsal,
        todo: Collection[str],
        usual_secs: float | None,
        anchor: Callable[[], Rehearsal] | None,
        on_progress: Progress | None,
    ) -> Played:
        """Times of the kernels `todo`, by name, and of those of the graph that are known, as they are now.

        A worker that is killed or takes too long is no property of the graph: another builds and times it once more.
        """
        failed: dict[str, Answer] = {}
        for step in steps:
            known = self._times.find(step, self._version)
            if known is not None and not known.ok:  # it fails however warm its operands are
                failed[step.key] = {"error": known.error, "error_kind": known.error_kind, "passing": True}
        for _ in range(TRIES):
            answer = self._build(steps, failed, on_progress)
            played = [s for s in steps if s.key not in failed]
            wanted: dict[str, list[int]] = {}
            for i, step in enumerate(played):
                if known_as(step) in todo or self._times.find(step, self._version) is not None:
                    wanted.setdefault(known_as(step), []).append(i)
            if "error" not in answer and wanted.keys() & set(todo):
                answer = self._calmest(played, wanted, usual_secs, anchor)
            if "passing" not in answer and answer.get("error_kind") != "timeout":
                break
        return Played(answer.get("times", {}), failed, answer if "error" in answer else {})

    def _calmest(
        self,
        steps: Sequence[Step],
        wanted: Mapping[str, Sequence[int]],
        usual_secs: float | None,
        anchor: Callable[[], Rehearsal] | None,
    ) -> Answer:
        """As `_play`, reckoned to those before it by what is known, of the calmest of some moments.

        Where too little of the graph is known to tell, all tries are made, each reckoned by the anchor, and the middle
        time of each kernel counts: of the first graph of all, to which all others are reckoned, and of the first one in
        another layout, to which those after it are.
        """
        best: tuple[float, Answer] | None = None
        unjudged: list[Answer] = []
        enough = self._patience.enough
        for turn in range(self._patience.tries):
            if turn:
                time.sleep(_PAUSE_SECS)
            answer = self._play(steps, wanted, usual_secs)
            if "error" in answer and turn == 0:
                return answer
            if "error" in answer:
                break  # another worker builds again what this one has lost, when it is needed
            told = _told(steps, wanted, answer["times"])
            moment = self._times.moment(self._version, told)
            if moment is None:
                by = self._by_anchor(anchor(), usual_secs) if anchor is not None else None
                unjudged.append(_reckoned(answer, told, by))
                continue
            unrest = self._times.unrest(self._version, told)
            if best is None or unrest < best[0]:
                best = unrest, _reckoned(answer, told, moment)
            if unrest <= enough:
                break
        if best is None:
            return _middle(unjudged)
        self._patience.note(best[0])
        return best[1]

    def _by_anchor(self, anchor: Rehearsal, usual_secs: float | None) -> Moment | None:
        """The moment by a graph that is known; None where that is not, or cannot be timed now."""
        known = [self._times.find(step, self._version) for step in anchor]
        failed: dict[str, Answer] = {}
        if (
            not any(each is not None and each.confirmed for each in known)
            or self._build(anchor, failed, None)
            or failed
        ):
            return None
        wanted = dict[str, list[int]]()
        for i, step in enumerate(anchor):
            wanted.setdefault(known_as(step), []).append(i)
        times = self._play(anchor, wanted, usual_secs).get("times", {})
        return self._times.moment(self._version, _told(anchor, wanted, times))

    def _play(self, steps: Sequence[Step], wanted: Mapping[str, Sequence[int]], usual_secs: float | None) -> Answer:
        """Have the worker, which has built all of it, time a graph's launches."""
        launches = [[step.key, step.places] for step in steps]
        request = {"op": "rehearse", "launches": launches, "wanted": wanted, "usual_secs": usual_secs}
        return self._answer(request, self._timeout_secs * len(steps))

    def _build(self, steps: Rehearsal, failed: dict[str, Answer], on_progress: Progress | None) -> Answer:
        """Have the worker build what it has not of `steps`, but for those `failed`, to which those that fail now are
        added. The answer is empty, or the error of a worker that could not even say what it has."""
        funcs = {s.key: s for s in steps}
        for _ in range(_BUILDS):
            keys = [key for key in funcs if key not in failed]
            answer = self._answer({"op": "missing", "keys": keys}, self._timeout_secs)
            if "error" in answer:
                return answer
            build = [funcs[key] for key in answer["missing"]]
            if not build:
                break
            requests = [{"op": "build", "func": tvm.ir.save_json(s.func), "key": s.key} for s in build]
            for done, (number, built) in enumerate(self._ask(requests, self._timeout_secs, TRIES), start=1):
                if "error" in built:
                    failed[build[number].key] = built
                if on_progress is not None:
                    on_progress(done, len(build))
        return {}

    def _answer(self, request: Request, limit_secs: float) -> Answer:
        ((_number, answer),) = self._ask([request], limit_secs, 1)
        return answer


def _reckoned(answer: Answer, told: Told, moment: Moment | None) -> Answer:
    """With what the kernels would have taken at another time."""
    factors = (moment or Moment()).factors(told)
    times = {name: {**each, "run_secs": factors[name] * told.secs[name]} for name, each in answer["times"].items()}
    return {**answer, "times": times}


def _middle(answers: Sequence[Answer]) -> Answer:
    """Of each kernel, the middle one of its times; of two the smaller."""
    ordered = {
        name: sorted((each["times"][name] for each in answers), key=lambda fields: fields["run_secs"])
        for name in answers[0]["times"]
    }
    return {**answers[0], "times": {name: each[(len(each) - 1) // 2] for name, each in ordered.items()}}


def _told(steps: Sequence[Step], wanted: Mapping[str, Sequence[int]], times: Mapping[str, Answer]) -> Told:
    """What a rehearsal's `times` tell of the launches `wanted`."""
    traffic = {known_as(step): cold_bytes(step.func, step.cold) for step in steps}
    secs = {name: each["run_secs"] for name, each in times.items()}
    return Told(secs, {name: len(own) for name, own in wanted.items()}, traffic)
