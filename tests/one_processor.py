"""One processor for what measures kernels, of those that the pytest processes share.

Kernels of several threads wait for the processors that the tests beside them have, which is not told from slowness:
each is then measured again and again, and a search may find another graph than on a quiet machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_processor() -> Iterator[None]:
    """This process, and those that it starts, on a processor that no other pytest process of the session is kept to,
    if there are enough; on all where the system has no such thing."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[number % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
