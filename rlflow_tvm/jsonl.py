"""Logs of a JSON object a line, which a training appends to, and which one that was killed may have left in the middle
of a line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import AgentError

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """A log's lines, none where there is no file; a last one without its end is left out. AgentError, naming file and
    line, where it cannot be read."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(f"{path}: cannot be read ({error}): move it away") from None
    found = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise AgentError(f"{path}: line {number} is no JSON object: mend it, or move the file away")
        found.append(line)
    return found


def keep_lines(path: Path, keeps: Callable[[Line], bool] = lambda _: True) -> list[Line]:
    """The lines of a log that is to be gone on with; others, and half of a line, are taken out of the file."""
    lines = [line for line in read_lines(path) if keeps(line)]
    if path.is_file():
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _unwritten(path, error) from error
    return lines


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One more line, on disk when this returns; ValueError for what is no number, AgentError where it cannot be."""
    text = json.dumps(line, allow_nan=False)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> AgentError:
    return AgentError(f"{path}: cannot be written ({error.strerror}); free space, then resume")
