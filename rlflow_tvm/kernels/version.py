"""The version of the kernels: what their measured times depend on beside kernel and target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tvm


def source_version() -> str:
    """TVM's version and a digest of this folder's source, so that no edit of a schedule leaves old times valid."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"tvm {tvm.__version__}, kernels {digest.hexdigest()[:16]}"
