"""Seconds for kernels: from memory, from the database, else measured, here or on other machines.

A kernel is measured in its graph, among the launches that surround it there (`rehearsal`), or, where there is no graph
or its launches cannot be timed one by one (on a GPU, on other machines), alone (`caches`). The two are different times,
under different versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Self

import tvm
from tvm import tirx

from rlflow_tvm.cost.database import KernelDatabase
from rlflow_tvm.cost.description import Descriptions
from rlflow_tvm.cost.graph_timer import TRIES, GraphTimer, Progress
from rlflow_tvm.cost.kernel_worker import DEFAULT_SCHEDULE, Answer, LocalWorkers, Request, Workers
from rlflow_tvm.cost.known_times import KnownTimes, MeasurableKernel, TimedKernel, known_as
from rlflow_tvm.cost.machine import check_device, check_remote, target_key
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.quiet import QuietMachine
from rlflow_tvm.cost.rehearsal import Rehearsal
from rlflow_tvm.cost.remote import RemoteWorkers
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels.target import as_target

# Of measuring, alone and in a graph: part of the versions, as times of different methods are not to be added up.
_METHOD = 5
_GRAPH_METHOD = "graph7"
_ONCE_LIMIT_SECS = 60.0


class KernelTimer:
    """Measures kernels: one after the other in a worker process that has the machine's cores to itself, or, with
    `remote`, on all the machines that these are, at once.

    The worker schedules the kernel with `schedule` ("module:function" of (PrimFunc, Target)), builds it, and times it
    in its graph, or alone with its operands as warm as the kernel says. What is known already, from memory or
    `database`, is not measured again; a kernel that failed is not tried again either, unless its worker was killed from
    outside or the machine was short of memory or disk, which is not stored. A kernel, or a graph of them, that takes
    too long, or whose worker is killed, has a second try, as has a kernel whose worker dies, or whose server is lost:
    the second that it takes is a "crash". `version` names what the times depend on beside kernel and target: by default
    the kernel pipeline's version, for another `schedule` that function's name.
    `timeout_secs` bounds building, sending and running of one kernel together. Processes of this machine that use the
    same database file take turns at measuring (`QuietMachine.measuring`), and what one has measured stands for all.
    `quiet`: entered for that, by a process that also computes while others measure, in place of a lock of the timer's.
    A context manager; `close` ends the workers. Not for use from several threads.
    UsageError at construction where `target` is none that `rlflow_tvm.kernels.as_target` takes; CostError for a GPU's
    target on a machine without one; with `remote`, for a target that does not say how many cores the machines have;
    where there is no compiler for a GPU's kernels.
    """

    def __init__(
        self,
        target: tvm.target.Target | str | dict,
        database: KernelDatabase | None = None,
        timeout_secs: float = 30.0,
        *,
        schedule: str = DEFAULT_SCHEDULE,
        version: str | None = None,
        remote: RpcDevices | None = None,
        quiet: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        if remote is not None:
            check_remote(target)  # as given: this machine's processors are not those of the others
        target = as_target(target)
        if remote is None:
            check_device(target)
        self.target = target
        self.remote = remote
        self.target_key = target_key(target, remote.key if remote is not None else None)
        self.database = database
        self.timeout_secs = timeout_secs
        self.schedule = schedule
        self._quiet = quiet
        self._turns: QuietMachine | None = None  # its own, made when first needed
        self.version = version if version is not None else _version_of(schedule)
        rehearses = remote is None and target.kind.name == "llvm"
        self.graph_version = f"{self.version}.{_GRAPH_METHOD}" if rehearses else self.version
        """The same as `version` where kernels are always timed alone."""
        self.measured = 0
        """Kernels measured so far (the rest came from memory or the database); a second time does not count."""
        self.measuring_secs = 0.0
        """Wall time that this took so far, with building kernels and waiting for one's turn."""
        self.anchor: Callable[[], Rehearsal] | None = None
        """Launches of a graph that others are held against: where too little of one is known, it is timed beside."""
        self._times = KnownTimes(self.target_key, database)
        self.descriptions = Descriptions(target, schedule == DEFAULT_SCHEDULE)
        self._once: dict[str, float] = {}  # seconds by reserved key
        self._workers: Workers = (
            LocalWorkers(target, schedule) if remote is None else RemoteWorkers(remote, target, schedule)
        )
        self._graphs = GraphTimer(self._times, self.graph_version, self._ask, timeout_secs)

    def measure(
        self,
        kernels: Sequence[MeasurableKernel],
        on_progress: Progress | None = None,
        graph: Callable[[], Rehearsal] | None = None,
        *,
        confirmed: bool = False,
    ) -> list[Measurement]:
        """A measurement for each of `kernels`, in their order; errors are among them as values.

        `graph`: asked for the launches that the kernels are among, where some have to be measured; without it they are
        measured alone. `on_progress(done, total)` is called after each kernel that had to be built or measured, `total`
        being their number; of kernels measured alone those that came before an error are kept. With `confirmed`, those
        that were measured once are measured again, and what they take then stands for good (see `Measurement`), as does
        what those take that were not.
        CostError when the worker cannot be started, or there is no other machine (left).
        """
        version = self._version(in_graph=graph is not None)
        for wanting in (self._times.unknown, self._times.single) if confirmed else (self._times.unknown,):
            if not wanting(kernels, version):
                continue
            began = time.monotonic()
            usual_secs = self._usual_secs()
            with self._alone():
                self.refresh()  # others may have measured some while this one waited
                self._times.hold(REFERENCE_KEY, ONCE_VERSION)
                todo = wanting(kernels, version)
                if graph is None or self.graph_version == self.version:
                    self._measure(todo, usual_secs, on_progress, confirmed)
                elif todo:
                    self._rehearse(graph(), todo, usual_secs, on_progress, confirmed)
            self.measuring_secs += time.monotonic() - began
        found = [self._times[kernel, version] for kernel in kernels]
        if version == self.graph_version and self.database is not None:  # what a model of costs learns from
            timed = [kernel for kernel, each in zip(kernels, found, strict=True) if each.ok]
            self.descriptions.store(timed, self.database, self.target_key, version)
        return found

    @property
    def revision(self) -> int:
        """How often what was known has given way to a better: a time to a confirmed one, a failure to seconds."""
        return self._times.revision

    def refresh(self) -> None:
        """Take over what other processes with this database have confirmed since, or measured where it failed here."""
        self._times.refresh()

    def _alone(self) -> AbstractContextManager[None]:
        """While no other process measures for the same database on this machine; not to be entered twice."""
        return nullcontext() if self._quiet is None and self.remote is not None else self.in_turn()

    def in_turn(self) -> AbstractContextManager[None]:
        """While no process with the same database on this machine measures or computes (`QuietMachine`)."""
        if self._quiet is not None:
            return self._quiet()
        if self.database is None or self.database.path == ":memory:":
            return nullcontext()
        if self._turns is None:
            self._turns = QuietMachine(self.database.path)
        return self._turns.measuring()

    def _measure(
        self,
        todo: Mapping[str, MeasurableKernel],
        usual_secs: float | None,
        on_progress: Progress | None,
        stands: bool,
    ) -> None:
        kernels = list(todo.values())
        requests = [{**_request(k.func, k.cold, usual_secs), "key": k.key} for k in kernels]
        for done, (number, answer) in enumerate(self._ask(requests, self.timeout_secs, TRIES), start=1):
            self._learn(kernels[number], answer, self.version, stands)
            if on_progress is not None:
                on_progress(done, len(todo))

    def _rehearse(
        self,
        steps: Rehearsal,
        todo: Mapping[str, MeasurableKernel],
        usual_secs: float | None,
        on_progress: Progress | None,
        stands: bool,
    ) -> None:
        """Learn what a graph tells of `todo`, and of those of its other kernels that were measured once: of these it is
        the second time."""
        played = self._graphs.time(steps, todo, usual_secs, self.anchor, on_progress)
        for name, kernel in todo.items():
            # what stops the whole graph says nothing of a kernel that ran before
            lost = {**played.lost, "passing": True} if played.lost else None
            answer = played.failed.get(kernel.key) or lost or played.times[name]
            self._learn(kernel, answer, self.graph_version, stands)
        for name in played.times.keys() - todo.keys():
            self._times.learn(name, self.graph_version, _measurement(played.times[name]))

    def _ask(self, requests: Sequence[Request], limit_secs: float, tries: int = 1) -> Generator[tuple[int, Answer]]:
        """As `Workers.answers`, of the workers that there are."""
        with closing(self._workers.answers(requests, limit_secs, tries)) as answers:
            yield from answers

    def _learn(self, kernel: MeasurableKernel, answer: Answer, version: str, stands: bool) -> None:
        measurement = _measurement(answer)
        # what the kernel has not done itself is not kept: the next process tries again
        keep = "passing" not in answer
        self.measured += self._times.learn(known_as(kernel), version, measurement, keep=keep, stands=stands)

    def lookup(self, kernel: TimedKernel, *, in_graph: bool = False) -> Measurement | None:
        """What is known of a kernel in a graph, or alone, without measuring."""
        return self._times.find(kernel, self._version(in_graph))

    def _version(self, in_graph: bool) -> str:
        return self.graph_version if in_graph else self.version

    def time(self, func: tirx.PrimFunc, limit_secs: float | None = None, cold: str = "") -> Measurement:
        """Measure `func` (scheduled by the worker, unless it carries `tirx.is_scheduled`); nothing is remembered.

        `cold` as in `Kernel`.
        """
        request = _request(func, cold, self._usual_secs())
        with self._alone():
            return _measurement(self._answer(request, limit_secs or self.timeout_secs))

    def difference(self, func: tirx.PrimFunc, other: tirx.PrimFunc) -> float | None:
        """Greatest difference between what the two write on the same inputs, as a share of `func`'s range.

        Both as in `time`. None where one of them fails.
        """
        request = {"op": "difference", "func": tvm.ir.save_json(func), "other": tvm.ir.save_json(other)}
        with self._alone():
            return self._answer(request, self.timeout_secs).get("difference")

    def launch_secs(self) -> float:
        """Seconds that launching one kernel costs in the Relax VM beside its own run time; measured once per target.

        CostError when it cannot be measured.
        """
        return self._measured_once(LAUNCH_KEY, "launch", "launch overhead")

    def _usual_secs(self) -> float | None:
        """The reference kernel's, to whose speed kernels' are reckoned; a GPU's have nothing to do with it."""
        if self.target.kind.name != "llvm":
            return None
        return self._measured_once(REFERENCE_KEY, "reference", "reference kernel")

    def _measured_once(self, key: str, op: str, what: str) -> float:
        """Seconds that stand for a target, or its machine, for good; CostError when they cannot be measured."""
        if key not in self._once and (stored := self._stored(key)) is not None:
            self._once[key] = stored
        if key not in self._once:
            with self.in_turn():  # two searches that use the same servers are to have one and the same
                self._once[key] = self._stored(key) or self._measure_once(key, op, what)
        return self._once[key]

    def _stored(self, key: str) -> float | None:
        stored = self._times.stored(key, ONCE_VERSION)
        return None if stored is None else stored.run_secs

    def _measure_once(self, key: str, op: str, what: str) -> float:
        measurement = _measurement(self._answer({"op": op}, _ONCE_LIMIT_SECS))
        if measurement.run_secs is None:
            raise CostError(
                f"the {what} could not be measured for {self.target_key} ({measurement.error}): "
                "try again, and check that the target is that of the machine"
            )
        self._times.store(key, ONCE_VERSION, measurement)
        return measurement.run_secs

    def close(self) -> None:
        """End the workers; the database stays open, it belongs to the caller. The timer may be used again."""
        self._workers.close()
        if self._turns is not None:
            self._turns.close()
            self._turns = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answer(self, request: Request, limit_secs: float) -> Answer:
        ((_number, answer),) = self._ask([request], limit_secs)
        return answer


def _request(func: tirx.PrimFunc, cold: str, usual_secs: float | None) -> Request:
    return {"op": "measure", "func": tvm.ir.save_json(func), "cold": cold, "usual_secs": usual_secs}


def _measurement(answer: Answer) -> Measurement:
    return Measurement(**{name: value for name, value in answer.items() if name != "passing"})


def _version_of(schedule: str) -> str:
    if schedule != DEFAULT_SCHEDULE:
        return f"{schedule}, tvm {tvm.__version__}.{_METHOD}"
    from rlflow_tvm.kernels import PIPELINE_VERSION  # here, as it is not needed with a schedule of one's own

    return f"{PIPELINE_VERSION}.{_METHOD}"
