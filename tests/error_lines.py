"""How commands tell of bad input."""

from __future__ import annotations

import subprocess


def one_line(completed: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It ended with this code, no traceback, and one line of an error with the words in it."""
    assert completed.returncode == code, completed.stderr
    assert "Traceback" not in completed.stderr
    lines = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, completed.stderr
    for word in words:
        assert word in lines[0]
