"""Rollout workers as actors of a Ray cluster."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any

from rlflow_tvm.agents.pool import WorkerDiedError
from rlflow_tvm.agents.worker import RolloutWorker
from rlflow_tvm.errors import AgentError

_REACH_SECS = 10.0


class RayWorker:
    """An actor, on whichever machine has a processor for it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        # not restarted by Ray: a new one would know neither its environment nor the weights
        self._actor = ray.remote(RolloutWorker).options(num_cpus=1, max_restarts=0).remote()
        self.due: Any = None

    def send(self, request: Any, answered: bool) -> None:
        """Call the actor, after what it was called with before."""
        reference = self._actor.handle.remote(request)
        if answered:
            self.due = reference

    def answer(self) -> bytes:
        """The result of the last call; WorkerDiedError."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(self.due)
        except errors.RayTaskError:  # it never raises by itself
            raise
        except errors.RayError as error:
            raise WorkerDiedError(str(error).strip().splitlines()[0]) from error

    def stop(self) -> None:
        """Kill the actor."""
        self._ray.kill(self._actor)


class RayCrew:
    """`count` actors of the cluster at `address`, or one for each of its processors.

    A connection that this process has to a cluster already is used, and left. AgentError where Ray is not installed,
    the cluster cannot be reached, or has too few processors.
    """

    def __init__(self, address: str, count: int | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise AgentError(
                f"workers on a Ray cluster need {error.name}, which is not installed: pip install 'rlflow_tvm[ray]'"
            ) from error
        self._ray = ray
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            try:
                _check_reachable(address)
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            except (OSError, ValueError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                raise AgentError(
                    f"Ray cluster {address}: {reason}; start one with `ray start --head`, or give another address"
                ) from error
        processors = int(ray.cluster_resources().get("CPU", 0))
        self.count = processors if count is None else count
        if not 1 <= self.count <= processors:
            self.close()
            raise AgentError(
                f"Ray cluster {address}: {processors} processors cannot take {self.count} workers; "
                "add machines with `ray start --address`, or train with fewer workers"
            )

    def shared(self, request: bytes) -> Any:
        """A reference to the request, which Ray brings to each machine once."""
        return self._ray.put(request)

    def hire(self) -> RayWorker:
        """An actor, which waits until the cluster has a processor for it."""
        return RayWorker(self._ray)

    def wait(self, workers: Sequence[RayWorker]) -> RayWorker:
        """The first of those that have answered or died."""
        (ready, *_), _ = self._ray.wait([worker.due for worker in workers], num_returns=1)
        return next(worker for worker in workers if worker.due == ready)

    def close(self) -> None:
        """Leave the cluster, if it was entered here."""
        if self._owns_connection:
            self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """OSError where nothing listens at HOST:PORT; Ray itself would go on trying for ever."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH_SECS).close()
