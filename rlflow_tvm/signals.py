"""Ending in order where a signal asks for it: files that are half written are taken away, workers end, locks go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlflow_tvm.errors import Ended


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM, and SIGHUP where it is not ignored, end what is inside, of the main thread, in order; the exit code is
    that of a process that they end."""

    def end(number: int, _frame: Any) -> None:
        raise Ended(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
