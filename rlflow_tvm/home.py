"""The folder in which what was measured and built stays from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path

from rlflow_tvm.errors import UsageError


def home_folder() -> Path:
    """`$RLFLOW_TVM_HOME`, by default `~/.cache/rlflow_tvm`, which need not be there yet; UsageError where nobody knows
    the user's home."""
    home = os.environ.get("RLFLOW_TVM_HOME")
    try:
        return Path(home).expanduser() if home else Path.home() / ".cache" / "rlflow_tvm"
    except RuntimeError as error:
        raise UsageError(
            f"there is no home folder to keep kernels' times and built models in ({error}): set RLFLOW_TVM_HOME to a "
            "folder"
        ) from error
