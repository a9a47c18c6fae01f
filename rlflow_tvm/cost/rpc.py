"""Other machines to measure on, as TVM's own tracker (`python -m tvm.exec.rpc_tracker`) hands them out."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.rpc import base

from rlflow_tvm.errors import CostError

_ANSWER_SECS = 10.0


@dataclass(frozen=True)
class RpcDevices:
    """The machines whose servers (`python -m tvm.exec.rpc_server`) the tracker at `host`:`port` lists under `key`.

    They are taken to be alike: one's times are another's. `wait_secs`: how long to wait, when there is no server (left)
    to measure on, for one to come.
    """

    host: str
    port: int
    key: str
    wait_secs: float = 30.0

    def __str__(self) -> str:
        return f"{self.host}:{self.port} key {self.key}"

    def servers(self) -> int:
        """How many the tracker lists, those in use among them. CostError if there is no tracker there."""
        with self._tracker(_ANSWER_SECS) as tracker:
            base.sendjson(tracker, [base.TrackerCode.SUMMARY])
            _code, summary = base.recvjson(tracker)
        return sum(server["key"] == f"server:{self.key}" for server in summary["server_info"])

    def take(self, wait_secs: float) -> tuple[str, int, str] | None:
        """Host, port and password of a server that is free now or within `wait_secs`; None where there is none.

        CostError if there is no tracker there.
        """
        with self._tracker(_ANSWER_SECS) as tracker:
            base.sendjson(tracker, [base.TrackerCode.REQUEST, self.key, "", 1])
            tracker.settimeout(wait_secs)
            try:
                _code, (host, port, password) = base.recvjson(tracker)
            except TimeoutError:
                return None  # to close the connection withdraws the request
        return host, port, password

    @contextmanager
    def _tracker(self, timeout_secs: float) -> Iterator[socket.socket]:
        # TVM's own `TrackerSession` tries for a minute where nobody listens, and waits for ever for an answer
        try:
            with socket.create_connection((self.host, self.port), timeout_secs) as tracker:
                tracker.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(tracker, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("something else answers")
                yield tracker
        except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
            raise CostError(
                f"no RPC tracker at {self.host}:{self.port} ({error}): start one with "
                f"`python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self.port}`, or mend the address"
            ) from error
