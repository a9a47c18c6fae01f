"""A training's view of its workers: who collects which episode, and what happens when one of them dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from rlflow_tvm.agents.collect import Quota
from rlflow_tvm.agents.config import PPOConfig
from rlflow_tvm.agents.designs import DESIGNS, Design
from rlflow_tvm.agents.messages import pack, unpack, unpack_episode
from rlflow_tvm.agents.opening import PLAIN, Opening
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.errors import AgentError

_TRIES = 3
_START = -1  # in place of an episode's number


@dataclass(frozen=True)
class Workers:
    """Where a training's episodes are collected, if not in its own process.

    Attributes:
        factory: "module:function", which makes the environment in each worker.
        arguments: the function's, as JSON takes them.
        count: how many workers; with `ray` None means one for each processor of the cluster.
        ray: address of a Ray cluster, as `ray.init` takes it; None: processes on this machine.
    """

    factory: str
    arguments: Mapping[str, Any]
    count: int | None
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.count is None and self.ray is None:
            raise AgentError("workers: say how many; only a Ray cluster knows by itself")
        if self.count is not None and self.count < 1:
            raise AgentError(f"workers: {self.count} are too few; give at least 1")


class WorkerDiedError(Exception):
    """A worker is gone; the message says how."""


class Worker(Protocol):
    """One worker: it does what it is sent in that order, and is waited for where an answer is due."""

    def send(self, request: Any, answered: bool) -> None:
        """Send a request as `Crew.shared` gave it; where the worker has died, only `answer` says so."""

    def answer(self) -> bytes:
        """The answer that `Crew.wait` saw coming; WorkerDiedError."""

    def stop(self) -> None:
        """End it at once, whatever it does."""


class Crew(Protocol):
    """Where workers come from."""

    @property
    def count(self) -> int:
        """How many to hire."""

    def shared(self, request: bytes) -> Any:
        """A request in the form that is sent, to one worker or to all."""

    def hire(self) -> Any:
        """A new `Worker`, which need not be there yet."""

    def wait(self, workers: Sequence[Any]) -> Any:
        """One of the workers that has answered or died."""

    def close(self) -> None:
        """Called last."""


@dataclass(eq=False)
class _Place:
    """A worker, the episode it is at (None: none), and whether it has the newest weights."""

    worker: Worker
    task: int | None = _START
    loaded: bool = False


class Pool:
    """The workers of one training; one that dies is replaced, and its episode begun again. See `open_pool`."""

    def __init__(self, crew: Crew, start: bytes, design: Design, sizes: Any) -> None:
        self._crew, self._start, self._design, self._sizes = crew, crew.shared(start), design, sizes
        self._weights: Any = None
        self._deaths: Counter[int] = Counter()
        self._places: list[_Place] = []

    def start(self) -> None:
        """Hire the workers."""
        for _ in range(self._crew.count):
            self._places.append(_Place(self._hire()))

    def collect(
        self,
        tensors: Mapping[str, torch.Tensor],
        first: int,
        quota: Quota,
        on_arrival: Callable[[int], None],
        opening: Callable[[int], Opening] = lambda _number: PLAIN,
    ) -> Iterator[Episode]:
        """An update's episodes under the policy of `tensors`, in the order of their numbers, from `first` on.

        `opening(number)`: how one begins.

        `on_arrival(steps)` is called for each episode when it comes in, in whatever order. AgentError where the same
        episode kills its workers again and again, or a worker reports an error.
        """
        self._weights = self._crew.shared(pack({"op": "load"}, tensors))
        for place in self._places:
            place.loaded = False
        begun, again = first + quota.taken, list[int]()
        arrived: dict[int, Episode] = {}
        while quota.open:
            for place in self._places:
                if place.task is None and again:
                    number = again.pop()
                    self._begin(place, number, opening(number))
                elif place.task is None and begun < first + quota.planned:
                    self._begin(place, begun, opening(begun))
                    begun += 1
            worker = self._crew.wait([place.worker for place in self._places if place.task is not None])
            place = next(place for place in self._places if place.worker is worker)
            assert place.task is not None
            number, place.task = place.task, None
            try:
                answer = _checked(worker.answer())
            except WorkerDiedError as error:
                self._replace(place, number, error)
                if number != _START:
                    again.append(number)
                continue
            del self._deaths[number]
            if number == _START:
                self._check_sizes(answer)
                continue
            arrived[number] = unpack_episode(answer, self._design.kept)
            on_arrival(len(arrived[number]))
            while first + quota.taken in arrived:
                episode = arrived.pop(first + quota.taken)
                quota.add(episode.drawn)
                yield episode

    def close(self) -> None:
        """End all workers at once."""
        for place in self._places:
            place.worker.stop()
        self._crew.close()

    def _hire(self) -> Worker:
        worker: Worker = self._crew.hire()
        worker.send(self._start, True)
        return worker

    def _begin(self, place: _Place, number: int, opening: Opening) -> None:
        if not place.loaded:
            place.worker.send(self._weights, False)
        place.worker.send(
            self._crew.shared(pack({"op": "episode", "number": number, "opening": asdict(opening)})), True
        )
        place.task, place.loaded = number, True

    def _replace(self, place: _Place, number: int, error: WorkerDiedError) -> None:
        self._deaths[number] += 1
        place.worker.stop()
        if self._deaths[number] >= _TRIES:
            work = "while starting" if number == _START else f"at episode {number}"
            raise AgentError(
                f"workers: {_TRIES} died {work}, the last one thus: {error}; "
                "train with fewer workers if memory is short, or without any to see the error itself"
            ) from error
        place.worker, place.task, place.loaded = self._hire(), _START, False

    def _check_sizes(self, answer: bytes) -> None:
        found = self._design.sizes(**unpack(answer)[0]["sizes"])
        if found != self._sizes:
            raise AgentError(
                f"workers: their environment's observations have {found}, the training's own {self._sizes}; "
                "give a factory of the same environment"
            )


def _checked(answer: bytes) -> bytes:
    """The answer, unless it is an error."""
    message = unpack(answer)[0]
    if "error" in message:
        raise AgentError(message["error"])
    if "bug" in message:
        raise RuntimeError(f"a worker failed:\n{message['bug']}")
    return answer


@contextmanager
def open_pool(workers: Workers, config: PPOConfig, seed: int, sizes: Any, policy: str = "ppo") -> Iterator[Pool]:
    """The workers of a training, which end with the block, however it is left; `policy`: one of `DESIGNS`."""
    crew: Crew
    if workers.ray is None:
        from rlflow_tvm.agents.processes import ProcessCrew

        assert workers.count is not None
        crew = ProcessCrew(workers.count)
    else:
        from rlflow_tvm.agents.ray_workers import RayCrew

        crew = RayCrew(workers.ray, workers.count)
    start = {
        "op": "start",
        "factory": workers.factory,
        "arguments": dict(workers.arguments),
        "config": config.as_dict(),
        "seed": seed,
        "policy": policy,
    }
    pool = Pool(crew, pack(start), DESIGNS[policy], sizes)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()
