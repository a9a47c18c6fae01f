"""A session with a server of TVM's RPC as a `Place`, and what keeps a kernel from bringing the server down."""

from __future__ import annotations

import math
from itertools import count

import tvm
from tvm import rpc
from tvm.target import Target

from rlflow_tvm.cost.caches import helpers
from rlflow_tvm.cost.machine import cores
from rlflow_tvm.cost.place import linked, processor_of
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.errors import CostError

IDLE_SECS = 10.0
"""After which a session without work is ended, for others that use the tracker's machines."""
_LOAD_SECS = 60.0


class SessionLostError(Exception):
    """The server, its machine or the network is gone, or a kernel has ended the session's process there."""


class Session:
    """The server that the tracker hands out next, until this object is dropped.

    `helpers` (see there) are loaded first: they keep the server from what becomes of the session (`session.cc`).
    CostError where the tracker hands out none within `wait_secs`, or the server has no such device; what TVM raises
    where the connection fails.
    """

    def __init__(self, devices: RpcDevices, target: Target, wait_secs: float) -> None:
        library = helpers(target)  # before anything is asked for
        address = devices.take(wait_secs)
        if address is None:
            raise CostError(f"all servers under key {devices.key!r} are in use, or none is left")
        self._session = rpc.connect(*address)
        self._numbers = count()
        self.device = self._session.device("cpu" if target.kind.name == "llvm" else target.kind.name)
        self.processor = self._session.cpu()
        self.helpers = self._load_library(library)
        self.helpers["protect"]()
        self._limit = self.helpers["limit"]
        self.check(_LOAD_SECS)
        self.helpers["threads"](cores(processor_of(target)))
        if not self.device.exist:
            raise CostError(f"a server under key {devices.key!r} has no device for target {target.kind.name}")

    def load(self, executable: tvm.runtime.Executable) -> tvm.runtime.Module:
        """As in `Place`: linked here and sent."""
        return self._load_library(linked(executable))

    def _load_library(self, library: bytes) -> tvm.runtime.Module:
        name = f"library{next(self._numbers)}.so"
        self._session.upload(bytearray(library), name)
        module = self._session.load_module(name)
        self._session.remove(name)  # loaded, it is not needed any more
        return module

    def check(self, limit_secs: float) -> None:
        """SessionLostError if the session is gone; else it ends by itself `limit_secs` after the last `check`."""
        try:
            self._limit(math.ceil(limit_secs))
        except (RuntimeError, OSError) as error:
            raise SessionLostError("the session with a server has ended") from error
