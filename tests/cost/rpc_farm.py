"""TVM's own tracker and servers on this machine, in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rlflow_tvm.cost import RpcDevices
from rlflow_tvm.errors import CostError

_LIMIT_SECS = 90.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """A server and everything it starts, with its log in a file."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: object) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(folder / "path")},
                cwd=folder,
                start_new_session=True,
            )

    def count(self, text: str) -> int:
        """How often its log has `text`."""
        return self.log.read_text(errors="replace").count(text)

    def kill(self) -> None:
        """SIGKILL for it and the processes of its sessions."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Farm:
    """A tracker, and servers by key. A context manager that kills them all."""

    def __init__(self, folder: Path, **numbers: int) -> None:
        self.folder = folder
        without_torch = folder / "path"  # TVM imports it where it is there, and a device has none
        without_torch.mkdir()
        (without_torch / "torch.py").write_text("raise ImportError('not for servers')\n")
        self.port = free_port()
        self.servers: dict[str, list[Server]] = {key: [] for key in numbers}
        self._all = [self._start("tracker", "tvm.exec.rpc_tracker", self.port)]
        try:
            self.wait(lambda: self.devices("").servers() == 0, "tracker")
            for key, number in numbers.items():
                for _ in range(number):
                    self.add(key)
            for key, number in numbers.items():
                self.wait(lambda key=key, number=number: self.devices(key).servers() == number, key)
        except BaseException:
            self.close()
            raise

    def devices(self, key: str, wait_secs: float = 30.0) -> RpcDevices:
        return RpcDevices("127.0.0.1", self.port, key, wait_secs)

    def add(self, key: str) -> Server:
        """Start another server; it is listed a little later."""
        name, tracker = f"{key}{len(self.servers[key])}", f"127.0.0.1:{self.port}"
        server = self._start(name, "tvm.exec.rpc_server", free_port(), "--tracker", tracker, "--key", key)
        self.servers[key].append(server)
        self._all.append(server)
        return server

    def close(self) -> None:
        for server in self._all:
            server.kill()

    def wait(self, done, what: str) -> None:
        """Until `done()`; RuntimeError with the end of all logs where that takes too long."""
        deadline = time.monotonic() + _LIMIT_SECS
        while time.monotonic() < deadline:
            try:
                if done():
                    return
            except CostError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"waited in vain for {what}: {[server.log.read_text()[-4000:] for server in self._all]}")

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self, name: str, module: str, port: int, *arguments: object) -> Server:
        return Server(
            self.folder, name, module, "--host", "127.0.0.1", "--port", port, "--port-end", port + 1, *arguments
        )
