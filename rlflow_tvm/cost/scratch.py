"""Temporary files, and what is said where they cannot be written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rlflow_tvm.errors import CostError


def scratch_folder(*, ignore_cleanup_errors: bool = False) -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with its context; CostError where none can be made."""
    with scratch_written():
        return tempfile.TemporaryDirectory(ignore_cleanup_errors=ignore_cleanup_errors)


@contextmanager
def scratch_written() -> Iterator[None]:
    """For what makes or writes temporary files: CostError where that fails."""
    try:
        yield
    except OSError as error:
        raise CostError(
            f"temporary files cannot be written ({error.strerror or error}): free their disk, or set TMPDIR to a "
            "folder that can be written"
        ) from error
