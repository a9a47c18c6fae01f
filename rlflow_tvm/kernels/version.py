"""The version of the kernels: what their measured times depend on beside kernel and target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tvm


def source_version() -> str:
    """TVM's version and a digest of this folder's source, so that no edit of a schedule leaves old times valid."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"tvm {tvm.__version__}, kernels {digest.hexdigest()[:16]}"
