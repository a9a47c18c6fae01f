"""A Ray cluster of this machine alone, for as long as a test needs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def ray_cluster(processors: int = 2, **environment: str) -> Iterator[str]:
    """The address of a head that runs with `environment`, and ends with all its processes, whatever happens."""
    # sockets lie in this folder: pytest's own has too long a path for them
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        command = [
            "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--port=0", f"--num-cpus={processors}",
            "--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir={folder}",
        ]  # fmt: skip
        with log.open("w") as output:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *command],
                stdout=output, stderr=output, start_new_session=True, env={**os.environ, **quiet(), **environment},
            )  # fmt: skip
        try:
            while (found := re.search(r"--address='([^']+)'", log.read_text())) is None:
                assert head.poll() is None, log.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            head.terminate()  # which ends what it started
            try:
                head.wait(timeout=30)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)


def quiet() -> dict[str, str]:
    """An environment for a head and those that connect to it: nothing is reported, the tests' modules are found."""
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    return {
        "PYTHONPATH": path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns of its own next version
    }
