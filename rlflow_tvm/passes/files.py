"""What plans and orders of passes have in common as files: JSON with a format, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import PlanError


def write_whole(path: Path, format_: int, fields: Mapping[str, Any], what: str) -> None:
    """Write a file of this format, atomically; `what` it holds is told in the PlanError where that cannot be."""
    real = Path(os.path.realpath(path))  # what a link leads to is what is written
    temporary = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"format": format_, **fields}, indent=1) + "\n")
        temporary.replace(real)
    except OSError as error:
        with suppress(OSError):  # its folder may be a file
            temporary.unlink(missing_ok=True)
        raise PlanError(f"{path}: the {what} cannot be written ({error.strerror})") from error


def read_whole(path: Path, format_: int, what: str, remedy: str) -> dict[str, Any]:
    """The fields of a file of this format; PlanError names the file, `what` it is not, and for a file of another format
    the `remedy`."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise PlanError(f"{path}: no such {what} file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, no JSON, a number of too many digits
        raise PlanError(f"{path}: not a {what} file ({error})") from None
    if not isinstance(data, dict) or data.get("format") != format_:
        found = data.get("format") if isinstance(data, dict) else None
        raise PlanError(f"{path}: {what} format {found!r}, this version reads {format_}: {remedy}")
    return data
